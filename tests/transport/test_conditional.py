"""Conditional W₂: positions are kept, and the parts add up."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meanfield.measures import ParticleMeasure, disintegrate
from meanfield.transport import conditional_w2, solve_conditional_w2, solve_w2, w2
from tests.transport.transport_oracles import linear_program_w2_squared


def ragged(seed: int, d: int = 2) -> tuple[ParticleMeasure, ParticleMeasure, float]:
    """Two measures with the same first marginal, and their distance by linear programs."""
    rng = np.random.default_rng(seed)
    groups = int(rng.integers(1, 6))
    masses = rng.dirichlet(np.ones(groups))
    parts: list[tuple[list, list, list]] = [([], [], []), ([], [], [])]
    total = 0.0
    for k in range(groups):
        clouds = []
        for points, logs, positions in parts:
            n = int(rng.integers(1, 7))
            x, a = rng.normal(size=(n, d)), rng.dirichlet(np.ones(n))
            clouds.append((x, a))
            points.append(x)
            logs.append(np.log(a * masses[k]))
            positions.append(np.full(n, (k + 1) / groups))
        (x, a), (y, b) = clouds
        total += masses[k] * linear_program_w2_squared(x, y, a, b)
    measures = []
    for points, logs, positions in parts:
        order = rng.permutation(sum(map(len, points)))
        x, weights, s = (np.concatenate(t)[order] for t in (points, logs, positions))
        measures.append(
            ParticleMeasure(
                torch.as_tensor(x),
                log_weights=torch.as_tensor(weights),
                positions=torch.as_tensor(s),
            )
        )
    return measures[0], measures[1], math.sqrt(total)


@given(st.integers(0, 2**32 - 1), st.integers(1, 3))
@settings(max_examples=25)
def test_it_is_the_root_mean_square_over_positions(seed: int, d: int) -> None:
    mu, nu, truth = ragged(seed, d)
    result = solve_conditional_w2(mu, nu)
    assert float(result.value) == pytest.approx(truth, rel=1e-7)
    assert float(result.lower) <= truth * (1 + 1e-7)
    assert float(result.upper) >= truth * (1 - 1e-7)
    assert result.coupling is not None
    assert mu.positions is not None
    assert nu.positions is not None
    rows, cols = result.coupling.rows, result.coupling.cols
    assert torch.equal(mu.positions[rows], nu.positions[cols])
    mine, theirs = result.coupling.marginals()
    torch.testing.assert_close(mine, mu.weights, rtol=0, atol=1e-14)
    torch.testing.assert_close(theirs, nu.weights, rtol=0, atol=1e-12)
    torch.testing.assert_close(result.coupling.cost().sqrt(), result.value, rtol=1e-12, atol=0)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_it_is_at_least_the_distance_that_forgets_positions(seed: int) -> None:
    mu, nu, _ = ragged(seed)
    assert float(conditional_w2(mu, nu)) >= float(w2(mu, nu)) * (1 - 1e-12)


def test_one_particle_per_position_is_a_weighted_sum_of_displacements() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 3, dtype=torch.float64, generator=generator)
    mu = ParticleMeasure.from_sequence(x)
    y = torch.randn(50, 3, dtype=torch.float64, generator=generator)
    truth = (x - y).square().sum(-1).mean().sqrt()
    result = solve_conditional_w2(mu, mu.replace(y))
    torch.testing.assert_close(result.value, truth, rtol=1e-13, atol=0)
    assert float(result.relative_width) < 1e-12


def test_groups_agree_with_the_plain_distance_of_each_conditional() -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(60, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    positions = (torch.arange(60) % 5 + 1).double() / 5
    mu, nu = (ParticleMeasure(t, positions=positions) for t in (x, y))
    parts = zip(disintegrate(mu).conditionals, disintegrate(nu).conditionals, strict=True)
    truth = torch.stack([solve_w2(p, q).value.square() for p, q in parts]).mean().sqrt()
    torch.testing.assert_close(conditional_w2(mu, nu), truth, rtol=1e-13, atol=0)


def test_unequal_first_marginals_are_infinitely_far() -> None:
    x = torch.zeros(2, 1, dtype=torch.float64)
    here = ParticleMeasure(x, positions=[0.5, 1.0])
    for other in (
        ParticleMeasure(x, positions=[0.25, 1.0]),
        ParticleMeasure(x, [0.4, 0.6], positions=[0.5, 1.0]),
        ParticleMeasure(x[:1], positions=[1.0]),
    ):
        result = solve_conditional_w2(here, other)
        assert float(result.value) == float(result.lower) == float(result.upper) == math.inf
        assert float(conditional_w2(other, here)) == math.inf


def test_weight_zero_does_not_make_a_marginal() -> None:
    x = torch.tensor([[0.0], [1.0], [9.0]], dtype=torch.float64)
    mu = ParticleMeasure(x, [0.5, 0.5, 0.0], positions=[0.5, 1.0, 0.75])
    nu = ParticleMeasure(x[:2] + 2.0, [0.5, 0.5], positions=[0.5, 1.0])
    assert float(conditional_w2(mu, nu)) == pytest.approx(2.0, rel=1e-14)


def test_positions_within_a_tolerance_are_one_group() -> None:
    x = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    mu = ParticleMeasure(x, positions=[0.5, 0.5 + 1e-9])
    nu = ParticleMeasure(x.flip(0), positions=[0.5, 0.5])
    assert float(conditional_w2(mu, nu)) == math.inf
    assert float(conditional_w2(mu, nu, position_atol=1e-6)) == 0.0


@pytest.mark.parametrize("atoms", [1, 3])
def test_a_position_of_mass_e_to_the_minus_900_is_seen(atoms: int) -> None:
    generator = torch.Generator().manual_seed(4)
    light = torch.randn(atoms, 2, dtype=torch.float64, generator=generator)
    moved = light + 0.01 * torch.randn(atoms, 2, dtype=torch.float64, generator=generator)
    anchor = torch.tensor([[5.0, 5.0]], dtype=torch.float64)
    logs = torch.tensor([0.0] + [-900.0 - math.log(atoms)] * atoms, dtype=torch.float64)
    positions = torch.tensor([1.0] + [0.5] * atoms, dtype=torch.float64)
    mu, nu = (
        ParticleMeasure(torch.cat([anchor, t]), log_weights=logs, positions=positions)
        for t in (light, moved)
    )
    result = solve_conditional_w2(mu, nu)
    truth = float(mpmath.exp(-450)) * float(w2(light, moved))
    assert float(result.value) == pytest.approx(truth, rel=1e-12)
    assert float(result.lower) <= truth <= float(result.upper)


def test_a_batch_is_its_entries() -> None:
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(3, 8, 2, dtype=torch.float64, generator=generator) for _ in range(2))
    positions = (torch.arange(8) // 2 + 1).double() / 4
    mu, nu = (ParticleMeasure(t, positions=positions) for t in (x, y))
    batch = conditional_w2(mu, nu)
    for k in range(3):
        torch.testing.assert_close(batch[k], conditional_w2(mu[k], nu[k]), rtol=1e-14, atol=0)


def test_a_collapsed_group_goes_through_the_whole_dispatch() -> None:
    rng = np.random.default_rng(6)
    inner = 1e-8 * rng.normal(size=(2, 30, 2))
    home = np.repeat([[0.0, 0.0], [4.0, 0.0]], 15, axis=0)
    x, y = (torch.as_tensor(home + t) for t in inner)
    far = torch.full((1, 2), 7.0, dtype=torch.float64)
    positions = torch.cat([torch.full((30,), 0.5), torch.ones(1)]).double()
    mu, nu = (ParticleMeasure(torch.cat([t, far]), positions=positions) for t in (x, y))
    result = solve_conditional_w2(mu, nu)
    truth = float(w2(x, y)) * math.sqrt(30 / 31)
    assert float(result.value) == pytest.approx(truth, rel=1e-12)
    assert float(result.relative_width) < 1e-6


def test_measures_without_positions_are_refused() -> None:
    x = torch.zeros(2, 1, dtype=torch.float64)
    with pytest.raises(ValueError, match="positions"):
        conditional_w2(ParticleMeasure(x), ParticleMeasure(x, positions=[0.5, 1.0]))
