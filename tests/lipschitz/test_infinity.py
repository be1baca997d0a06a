"""The ∞-norm against oracles."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meanfield.attention import AttentionParameters, SelfAttention, kernels
from meanfield.lipschitz import infinity_norm
from meanfield.maps import linearize
from meanfield.measures import ParticleMeasure
from tests import oracles


@pytest.mark.parametrize("kernel", [kernels.l2, kernels.dot_product])
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_the_largest_row_sum(kernel, causal):
    generator = torch.Generator().manual_seed(0)
    parameters = AttentionParameters.random(4, n_heads=2, generator=generator)
    F = SelfAttention(parameters, kernel=kernel, causal=causal)
    X = 2 * torch.randn(7, 4, generator=generator, dtype=torch.float64)
    mu = ParticleMeasure.from_sequence(X)
    J = linearize(F, mu).atoms.to_dense()
    found = infinity_norm(F, mu)
    assert float(found.value) == pytest.approx(float(J.abs().sum(-1).max()), rel=1e-12)
    assert 4 * found.token + found.feature == int(J.abs().sum(-1).argmax())
    image = (J @ found.direction.flatten()).reshape(7, 4)
    assert float(image[found.token, found.feature]) == pytest.approx(float(found.value))


def test_it_is_the_oracle_s_of_l2_attention():
    rng = np.random.default_rng(1)
    W, V, output = rng.normal(size=(2, 4, 2)), rng.normal(size=(2, 4, 2)), rng.normal(size=(4, 4))
    X = rng.normal(size=(5, 4))
    J = oracles.jacobian_by_complex_step(lambda Y: oracles.l2_attention(Y, W, V, output), X)
    F = SelfAttention(
        AttentionParameters.tied_l2(*oracles.outputs_by_inputs(W, V, output)), kernel=kernels.l2
    )
    found = infinity_norm(F, ParticleMeasure(X))
    assert float(found.value) == pytest.approx(np.abs(J).sum(1).max(), rel=1e-9)


def test_the_last_row_counts_and_so_does_a_map_into_another_dimension():
    def widen(mu):
        return mu.replace(torch.cat([mu.points, 3 * mu.points[..., :1]], -1))

    found = infinity_norm(widen, ParticleMeasure([[1.0, 2.0], [3.0, 4.0]]))
    assert (float(found.value), found.feature) == (3.0, 2)

    def last(mu):
        factor = mu.points.new_ones(mu.points.shape)
        factor[..., -1, -1] = 5.0
        return mu.replace(factor * mu.points)

    found = infinity_norm(last, ParticleMeasure([[1.0, 2.0], [3.0, 4.0]]))
    assert (float(found.value), found.token, found.feature) == (5.0, 1, 1)


def test_a_batch_is_refused():
    with pytest.raises(ValueError, match="without batch axes"):
        infinity_norm(lambda mu: mu, ParticleMeasure(torch.zeros(2, 3, 1, dtype=torch.float64)))
