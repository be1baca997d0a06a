"""What people type who come from other libraries, and what it is called here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from meanfield.checks import suggestion

_Called = TypeVar("_Called", bound=Callable[..., Any])

_MEASURE = "weights go with their points: (x, a), or ParticleMeasure(x, a)"
_STEPS = "max_steps is of a solver: solver=linalg.Lanczos(max_steps=...)"
# Neighbours' words, the argument that a function has to have for the sentence to be of use, and
# the sentence; the first row that fits is told.
_WORDS = (
    ("a b weight", "weights", "weights=(a, b), or with their points: (x, a) and (y, b)"),
    ("a b weights weight alpha beta", "", _MEASURE),
    ("x X y Y xs ys source target", "mu", "measures or arrays of points come first, in order"),
    ("M C metric cost cost_fn", "", "the cost is the Euclidean distance, no matrix of costs"),
    ("p power order", "mu", "the order is that of the function: w1, w2, wp(mu, nu, p)"),
    ("reg epsilon eps entropy", "blur", "blur=, a length; POT's reg of squares is 2 blur²"),
    ("reg epsilon eps entropy", "nu", "this distance is exact; sinkhorn_divergence has blur="),
    ("plan pi G T gamma P coupling", "plan", "plan=, mass between the atoms"),
    ("f g u v phi psi duals", "potentials", "potentials=(f, g), of |x − y|^p"),
    ("log return_plan full_output", "scaling", "sinkhorn_plan returns plan and potentials"),
    ("log return_plan full_output", "nu", "solve_w2 returns value, plan and potentials"),
    ("solver", "method", "method= names how it is solved"),
    ("solver", "plan", "what any solver has found: plan=, potentials="),
    ("numItermax max_iter maxiter n_iter", "time_limit", "time_limit=, in seconds"),
    ("numItermax max_iter maxiter n_iter max_steps", "solver", _STEPS),
    ("tol rtol atol", "step", "method=dynamics.Adaptive(rtol=..., atol=...)"),
    ("tol atol eps", "rtol", "rtol=, relative"),
    ("norm ord", "geometry", 'geometry="wasserstein" or "euclidean"'),
    ("T t_span t_eval t t1 tmax end", "times", "times, a list such as [0.0, 1.0]"),
    ("dt h step_size n_steps num_steps", "step", 'step=, with method="rk4" or "euler"'),
    ("x0 y0", "times", "the measure to start from is the second argument"),
    ("R r", "radius", "radius="),
    ("A V", "norm_A", "norms are numbers: norm_A and norm_V; bounds.table takes a layer"),
    ("d size", "dim", "dim="),
    ("size n_samples n_points num_samples", "n", "n="),
    ("seed random_state rng key", "generator", "generator=, an integer or a torch.Generator"),
    ("n_jobs num_workers workers n_workers", "executor", "executor=, a number of processes"),
    ("params parameters", "grid", "grid, of lists by the names of arguments"),
    ("out path output folder", "store", "store=, a folder that is continued after a crash"),
    ("verbose disp", "progress", "progress=True or False"),
    ("errors on_error", "store", 'failed cases are kept; ds["status"] and ds["message"] say so'),
    ("timeout", "case_timeout", "case_timeout=, with executor="),
    ("device_map", "device", "device="),
    ("torch_dtype", "dtype", "dtype="),
    ("revision", "download", "one model is a folder: give the path of its snapshot"),
    ("masked mask is_causal", "causal", "causal="),
    ("masked mask is_causal causal", "mu", "masked attention is SelfAttention(..., causal=True)"),
    ("seed random_state rng", "solver", "solver=linalg.Lanczos(generator=...)"),
    ("device dtype", "mu", "results are where the measure is: mu.to(device, dtype)"),
    ("verbose disp", "", "nothing is printed; answers carry their evidence"),
)


def with_hints(function: _Called) -> _Called:
    """The function, which answers an unknown keyword with what it is called here.

    Raises:
        TypeError: a keyword that it does not have, with the sentence of the table, the nearest of
            its arguments, or all of them; a matrix of costs in the place of two measures.
    """
    own = inspect.signature(function).parameters
    known, where = set(own), function.__qualname__.removesuffix(".__init__")
    places = [name for name, one in own.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    is_distance = places == ["mu", "nu"] and "weights" in known

    @functools.wraps(function)
    def hinted(*args: Any, **kwargs: Any) -> Any:
        if is_distance and len(args) > 2:
            raise TypeError(
                f"{where}: expected two measures, got {len(args)} positional arguments. In the "
                f"place of POT's emd2(a, b, M) write {where}((x, a), (y, b)) or {where}(x, y, "
                "weights=(a, b)), with points x (n, d) and y (m, d): costs are made from the "
                "points, since a matrix of squares has lost the digits of small displacements"
            )
        if kwargs.keys() <= known:
            return function(*args, **kwargs)
        word = next(name for name in kwargs if name not in known)
        listed = ", ".join(name for name in own if name not in ("self", "cls"))
        raise TypeError(f"{where}: expected some of {listed}, got {word}={_hint(word, known)}")

    return hinted  # type: ignore[return-value]


def _hint(word: str, known: set[str]) -> str:
    for words, needed, sentence in _WORDS:
        if word in words.split() and (not needed or needed in known):
            return f"; {sentence}"
    return suggestion(word, known)
