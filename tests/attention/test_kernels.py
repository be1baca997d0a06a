"""Every kernel with every normalisation against double loops, and derivatives by complex steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from mpmath import mp

from meanfield.attention import (
    AttentionParameters,
    SelfAttention,
    kernels,
    normalizations,
)
from meanfield.attention.kernels.kernel import FeatureTransform, ModifiedKernel
from meanfield.attention.tangent import AttentionTangent
from meanfield.errors import NoDerivativeError
from meanfield.lipschitz import local_lipschitz
from meanfield.maps import linearize
from meanfield.maps.autodiff import linearize_by_autodiff
from meanfield.measures import ParticleMeasure
from tests import oracles
from tests.attention import kernel_oracles as slow
from tests.attention.kernel_oracles import Case
from tests.maps.small_maps import by_products, close, is_map
from tests.strategies import LIGHT

F64 = torch.float64
DOT, L2 = ("dot",), ("l2",)
GAINS = [0.7, 1.3, -0.4, 2.0]
ROTARY = {"base": 100.0, "length": 7.0}
KERNELS = {
    "dot": DOT,
    "l2": L2,
    "cosine": ("cosine", 2.5, 0.0, DOT),
    "cosine_eps": ("cosine", 1.5, 0.3, DOT),
    "qk_norm": ("qk_norm", GAINS, GAINS[::-1], 1e-6, DOT),
    # The temperature of a cosine stands for the scale, which a norm around it takes back.
    "cosine_cosine": ("cosine", 1.5, 0.1, ("cosine", 2.0, 0.0, DOT)),
    "qk_norm_cosine": ("qk_norm", 1.5, GAINS, 0.1, ("cosine", 2.0, 0.0, DOT)),
    "soft_cap": ("soft_cap", 1.5, DOT),
    "rotary": ("rotary", ROTARY, DOT),
    "rotary_interleaved": ("rotary", {**ROTARY, "interleaved": True}, DOT),
    "rotary_partial": ("rotary", {**ROTARY, "dim": 2, "frequencies": [0.9]}, DOT),
    "alibi": ("alibi", [0.5, 0.25], 7.0, DOT),
    "window": ("window", 0.45, DOT),
    "window_alibi": ("window", 0.45, ("alibi", [0.6], 5.0, DOT)),
    "cap_l2": ("soft_cap", 2.0, L2),
    "alibi_l2": ("alibi", [0.3], 4.0, L2),
    "window_cap_qk_rotary": (
        "window",
        0.6,
        ("soft_cap", 3.0, ("rotary", ROTARY, ("qk_norm", 1.0, GAINS, 1e-5, DOT))),
    ),
    "alibi_cosine_cap": ("alibi", [0.4, 0.2], 3.0, ("cosine", 2.0, 1e-3, ("soft_cap", 1.0, DOT))),
}
PLACED = ("rotary", "alibi", "window")
NORMALIZATIONS = {
    "softmax": ("softmax",),
    "sink": ("sink", [0.4, -1.0]),
    "sigmoid": ("sigmoid", -0.5),
    "sinkhorn": ("sinkhorn", 900),  # sweeps; the scores of L2 need most, 600 for 11 digits
    "custom": ("custom",),
}


def library_kernel(spec: slow.Spec) -> kernels.Kernel:
    name, *settings = spec
    if name == "dot":
        return kernels.dot_product
    if name == "l2":
        return kernels.l2
    inner = library_kernel(settings[-1])
    if name == "cosine":
        return kernels.cosine(settings[0], eps=settings[1], inner=inner)
    if name == "qk_norm":
        gains = (torch.as_tensor(gain, dtype=F64) for gain in settings[:2])
        return kernels.qk_norm(*gains, eps=settings[2], inner=inner)
    if name == "rotary":
        return kernels.rotary(**settings[0], inner=inner)
    if name == "alibi":
        return kernels.alibi(settings[0], length=settings[1], inner=inner)
    return {"soft_cap": kernels.soft_cap, "window": kernels.window}[name](settings[0], inner=inner)


def library_normalization(spec: slow.Spec) -> Any:
    name, *settings = spec
    if name == "sink":
        return normalizations.sink(settings[0])
    if name == "sigmoid":
        shift = settings[0]
        logsigmoid = torch.nn.functional.logsigmoid
        return normalizations.RowWise(lambda s: logsigmoid(s + shift), divides=False)
    if name == "sinkhorn":
        return normalizations.sinkhorn(rtol=1e-12)
    if name == "custom":
        return normalizations.RowWise(lambda s: torch.nn.functional.softplus(s).log(), sink=0.0)
    return normalizations.softmax


def looks_at_positions(spec: slow.Spec) -> bool:
    return spec[0] in PLACED or (isinstance(spec[-1], tuple) and looks_at_positions(spec[-1]))


def make_case(
    kernel: str,
    normalization: str,
    *,
    causal: bool,
    seed: int = 0,
    n: int = 4,
    weights: str = "dirichlet",
    groups: int = 1,
) -> Case:
    """Two heads that share a key and value head, every bias, unsorted positions with a tie."""
    rng = np.random.default_rng([seed, len(kernel), len(normalization)])
    d, heads, k, v, out = 3, 2, 4, 3, 2
    layer = {
        "query": 0.7 * rng.normal(size=(heads, k, d)),
        "key": 0.7 * rng.normal(size=(groups, k, d)),
        "value": rng.normal(size=(groups, v, d)),
        "output": rng.normal(size=(heads, out, v)),
        "query_bias": rng.normal(size=(heads, k)),
        "key_bias": rng.normal(size=(groups, k)),
        "value_bias": rng.normal(size=(groups, v)),
        "output_bias": rng.normal(size=out),
        # Sinkhorn's plain iteration, the oracle's, is slow where scores are far apart.
        "scale": np.array([0.2, 0.1] if normalization == "sinkhorn" else [0.8, 0.5]),
    }
    logs = np.zeros(n) if weights == "uniform" else np.log(rng.dirichlet(np.ones(n)))
    # Unsorted, with a tie; the first position of all is not the last atom's, which may vanish.
    positions = np.array([0.5, 0.1, 0.5, 0.9, 0.3, 0.7, 1.0])[:n]
    if weights == "zeros":
        logs[-1] = -math.inf
    if weights == "light":
        logs[[0, 2]] = LIGHT
    logs = logs - np.logaddexp.reduce(logs)
    spec = KERNELS[kernel]
    placed = causal or looks_at_positions(spec)
    points = 0.8 * rng.normal(size=(n, d)) + 0.5
    return Case(
        points,
        logs,
        positions if placed else None,
        layer,
        spec,
        NORMALIZATIONS[normalization],
        causal,
    )


def library(case: Case) -> tuple[SelfAttention, ParticleMeasure]:
    F = SelfAttention(
        AttentionParameters(**case.layer),
        causal=case.causal,
        kernel=library_kernel(case.kernel),
        normalization=library_normalization(case.normalization),
    )
    return F, ParticleMeasure(case.points, log_weights=case.log_weights, positions=case.positions)


CASES = [
    pytest.param(kernel, normalization, causal, id=f"{kernel}-{normalization}-{causal}")
    for kernel in KERNELS
    for normalization in NORMALIZATIONS
    for causal in (False, True)
    if not (causal and normalization == "sinkhorn")
]
# Every kernel with three of the nine normalisations, each of these with five or six kernels; the
# other two thirds are a campaign.
A_THIRD = [
    case
    if (place // 9 + place) % 3 == 0
    else pytest.param(*case.values, id=case.id, marks=pytest.mark.slow)
    for place, case in enumerate(CASES)
]


def settings_of(kernel: str, normalization: str, causal: bool) -> dict[str, Any]:
    """Weights and groups that go round with the cases."""
    turn = len(kernel) + 2 * len(normalization) + causal
    return {"weights": ("dirichlet", "zeros", "uniform")[turn % 3], "groups": 1 + turn % 2}


@pytest.mark.parametrize(("kernel", "normalization", "causal"), A_THIRD)
def test_map_and_derivatives_are_those_of_the_double_loop(kernel, normalization, causal):
    case = make_case(
        kernel, normalization, causal=causal, **settings_of(kernel, normalization, causal)
    )
    F, mu = library(case)
    alive = case.log_weights > -math.inf
    image = F(mu).points
    close(image[alive], slow.attention_map(case)[alive], 1e-12)
    places = mu.positions
    field = F.field(mu)
    at_atoms = field(mu.points) if places is None else field(mu.points, places)
    torch.testing.assert_close(at_atoms[alive], image[alive], rtol=1e-11, atol=1e-12)
    whole = slow.jacobian(case)
    for geometry in ("euclidean", "wasserstein"):
        at = linearize(F, mu, geometry=geometry)
        wanted = slow.absent_out(whole, case.log_weights)
        if geometry == "wasserstein":
            wanted = slow.weighted(whole, case.log_weights)
        is_map(at.atoms, wanted, 1e-10)
    slopes = slow.field_jacobians(case)
    is_map(at.field, slopes, 1e-10, alive)
    assert not at.field.to_dense()[~alive].any()


@pytest.mark.parametrize(("kernel", "normalization", "causal"), A_THIRD[1::2])
def test_blocks_recomputed_are_the_matrices_kept(kernel, normalization, causal):
    if normalization == "sinkhorn":
        pytest.skip("its products are not made of blocks alone")
    case = make_case(kernel, normalization, causal=causal, seed=1, n=7)
    F, mu = library(case)
    for geometry in ("euclidean", "wasserstein"):
        wanted = AttentionTangent(F.weights(mu), geometry=geometry).as_linear_map().to_dense()
        blocks = AttentionTangent(F.weights(mu), geometry=geometry, memory=0, block_size=3)
        is_map(blocks.as_linear_map(), wanted, 1e-12)
        slopes = AttentionTangent(F.weights(mu), geometry=geometry).field_jacobians()
        is_map(blocks.field_linear_map(), slopes, 1e-12)


LIGHT_CASES = [
    ("dot", "softmax", False),
    ("dot", "sink", True),
    ("l2", "softmax", True),
    ("cosine", "sigmoid", False),
    ("qk_norm", "softmax", True),
    ("soft_cap", "softmax", False),
    ("soft_cap", "sinkhorn", False),
    ("rotary", "sink", False),
    ("window_cap_qk_rotary", "softmax", True),
    ("dot", "sinkhorn", False),
    ("l2", "sinkhorn", False),
]


@pytest.mark.parametrize(("kernel", "normalization", "causal"), LIGHT_CASES)
def test_weights_of_e_minus_900_are_right_to_ten_digits(kernel, normalization, causal):
    """Relative to the norm, in 50 digits, since e^{−900} is no float."""
    case = make_case(kernel, normalization, causal=causal, seed=3, n=3, weights="light")
    F, mu = library(case)
    with mp.workdps(50):
        exact = case._replace(
            points=oracles.exact(case.points),
            log_weights=oracles.exact(mu.log_weights.numpy()),
            layer=oracles.exact_layer(case.layer),
        )
        if normalization == "sinkhorn":
            exact = exact._replace(normalization=("sinkhorn", 60))
        matrix = slow.jacobian(exact)
        plain = matrix.astype(float)
        tilted = slow.weighted(matrix, exact.log_weights).astype(float)
        slopes = slow.field_jacobians(exact).astype(float)
    for geometry, wanted in (("euclidean", plain), ("wasserstein", tilted)):
        at = linearize(F, mu, geometry=geometry)
        is_map(at.atoms, wanted, 1e-10)
        close(at.field.to_dense(), slopes, 1e-10)


# ------------------------------------------------------------------ kernels of the user's own


class OnlyFeatures(kernels.Kernel):
    """Queries and keys through tanh, with a bias of the score that depends on the key."""

    def features(self, parameters, points, positions):
        q, k, v = parameters.project(points)
        return kernels.Features(torch.tanh(q), torch.tanh(k), v.sin(), k.square().sum(-1) / 10)


class AllThree(kernels.Kernel):
    """Sines of queries and keys, with the derivative and its transpose."""

    def features(self, parameters, points, positions):
        q, k, v = parameters.project(points)
        return kernels.Features(q.sin(), k.sin(), v)

    def push(self, at, displacement):
        q, k, _ = at.parameters.project(at.points)
        dq, dk, dv = at.parameters.project(displacement)
        return kernels.Features(q.cos() * dq, k.cos() * dk, dv)

    def pull(self, at, cotangents):
        q, k, _ = at.parameters.project(at.points)
        q, k = q.cos() * cotangents.q, k.cos() * cotangents.k
        return at.parameters.project_transposed(q, k, cotangents.v)


class Child(AllThree):
    """Other features than its parent's, whose derivative it must not inherit."""

    def features(self, parameters, points, positions):
        q, k, v = parameters.project(points)
        return kernels.Features(q.atan(), k.sin(), v)


class Mixin:
    """Features from beside the line of kernels."""

    def features(self, parameters, points, positions):
        q, k, v = parameters.project(points)
        return kernels.Features(q.sin(), k.cos(), v)


class Mixed(Mixin, AllThree):
    """The features of the mixin; the derivative of `AllThree` is not theirs."""


class Borrowed(kernels.Kernel):
    """The features of another class, set after the class is made."""


Borrowed.features = OnlyFeatures.features


class OfDotProduct(type(kernels.dot_product)):
    """A subclass of a kernel of the library, with features of its own."""

    def features(self, parameters, points, positions):
        q, k, v = parameters.project(points)
        return kernels.Features(torch.tanh(q), k, v)


@dataclass(frozen=True)
class Tempered(ModifiedKernel):
    """Another kernel with features of its own on top."""

    inner: kernels.Kernel = kernels.l2

    def features(self, parameters, points, positions):
        f = self.inner.features(parameters, points, positions).whole_keys()
        return f._replace(q=2 * f.q.tanh(), v=f.v + f.v_centre, v_centre=None)


@dataclass(frozen=True)
class Louder(ModifiedKernel):
    """Only the activation is new: what is inherited stays right."""

    inner: kernels.Kernel = kernels.l2

    @property
    def activation(self):
        return lambda s: 2 * torch.atan(s)


OWN = [OnlyFeatures(), AllThree(), Child(), Mixed(), Borrowed(), OfDotProduct(), Tempered()]
OWN.append(Louder())


@pytest.mark.parametrize("normalization", ["softmax", "sink", "sigmoid", "sinkhorn"])
@pytest.mark.parametrize("kernel", OWN, ids=lambda kernel: type(kernel).__name__)
def test_a_kernel_of_your_own_has_its_own_derivative(kernel, normalization):
    case = make_case("dot", normalization, causal=False, seed=4)
    F, mu = library(case)
    F = replace(F, kernel=kernel)

    def move(points):
        return F(mu.replace(points)).points

    size = mu.points.numel()
    wanted = torch.func.jacrev(move)(mu.points).reshape(-1, size)
    at = F.linearisation(mu)
    is_map(at.atoms, wanted, 1e-10)
    step = 1e-6 * torch.randn(mu.points.shape, dtype=F64)
    quotient = (move(mu.points + step) - move(mu.points - step)) / 2
    torch.testing.assert_close(at.atoms.matvec(step), quotient, rtol=1e-6, atol=1e-11)


def test_centres_without_a_derivative_are_refused():
    class Centred(kernels.Kernel):
        def features(self, parameters, points, positions):
            return kernels.dot_product.features(parameters, points, positions)

    F = SelfAttention(AttentionParameters.random(3), kernel=Centred())
    with pytest.raises(TypeError, match="Centred: expected features without k_centre"):
        F.linearize(ParticleMeasure(torch.eye(3, dtype=F64))).to_dense()


def test_a_turn_without_its_derivative_is_refused():
    with pytest.raises(
        TypeError, match="expected turn, turn_push and turn_pull, got \\['turn'\\]"
    ):

        class Half(FeatureTransform):
            def turn(self, at, features):
                return features


@pytest.mark.parametrize(
    ("made", "error", "words"),
    [
        (lambda q, k, v: (q, k, v), TypeError, r"expected kernels.Features\(q, k, v\), got tuple"),
        (
            lambda q, k, v: kernels.Features(q[0], k, v),
            ValueError,
            r"q of shape .*heads, 5, width",
        ),
        (lambda q, k, v: kernels.Features(q, k.mT, v), ValueError, r"expected k of shape"),
        (lambda q, k, v: kernels.Features(q[:1], k[:1], v), ValueError, r"q of .*got \(1, 5, "),
        (lambda q, k, v: kernels.Features(q, k[..., :1], v), ValueError, r"k of .*one width"),
        (lambda q, k, v: kernels.Features(q, k, v.repeat(1, 1, 2)), ValueError, r"v of shape"),
        (lambda q, k, v: kernels.Features(q, k, v, k[0, :, 0]), ValueError, r"b of .*heads, 5\)"),
        (lambda q, k, v: kernels.Features(q.float(), k, v), TypeError, r"q of torch.float64, got"),
    ],
)
def test_features_of_another_kind_or_shape_are_refused(made, error, words):
    class Mine(kernels.Kernel):
        def features(self, parameters, points, positions):
            return made(*parameters.project(points))

    case = make_case("dot", "softmax", causal=False, n=5)
    F = SelfAttention(AttentionParameters(**case.layer), kernel=Mine())
    with pytest.raises(error, match=f"Mine.features: .*{words}"):
        F(ParticleMeasure(case.points))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: kernels.cosine(0.0), "temperature: expected a number > 0, got 0.0"),
        (lambda: kernels.cosine(1.0, eps=-1), "eps: expected a number ≥ 0"),
        (lambda: kernels.soft_cap(-1.0), "tau: expected a number > 0"),
        (lambda: kernels.rotary(0.0), "base: expected a number > 0"),
        (lambda: kernels.rotary(dim=3), "dim: expected an even number"),
        (lambda: kernels.rotary(dim=4, frequencies=[1.0]), "frequencies: expected 2 numbers"),
        (lambda: kernels.window(0.0), "width: expected a number > 0"),
        (lambda: kernels.window(4), r"width: .* got 4; for w of n tokens"),
        (lambda: normalizations.sink([[0.0]]), "sink: expected a finite number"),
        (lambda: normalizations.sink(math.inf), "sink: expected a finite number"),
    ],
)
def test_settings_that_mean_nothing_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("turn", [kernels.cosine(1.0), kernels.qk_norm(), kernels.rotary(dim=2)])
def test_queries_and_keys_that_are_not_whole_vectors_are_not_turned(turn):
    inner = kernels.alibi([1.0], inner=kernels.l2)
    F = SelfAttention(AttentionParameters.random(4), kernel=replace(turn, inner=inner))
    mu = ParticleMeasure.from_sequence(torch.eye(4, dtype=F64))
    with pytest.raises(ValueError, match="expected an inner kernel whose scores are functions of"):
        F(mu)


def test_a_cap_is_inside_biases_by_position_wherever_it_stands():
    case = make_case("alibi", "softmax", causal=False)
    F, mu = library(case)
    inside = kernels.soft_cap(0.5, inner=F.kernel)
    outside = kernels.alibi([0.5, 0.25], length=7.0, inner=kernels.soft_cap(0.5))
    images = (replace(F, kernel=kernel)(mu).points for kernel in (inside, outside))
    torch.testing.assert_close(*images)


def test_a_place_from_which_a_window_hides_all_the_mass_has_no_image():
    case = make_case("window", "softmax", causal=False)
    F, mu = library(case)
    F = replace(F, kernel=kernels.window(0.15))
    x = torch.zeros(2, 3, dtype=F64)
    assert F.field(mu)(x, torch.tensor([0.2, 0.8], dtype=F64)).isfinite().all()
    with pytest.raises(
        ValueError, match="s: expected positions that see an atom.*Window.* hides all the mass"
    ):
        F.field(mu)(x, torch.tensor([0.2, 0.0 - 0.2], dtype=F64))
    late = replace(F, causal=True, kernel=kernels.window(0.05))
    with pytest.raises(ValueError, match="hides all the mass"):
        late.field(mu)(x[:1], torch.tensor([0.88], dtype=F64))
    logs = mu.log_weights.masked_fill(mu.positions < 0.5, -math.inf).log_softmax(-1)
    absent = ParticleMeasure(mu.points, log_weights=logs, positions=mu.positions)
    with pytest.raises(ValueError, match="hides all the mass"):
        F.field(absent)(x[:1], torch.tensor([0.2], dtype=F64))


def test_kernels_that_need_positions_say_so():
    F = SelfAttention(AttentionParameters.random(4), kernel=kernels.alibi([1.0]))
    with pytest.raises(ValueError, match="expected a measure with positions"):
        F(ParticleMeasure(torch.eye(4, dtype=F64)))


@pytest.mark.parametrize("kernel", ["dot", "cosine", "l2"])
def test_reverse_derivatives_see_no_light_atom_that_is_hidden(kernel):
    # Rounding of 1e-17 there would be multiplied by e^450.
    case = make_case(kernel, "softmax", causal=True, n=5)
    logs = np.log([0.4, 1e-300, 0.3, 0.2, 0.1])
    case = case._replace(log_weights=logs, positions=np.array([0.1, 0.9, 0.2, 0.3, 0.4]))
    F, mu = library(case)
    at = linearize_by_autodiff(F, mu, geometry="wasserstein").atoms
    close(by_products(at.T).mT, slow.weighted(slow.jacobian(case), logs), 1e-10)


@pytest.mark.parametrize(
    ("dtype", "power"), [("float32", 70), ("float64", -540), ("float64", 540)]
)
@pytest.mark.parametrize("kernel", [kernels.cosine(3.0), kernels.qk_norm(3.0, eps=0.0)])
def test_normalised_scores_do_not_depend_on_the_unit_of_points(kernel, dtype, power):
    dtype, unit = getattr(torch, dtype), 2.0**power
    layer = SelfAttention(AttentionParameters.random(2, n_heads=1, dtype=dtype), kernel=kernel)
    x = torch.tensor([[1.0, -2.0], [0.5, 3.0], [0.0, 0.25]], dtype=dtype)
    image, far = layer(ParticleMeasure(x)).points, layer(ParticleMeasure(unit * x)).points
    torch.testing.assert_close(far, unit * image, rtol=1e-5, atol=0)


def test_gains_of_another_shape_are_refused():
    for gain in (torch.ones(2, 3), torch.ones(2, 2, 3)):
        with pytest.raises(ValueError, match=r"query_gain: expected a number, one per coordinate"):
            kernels.qk_norm(gain)


def test_l2_attention_of_scale_0_is_that_of_equal_scores():
    par = AttentionParameters.random(3)
    par = AttentionParameters(par.query, par.key, par.value, scale=0.0)
    mu = ParticleMeasure(torch.randn(4, 3, dtype=torch.float64), weights=[0.1, 0.2, 0.3, 0.4])
    F, G = SelfAttention(par, kernel=kernels.l2), SelfAttention(par)
    torch.testing.assert_close(F(mu).points, G(mu).points)
    at, other = linearize(F, mu).atoms, linearize(G, mu).atoms
    torch.testing.assert_close(at.to_dense(), other.to_dense())
    way = torch.randn(4, 3, dtype=torch.float64)
    torch.testing.assert_close(at.matvec(way), other.matvec(way))
    torch.testing.assert_close(at.rmatvec(way), other.rmatvec(way))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("normalization", ["softmax", "sigmoid"])
@pytest.mark.parametrize("kernel", ["l2", "cap_l2", "alibi_l2"])
def test_tied_l2_keeps_its_digits_far_from_the_origin(kernel, normalization, causal):
    case = make_case(kernel, normalization, causal=causal)
    query = np.repeat(case.layer["key"], 2, 0)
    # Values that do not grow with the distance show what the scores have lost.
    layer = {**case.layer, "query": query, "value": 0 * case.layer["value"]}
    F, mu = library(case._replace(layer=layer, points=np.round(64 * case.points) / 64))
    far, x = mu.replace(mu.points + 2.0**30), mu.points[:3]
    close(F(far).points, F(mu).points, 1e-12)
    at = () if mu.positions is None else (mu.positions[:3],)
    close(F.field(far)(x + 2.0**30, *at), F.field(mu)(x, *at), 1e-12)
    values = AttentionParameters(**{**layer, "value": case.layer["value"]})
    G = replace(F, parameters=values)
    near, there = (local_lipschitz(G, nu).value for nu in (mu, far))
    if normalization == "softmax":  # elsewhere rows do not add up to one and values count
        torch.testing.assert_close(there, near, rtol=1e-9, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constants_of_tied_l2_do_not_depend_on_where_the_cloud_is(dtype):
    at = 4 * torch.finfo(dtype).eps ** -0.5  # scores from the origin would err by ten and more
    parameters = AttentionParameters.tied_l2(
        torch.tensor([[1.0, 0.5]], dtype=dtype), torch.tensor([[0.3], [1.0]], dtype=dtype).mT
    )
    layer = SelfAttention(parameters, kernel=kernels.l2)
    x = torch.tensor([[1.0, -2.0], [0.5, 3.0], [0.0, 0.25]], dtype=dtype)
    clouds = ParticleMeasure(x), ParticleMeasure(x + at), ParticleMeasure(torch.stack([x, x + at]))
    near, far, both = (local_lipschitz(layer, mu).value for mu in clouds)
    torch.testing.assert_close(far, near)
    torch.testing.assert_close(both, torch.stack([near, far]))


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
def test_tied_l2_is_linearised_by_torch_as_by_hand():
    case = make_case("l2", "softmax", causal=False)
    query = np.repeat(case.layer["key"], 2, 0)
    F, mu = library(case._replace(layer={**case.layer, "query": query}))

    def image(points: torch.Tensor) -> torch.Tensor:
        return F(mu.replace(points)).points

    value, along = torch.func.linearize(image, mu.points)
    close(value, image(mu.points), 1e-14)
    step = torch.ones_like(mu.points)
    close(along(step), F.linearize(mu).matvec(step), 1e-12)


def test_gradients_in_one_of_two_equal_matrices_are_those_of_that_one():
    case = make_case("l2", "softmax", causal=False)
    query = np.repeat(case.layer["key"], 2, 0)
    query = torch.tensor(query, requires_grad=True)
    F = SelfAttention(AttentionParameters(**{**case.layer, "query": query}), kernel=kernels.l2)
    mu = ParticleMeasure(case.points, log_weights=case.log_weights)

    def image(q: torch.Tensor) -> torch.Tensor:
        G = replace(F, parameters=AttentionParameters(**{**case.layer, "query": q}))
        return G(mu).points.square().sum()

    ours = torch.autograd.grad(image(query), query)[0]
    step, slopes = 1e-6, torch.zeros_like(query)
    for index in np.ndindex(*query.shape):
        unit = torch.zeros_like(query)
        unit[index] = step
        with torch.no_grad():
            slopes[index] = (image(query + unit) - image(query - unit)) / (2 * step)
    close(ours, slopes, 1e-7)
    forward = torch.func.jvp(image, (query.detach(),), (torch.ones_like(query),))[1]
    torch.testing.assert_close(forward, slopes.sum(), rtol=1e-7, atol=0)


@pytest.mark.parametrize("zero", ["query", "key"])
def test_without_eps_a_cosine_is_refused_where_a_query_or_a_key_is_0(zero):
    matrices = {name: torch.eye(2, dtype=torch.float64) for name in ("query", "key", "value")}
    matrices[zero] = torch.tensor([[0.0, 1.0], [0.0, 2.0]], dtype=torch.float64)
    F = SelfAttention(AttentionParameters(**matrices), kernel=kernels.cosine(2.0))
    mu = ParticleMeasure([[1.0, 0.0], [1.0, 1.0]])
    with pytest.raises(NoDerivativeError):
        local_lipschitz(F, mu)
    assert float(local_lipschitz(F, ParticleMeasure([[1.0, 1.0], [0.0, 1.0]])).value) > 0
