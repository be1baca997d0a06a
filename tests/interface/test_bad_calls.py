"""Every public function refuses a plausible wrong argument: what it expected, what it got.

`right_calls` has well-formed calls, `mistakes` what is put in the place of each argument,
`wrong_calls` what is wrong as a whole, and `calls` says how a call ends. By default one mistake in
fifteen is made, and all of them under the marker `slow`.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import meanfield
from meanfield import AttentionParameters, SelfAttention, checks, habits
from meanfield.checks import as_float_tensor
from meanfield.linalg.evidence import NormEstimate
from meanfield.linalg.linear_map import LinearMap
from meanfield.maps.autodiff import Linearisation
from meanfield.measures import ParticleMeasure
from meanfield.pretrained import Transformer
from meanfield.transport import TransportResult, w2
from meanfield.transport.coupling import Coupling
from tests.interface import calls, right_calls, wrong_calls
from tests.interface.calls import CLEAR, FOREIGN, NONSENSE, RIGHT, Case
from tests.interface.mistakes import KINDS, Mistake
from tests.interface.test_architecture import public_names

ALL = calls.cases()
EVERY = 15


def check(cases: list[Case], folder: Path) -> None:
    found = [(str(case), *calls.verdict(case, folder)) for case in cases]
    count = Counter(verdict for _, verdict, _ in found)
    silent = [f"{case}: {text}" for case, verdict, text in found if verdict == NONSENSE]
    foreign = [f"{case}: {text}" for case, verdict, text in found if verdict == FOREIGN]
    assert not silent
    assert count[CLEAR] >= 0.99 * (len(cases) - count[RIGHT]), foreign


def test_the_harness_is_as_wide_as_it_says():
    assert len(ALL) >= 10_000
    assert len({mistake for kind in KINDS.values() for mistake in kind}) >= 95


@pytest.mark.parametrize("line", right_calls.LINES)
def test_the_well_formed_call_works(line, tmp_path):
    assert calls.value_of(line, tmp=tmp_path) is not None


def test_one_wrong_call_in_many_ends_in_a_clear_error(tmp_path):
    check(ALL[::EVERY], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1, EVERY))
def test_wrong_calls_end_in_a_clear_error(start, tmp_path):
    check(ALL[start::EVERY], tmp_path)


@pytest.mark.parametrize("group", wrong_calls.GROUPS)
def test_wrong_calls_as_people_type_them_end_in_a_clear_error(group, tmp_path):
    lines = wrong_calls.GROUPS[group].strip().splitlines()
    found = {line: calls.ending(line, tmp_path) for line in lines}
    assert not {line: end for line, end in found.items() if end[0] != CLEAR}


@pytest.mark.parametrize("pair", wrong_calls.PAIRS, ids=lambda pair: pair[0])
def test_odd_calls_mean_what_they_say(pair, tmp_path):
    found, meant = (np.asarray(calls.value_of(line, tmp=tmp_path), float) for line in pair)
    np.testing.assert_allclose(found, meant, rtol=1e-6, atol=1e-9)


# Public, but not called by users with values of their own.
UNTRIED = {
    **dict.fromkeys(("figure",), "for figures of one's own"),
    **dict.fromkeys(("expanded_radii",), "for authors of maps"),
    **dict.fromkeys(("corpus", "grade"), "take files; their own tests have the errors"),
}


def test_every_public_function_has_a_call():
    lines = [*right_calls.LINES, *wrong_calls.LINES]
    nodes = [node for line in lines for node in ast.walk(ast.parse(line))]
    by_name = {ast.unparse(one.func): one for one in nodes if isinstance(one, ast.Call)}
    known = calls.names().keys()  # and not an argument of a lambda
    plain = [name for name in by_name if re.fullmatch(r"[\w.]+", name)]
    called = [calls.function_of(by_name[name]) for name in plain if name.split(".")[0] in known]
    missing = {
        name
        for name, one in public_names().items()
        if inspect.isfunction(one)
        and one not in called
        and not one.__module__.startswith("meanfield.experiments.")
    }
    assert missing == set(UNTRIED), "give it a line in `right_calls`"


def test_what_is_no_mistake_is_at_an_argument():
    """What `right_calls.FINE` names exists, so that it speaks of nothing that is gone."""
    known = {
        (mistake.text, name)
        for line in right_calls.LINES
        for argument in calls.arguments(line)
        for mistake in KINDS[calls.kind_of(argument.good)]
        for name in argument.names
    }
    assert known >= right_calls.FINE, calls.GONE


def _judged(mistake: Mistake, function, monkeypatch, tmp_path) -> str:
    known = {**calls.names(), "tried": function}
    monkeypatch.setattr(calls, "names", lambda device=None: known)
    function.__module__ = "meanfield.checks"
    (argument,) = calls.arguments("tried(2.0)")
    return calls.verdict(Case(argument, mistake), tmp_path)[0]


def test_the_judge_tells_the_four_endings_apart(monkeypatch, tmp_path):
    judged = lambda f, wrong: _judged(wrong, f, monkeypatch, tmp_path)  # noqa: E731
    text, whole = Mistake("str(g)", None), Mistake("np.array(g)", "g")
    assert judged(lambda x: checks.number(x, "x") / 2, text) == CLEAR
    assert judged(lambda x: checks.number(x, "x") / 2, whole) == RIGHT
    assert judged(lambda x: x / 2, text) == FOREIGN
    assert judged(lambda x: float(x) / 2, text) == NONSENSE
    # Not what the well-formed value gives.
    assert judged(lambda x: type(x).__name__, whole) == NONSENSE


def test_what_is_gone_is_named():
    for line in ("lipschitz.gone(F)", "split(mu, gone=2)"):
        with pytest.raises(LookupError, match="gone .*is gone from the library: delete"):
            list(calls.arguments(line))


@pytest.mark.parametrize("call", [w2, ParticleMeasure.from_sequence])
def test_a_forgotten_argument_is_named(call):
    with pytest.raises(TypeError, match=r"missing .*required positional argument"):
        call()


def test_a_misspelt_name_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'lanczos'"):
        checks.choice("lancos", "method", ("auto", "lanczos"))
    with pytest.raises(ValueError, match="got 'xyz'$"):
        checks.choice("xyz", "method", ("auto", "lanczos"))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ('w2(x, y, a=a, b=a)', r"got a=; weights=\(a, b\)"),
        ('dynamics.flow(F, mu, [0.0, 1.0], rtol=1e-3)', r"method=dynamics.Adaptive\(rtol="),
        ('dynamics.flow(F, mu, [0.0, 1.0], method="RK45")', "did you mean 'dopri5'"),
        ('sweep(f, {"radius": [1.0]}, n_jobs=2)', "executor=, a number of processes"),
        ("sweep(f, a=[1.0])", "parameters stand in the grid"),
        ("sweep(f, radius=[1.0], n=[2, 3])", "parameters stand in the grid"),
        ("split(mu, inplace=True)", "take what is returned"),
        ('figures.plot_growth(ds, "x", "y")', "at most 1 arguments without a name, got 3"),
        ('figures.plot_growth(results.to_cube(ds), x="radius", y="y")', "; draw what the sweep"),
        ('figures.save_all(ds, [figures.plot_growth], ".")', "figures: expected functions by"),
        ('figures.save_all(ds, {"growth": 3}, ".")', "figures: expected functions by"),
        ('figures.save_all(ds, {}, None)', "folder: expected a path, got None"),
        ('figures.plot_particle_paths(flown.isel(time=[]))', "got {'time': 0"),
        ('results.read_provenance(ds.assign_attrs(provenance="by hand"))', "one line of JSON"),
        ("linearize(F, mu).atoms * x", "J @ x applies J"),
        ("results.fit_power(frame_of_x[0], frame_of_x[1][::-1])", "y: expected the row labels"),
        ("w2(frame_of_x.reset_index(), x)", r"reset_index\(drop=True\)"),
        ('local_lipschitz(F, mu, rtoll=1e-3)', "got rtoll=; did you mean 'rtol'"),
        ("AttentionParameters.from_bilinear(A=A, V=V)", r"from_bilinear\(A, V\), in this order"),
        ("AttentionParameters.random(4, seed=0)", "generator=, an integer"),
        ("mu.sample(4, seed=0)", "generator=, an integer"),
        ("SelfAttention(params, masked=True)", "causal="),
        ("SelfAttention(torch.nn.MultiheadAttention(4, 2))", "whose from_module reads a torch.nn"),
        ("SelfAttention(A=A, V=V)", r"from_bilinear\(A, V\)"),
        ("transport.certify(x, y, x)", "at most 2 arguments without a name, got 3; by name: p"),
        ("transport.conditional_w2(seq, seq, beta=1.0)", "got beta=; penalty="),
        ("SelfAttention(params, beta=2.0)", r"; AttentionParameters\(..., scale=\)"),
        ("SelfAttention(params, heads=2)", "; of the parameters"),
        ("AttentionParameters.from_bilinear(A, V, beta=2.0)", "; multiply A by it"),
        ("AttentionParameters(Q=A, K=A, V=V)", "; query=, key=, value="),
        ("ParticleMeasure(x, a, normalize=True)", r"weights / weights.sum\(\)"),
        ("lipschitz.worst_case(F, 1.0, n=3)", "; n_atoms="),
        ("layers.Residual(F, dropout=0.1)", "Residual: expected some of map, scale, got dropout="),
        ("np.mean(mu)", "expected numbers, got a ParticleMeasure; take mu.points"),
        ("linalg.LinearMap.pointwise(torch.eye(3))", r"\(..., n, e, d\), got Tensor of shape"),
        ("linalg.LinearMap.pointwise(torch.ones(2, 3, 3).half())", "float64, got torch.float16"),
        ("linalg.LinearMap.diagonal(torch.ones(2))", r"tensor \(..., n, d\), got Tensor of shape"),
        ("solve_w2(x, y) + 'a'", "unsupported operand type.*'TransportResult' and 'str'"),
        ("linalg.Lanczos(tol=1e-3)", "Lanczos: expected some of max_steps, miss, generator"),
        ("stack([mu, mu], axis=0)", "stack: expected some of measures, got axis="),
        ("ParticleMeasure.from_sequence(x, weights=a)", "from_sequence: expected some of points"),
        ("kernels.rotery(dim=2)", "did you mean 'rotary'"),
        ("normalizations.softmaxx", "did you mean 'softmax'"),
        ("results.to_cub(ds)", "did you mean 'to_cube'"),
        ("experiments.two_diracs", "; experiments.get"),
        ("local_lipschitz(lambda p: 2 * p, mu)", r"got a ParticleMeasure.*pushforward\(T, mu\)"),
        ("w2(frame_of_x.assign(label='a'), y)", "with 'a' in it"),
        ("mu.sample(4, 0)", "sample: expected at most 1 arguments without a name, got 2"),
        ('ParticleMeasure(x, wieghts=a)', "ParticleMeasure: .*did you mean 'weights'"),
        ('meanfield.certify(x, y)', "or meanfield.transport.certify"),
        ('meanfield.local_lipshitz(F, mu)', "did you mean 'local_lipschitz'"),
        ("meanfield.W2(x, y)", r"w2\(x, y\) is the distance"),
        ("meanfield.wasserstein(x, y)", r"w2\(x, y\) is the distance"),
        ("meanfield.set_seed(0)", "'set_seed'; generator=, an integer"),
        ("transport.emd(a, a, x)", r"solve_w2\(x, y\) has the plan"),
        ("transport.sliced_wasserstein(x, y)", "; w2 is the distance itself"),
        ("transport.sinkhorn(a, a, x, 1.0)", "; transport.sinkhorn_divergence"),
        ("bounds.prop_3_4(2, 1, 1)", "did you mean 'proposition_3_4'"),
        ("sampling.gaussian(9, 2)", r"ParticleMeasure\(torch.randn\(n, d\).double\(\)\)"),
        ('experiments.run("two-dirac")', r"; experiments.get\(name\).run\(\)"),
        ('experiments.get("two-dirac").run(seed=3)', "replace.experiment.settings, seed="),
        ('pretrained.from_pretrained("gpt2")', r"; pretrained.load\("),
        ('pretrained.load("random:bert", seed=None)', "seed: expected a whole number"),
        ("layers.MLP(torch.nn.Sequential(torch.nn.GELU()))", r"MLP\(first.weight, second.w"),
        ("layers.Chain(F, F)", r"; the maps are in a list: Chain\(\[F, G\]\)"),
        ("layers.LayerNorm(8)", r"; of a module: LayerNorm\(module.weight"),
        ("layers.LayerNorm(torch.nn.LayerNorm(8))", r"; of a module: LayerNorm\(module.weight"),
        ("layers.RMSNorm(torch.nn.LayerNorm(8))", r"; of a module: RMSNorm\(module.weight"),
        ("dynamics.flow(F, mu, [0.0, 1.0], observe=[f])", 'expected {"name": function}, got list'),
        ('figures.plot_growth(ds, y="y", color="red")', "some of ds, ax, x, y, by, bounds"),
        ("sweep(f, frame_of_x)", r'table.to_dict\("records"\), got DataFrame'),
        ("pushforward(mu, torch.tanh)", r"got ParticleMeasure; the order is pushforward\(T, mu\)"),
        ("SelfAttention(F.parameters, kernel=kernels.rotary)", r"; call it: rotary\(…\)"),
        ("SelfAttention(F.parameters, normalization=normalizations.sink)", r"call it: sink\(…\)"),
        ("ParticleMeasure(x, weights=0 * a)", "total mass of 1, got 0; give one atom"),
        ("mu.replace(x)", r"own, got .*; torch.as_tensor\(points, dtype=torch.float64\) is one"),
        ("local_lipschitz(F, [mu, mu])", r"; stack\(\[mu, nu\]\) makes a batch"),
    ],
)  # fmt: skip
def test_words_of_neighbours_are_answered_with_ours(call, said):
    with pytest.raises((TypeError, ValueError, AttributeError), match=said):
        calls.value_of(call)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("solve_w2(x, y).P", "TransportResult has no attribute 'P'; .plan is the matrix"),
        ("solve_w2(x, y).coupling.toarray()", r"\.dense\(\)"),
        ("solve_w2(x, y).item()", r"float\(...\)"),
        ("local_lipschitz(F, mu).convergd", "did you mean 'converged'"),
        ("local_lipschitz(F, mu).certified", r"\.upper"),
        ("mu.shape", "n_particles, .dim"),
        ("params.state_dict()", "they are .query, .key"),
        ("params.W_q", r"\.query, of all heads"),
        ("params.num_heads", r"\.n_heads"),
        ("mu.copy()", "; a measure never changes"),
        ("linearize(F, mu).to_dense()", r"; .atoms is the map"),
        ("mu.cuda()", r"\.to\(device, dtype\)"),
        ("F.attention_matrix(mu)", r"\.plan\(mu\)\.weights"),
        ("encoder().layers[0]", r"; .block\(l\)"),
        ("encoder().encoder", r"; .block\(l\)"),
        ("encoder().embed(x)", r"; .embeddings\(tokens\)"),
        ("encoder().hidden_states(x)", r"; .embeddings\(tokens\)"),
        ("local_lipschitz(encoder(), mu)", r"; source.attention\(layer\) makes one"),
        ("mixture([mu, nu], [[0.5, 0.5]])", r"weights: expected 2 numbers, got shape \(1, 2\)"),
        ("mixture(mu, mu)", r"expected a list of measures, \[mu, nu\]"),
    ],
)  # fmt: skip
def test_members_of_neighbours_are_answered_with_ours(call, said):
    with pytest.raises((TypeError, ValueError, AttributeError), match=said):
        calls.value_of(call)


class Broken(meanfield.Map):
    """A map with a fault of its own in a property."""

    @property
    def slope(self):
        return self.slop

    def __call__(self, mu, /):
        return mu.replace(self.slope * mu.points)


def test_the_error_inside_a_property_of_a_map_is_told():
    with pytest.raises(AttributeError, match="Broken has no attribute 'slop'"):
        _ = Broken().slope


def test_a_head_that_is_not_there_is_an_index_error():
    parameters = calls.value_of("params")
    for index in (parameters.n_heads, -parameters.n_heads - 1):
        with pytest.raises(IndexError, match="expected a head in 0"):
            parameters.head(index)


# These answer an unknown word in words of Python's or of their own: their arguments are few, go on
# to another function, or are not written by users.
PLAIN = {
    *("disintegrate", "figure", "grade", "known_problem", "log_energy", "numbers", "status"),
    *("l2_attention_2", "l2_attention_inf", "l2_attention_max", "l2_spread", "scaling_factor"),
    *("plot_constants", "plot_growth", "plot_particle_paths", "read_provenance"),
    *("released_quantity", "secant_ratio"),
    *("BallBounds", "Candidate", "Coupling", "Experiment", "Features", "Kernel", "LinearMap"),
    *("Linearisation", "LocalLipschitz", "Map", "NormEstimate", "NormSolver", "Particlewise"),
    *("SecantRatio", "Settings", "Task", "Transformer", "TransportResult", "Variable"),
    *("CertificateError", "ConvergenceError", "MissingExtraError", "NoDerivativeError"),
}


def test_every_public_call_answers_an_unknown_word():
    tried = {n: one for n, one in public_names().items() if callable(one) and n not in PLAIN}
    tried = {n: one for n, one in tried.items() if inspect.isroutine(one) or inspect.isclass(one)}
    methods = [Transformer.constants, Transformer.attention, Transformer.block, Coupling.sample]
    methods += [Transformer.embeddings, Transformer.attention_inputs, Transformer.network]
    methods += [Transformer.encode, Coupling.interpolate, TransportResult.save]
    methods += [AttentionParameters.head, AttentionParameters.after]
    assert len(tried) > 80
    for one in (*tried.values(), *methods):
        with pytest.raises(TypeError, match="expected some of .*got no_such_word="):
            one(no_such_word=0)


def test_every_sentence_for_members_speaks_of_members_that_exist():
    kinds = (ParticleMeasure, TransportResult, NormEstimate, Coupling, SelfAttention)
    kinds += (Transformer, LinearMap, Linearisation, AttentionParameters)
    known = {name for kind in kinds for name in (*dir(kind), *kind.__annotations__)}
    for words, needed, sentence in habits._MEMBERS:
        named = re.findall(r"(?<=[ (])\.([a-z_]+)", f" {sentence}")
        assert words and {*named, needed or "to"} <= known, sentence


def test_every_sentence_for_names_and_calls_speaks_of_names_that_exist():
    known = {*public_names(), *meanfield.__all__, *meanfield.experiments.__all__}
    for words, needed, sentence in habits._NAMES:
        assert words and sentence and (not needed or needed in known), sentence
    assert {*habits._FORMS} <= known


def test_every_sentence_for_neighbours_speaks_of_arguments_that_exist():
    functions = [one for one in public_names().values() if inspect.isfunction(one)]
    functions += [
        SelfAttention,
        AttentionParameters,
        AttentionParameters.from_bilinear,
        AttentionParameters.random,
    ]
    known = {name for one in functions for name in inspect.signature(one).parameters}
    for words, needed, sentence in habits._WORDS:
        assert words and sentence and (not needed or needed in known), sentence


@pytest.mark.parametrize(
    "given",
    [
        [[1, 2], [3, 4]],
        np.array([[1, 2], [3, 4]], ">f8"),
        np.array([[3.0, 4.0], [1.0, 2.0]])[::-1],
        np.ma.masked_array([[1.0, 2.0], [3.0, 4.0]]),
        np.array([[1.0, 2.0], [3.0, 4.0]], np.longdouble),
        ((1.0, 2.0), (3.0, 4.0)),
    ],
)
def test_numbers_of_any_make_are_taken(given):
    tensor = as_float_tensor(given, "x")
    assert tensor.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert tensor.dtype == torch.float64


def test_arrays_of_single_precision_stay_so_and_lists_are_double():
    assert as_float_tensor(np.ones(2, np.float32), "x").dtype == torch.float32
    assert as_float_tensor([np.float32(1.0)], "x").dtype == torch.float64


@pytest.mark.parametrize("end", ["above", "least", "below", "most"])
def test_a_number_at_an_end_of_its_range_is_in_it_or_not(end: str) -> None:
    if end in ("least", "most"):
        assert checks.number(1, "x", **{end: 1.0}) == 1.0
    else:
        with pytest.raises(ValueError, match="x: expected a number"):
            checks.number(1, "x", **{end: 1.0})
