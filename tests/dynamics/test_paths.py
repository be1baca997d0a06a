"""Quantities along a whole flow, and the flow as a map of measures."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, dynamics, sampling
from meanfield.lipschitz import local_lipschitz, secant_ratio
from meanfield.measures import stack
from meanfield.transport import w2


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


# --- distances between times ---


def test_particles_that_change_places_move_and_their_measure_does_not():
    mu = ParticleMeasure([[1.0, 0.0], [-1.0, 0.0]])
    ds = dynamics.flow(swapping, mu, np.linspace(0, math.pi, 5), method="rk4", step=0.01)
    found = dynamics.displacements(ds)
    np.testing.assert_allclose(found.identity[-1], 2.0, rtol=1e-6)
    np.testing.assert_allclose(found.w2[-1], 0.0, atol=1e-6)
    np.testing.assert_allclose(found.w2[2], math.sqrt(2), rtol=1e-6)
    assert (found.w2_lower <= found.w2).all()
    assert (found.w2 <= found.w2_upper).all()
    assert (found.w2 <= found.identity + 1e-12).all()


def test_displacements_are_the_distances_of_the_measures_of_the_flow():
    mu = ParticleMeasure(gaussian(9, 3, 1))
    nu = ParticleMeasure(gaussian(5, 3, 2))
    ds = dynamics.flow(attention(3), mu, [0, 0.3, 0.6], method="rk4", step=0.1)
    at = [dynamics.measure_at(ds, k) for k in range(3)]
    with pytest.raises(TypeError, match=r"got Dataset; dynamics\.measure_at\(ds, -1\)"):
        dynamics.cluster_count(ds, 0.1)
    np.testing.assert_array_equal(at[0].points, mu.points)
    for to, others in {
        "start": [at[0]] * 3, "previous": [at[0], at[0], at[1]], "measure": [nu] * 3
    }.items():  # fmt: skip
        found = dynamics.displacements(ds, nu if to == "measure" else to)
        expected = [float(w2(a, b)) for a, b in zip(at, others, strict=True)]
        np.testing.assert_allclose(found.w2, expected, rtol=1e-8, atol=1e-12)
        assert np.isnan(found.identity).all() == (to == "measure")


def test_conditional_displacements_of_tokens_are_those_of_the_tokens():
    mu = ParticleMeasure.from_sequence(gaussian(6, 2, 3))
    ds = dynamics.flow(attention(2, causal=True), mu, [0, 0.5], method="rk4", step=0.1)
    found = dynamics.displacements(ds, conditional=True)
    np.testing.assert_allclose(found.w2, found.identity, rtol=1e-9)
    assert dynamics.displacements(ds).w2[-1] <= found.w2[-1] + 1e-12


def test_a_batch_of_flows_has_a_distance_each():
    members = [ParticleMeasure(gaussian(4, 2, s)) for s in range(3)]
    F = attention(2)
    ds = dynamics.flow(F, stack(members), [0, 0.4], method="rk4", step=0.1)
    found = dynamics.displacements(ds)
    assert found.w2.dims == ("time", "case")
    for k, mu in enumerate(members):
        one = dynamics.displacements(dynamics.flow(F, mu, [0, 0.4], method="rk4", step=0.1))
        np.testing.assert_allclose(found.w2[:, k], one.w2, rtol=1e-9, atol=1e-12)


def test_a_flow_without_points_says_what_is_missing():
    mu = ParticleMeasure([[1.0, 0.0]])
    ds = dynamics.flow(swapping, mu, [0, 1], keep_points=False)
    with pytest.raises(ValueError, match="keep_points=True"):
        dynamics.displacements(ds)
    ds = dynamics.flow(swapping, mu, [0, 1])
    with pytest.raises(ValueError, match="expected 'start', 'previous' or a measure"):
        dynamics.displacements(ds, "end")


# --- the flow as a map ---


def test_flow_maps_compose_and_end_where_the_flow_does():
    F = attention(3)
    mu = ParticleMeasure(sampling.sphere(7, 3, generator=generator(4)))
    whole = dynamics.FlowMap(F, 1.0, method="rk4", step=0.1, constraint="sphere")
    first = dynamics.FlowMap(F, 0.4, method="rk4", step=0.1, constraint="sphere")
    rest = dynamics.FlowMap(F, 1.0, start=0.4, method="rk4", step=0.1, constraint="sphere")
    torch.testing.assert_close(rest(first(mu)).points, whole(mu).points, rtol=0, atol=1e-12)
    ds = dynamics.flow(F, mu, [0, 1], method="rk4", step=0.1, constraint="sphere")
    np.testing.assert_array_equal(ds.points[-1], whole(mu).points)
    still = dynamics.FlowMap(F, 0.0)
    torch.testing.assert_close(still(mu).points, mu.points)
    with pytest.raises(ValueError, match="end: expected a number ≥"):
        dynamics.FlowMap(F, 0.0, start=1.0)


def test_two_measures_part_no_faster_than_local_constants_allow():
    F = attention(2, 5)
    mu = ParticleMeasure(sampling.ball(6, 2, generator=generator(6)))
    Phi = dynamics.FlowMap(F, 0.5, method="rk4", step=0.05)
    constant = local_lipschitz(Phi, mu, rtol=1e-8)
    direction = constant.direction
    near = mu.replace(mu.points + 1e-6 * direction / direction.norm())
    ratio = secant_ratio(Phi, mu, near)
    assert float(ratio.value) == pytest.approx(float(constant.particle), rel=1e-4)
