"""Contributions of particles and heads: against dense algebra head by head, and their laws."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.lipschitz import local_lipschitz, localize
from meanfield.maps import Map
from meanfield.measures import ParticleMeasure
from tests import oracles
from tests.attention.test_self_attention import attention
from tests.strategies import Problem, problems

F64 = torch.float64
KINDS = ["uniform", "dirichlet", "light", "zeros"]


@given(problems(weight_kinds=KINDS), st.sampled_from(["wasserstein", "euclidean"]))
@settings(max_examples=25)
def test_shares_agree_with_dense_algebra_head_by_head(problem: Problem, geometry: str):
    # The oracle's plain Jacobian has a row for an atom without mass, which here is absent.
    assume(geometry == "wasserstein" or problem.alive.all())
    F, mu = attention(problem), problem.measure
    constant = local_lipschitz(F, mu, geometry=geometry)
    assume(1e-100 < float(constant.value) < 1e100)
    found = localize(constant, F, mu)
    v = constant.direction.numpy().ravel()
    expected = oracles.head_shares(
        problem.points,
        problem.log_weights,
        problem.layer,
        v,
        weighted=geometry == "wasserstein",
        **problem.mask,
    )
    assert found.heads is not None
    # Heads that cancel lose digits: relative to the largest share.
    size = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(found.heads, expected, rtol=0, atol=1e-8 * size)
    np.testing.assert_allclose(found.heads.sum(), 1.0, rtol=0, atol=1e-8 * size)
    np.testing.assert_allclose(found.particles.sum(), 1.0)
    np.testing.assert_allclose(found.responses.sum(), 1.0)
    np.testing.assert_allclose(
        found.particles, np.square(v.reshape(mu.points.shape)).sum(-1), atol=1e-12
    )
    if geometry == "wasserstein":
        assert float(found.particles[torch.as_tensor(~problem.alive)].sum()) < 1e-20


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("component", ["particle", "splitting"])
@pytest.mark.parametrize("geometry", ["wasserstein", "euclidean"])
def test_a_batch_is_localised_one_by_one(causal, component, geometry):
    F = SelfAttention(AttentionParameters.random(4, n_heads=2, biases=True), causal=causal)
    mu = ParticleMeasure.from_sequence(torch.randn(3, 5, 4, dtype=F64))
    constant = local_lipschitz(F, mu, geometry=geometry)
    if component == "splitting" and geometry == "euclidean":
        with pytest.raises(ValueError, match="geometry 'wasserstein'"):
            localize(constant, F, mu, component=component)
        return
    together = localize(constant, F, mu, component=component)
    assert together.heads is not None
    assert together.heads.shape == (3, 2)
    torch.testing.assert_close(together.heads.sum(-1), torch.ones(3, dtype=F64))
    for k, one in enumerate(mu):
        alone = localize(local_lipschitz(F, one, geometry=geometry), F, one, component=component)
        torch.testing.assert_close(together.particles[k], alone.particles)
        torch.testing.assert_close(together.responses[k], alone.responses)
        torch.testing.assert_close(together.heads[k], alone.heads)


def test_splitting_is_one_particle_and_its_heads_add_up_to_the_component():
    F = SelfAttention(AttentionParameters.random(3, n_heads=3, std=1.0))
    mu = ParticleMeasure(torch.randn(4, 3, dtype=F64), weights=[0.1, 0.2, 0.3, 0.4])
    constant = local_lipschitz(F, mu)
    found = localize(constant, F, mu, component="splitting")
    atom, u = int(constant.splitting_atom), constant.splitting_direction
    torch.testing.assert_close(found.particles, torch.eye(4, dtype=F64)[atom])
    torch.testing.assert_close(found.responses, torch.eye(4, dtype=F64)[atom])
    each = torch.stack(
        [SelfAttention(F.parameters.head(h)).field_jacobians(mu)[atom] @ u for h in range(3)]
    )
    total = each.sum(0)
    torch.testing.assert_close(found.heads, each @ total / (total @ total))


def test_a_map_without_heads_has_particles_only():
    F = SelfAttention(AttentionParameters.random(3, n_heads=1))
    mu = ParticleMeasure(torch.randn(4, 3, dtype=F64))
    own = localize(local_lipschitz(F, mu), F, mu)
    other = localize(local_lipschitz(lambda m: F(m), mu), lambda m: F(m), mu)
    assert other.heads is None
    torch.testing.assert_close(other.particles, own.particles)
    torch.testing.assert_close(other.responses, own.responses)
    assert "heads" not in repr(other)
    assert "share of a head" in own._repr_html_()


def test_a_map_that_is_not_the_sum_of_its_heads_has_particles_only():
    @dataclasses.dataclass(frozen=True)
    class Residual(Map):
        parameters: AttentionParameters

        def __call__(self, mu):
            return mu.replace(mu.points + SelfAttention(self.parameters)(mu).points)

        @property
        def heads(self):
            return SelfAttention(self.parameters).heads

    F = Residual(AttentionParameters.random(2, n_heads=2))
    mu = ParticleMeasure(torch.randn(3, 2, dtype=F64))
    assert localize(local_lipschitz(F, mu), F, mu).heads is None


def test_a_constant_of_zero_has_no_response():
    F = SelfAttention(AttentionParameters.from_bilinear([[1.0]], [[0.0]]))
    mu = ParticleMeasure([[0.0], [1.0]])
    found = localize(local_lipschitz(F, mu), F, mu)
    assert not bool(found.responses.any())
    assert not bool(found.heads.any())


def test_bad_arguments_are_refused():
    F = SelfAttention(AttentionParameters.random(2))
    mu = ParticleMeasure(torch.randn(3, 2, dtype=F64))
    constant = local_lipschitz(F, mu)
    with pytest.raises(ValueError, match="component.*'heads'"):
        localize(constant, F, mu, component="heads")
    with pytest.raises(ValueError, match="constant of this measure"):
        localize(constant, F, ParticleMeasure([[0.0, 0.0]]))
