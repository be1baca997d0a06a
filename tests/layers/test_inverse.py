"""Inverses of contractive layers: the returned error always holds; it is ∞ if nothing is proved.

The layers are evaluated a second time in extended precision, so that the preimage is known.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from meanfield import bounds
from meanfield.attention import AttentionParameters, SelfAttention, kernels
from meanfield.errors import ConvergenceError
from meanfield.layers import Bounded, Chain, Pointwise, Residual, contractive, invert
from meanfield.measures import ParticleMeasure

WIDE = np.longdouble
FACTORS = (0.3, 0.5, 0.7, 0.9, 0.99, 0.999)


def wide_l2_attention(points, weights, parameters, causal):
    """A batch (b, n, d) in extended precision; ties do not occur."""
    x = np.asarray(points, WIDE)
    total = np.zeros_like(x)
    for h in range(parameters.n_heads):
        q, v = (np.asarray(m[h].numpy(), WIDE) for m in (parameters.query, parameters.value))
        u, scale = x @ q.T, WIDE(float(parameters.scale[h]))
        scores = -scale * ((u[:, :, None] - u[:, None]) ** 2).sum(-1)
        kernel = np.asarray(weights, WIDE)[:, None] * np.exp(scores)
        if causal:
            kernel = kernel * np.tri(x.shape[1], dtype=WIDE)
        p = kernel / kernel.sum(-1, keepdims=True)
        w = np.asarray(parameters.output[h].numpy(), WIDE)
        total += p @ (x @ v.T) @ w.T
    return total


def weighted_l2(difference, weights):
    return np.sqrt((np.asarray(weights, WIDE)[..., None] * difference**2).sum((-2, -1)))


def draw_layer(generator, d, heads, size=1.0):
    k = int(torch.randint(1, d + 1, (), generator=generator))

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return AttentionParameters.tied_l2(
        size * normal(heads, k, d), normal(heads, k, d), normal(heads, d, k)
    )


def constant_of(F, n, norm):
    bound = bounds.l2_attention_2 if norm == "l2" else bounds.l2_attention_max
    return bound(F, n)


def image_of(X, weights, layers):
    """Through the layers, in extended precision, rounded once at the end."""
    x = np.asarray(X, WIDE)
    for layer in layers:
        F = layer.map.map
        x = x + WIDE(layer.scale) * wide_l2_attention(x, weights, F.parameters, F.causal)
    return x


def holds(X, weights, layers, **how):
    """Inverts the image of a batch X; how far the answers are, over their errors."""
    y = image_of(X, weights, layers)
    n = X.shape[-2]
    positions = torch.arange(1, n + 1, dtype=torch.float64) / n
    nu = ParticleMeasure(torch.from_numpy(y.astype(np.float64)), weights, positions=positions)
    G = layers[0] if len(layers) == 1 else Chain(layers)
    found = invert(G, nu, **how)
    off = weighted_l2(found.measure.points.numpy() - np.asarray(X, WIDE), weights.numpy())
    return found, (off / np.asarray(found.error.numpy(), WIDE)).astype(float)


@pytest.mark.parametrize(
    "seed", [s if s < 16 else pytest.param(s, marks=pytest.mark.slow) for s in range(50)]
)
def test_the_error_of_ten_random_cases_holds(seed):
    generator = torch.Generator().manual_seed(seed)

    def one_of(values):
        return values[int(torch.randint(len(values), (), generator=generator))]

    n, d, heads = one_of((1, 2, 3, 5, 8)), one_of((1, 2, 3, 4)), one_of((1, 2))
    weights = torch.rand(n, generator=generator, dtype=torch.float64) + 0.05
    weights = torch.full_like(weights, 1 / n) if seed % 2 else weights / weights.sum()
    norm, causal, depth = one_of(("l2", "max")), one_of((False, True)), one_of((1, 1, 2, 3))
    layers = []
    for _ in range(depth):
        F = SelfAttention(draw_layer(generator, d, heads), causal=causal, kernel=kernels.l2)
        constant = constant_of(F, 1 / float(weights.min()), norm)
        layers.append(contractive(F, one_of(FACTORS[:5]), constant=constant, norm=norm))
    sizes = 10 ** (3 * torch.rand(10, 1, 1, generator=generator, dtype=torch.float64) - 1.5)
    X = sizes * torch.randn(10, n, d, generator=generator, dtype=torch.float64)
    rtol = 10.0 ** -one_of((1, 2, 4, 6, 8))
    found, share = holds(X.numpy(), weights.expand(10, n), layers, rtol=rtol)
    assert (share <= 1).all()
    assert bool(found.converged.all())
    assert float(found.steepness.max()) <= 1


@pytest.mark.parametrize("factor", FACTORS[:5])
def test_the_bound_is_met_by_a_map_as_steep_as_its_constant(factor):
    # F(x) = −x: the layer is (1 − c) x, and ‖y − G(x)‖/(1 − c) is the error itself.
    G = contractive(Pointwise(lambda x: -x), factor, constant=1.0)
    mu = ParticleMeasure([[1.0, 2.0], [-3.0, 0.5]], [0.25, 0.75])
    found = invert(G, G(mu), rtol=1e-3, max_steps=20_000)
    off = float(weighted_l2((found.measure.points - mu.points).numpy(), mu.weights.numpy()))
    assert off <= float(found.error) <= off * (1 + 1e-5)
    assert float(found.steepness) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("factor", [0.9, 0.97])
def test_rounding_counts_where_the_residual_is_nothing(factor):
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(500, 1, 1, generator=generator, dtype=torch.float64)
    G = contractive(Pointwise(lambda x: -x), factor, constant=1.0)
    y = np.asarray(X, WIDE) * (1 - WIDE(factor))
    found = invert(G, ParticleMeasure(torch.from_numpy(y.astype(float))), rtol=1e-300,
                   max_steps=5_000, strict=False, probe=False)  # fmt: skip
    off = np.abs(found.measure.points.numpy() - np.asarray(X, WIDE))[:, 0, 0].astype(float)
    without = found.residual.numpy() / (1 - factor)
    assert (off > without).any()  # the residual alone would say too little
    assert (off <= found.error.numpy()).all()
    # The measure is that of the least residual, and not that of the last step.
    x, nu = found.measure.points.numpy(), y.astype(float)
    residual = np.abs(nu - x - factor * -x)[:, 0, 0]
    np.testing.assert_array_equal(found.residual.numpy(), residual)


@pytest.mark.parametrize("factor", [0.5, 0.7, 0.9])
def test_twelve_digits_within_the_iterations_that_c_predicts(factor):
    generator = torch.Generator().manual_seed(1)
    F = SelfAttention(draw_layer(generator, 4, 2), kernel=kernels.l2)
    G = contractive(F, factor, constant=bounds.l2_attention_2(F, 16))
    mu = ParticleMeasure(torch.randn(16, 4, generator=generator, dtype=torch.float64))
    nu = G(mu)
    found = invert(G, nu, rtol=1e-12)
    first = float((G(nu).points - nu.points).norm() / 4)  # ‖x₁ − x₀‖
    scale = float(nu.points.norm() / 4)
    predicted = math.ceil(math.log(1e-12 * scale * (1 - factor) / first) / math.log(factor))
    assert found.n_steps <= predicted + 1
    np.testing.assert_allclose(found.measure.points, mu.points, atol=1e-12 * scale)
    assert float(found.error) <= 1e-12 * max(scale, float(mu.points.norm() / 4))


def test_a_constant_that_is_refuted_proves_nothing():
    parameters = AttentionParameters.from_bilinear([[4.0]], [[1.0]])
    X = torch.tensor([[0.0], [6.0], [-6.0], [5.0]], dtype=torch.float64)
    G = contractive(SelfAttention(parameters), 0.9, constant=1.0)
    nu = G(ParticleMeasure(X))
    found = invert(G, nu, strict=False, max_steps=50)
    assert math.isinf(float(found.error))
    assert not bool(found.converged)
    assert float(found.steepness) > 1
    with pytest.raises(ConvergenceError, match=r"refuted.*times as steep.*dot-product"):
        invert(G, nu, max_steps=50)


def test_two_iterates_refute_a_constant_without_the_jacobian():
    G = contractive(Pointwise(lambda x: -3 * x), 0.5, constant=1.0)
    nu = G(ParticleMeasure([[1.0], [2.0]]))
    found = invert(G, nu, strict=False, probe=False)
    assert float(found.steepness) == pytest.approx(3)
    assert math.isinf(float(found.error))
    assert found.n_steps == 2


def test_the_jacobian_at_the_answer_refutes_what_no_step_did():
    # Flat where the iteration walks, steep at the answer: ν = 0 is its own preimage.
    steep = Pointwise(lambda x: torch.sin(5 * x))
    G = contractive(steep, 0.9, constant=1.0)
    nu = ParticleMeasure([[0.0]])
    assert float(invert(G, nu, strict=False, probe=False).error) == 0
    found = invert(G, nu, strict=False)
    assert float(found.steepness) == pytest.approx(5)
    assert math.isinf(float(found.error))


def test_an_error_changes_its_norm_between_the_layers_of_a_chain():
    # The light atom hides its error from the weighted norm, and then all others take it up.
    def first_everywhere(mu):
        return mu.replace(mu.points[..., :1, :].expand(mu.points.shape))

    inner = contractive(first_everywhere, 0.5, constant=1.0, norm="max")
    G = Chain([inner, contractive(Pointwise(lambda x: -x), 0.9, constant=1.0, norm="l2")])
    mu = ParticleMeasure([[1.0], [-0.5]], [1e-8, 1 - 1e-8])  # between the layers: 1.5 and 0
    found = invert(G, G(mu), rtol=1e-2, strict=False)
    off = float(weighted_l2((found.measure.points - mu.points).numpy(), mu.weights.numpy()))
    assert 0 < off <= float(found.error)


@pytest.mark.parametrize("norm", ["l2", "max"])
def test_weights_and_positions_ride_and_absent_atoms_are_absent(norm):
    generator = torch.Generator().manual_seed(5)
    F = SelfAttention(draw_layer(generator, 2, 1), kernel=kernels.l2, causal=True)
    G = contractive(F, 0.7, constant=constant_of(F, 4, norm), norm=norm)
    X = torch.randn(4, 2, generator=generator, dtype=torch.float64)
    X[3] = 1e6
    mu = ParticleMeasure(X, [0.5, 0.25, 0.25, 0.0], positions=[0.2, 0.5, 0.9, 0.3])
    found = invert(G, G(mu), rtol=1e-12)
    np.testing.assert_allclose(found.measure.points[:3], X[:3], atol=1e-11)
    np.testing.assert_array_equal(found.measure.weights, mu.weights)
    np.testing.assert_array_equal(found.measure.positions, mu.positions)


def test_single_precision_says_so_in_its_error():
    generator = torch.Generator().manual_seed(6)
    F = SelfAttention(draw_layer(generator, 3, 1), kernel=kernels.l2)
    single = SelfAttention(F.parameters.to(torch.float32), kernel=kernels.l2)
    X = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    constant = bounds.l2_attention_2(F, 6)
    G = contractive(single, 0.9, constant=constant)
    y = image_of(X.numpy()[None], np.full((1, 6), 1 / 6), [contractive(F, 0.9, constant=constant)])
    nu = ParticleMeasure(torch.from_numpy(y[0].astype(np.float32)))
    found = invert(G, nu, strict=False)
    off = float((found.measure.points.double() - X).norm()) / math.sqrt(6)
    assert off <= float(found.error) < 1e-3
    with pytest.raises(ConvergenceError, match=r"certified error of .* relative 1.00e-10"):
        invert(G, nu)


def test_a_contraction_scales_by_its_constant_and_has_its_derivative():
    F = Pointwise(torch.sin)
    G = contractive(F, 0.6, constant=3.0)
    mu = ParticleMeasure([[0.3], [1.0]])
    np.testing.assert_allclose(G(mu).points, mu.points + 0.2 * mu.points.sin())
    J = G.linearisation(mu).atoms.to_dense()
    np.testing.assert_allclose(J.diagonal(), (1 + 0.2 * mu.points.cos()).flatten())


def test_what_cannot_be_inverted_is_refused():
    F = Pointwise(torch.sin)
    for factor in (0.0, 1.0, 1.5, -0.5, math.nan):
        with pytest.raises(ValueError, match="factor: expected a number between 0 and 1"):
            contractive(F, factor, constant=1.0)
    for constant in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="constant: expected"):
            contractive(F, 0.5, constant=constant)
    with pytest.raises(TypeError, match="holds at one measure only"):
        contractive(F, 0.5, constant=object())
    with pytest.raises(ValueError, match="norm: expected one of"):
        contractive(F, 0.5, constant=1.0, norm="l1")
    nu = ParticleMeasure([[0.0]])
    with pytest.raises(TypeError, match="made by meanfield.layers.contractive"):
        invert(Residual(F, 0.1), nu)
    with pytest.raises(TypeError, match="got Pointwise"):
        invert(Chain([contractive(F, 0.5, constant=1.0), F]), nu)
    with pytest.raises(ValueError, match=r"below 1, got scale · constant = 1.2"):
        invert(Residual(Bounded(F, 1.0), -1.2), nu)
    with pytest.raises(ValueError, match="rtol: expected a number > 0"):
        invert(contractive(F, 0.5, constant=1.0), nu, rtol=0.0)


def test_a_batch_goes_on_until_its_slowest_measure_is_inverted():
    """Beside one that is its own preimage, and no better after the first step."""
    layer = contractive(Pointwise(torch.relu, lipschitz=1.0), 0.9, constant=1.0)
    nu = ParticleMeasure(torch.tensor([[[-1.0]], [[1.0]]], dtype=torch.float64))
    found = invert(layer, nu, rtol=1e-10)
    assert found.converged.all()
    assert found.measure.points.flatten().tolist() == pytest.approx([-1.0, 1 / 1.9], rel=1e-9)


def test_in_the_norm_of_the_furthest_a_light_atom_counts_as_much_as_a_heavy_one():
    """Each atom goes where the other is: what is missing at the light one is soon at the heavy."""
    weights = torch.tensor([1e-6, 1 - 1e-6], dtype=torch.float64)
    nu = ParticleMeasure(torch.tensor([[0.0], [1.0]], dtype=torch.float64), weights)
    G = contractive(lambda mu: mu.replace(mu.points.flip(-2)), 0.5, constant=1.0, norm="max")
    found = invert(G, nu, max_steps=1, strict=False, probe=False)
    # (I + P/2)⁻¹(0, 1) = (−2, 4)/3, and the residual of (0, 1) is (1/2, 0).
    off = found.measure.points.flatten() - torch.tensor([-2 / 3, 4 / 3], dtype=torch.float64)
    assert float((weights * off**2).sum().sqrt()) <= float(found.error) <= 1 + 1e-12
    assert float(found.residual) == 0.5 and not found.converged


def test_a_constant_of_zero_holds_for_what_does_not_move() -> None:
    G = Residual(Bounded(Pointwise(lambda x: 0 * x + 1.0), 0.0), 1.0)
    found = invert(G, ParticleMeasure([[3.0]]))
    assert found.measure.points.item() == 2.0 and bool(found.converged)
    wrong = Residual(Bounded(Pointwise(lambda x: 0.1 * x), 0.0), 1.0)
    with pytest.raises(ConvergenceError, match="refuted"):
        invert(wrong, ParticleMeasure([[3.0]]))


def test_a_layer_into_another_dimension_has_no_inverse() -> None:
    G = contractive(Pointwise(lambda x: torch.cat([x, x], -1)), 0.5, constant=2.0)
    with pytest.raises(ValueError, match=r"from R\^1 to itself, got one to R\^2"):
        invert(G, ParticleMeasure([[3.0], [4.0]]))


def test_a_chain_of_two_norms_with_an_atom_too_light_is_told_to_take_one() -> None:
    logs = torch.tensor([-900.0, 0.0], dtype=torch.float64).log_softmax(-1)
    mu = ParticleMeasure([[1.0], [2.0]], log_weights=logs)

    def chain(*kinds: str) -> Chain:
        return Chain(
            [contractive(Pointwise(torch.sin), 0.5, constant=1.0, norm=kind) for kind in kinds]
        )

    mixed = chain("max", "l2")
    with pytest.raises(ConvergenceError, match="give all layers of the chain one norm"):
        invert(mixed, mixed(mu))
    for G in (chain("max", "max"), chain("l2", "l2")):
        assert bool(invert(G, G(mu)).converged)
    with pytest.raises(ConvergenceError, match="raise max_steps or rtol"):
        invert(chain("l2", "l2"), chain("l2", "l2")(mu), max_steps=2)


@pytest.mark.parametrize("order", [1, -1])
def test_a_chain_is_as_good_as_the_worst_of_its_layers(order: int) -> None:
    steep = contractive(Pointwise(lambda x: -x), 0.5, constant=1.0)
    loose = contractive(Pointwise(lambda x: -x / 2), 0.9, constant=1.0)
    nu = ParticleMeasure([[1.0]])
    found = invert(Chain([steep, loose][::order]), nu, max_steps=1, strict=False)
    assert found.factor == 0.9 and found.n_steps == 2
    # One step leaves 1 − G(1): 1/2 of the first, 0.45 of the second.
    assert float(found.residual) == 0.5
    assert float(found.steepness) == pytest.approx(1.0)


def test_a_preimage_has_no_gradient() -> None:
    points = torch.tensor([[1.0], [2.0]], dtype=torch.float64, requires_grad=True)
    answer = invert(contractive(Pointwise(torch.sin), 0.5, constant=1.0), ParticleMeasure(points))
    assert not answer.measure.points.requires_grad and not answer.error.requires_grad


@pytest.mark.parametrize("kinds", list(itertools.product(("max", "l2"), repeat=3)))
def test_a_light_atom_does_not_keep_a_chain_of_two_norms_from_its_tolerance(kinds):
    light = torch.tensor([1e-8, 1 - 1e-8, 0.0], dtype=torch.float64)  # and one without mass
    mu = ParticleMeasure(torch.tensor([[1.0], [2.0], [7.0]], dtype=torch.float64), light)
    layers = [contractive(Pointwise(torch.sin), 0.5, constant=1.0, norm=n) for n in kinds]
    answer = invert(Chain(layers), Chain(layers)(mu), rtol=1e-6)
    assert bool(answer.converged)
    off = float((answer.measure.points - mu.points)[:2].abs().max())
    assert off <= float(answer.error) * (1 + 1e-9) + 1e-12
