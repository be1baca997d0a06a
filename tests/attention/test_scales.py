"""Normalised queries and keys at any scale of the layer, 0 and the smallest numbers included."""

from __future__ import annotations

import pytest
import torch

from meanfield.attention import AttentionParameters, SelfAttention, kernels
from meanfield.lipschitz import local_lipschitz
from meanfield.maps import linearize
from meanfield.measures import ParticleMeasure

F64 = torch.float64


@pytest.mark.parametrize("scale", [0.0, 1e-320, 1e-300, -2.0])
@pytest.mark.parametrize("kernel", [kernels.cosine(2.0), kernels.cosine(2.0, eps=0.1)])
def test_a_temperature_replaces_any_scale(kernel, scale):
    mu = ParticleMeasure(torch.randn(5, 3, dtype=F64, generator=torch.Generator().manual_seed(1)))
    par = AttentionParameters.random(3, n_heads=2, head_dim=2, biases=True, generator=0)
    parts = {
        name: getattr(par, name)
        for name in ("query", "key", "value", "output", "query_bias", "value_bias", "output_bias")
    }
    known, F = (
        SelfAttention(AttentionParameters(**parts, scale=s), kernel=kernel) for s in (1.0, scale)
    )
    torch.testing.assert_close(F(mu).points, known(mu).points)
    for geometry in ("euclidean", "wasserstein"):
        found, expected = (linearize(G, mu, geometry=geometry) for G in (F, known))
        torch.testing.assert_close(found.atoms.to_dense(), expected.atoms.to_dense())
        torch.testing.assert_close(found.field.to_dense(), expected.field.to_dense())
    torch.testing.assert_close(local_lipschitz(F, mu).value, local_lipschitz(known, mu).value)
    if scale == -2.0:
        torch.testing.assert_close(
            F.ball_bounds(mu, 0.01).upper, known.ball_bounds(mu, 0.01).upper
        )
    if scale == 0.0:  # what queries move by is no multiple of the layer's own
        with pytest.raises(NotImplementedError):
            F.ball_bounds(mu, 0.01)


@pytest.mark.parametrize("scale", [0.0, 1e-320])
def test_at_scale_0_normalised_scores_are_0_and_have_their_slope_in_the_scale(scale):
    mu = ParticleMeasure(torch.randn(5, 3, dtype=F64, generator=torch.Generator().manual_seed(1)))
    par = AttentionParameters.random(3, n_heads=2, head_dim=2, generator=0)

    def image(s):
        same = AttentionParameters(par.query, par.key, par.value, par.output, scale=s)
        return SelfAttention(same, kernel=kernels.qk_norm())

    mean = (mu.points @ par.V.sum(0).mT).mean(0)
    torch.testing.assert_close(image(scale)(mu).points, mean.expand(5, 3))
    asks = torch.tensor(scale, dtype=F64, requires_grad=True)
    (slope,) = torch.autograd.grad(image(asks)(mu).points[0].sum(), asks)
    h = 1e-5
    apart = image(h)(mu).points[0].sum() - image(-h)(mu).points[0].sum()
    assert float(slope) == pytest.approx(float(apart / (2 * h)), rel=1e-6)
    expected = float(local_lipschitz(image(1e-9), mu).value)
    assert float(local_lipschitz(image(scale), mu).value) == pytest.approx(expected, rel=1e-6)
    assert expected * (1 - 1e-6) <= float(image(scale).ball_bounds(mu, 0.01).upper)
