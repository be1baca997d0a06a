"""Files of other solvers' answers, graded: what ``meanfield grade`` does."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meanfield.checks import as_path
from meanfield.transport.grading import certify
from meanfield.transport.known import KnownProblem, known_problem
from meanfield.transport.solve import as_order, solve_wp

SUFFIXES = (".npy", ".npz")
_ANSWER = "plan", "rows", "cols", "mass", "f", "g"
_PROBLEM = "x", "y", "a", "b", "p", "problem"
_SPARSE = {"format", "shape", "data"}  # of `scipy.sparse.save_npz`
_SOLVED = 4_000_000  # pairs of points that are not of the test set, up to which W_p is solved
_NOTHING = 1e-9  # relative errors below it are nobody's fault


@dataclass(frozen=True)
class Grade:
    """What a file of an answer is worth.

    Attributes:
        file: its name.
        problem: the name of the problem, "" for points of its own.
        lower: W_p is at least this, by the potentials of the file.
        upper: and at most this, by its plan.
        plan_error: upper / W_p − 1; NaN if W_p is not known to a hundredth of this error, as
            where an order of 60 leaves its own interval wide.
        potentials_error: 1 − lower / W_p, likewise.
        blame: what makes the interval wide: "plan" or "potentials", whichever is farther off,
            with "none given" where the file has none; "nothing" within 1e-9; "" if W_p is not
            known well enough to say.
    """

    file: str
    problem: str
    lower: float
    upper: float
    plan_error: float
    potentials_error: float
    blame: str


def grade(path: str | os.PathLike[str]) -> Grade:
    """Grade a plan, potentials or both from a file of any solver, as `certify` does.

    Args:
        path: a ``.npy`` of a permutation (n,) or a plan (n, m); a ``.npz`` of
            ``scipy.sparse.save_npz``, or with any of ``plan`` (either of these), ``rows``,
            ``cols`` and ``mass`` (its entries), ``f`` and ``g`` (potentials of the cost
            ‖x − y‖^p); of any precision. The problem is the one that `known_problem` has by the
            entry ``problem``, or by the file's name up to a dot (``gaussian-1000-2.mine.npz``);
            or the points ``x`` and ``y`` of the file, with weights ``a`` and ``b`` and order
            ``p`` (by default uniform, and 2).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a damaged file, an unknown name, and what `certify` refuses.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.save(f"{folder}/gaussian-60-2.npy", np.arange(60))
        ...     found = grade(f"{folder}/gaussian-60-2.npy")
        >>> found.blame, round(found.plan_error, 2), found.lower < found.upper
        ('plan', 1.21, True)
    """
    path = as_path(path)
    try:
        return _graded(path, _read(path))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def _graded(path: Path, held: dict[str, Any]) -> Grade:
    known = _problem(path, held)
    plan, f, g = (held.get(name) for name in ("plan", "f", "g"))
    entries: list[str] = [name for name in ("rows", "cols", "mass") if name in held]
    if entries:
        if plan is not None or entries[:2] != ["rows", "cols"]:
            raise ValueError(
                "expected plan, or rows and cols with mass or without, got "
                f"{', '.join([*['plan'] * (plan is not None), *entries])}"
            )
        plan = tuple(held[name] for name in entries)
    if plan is None and f is None and g is None:
        raise ValueError(
            f"expected any of {', '.join(_ANSWER)}, got {', '.join(held) or 'nothing'}"
        )
    measures = (known.x, known.a), (known.y, known.b)
    found = certify(*measures, plan=plan, potentials=(f, g), p=known.order)
    lower, upper = float(found.lower), float(found.upper)
    width = known.upper - known.lower
    errors = (
        _beyond(upper - known.upper, known.upper, width),
        _beyond(known.lower - lower, known.lower, width),
    )
    # One that is not known is less than a hundred widths, and so less than one that is.
    off = np.nan_to_num(errors, nan=-1.0)
    blame = "plan" if off[0] >= off[1] else "potentials"
    if plan is None if blame == "plan" else f is None and g is None:
        blame += ", none given"
    if off.max() <= _NOTHING:
        blame = "nothing" if off.min() >= 0 else ""
    return Grade(path.name, known.name, lower, upper, *errors, blame)


def _beyond(distance: float, known: float, width: float) -> float:
    """What lies outside the interval that is known, relative to its end.

    NaN where that interval is wider than a hundredth of it.
    """
    if width > max(_NOTHING * known, distance / 100):
        return math.nan
    if known == 0:
        return math.inf if distance > 0 else 0.0
    return 0.0 if distance <= 0 else distance / known  # NaN stays NaN


def _problem(path: Path, held: dict[str, Any]) -> KnownProblem:
    """Of the test set, or of the file's points, whose distance is solved where they are few."""
    own = held.keys() & {"x", "y"}
    if stray := [name for name in (("problem",) if own else ("a", "b", "p")) if name in held]:
        raise ValueError(
            f"{', '.join(stray)}: expected either the points x and y, with a, b and p, or the "
            "name of a problem of the test set, which has weights and an order of its own"
        )
    if not own:
        name = str(held["problem"]) if "problem" in held else path.name.partition(".")[0]
        return known_problem(name)
    for name in ("x", "y"):
        if held.get(name, np.zeros(0)).ndim != 2 or not len(held[name]):
            raise ValueError(
                f"{name}: expected points of shape (n, d), n ≥ 1, beside those of the other"
            )
    x, y = (  # double precision holds them all, and rounds no end of an interval
        t.astype(float) if t.dtype.kind == "f" else t for t in (held["x"], held["y"])
    )
    a, b = (held.get(w, np.full(len(t), 1 / len(t))) for w, t in (("a", x), ("b", y)))
    order = held.get("p", np.array(2))
    if order.size != 1:
        raise ValueError(f"p: expected one number, got an array of shape {order.shape}")
    order = as_order(order.item())
    ends = math.nan, math.nan
    if len(x) * len(y) <= _SOLVED:
        found = solve_wp((x, a), (y, b), order, strict=False)
        ends = float(found.lower), float(found.upper)
    return KnownProblem("", x, y, a, b, order, *ends)


def _read(path: Path) -> dict[str, Any]:
    """The arrays of a file, by their names; nothing in it is executed."""
    from scipy.sparse import load_npz

    if not path.is_file():
        what = "it is no file" if path.exists() else "there is no such file"
        raise FileNotFoundError(f"{path}: {what}")
    if path.suffix not in SUFFIXES:
        raise ValueError(f"expected a file that ends in {' or '.join(SUFFIXES)}")
    try:
        with path.open("rb") as file:  # which NumPy leaves open where it is damaged
            held = np.load(file, allow_pickle=False)
            if isinstance(held, np.ndarray):
                return {"plan": held}
            held = {name: held[name] for name in held}
            sparse = held.keys() >= _SPARSE
            if sparse:
                file.seek(0)
                plan = load_npz(file)
    except Exception as error:  # NumPy, zip and zlib have a dozen kinds
        raise ValueError(
            "expected a file of numpy.save, numpy.savez or scipy.sparse.save_npz, got a damaged "
            f"or another one ({type(error).__name__})"
        ) from error
    unknown = held.keys() - {*_ANSWER, *_PROBLEM}
    if sparse and unknown == held.keys():
        return {"plan": plan}
    if unknown:
        said = ", ".join((*_ANSWER, *_PROBLEM))
        raise ValueError(f"expected arrays named {said}, got {', '.join(sorted(unknown))}")
    return held
