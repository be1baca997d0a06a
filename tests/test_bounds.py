"""The constants of the theorems: against the oracle's formulas, and never below a measurement."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meanfield import bounds, sampling
from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.lipschitz import local_lipschitz
from meanfield.measures import ParticleMeasure
from tests import oracles
from tests.strategies import problems
from tests.test_attention import attention

F64 = torch.float64
norms = st.floats(0, 3)
radii = st.floats(0.01, 2.5)


@given(norms, norms, radii, st.integers(1, 500))
def test_the_formulas_agree_with_the_oracle(norm_A, norm_V, radius, n):
    pairs = [
        (
            bounds.general(norm_A, norm_V, radius, n),
            oracles.general_bound(norm_A, norm_V, radius, n),
        ),
        (
            bounds.mean_field(norm_A, norm_V, radius),
            oracles.mean_field_bound(norm_A, norm_V, radius),
        ),
        (
            bounds.masked_mean_field(norm_A, norm_V, radius),
            oracles.masked_mean_field_bound(norm_A, norm_V, radius),
        ),
        (
            bounds.masked_mean_field(norm_A, norm_V, radius, p=3.0),
            oracles.masked_mean_field_bound(norm_A, norm_V, radius, p=3.0),
        ),
        (
            bounds.general_lower(norm_A, radius, n),
            oracles.tightness_lower_bound(-norm_A * np.eye(1), radius, n),
        ),
    ]
    for actual, expected in pairs:
        assert actual == pytest.approx(expected, rel=1e-12)


@given(st.floats(0.01, 2), radii)
def test_the_best_ratio_of_weights_maximises_the_two_dirac_entry(gamma, radius):
    best = bounds.two_dirac_lower(gamma, radius)
    place = bounds.two_dirac_best_log_ratio(gamma, radius)
    around = bounds.two_dirac_entry(gamma, radius, place + np.linspace(-5, 5, 1001))
    assert around.max() <= best * (1 + 1e-12)
    assert best == pytest.approx(oracles.two_dirac_growth(-gamma, radius), rel=1e-6)


def test_the_two_dirac_growth_has_its_limit_and_does_not_overflow_early():
    radius = math.sqrt(600)
    limit = oracles.two_dirac_growth_limit(-1.0, radius)
    assert bounds.two_dirac_lower(1.0, radius) == pytest.approx(limit, rel=2e-3)
    place = bounds.two_dirac_best_log_ratio(1.0, radius)
    assert place == pytest.approx(-2 * 600 - math.log(3), abs=2e-3)
    assert bounds.mean_field(1.0, 1.0, radius) == math.inf


@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 6),
    radius=st.sampled_from([0.1, 0.7, 1.5, 3.0]),
    causal=st.booleans(),
)
@settings(max_examples=300)
def test_no_measured_constant_exceeds_its_bound(seed, n, radius, causal):
    generator = torch.Generator().manual_seed(seed)
    d = 1 + seed % 4
    A, V = torch.randn(2, d, d, dtype=F64, generator=generator) / math.sqrt(d)
    F = SelfAttention(AttentionParameters.from_bilinear(A, V), causal=causal)
    points = sampling.ball(n, d, radius=radius, generator=generator)
    if seed % 2:
        points = sampling.sphere(n, d, radius=radius, generator=generator)
    logs = (4 * torch.randn(n, dtype=F64, generator=generator)).log_softmax(-1)
    positions = torch.rand(n, dtype=F64, generator=generator).mul(4).floor() / 4
    norm_A, norm_V = (float(torch.linalg.matrix_norm(M, 2)) for M in (A, V))

    mu = ParticleMeasure(points, log_weights=logs, positions=positions)
    measured = float(local_lipschitz(F, mu).value)
    bound = bounds.masked_mean_field if causal else bounds.mean_field
    assert measured <= bound(norm_A, norm_V, radius) * (1 + 1e-12)

    tokens = ParticleMeasure.from_sequence(points)
    measured = float(local_lipschitz(F, tokens, geometry="euclidean").value)
    assert measured <= bounds.general(norm_A, norm_V, radius, n) * (1 + 1e-12)


@pytest.mark.parametrize("branch", ["negative", "positive"])
@pytest.mark.parametrize("causal", [False, True])
@given(seed=st.integers(0, 10**6), n=st.integers(2, 40), radius=st.sampled_from([0.5, 2.0, 4.0]))
def test_the_adversarial_sequence_reaches_the_lower_bound(seed, n, radius, branch, causal):
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(3, 3, dtype=F64, generator=generator)
    try:
        pair = sampling.critical_pair(A, branch=branch)
    except ValueError:
        return
    F = SelfAttention(AttentionParameters.from_bilinear(A, torch.eye(3, dtype=F64)))
    tokens = sampling.adversarial(A, radius, n, branch=branch)
    measured = float(local_lipschitz(F, tokens, geometry="euclidean", rtol=1e-6).value)
    assert measured >= bounds.general_lower(pair.scaling, radius, n) * (1 - 1e-6)
    # Ours: the entry of the two-atom measure, where the crowd is one heavy atom.
    atoms = sampling.two_diracs(
        radius, -math.log(n - 1), pair.direction, crowd=pair.crowd, positioned=causal
    )
    G = SelfAttention(F.parameters, causal=causal)
    constant = local_lipschitz(G, atoms)
    entry = bounds.two_dirac_entry(pair.scaling, radius, -math.log(n - 1))
    assert float(constant.particle) >= entry * (1 - 1e-9)


def test_the_masked_map_at_a_zero_exceeds_the_unmasked_bound_but_not_the_hardy_bound():
    F = SelfAttention(AttentionParameters.from_bilinear([[0.0]], [[1.0]]), causal=True)
    for n, norm in ((10, 1.41), (100, 1.63), (1000, 1.75)):
        mu = ParticleMeasure.from_sequence(torch.zeros(n, 1, dtype=F64))
        measured = float(local_lipschitz(F, mu, rtol=1e-3).value)
        assert measured == pytest.approx(norm, abs=6e-3)
        assert bounds.mean_field(0.0, 1.0, 1.0) < measured < bounds.masked_mean_field(0, 1, 1)


def test_heads_add_up_by_their_output_norms():
    assert bounds.multi_head([1.0, 2.0], [3.0, 0.5]) == 4.0


@given(seed=st.integers(0, 10**6), d=st.integers(1, 5))
def test_the_scaling_factor_is_that_of_the_critical_pair(seed, d):
    A = torch.randn(d, d, dtype=F64, generator=torch.Generator().manual_seed(seed))
    gamma = bounds.scaling_factor(A)
    try:
        pair = sampling.critical_pair(A)
    except ValueError:
        assert gamma == 0.0
        return
    assert gamma == pytest.approx(pair.scaling, rel=1e-9)
    residual = A @ pair.direction - pair.eigenvalue * pair.direction
    assert float(residual.norm()) < 1e-10
    assert float(pair.direction.norm()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bounds.general(-1, 1, 1, 2), "norm_A.*≥ 0"),
        (lambda: bounds.mean_field(1, math.nan, 1), "norm_V.*≥ 0"),
        (lambda: bounds.general(1, 1, 1, 0), "n: expected at least 1"),
        (lambda: bounds.masked_mean_field(1, 1, 1, p=1), "p > 1"),
        (lambda: bounds.scaling_factor(np.ones((2, 3))), "square"),
    ],
)
def test_bad_arguments_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@given(problem=problems(), shift=st.sampled_from([0.0, 5.0]))
@settings(max_examples=300)
def test_the_bound_from_the_weights_seen_holds_for_both_components(problem, shift):
    F, mu = attention(problem), problem.measure
    mu = mu.replace(mu.points + shift)
    found = local_lipschitz(F, mu)
    bound = float(bounds.local_upper(F, mu))
    assert float(found.value) <= bound * (1 + 1e-9) + 1e-300


def test_the_bound_from_the_weights_seen_is_far_below_theorem_3_3():
    par = AttentionParameters.random(8, std=0.5)
    F = SelfAttention(par)
    X = sampling.ball(50, 8, radius=3.0)
    norms = [float(torch.linalg.matrix_norm(M[0], 2)) for M in (par.A, par.V)]
    mu = ParticleMeasure(X)
    measured, bound = float(local_lipschitz(F, mu).value), float(bounds.local_upper(F, mu))
    assert measured <= bound < 0.1 * bounds.general(*norms, 3.0, 50)


def test_the_bound_at_a_batch_and_in_blocks_is_that_one_by_one():
    for causal in (False, True):
        F = SelfAttention(AttentionParameters.random(4, n_heads=2, biases=True), causal=causal)
        mu = ParticleMeasure.from_sequence(torch.randn(3, 9, 4, dtype=F64))
        alone = torch.stack([bounds.local_upper(F, one) for one in mu])
        torch.testing.assert_close(bounds.local_upper(F, mu), alone)


def test_a_map_without_that_bound_says_so():
    with pytest.raises(TypeError, match="local_upper"):
        bounds.local_upper(lambda mu: mu, ParticleMeasure([[0.0]]))
