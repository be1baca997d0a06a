"""Cross-attention: on the diagonal it is self-attention, and both constants against matrices."""

from __future__ import annotations

import pytest
import torch

from meanfield.attention import AttentionParameters, CrossAttention, SelfAttention
from meanfield.errors import NoDerivativeError
from meanfield.layers import Chain, LayerNorm, Residual
from meanfield.lipschitz import cross_lipschitz, local_lipschitz
from meanfield.maps import linearize
from meanfield.measures import ParticleMeasure, split, stack
from meanfield.transport import w2
from tests.maps.small_maps import KERNELS, NORMALIZATIONS, attention, cloud, same_products

F64 = torch.float64
LAYERS = {
    "dot product": {},
    "rotary": {"kernel": KERNELS["rotary"]},
    "window": {"kernel": KERNELS["window"]},
    "sigmoid": {"normalization": NORMALIZATIONS["sigmoid"]},
    "sinkhorn": {"normalization": NORMALIZATIONS["sinkhorn"]},
    "causal": {"causal": True},
}


def queries(m=4, seed=40):
    """Later than some of the context, at other points, one of them absent."""
    eta = cloud(seed, m + 1, absent=True)
    return ParticleMeasure(
        eta.points, log_weights=eta.log_weights, positions=0.5 + 0.5 * eta.positions
    )


@pytest.mark.parametrize(
    ("name", "geometry"), [*((name, "wasserstein") for name in LAYERS), ("causal", "euclidean")]
)
def test_on_the_diagonal_the_two_derivatives_add_up_to_that_of_self_attention(name, geometry):
    F, mu = attention(**LAYERS[name]), cloud(absent=name != "causal")
    cross = CrossAttention(F)
    torch.testing.assert_close(cross(mu, mu).points, F(mu).points, rtol=1e-10, atol=1e-12)
    by_context = cross.context_derivative(mu, mu, geometry=geometry)
    by_query = linearize(cross.at(mu), mu, geometry=geometry).atoms
    whole = linearize(F, mu, geometry=geometry).atoms
    same_products(whole, by_context + by_query, 1e-8)


@pytest.mark.parametrize("name", ["dot product", "causal", "rotary", "window"])
def test_both_constants_are_norms_of_dense_jacobians(name):
    mu, eta, cross = cloud(absent=True), queries(), CrossAttention(attention(**LAYERS[name]))
    found = cross_lipschitz(cross, mu, eta)
    a, b = mu.weights, eta.weights
    T = torch.func.jacrev(lambda x: cross(mu.replace(x), eta).points)(mu.points)
    there = (b > 0)[:, None, None, None] & (a > 0)[:, None]
    T = torch.where(there, T * b.sqrt()[:, None, None, None] / a.sqrt()[:, None], 0.0)
    norm = torch.linalg.matrix_norm(T.flatten(2).flatten(0, 1), 2)
    torch.testing.assert_close(found.context.value, norm, rtol=1e-10, atol=0)
    S = torch.func.jacrev(lambda y: cross(mu, eta.replace(y)).points)(eta.points)
    blocks = torch.stack([S[i, :, i] for i in range(eta.n_particles) if b[i] > 0])
    norm = torch.linalg.matrix_norm(blocks, 2).max()
    torch.testing.assert_close(found.queries.value, norm, rtol=1e-10, atol=0)


def test_without_scores_the_constants_are_0_and_the_norm_of_the_values():
    V = torch.randn(3, 3, dtype=F64, generator=torch.Generator().manual_seed(3))
    F = SelfAttention(AttentionParameters.from_bilinear(torch.zeros(3, 3, dtype=F64), V))
    found = cross_lipschitz(CrossAttention(F), cloud(), cloud(7))
    assert float(found.queries.value) == 0
    assert float(found.context.value) == pytest.approx(float(torch.linalg.matrix_norm(V, 2)))


def test_small_steps_of_either_measure_attain_the_constants():
    mu, eta, cross = cloud(), queries(), CrossAttention(attention())
    found, image = cross_lipschitz(cross, mu, eta), cross(mu, eta)

    def moved(nu, weighted, step=1e-6):
        roots = torch.where(nu.weights > 0, nu.weights, 1.0).sqrt()[:, None]
        return nu.replace(nu.points + step * weighted / roots)

    near = moved(mu, found.context.direction)
    ratio = float(w2(cross(near, eta), image)) / float(w2(near, mu))
    assert ratio == pytest.approx(float(found.context.value), rel=1e-4)
    near = moved(eta, found.queries.direction)
    ratio = float(w2(cross(mu, near), image)) / float(w2(near, eta))
    assert ratio == pytest.approx(float(found.queries.value), rel=1e-4)


def test_splitting_atoms_of_either_measure_changes_neither_constant():
    mu, eta, cross = cloud(), queries(), CrossAttention(attention(True))
    once, twice = cross_lipschitz(cross, mu, eta), cross_lipschitz(cross, split(mu), split(eta, 3))
    torch.testing.assert_close(twice.context.value, once.context.value, rtol=1e-9, atol=0)
    torch.testing.assert_close(twice.queries.value, once.queries.value, rtol=1e-9, atol=0)


def test_the_constant_of_self_attention_is_at_most_the_sum():
    mu, F = cloud(), attention()
    found = cross_lipschitz(CrossAttention(F), mu, mu)
    both = float(found.queries.value + found.context.value)
    assert float(local_lipschitz(F, mu).value) <= both * (1 + 1e-12)


def test_batches_are_measured_one_by_one():
    cross = CrossAttention(attention())
    mus, etas = [cloud(1), cloud(2)], [queries(seed=3), queries(seed=4)]
    found = cross_lipschitz(cross, stack(mus), stack(etas))
    for k, (mu, eta) in enumerate(zip(mus, etas, strict=True)):
        alone = cross_lipschitz(cross, mu, eta)
        torch.testing.assert_close(found.context.value[k], alone.context.value)
        torch.testing.assert_close(found.queries.value[k], alone.queries.value)


def test_a_decoder_block_is_a_chain_like_any_other():
    mu, eta, cross = cloud(), queries(), CrossAttention(attention())
    F = Residual(Chain([LayerNorm(torch.ones(3, dtype=F64)), cross.at(mu)]))
    by_hand = local_lipschitz(lambda nu: F(nu), eta)
    torch.testing.assert_close(local_lipschitz(F, eta).value, by_hand.value, rtol=1e-9, atol=0)


def test_what_does_not_fit_is_refused():
    mu, cross = cloud(), CrossAttention(attention(True))
    with pytest.raises(ValueError, match="eta: expected a measure with positions"):
        cross(mu, ParticleMeasure(mu.points))
    with pytest.raises(ValueError, match="eta: expected the batch shape"):
        cross(mu, stack([mu, mu]))
    with pytest.raises(TypeError, match="layer: expected SelfAttention"):
        CrossAttention(lambda mu: mu)
    with pytest.raises(TypeError, match="cross: expected"):
        cross_lipschitz(attention(), mu, mu)


def test_a_context_whose_light_atoms_are_lost_in_rounding_is_refused():
    F, mu, eta = attention(), cloud(), queries()
    logs = torch.cat([torch.zeros(mu.n_particles - 1), torch.tensor([-900.0])]).double()
    light = ParticleMeasure(mu.points, log_weights=logs.log_softmax(0))
    assert torch.isfinite(CrossAttention(F).context_derivative(light, eta).to_dense()).all()
    # The keys of attention are measured from their mean, and far away that is rounded.
    far, there = light.replace(light.points + 1e3), eta.replace(eta.points + 1e3)
    with pytest.raises(NoDerivativeError, match="rounding"):
        CrossAttention(F).context_derivative(far, there)
    CrossAttention(F).context_derivative(far, there, geometry="euclidean")
