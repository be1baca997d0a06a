"""What people type who come from other libraries, and what it is called here."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from meanfield.checks import suggestion

_Called = TypeVar("_Called", bound=Callable[..., Any])

_MEASURE = "weights go with their points: (x, a), or ParticleMeasure(x, a)"
_GRID = "parameters stand in the grid: sweep(f, {name: values})"
_STEPS = "max_steps is of a solver: solver=linalg.Lanczos(max_steps=...)"
# Neighbours' words, the argument that a function has to have for the sentence to be of use, and
# the sentence; the first row that fits is told.
_WORDS = (
    ("a b weight", "weights", "weights=(a, b), or with their points: (x, a) and (y, b)"),
    ("beta lam lambda_ reg", "penalty", "penalty=, the price of changing the condition"),
    ("beta temperature scale", "kernel", "AttentionParameters(..., scale=), or multiply A by it"),
    ("scale beta temperature", "bilinear", "multiply A by it"),
    ("a b c d k n p x y R alpha beta gamma radius weights", "grid", _GRID),
    ("a b weights weight alpha beta", "", _MEASURE),
    ("normalize normalise", "log_weights", "divide them by their sum: weights / weights.sum()"),
    ("Q K V q k v W_q W_k W_v", "query", "query=, key=, value=, output="),
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
    ("A W", "bilinear", "AttentionParameters.from_bilinear(A, V), in this order"),
    ("heads num_heads nhead", "n_heads", "n_heads="),
    ("heads num_heads n_heads nhead dim", "kernel", "of the parameters: F.parameters"),
    ("n N n_points n_particles", "n_atoms", "n_atoms="),
    ("A V Q K W", "kernel", "AttentionParameters.from_bilinear(A, V), or (Q, K, V), come first"),
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
    ("out inplace in_place", "", "nothing is changed in place: take what is returned"),
)

# Likewise of attributes: the words, a member that the value has to have, and the sentence.
_MEMBERS = (
    ("P G T pi gamma matrix", "coupling", ".plan is the matrix, .coupling what to do with it"),
    ("f g u v duals dual_potentials", "coupling", ".potentials is the pair (f, g)"),
    ("cost distance dist value_linear reg_ot_cost", "coupling", "float(...) is the distance"),
    ("interval bounds certified ci", "lower", ".lower and .upper are its ends"),
    ("certified bound", "upper", ".upper, which .miss says how surely"),
    ("to_dict asdict to_dataframe to_pandas", "to_dataset", ".to_dataset().to_dataframe()"),
    ("item numpy tolist detach max mean norm backward", "value", "float(...), or .value"),
    ("numpy toarray todense to_numpy", "to_scipy", ".dense(), or .to_scipy() if it is sparse"),
    ("n size shape d length", "n_particles", ".n_particles, .dim and .batch_shape"),
    ("x X atoms support locations", "n_particles", ".points, and .weights"),
    ("a w mass masses probs", "n_particles", ".weights, and .points"),
    ("cov var std", "n_particles", ".covariance()"),
    ("barycenter barycentre center", "n_particles", ".mean()"),
    ("numpy tolist", "n_particles", ".points.numpy() and .weights.numpy()"),
    ("cpu cuda float double half", "to", ".to(device, dtype)"),
    ("copy clone", "n_particles", "a measure never changes: it needs no copy"),
    ("with_weights reweight", "n_particles", "ParticleMeasure(mu.points, weights)"),
    ("save", "n_particles", "torch.save(mu, path), torch.load(path, weights_only=False)"),
    ("A V Q K W query key value", "parameters", ".parameters has the matrices"),
    ("cpu cuda float double half to", "parameters", "SelfAttention(F.parameters.to(dtype))"),
    ("state_dict eval train", "parameters", "a map has no modes; .parameters has the matrices"),
    ("state_dict parameters", "query", "they are .query, .key, .value, .output and their biases"),
    ("W_q W_Q Wq Q in_proj_weight q_proj", "query", ".query, of all heads (H, k, d)"),
    ("W_k W_K Wk K k_proj", "query", ".key, of all heads (H, k, d)"),
    ("W_v W_V Wv v_proj", "query", ".value; .V is output times value, (H, d_out, d)"),
    ("W_o W_O Wo O out_proj o_proj", "query", ".output, or None for the identity"),
    ("num_heads nhead heads H", "n_heads", ".n_heads"),
    ("embed_dim d_model hidden_size d in_dim", "n_heads", ".dim"),
    ("jacobian jac J", "field", "linearize(F, mu).atoms, and its .to_dense()"),
    (
        "attention_matrix attention attn weights scores",
        "field",
        "made in blocks, see .weights(mu).log_p; of a Sinkhorn layer .plan(mu).weights",
    ),
    ("gamma Gamma", "field", ".field(mu)"),
    ("forward", "field", "call it: F(mu)"),
    (
        "to_dense matvec rmatvec T shape norm J",
        "atoms",
        ".atoms is the map J, as .atoms.to_dense()",
    ),
    ("layers layer blocks encoder h", "embeddings", ".block(l), .attention(l) or .network()"),
    ("embed hidden_states encode_text", "embeddings", ".embeddings(tokens)"),
    ("plot scatter show", "", "figures are in meanfield.figures"),
)

# Likewise of names that a module lacks: the words, a name that it has, and the sentence.
_NAMES = (
    ("emd emd2 ot wasserstein W2", "w2", "w2(x, y) is the distance, solve_w2(x, y) has the plan"),
    ("sliced_wasserstein", "w2", "w2 is the distance itself, also of large clouds"),
    ("sinkhorn sinkhorn2", "", "transport.sinkhorn_divergence, transport.sinkhorn_plan"),
    ("seed set_seed manual_seed", "", "generator=, an integer, or torch.manual_seed"),
    ("gaussian normal randn", "ball", "ParticleMeasure(torch.randn(n, d).double())"),
    (
        "two_dirac two_diracs lemma_3_2 real_text",
        "EXPERIMENTS",
        'experiments.get("two-dirac"), hyphens',
    ),
    ("run", "EXPERIMENTS", "experiments.get(name).run()"),
    ("from_pretrained load_model AutoModel", "", "pretrained.load(name_or_path)"),
)
# What is written where such a call is refused.
_FORMS = {
    "Chain": "; the maps are in a list: Chain([F, G])",
    "MLP": "; of two layers: MLP(first.weight, second.weight, first.bias, second.bias)",
    "LayerNorm": "; of a module: LayerNorm(module.weight, module.bias, module.eps)",
    "RMSNorm": "; of a module: RMSNorm(module.weight, module.eps)",
}


class Hinted:
    """Base of values that answer a missing member with what it is called here."""

    if not TYPE_CHECKING:  # where mypy would then find every member

        def __getattr__(self, name: str) -> Any:
            with suppress(AttributeError):  # a torch module that is a map as well has its own
                return super().__getattr__(name)
            if name in dir(type(self)):  # a property, whose own error is told
                return super().__getattribute__(name)
            hint = ""
            if not name.startswith("_"):  # those are asked for by Python and by tools
                members = {one for one in dir(self) if not one.startswith("_")}
                hint = sentence_of(_MEMBERS, name, members) or suggestion(name, members)
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{hint}")


class NoArithmetic:
    """Base of values that refuse to be calculated with."""

    _instead: str

    def _refused(self, *_: object, **__: object) -> Any:
        name = type(self).__name__
        raise TypeError(f"expected numbers, got a {name}; {self._instead}")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = _refused
    __truediv__ = __neg__ = __pow__ = __lt__ = __gt__ = __abs__ = __round__ = _refused


class NoNumber(NoArithmetic):
    """Base of values that refuse as well to be a number, or an object in an array of NumPy's."""

    __int__ = __float__ = __array__ = __array_function__ = NoArithmetic._refused


class NoFunction:
    """Base of values that are given to a layer, and say so where they are called."""

    _instead: str

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Refuse."""
        raise TypeError(f"{type(self).__name__}: expected no call; {self._instead}")


def is_function(value: object) -> bool:
    """Whether it can be called for a result: no class, and nothing that refuses the call."""
    return callable(value) and not isinstance(value, type | NoFunction)


def with_hints(function: _Called) -> _Called:
    """The function, which answers an unknown keyword with what it is called here.

    Raises:
        TypeError: a keyword that it does not have, with the sentence of the table, the nearest of
            its arguments, or all of them; more arguments without a name than it takes, such as a
            matrix of costs beside two measures.
    """
    if isinstance(function, type):  # a dataclass, whose call is written for it
        function.__init__ = with_hints(function.__init__)  # type: ignore[misc]
        return function
    own = inspect.signature(function).parameters
    known, where = set(own), function.__qualname__
    where = where.removesuffix(".__init__").removesuffix(".__call__")
    listed = [name for name in own if name not in ("self", "cls")]
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [name for name, one in own.items() if one.kind in by_place]
    is_distance = places == ["mu", "nu"] and "weights" in known
    form = _FORMS.get(where, "")

    @functools.wraps(function)
    def hinted(*args: Any, **kwargs: Any) -> Any:
        if kwargs.keys() <= known and len(args) <= len(places):
            try:
                return function(*args, **kwargs)
            except (TypeError, ValueError) as error:
                if form:
                    error.args = (f"{error}{form}",)
                raise
        if is_distance and len(args) > 2:
            raise TypeError(
                f"{where}: expected two measures, got {len(args)} positional arguments. In the "
                f"place of POT's emd2(a, b, M) write {where}((x, a), (y, b)) or {where}(x, y, "
                "weights=(a, b)), with points x (n, d) and y (m, d): costs are made from the "
                "points, since a matrix of squares has lost the digits of small displacements"
            )
        if len(args) > len(places):
            named = [f"{name}=" for name in listed if name not in places]
            own_self = len(own) - len(listed)
            raise TypeError(
                f"{where}: expected at most {len(places) - own_self} arguments without a name, "
                f"got {len(args) - own_self}; by name: {', '.join(named) or 'none'}{form}"
            )
        word = next(name for name in kwargs if name not in known)
        hint = sentence_of(_WORDS, word, known) or suggestion(word, known)
        raise TypeError(f"{where}: expected some of {', '.join(listed)}, got {word}={hint}")

    return hinted  # type: ignore[return-value]


def hint_names(module: str, names: Iterable[str]) -> None:
    """Let a module answer a name that it lacks with what it is called here."""

    def missing(name: str) -> Any:
        hint = name_hint(name, names)
        raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}")

    vars(sys.modules[module])["__getattr__"] = missing


def name_hint(name: str, names: Iterable[str]) -> str:
    """The end of a message on a name that a module of these names lacks."""
    if name.startswith("_"):  # asked for by tools, in every module
        return ""
    return sentence_of(_NAMES, name, set(names)) or suggestion(name, names)


def sentence_of(rows: Iterable[tuple[str, str, str]], word: str, known: set[str]) -> str:
    """The end of a message: the sentence of the first row that fits, or nothing."""
    for words, needed, sentence in rows:
        if word in words.split() and (not needed or needed in known):
            return f"; {sentence}"
    return ""
