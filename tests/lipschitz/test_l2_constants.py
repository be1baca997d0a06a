"""Measured constants of L2 attention stay below their bounds, on thousands of measures."""

from __future__ import annotations

import pytest
import torch

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, bounds, sampling
from meanfield.attention import kernels
from meanfield.lipschitz import local_lipschitz

F64 = torch.float64


def layer(dim: int, width: int, generator: torch.Generator) -> SelfAttention:
    W, V = (torch.randn(width, dim, generator=generator, dtype=F64) for _ in range(2))
    return SelfAttention(AttentionParameters(W, W, V), kernel=kernels.l2)


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_local_constants_on_a_ball_are_below_the_polynomial_bound(seed, dim):
    generator = torch.Generator().manual_seed(10 * dim + seed)
    F = layer(dim, min(dim, 2), generator)
    (W,), (V,) = F.parameters.query, F.parameters.value
    G = W.T @ W * F.parameters.scale
    largest = 0.0
    for radius in (0.3, 1.0, 3.0):
        for n in (2, 3, 6):
            x = (
                sampling.sphere(n, dim, radius=radius, batch_shape=(100,), generator=generator)
                * torch.rand(100, n, 1, generator=generator, dtype=F64).sqrt()
            )
            logs = 4 * torch.randn(100, n, generator=generator, dtype=F64)
            mu = ParticleMeasure(x, log_weights=logs.log_softmax(-1))
            found = local_lipschitz(F, mu, rtol=1e-3).upper.max()
            bound = bounds.l2_mean_field(
                float(torch.linalg.matrix_norm(G, 2)),
                float(torch.linalg.matrix_norm(V, 2)),
                radius,
                len(W),
            )
            largest = max(largest, float(found) / bound)
    assert 0.02 < largest <= 1


@pytest.mark.parametrize("n", [2, 5, 12])
@pytest.mark.parametrize("seed", range(3))
def test_jacobians_on_tokens_are_below_the_bound_that_knows_no_radius(seed, n):
    generator = torch.Generator().manual_seed(seed)
    F = layer(2, 2, generator)
    bound = bounds.l2_attention_2(F.parameters, n)
    for scale in (0.3, 1.0, 3.0, 10.0):
        x = scale * torch.randn(100, n, 2, generator=generator, dtype=F64)
        found = local_lipschitz(F, ParticleMeasure(x), geometry="euclidean", rtol=1e-3)
        assert float(found.upper.max()) <= bound
