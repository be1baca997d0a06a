"""Any positive ψ of the scores is a normalisation with exact derivatives, in blocks of rows."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid, softplus

from meanfield.attention import (
    AttentionParameters,
    SelfAttention,
    kernels,
    weights,
)
from meanfield.attention.normalizations import (
    RowWise,
    exponential,
    sigmoid,
    sink,
    softmax,
)
from meanfield.errors import NoDerivativeError
from meanfield.lipschitz import local_lipschitz
from meanfield.maps import linearize
from meanfield.maps.autodiff import linearize_by_autodiff
from meanfield.measures import ParticleMeasure, pushforward
from tests.attention.kernel_oracles import Case, attention_map
from tests.maps import small_maps as small

F64 = torch.float64

# Each with ψ itself as plain Python arithmetic, whether rows are divided, and the sink's logit.
CASES = {
    "softmax": (softmax, math.exp, True, None),
    "exponential": (exponential, math.exp, False, None),
    "sigmoid": (sigmoid, lambda s: 1 / (1 + math.exp(-s)), False, None),
    "sink": (sink([0.3, -1.0]), math.exp, True, (0.3, -1.0)),
    "softplus": (
        RowWise(lambda s: softplus(s).log()),
        lambda s: math.log1p(math.exp(s)),
        True,
        None,
    ),
    "elu + 1": (
        RowWise(lambda s: torch.where(s > 0, s.clamp_min(0).log1p(), s)),
        lambda s: s + 1 if s > 0 else math.exp(s),
        True,
        None,
    ),
    "softplus with a sink": (
        RowWise(lambda s: softplus(s).log(), sink=0.5),
        lambda s: math.log1p(math.exp(s)),
        True,
        (0.5, 0.5),
    ),
    "shifted sigmoid": (
        RowWise(lambda s: logsigmoid(s - 2), divides=False),
        lambda s: 1 / (1 + math.exp(2 - s)),
        False,
        None,
    ),
}


def layer(name: str, *, causal: bool = False, kernel=kernels.dot_product) -> SelfAttention:
    return small.attention(causal, kernel=kernel, normalization=CASES[name][0])


def measure(n: int = 7, *, far: float = 0.0) -> ParticleMeasure:
    mu = small.cloud(n=n, absent=True)
    return mu.replace(mu.points + far)


@pytest.mark.parametrize("causal", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize("name", CASES)
def test_the_map_is_that_of_the_double_loop(name, causal):
    F, mu = layer(name, causal=causal), measure()
    measure_of_arrays = (t.numpy() for t in (mu.points, mu.log_weights, mu.positions))
    normalization = ("psi", *CASES[name][1:])
    case = Case(*measure_of_arrays, F.parameters._given(), ("dot",), normalization, causal)
    wanted, alive = torch.from_numpy(attention_map(case)), mu.weights > 0
    torch.testing.assert_close(F(mu).points[alive], wanted[alive], rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("causal", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize("name", CASES)
def test_the_derivative_far_from_the_origin_is_that_of_autodiff(name, causal):
    """Only the softmax may measure its keys from their centre."""
    F, mu = layer(name, causal=causal), measure(far=5.0)
    own, auto = (of(F, mu, geometry="wasserstein") for of in (linearize, linearize_by_autodiff))
    small.is_map(own.atoms, auto.atoms.to_dense(), 1e-12)
    small.is_map(own.field, auto.field.to_dense(), 1e-12, mu.weights > 0)


@pytest.mark.parametrize("name", CASES)
def test_blocks_of_rows_change_nothing(name, monkeypatch):
    F, mu = layer(name, causal=True), measure(12)
    image = F(mu).points
    monkeypatch.setattr(weights, "_BLOCK_ENTRIES", 50)
    monkeypatch.setattr(weights, "_LARGE_BLOCK_ENTRIES", 50)
    torch.testing.assert_close(F(mu).points, image, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", ["softmax", "elu + 1", "softplus with a sink"])
def test_rows_that_see_nothing_through_a_window_are_finite_and_differentiable(name):
    """An absent atom far from the others: all of its logits are −∞, where ψ has no derivative."""
    F = layer(name, kernel=kernels.window(0.2))
    positions = torch.tensor([0.0, 0.1, 0.15, 0.9], dtype=F64)
    points = torch.randn(4, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    mu = ParticleMeasure(points, [0.5, 0.3, 0.2, 0.0], positions=positions)
    assert F(mu).points.isfinite().all()
    own, auto = linearize(F, mu), linearize_by_autodiff(F, mu)
    assert own.atoms.to_dense().isfinite().all()
    torch.testing.assert_close(own.atoms.to_dense()[:9, :9], auto.atoms.to_dense()[:9, :9])
    leaf = points.clone().requires_grad_()
    F(mu.replace(leaf)).points[:3].square().sum().backward()
    assert leaf.grad is not None and leaf.grad.isfinite().all()


@pytest.mark.parametrize("a", [-25.0, -36.0, -700.0])
def test_the_form_that_is_shown_keeps_its_digits_where_psi_is_small(a):
    mu = ParticleMeasure([[1.0], [1.05], [1.1]])
    par = AttentionParameters.from_bilinear([[a]], [[1.0]])
    F = SelfAttention(par, normalization=CASES["elu + 1"][0])  # ψ = exp where scores are negative
    torch.testing.assert_close(F(mu).points, SelfAttention(par)(mu).points, rtol=1e-13, atol=0)
    found, wanted = (
        float(local_lipschitz(G, mu, rtol=1e-9).value) for G in (F, SelfAttention(par))
    )
    assert found == pytest.approx(wanted, rel=1e-8)


@pytest.mark.parametrize("kernel", [kernels.dot_product, kernels.window(0.9)])
def test_a_row_without_mass_that_is_not_masked_is_refused(kernel):
    relu = RowWise(lambda s: s.relu().log(), name="relu")
    F = SelfAttention(
        AttentionParameters.from_bilinear([[1.0]], [[1.0]]), kernel=kernel, normalization=relu
    )
    mu = ParticleMeasure([[1.0], [-1.0], [2.0]], positions=[0.1, 0.2, 0.3])
    assert F(mu).points.isfinite().all()
    at = (0.2,) if kernel.needs_positions else ()
    away = ParticleMeasure([[0.0]], positions=[0.2])
    for call in (
        lambda: F.field(mu)([[0.0]], *at),
        lambda: F(ParticleMeasure([[1.0], [0.0]], positions=[0.1, 0.2])),
        lambda: pushforward(F.field(mu), away, use_positions=kernel.needs_positions),
    ):
        with pytest.raises(ValueError, match="relu: expected ψ > 0, got a row in which ψ is 0"):
            call()


def pickled(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
@pytest.mark.parametrize("normalization", [softmax, sigmoid, exponential])
def test_a_copy_of_a_layer_has_its_normalisation(normalization, copied):
    F = SelfAttention(AttentionParameters.random(3), normalization=normalization)
    assert copied(normalization) is normalization and repr(copied(F)) == repr(F)
    assert float(copied(sink(0.5)).sink) == 0.5


def test_what_is_no_normalisation_is_refused():
    with pytest.raises(TypeError, match="log_psi: expected a function of scores, got 2"):
        RowWise(2)
    with pytest.raises(ValueError, match="sink: expected none where rows are not divided"):
        RowWise(divides=False, sink=0.0)
    with pytest.raises(NoDerivativeError, match="ψ > 0, .*got a slope of nan; log ψ is −∞ where"):
        local_lipschitz(
            SelfAttention(
                AttentionParameters.random(3), normalization=RowWise(lambda s: s.relu().log())
            ),
            ParticleMeasure(torch.randn(5, 3, generator=torch.Generator().manual_seed(0))).to(F64),
        )
    assert softmax.is_softmax
    assert not CASES["softplus"][0].is_softmax and not CASES["sink"][0].is_softmax


@pytest.mark.parametrize("rows", [sigmoid, sink(0.3)])
def test_where_rows_see_nothing_and_are_not_divided_by_it_the_field_is_0(rows):
    F = SelfAttention(AttentionParameters.random(2), causal=True, normalization=rows)
    mu = ParticleMeasure(torch.randn(3, 2, dtype=F64), positions=[0.4, 0.5, 0.6])
    assert F.field(mu)(torch.ones(1, 2, dtype=F64), 0.1).tolist() == [[0.0, 0.0]]


class _Detached(kernels.Kernel):
    def features(self, parameters, points, positions):
        q, k, v = parameters.project(points)
        return kernels.Features(q, k.detach(), v)


class _Kinked(kernels.Kernel):
    def features(self, parameters, points, positions):
        q, k, v = parameters.project(points)
        return kernels.Features(q.relu(), k.relu(), v)


_PAR = AttentionParameters.from_bilinear([[1.0]], [[1.0]])


@pytest.mark.parametrize(
    "layer",
    [
        SelfAttention(_PAR, kernel=_Detached()),
        SelfAttention(_PAR, kernel=kernels.soft_cap(2.0, inner=_Detached())),
        SelfAttention(_PAR, normalization=RowWise(lambda s: s.detach())),
        SelfAttention(_PAR, normalization=RowWise(lambda s: s / (2 + s.amax(-1, keepdim=True)))),
    ],
    ids=["kernel", "inner kernel", "psi", "psi of a row"],
)
def test_slopes_of_others_that_are_not_those_of_their_values_are_refused(layer):
    mu = ParticleMeasure([[1.0], [-1.0], [0.3]])
    for geometry in ("euclidean", "wasserstein"):
        with pytest.raises(ValueError, match="whose derivative is that of its difference"):
            local_lipschitz(layer, mu, geometry=geometry)


def test_kinks_of_others_are_refused_where_they_are():
    steep = RowWise(lambda s: (s.relu() + 1e-2).log())
    for layer in (
        SelfAttention(_PAR, normalization=steep),
        SelfAttention(_PAR, kernel=_Kinked()),
    ):
        with pytest.raises(NoDerivativeError, match="at other rates on one side"):
            local_lipschitz(layer, ParticleMeasure([[0.0], [1.0]]))
        smooth = ParticleMeasure([[0.5], [1.0]])
        found = local_lipschitz(layer, smooth)
        dense = local_lipschitz(lambda mu, F=layer: F(mu), smooth)
        assert float(found.value) == pytest.approx(float(dense.value), rel=1e-9)


def test_functions_that_draw_are_refused():
    noisy = RowWise(lambda s: s + torch.rand(s.shape, dtype=s.dtype))
    with pytest.raises(ValueError, match="expected the same image of the same measure"):
        local_lipschitz(SelfAttention(_PAR, normalization=noisy), ParticleMeasure([[1.0], [-1.0]]))


def test_a_kernel_that_sees_how_atoms_are_stored_is_refused():
    class Counting(kernels.Kernel):
        def features(self, parameters, points, positions):
            q, k, v = parameters.project(points)
            return kernels.Features(q * points.shape[-2], k, v)

    layer, mu = SelfAttention(_PAR, kernel=Counting()), ParticleMeasure([[1.0], [-1.0]])
    with pytest.raises(ValueError, match="depends on the measure alone"):
        local_lipschitz(layer, mu)
    assert float(local_lipschitz(layer, mu, geometry="euclidean").value) > 0


def test_kernels_of_others_may_be_flat_or_undefined_further_out():
    class Cubed(kernels.Kernel):
        def features(self, parameters, points, positions):
            q, k, v = parameters.project(points)
            return kernels.Features(q, k, v**3)

    flat = local_lipschitz(SelfAttention(_PAR, kernel=Cubed()), ParticleMeasure([[0.0]]))
    assert float(flat.value) == 0
    layer = SelfAttention(_PAR, normalization=RowWise(lambda s: s.log()))
    mu = ParticleMeasure([[1e-2], [1.0], [30.0]])
    found, dense = local_lipschitz(layer, mu), local_lipschitz(lambda mu: layer(mu), mu)
    assert float(found.value) == pytest.approx(float(dense.value), rel=1e-6)


@pytest.mark.parametrize(
    ("log_psi", "words"),
    [
        (
            lambda s: s[..., :1],
            r"shape \(1, 2, 2\) and torch.float64, got Tensor of shape \(1, 2, 1\)",
        ),
        (lambda s: s.float(), "got Tensor of .* and torch.float32"),
        (lambda s: s.new_tensor(0.0), "got Tensor and torch.float64"),
        (lambda s: 0.0, "got 0.0"),
        (lambda s: None, "got None"),
        (lambda s, temperature: s, "expected a function of scores, .* missing 1 required"),
        (lambda s: torch.from_numpy(np.tanh(s.numpy())), "which leaves torch"),
    ],
)
def test_a_function_that_gives_no_number_for_each_score_is_refused(log_psi, words):
    F = SelfAttention(
        AttentionParameters.from_bilinear([[1.0]], [[1.0]]), normalization=RowWise(log_psi)
    )
    with pytest.raises(TypeError, match=f"log_psi.*: .*{words}"):
        F.linearize(ParticleMeasure([[1.0], [2.0]]))
