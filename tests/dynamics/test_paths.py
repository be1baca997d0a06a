"""The measures of a flow, and the flow as a map of measures."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, dynamics, sampling
from meanfield.lipschitz import local_lipschitz, secant_ratio


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(n: int, d: int, seed: int) -> torch.Tensor:
    return torch.randn(n, d, generator=generator(seed), dtype=torch.float64)


def attention(d: int, seed: int = 0, **settings) -> SelfAttention:
    A, V = torch.randn(2, d, d, generator=generator(seed), dtype=torch.float64)
    return SelfAttention(AttentionParameters.from_bilinear(A, V), **settings)


def swapping(mu):
    """A velocity that turns by a right angle in a unit of π/2: two particles change places."""
    x, y = mu.points.unbind(-1)
    return mu.replace(torch.stack([-y, x], -1))


def test_the_measure_at_a_time_is_that_of_the_flow():
    weights, positions = [0.3, 0.1, 0.1, 0.2, 0.2, 0.1], np.arange(1, 7) / 6
    mu = ParticleMeasure(gaussian(6, 2, 3), weights, positions=positions)
    F = attention(2, causal=True)
    ds = dynamics.flow(F, mu, [0, 0.3, 0.6], method="rk4", step=0.1)
    for k, index in ((0, 0), (2, -1)):
        found = dynamics.measure_at(ds, index)
        np.testing.assert_array_equal(found.points, ds.points[k])
        assert torch.equal(found.log_weights, mu.log_weights)
        assert torch.equal(found.positions, mu.positions)
    with pytest.raises(TypeError, match=r"got Dataset; dynamics\.measure_at\(ds, -1\)"):
        dynamics.cluster_count(ds, 0.1)
    with pytest.raises(IndexError, match="one of the 3 times"):
        dynamics.measure_at(ds, 3)
    with pytest.raises(ValueError, match="keep_points=True"):
        dynamics.measure_at(dynamics.flow(F, mu, [0, 0.1], keep_points=False), 0)


# --- the flow as a map ---


def test_flow_maps_compose_and_end_where_the_flow_does():
    F = attention(3)
    mu = ParticleMeasure(sampling.sphere(7, 3, generator=generator(4)))
    whole = dynamics.FlowMap(F, 1.0, method="rk4", step=0.1, constraint="sphere")
    first = dynamics.FlowMap(F, 0.4, method="rk4", step=0.1, constraint="sphere")
    rest = dynamics.FlowMap(F, 0.6, method="rk4", step=0.1, constraint="sphere")
    torch.testing.assert_close(rest(first(mu)).points, whole(mu).points, rtol=0, atol=1e-12)
    ds = dynamics.flow(F, mu, [0, 1], method="rk4", step=0.1, constraint="sphere")
    np.testing.assert_array_equal(ds.points[-1], whole(mu).points)
    still = dynamics.FlowMap(F, 0.0)
    torch.testing.assert_close(still(mu).points, mu.points)
    with pytest.raises(ValueError, match="time: expected a number ≥"):
        dynamics.FlowMap(F, -1.0)


def test_two_measures_part_no_faster_than_local_constants_allow():
    F = attention(2, 5)
    mu = ParticleMeasure(sampling.ball(6, 2, generator=generator(6)))
    Phi = dynamics.FlowMap(F, 0.5, method="rk4", step=0.05)
    constant = local_lipschitz(Phi, mu, rtol=1e-8)
    direction = constant.direction
    near = mu.replace(mu.points + 1e-6 * direction / direction.norm())
    ratio = secant_ratio(Phi, mu, near)
    assert float(ratio.value) == pytest.approx(float(constant.particle), rel=1e-4)
