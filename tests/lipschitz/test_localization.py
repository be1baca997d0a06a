"""Contributions of particles and heads: against dense algebra head by head, and their laws."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meanfield import sampling
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
@pytest.mark.parametrize("geometry", ["wasserstein", "euclidean"])
def test_a_batch_is_localised_one_by_one(causal, geometry):
    F = SelfAttention(AttentionParameters.random(4, n_heads=2, biases=True), causal=causal)
    mu = ParticleMeasure.from_sequence(torch.randn(3, 5, 4, dtype=F64))
    constant = local_lipschitz(F, mu, geometry=geometry)
    together = localize(constant, F, mu)
    assert together.heads is not None
    assert together.heads.shape == (3, 2)
    torch.testing.assert_close(together.heads.sum(-1), torch.ones(3, dtype=F64))
    for k, one in enumerate(mu):
        alone = localize(local_lipschitz(F, one, geometry=geometry), F, one)
        torch.testing.assert_close(together.particles[k], alone.particles)
        torch.testing.assert_close(together.responses[k], alone.responses)
        torch.testing.assert_close(together.heads[k], alone.heads)
    empty = localize(local_lipschitz(F, mu[:0], geometry=geometry), F, mu[:0])
    assert empty.particles.shape == (0, 5) and empty.heads.shape == (0, 2)


def test_two_heads_that_are_equal_share_equally_and_opposite_ones_work_against_each_other():
    A, V = torch.randn(2, 3, 3, dtype=F64)
    mu = ParticleMeasure(torch.randn(5, 3, dtype=F64))
    for factors, expected in (((1.0, 1.0), (0.5, 0.5)), ((3.0, -1.0), (1.5, -0.5))):
        heads = torch.stack([f * V for f in factors])
        F = SelfAttention(AttentionParameters.from_bilinear(torch.stack([A, A]), heads))
        found = localize(local_lipschitz(F, mu), F, mu)
        torch.testing.assert_close(found.heads, torch.tensor(expected, dtype=F64))


def test_the_light_atom_carries_the_worst_direction_of_two_diracs_and_the_heavy_one_responds():
    F = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]))
    mu = sampling.two_diracs(20.0, -800.0, [1.0])
    found = localize(local_lipschitz(F, mu), F, mu)
    assert float(found.particles[0]) > 0.99
    assert float(found.responses[1]) > 0.99


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
    with pytest.raises(ValueError, match="constant of this measure"):
        localize(constant, F, ParticleMeasure([[0.0, 0.0]]))
    for other, at in ((F, mu.replace(3 * mu.points)), (lambda m: m.replace(2 * F(m).points), mu)):
        with pytest.raises(ValueError, match="constant of this map at this measure"):
            localize(constant, other, at)
