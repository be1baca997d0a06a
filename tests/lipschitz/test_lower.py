"""Search over pairs: each family against a computation by hand, the result against theorems."""

from __future__ import annotations

import math

import pytest
import torch

from meanfield import bounds, sampling
from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.lipschitz import lipschitz_lower, local_lipschitz, secant_ratio
from meanfield.lipschitz.lower import PAIR_FAMILIES
from meanfield.lipschitz.proposals import (
    direction_pairs,
    random_pairs,
    splitting_pairs,
    transfer_pairs,
)
from meanfield.measures import ParticleMeasure

F64 = torch.float64


def line(A: float, V: float = 1.0, *, causal: bool = False) -> SelfAttention:
    return SelfAttention(AttentionParameters.from_bilinear([[A]], [[V]]), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_the_bound_found_never_exceeds_the_theorem(seed, causal):
    generator = torch.Generator().manual_seed(seed)
    d, radius = 1 + seed % 3, (0.3, 1.0, 1.8)[seed % 3]
    A, V = torch.randn(2, d, d, dtype=F64, generator=generator)
    F = SelfAttention(AttentionParameters.from_bilinear(A, V), causal=causal)
    points = sampling.sphere(2 + seed % 2, d, radius=radius, generator=generator)
    start = ParticleMeasure.from_sequence(points) if causal else ParticleMeasure(points)
    found = lipschitz_lower(
        F, radius, n_atoms=2 + seed % 2, n_pairs=8, start=start, generator=generator
    )
    norms = [float(torch.linalg.matrix_norm(M, 2)) for M in (A, V)]
    bound = (bounds.masked_mean_field if causal else bounds.mean_field)(*norms, radius)
    assert set(found.best) <= set(PAIR_FAMILIES)
    for one in found.best.values():
        assert float(one.ratio.lower) <= bound * (1 + 1e-9)
        assert one.ratio.conditional == causal
        for mu in (one.mu, one.nu):
            assert float(torch.linalg.vector_norm(mu.points, dim=-1).max()) <= radius
    assert float(found) == max(float(one.ratio.lower) for one in found.best.values())
    # The structured steps come close to both components at the start.
    assert float(found) >= 0.99 * float(found.constant.value)


@pytest.mark.parametrize("causal", [False, True])
def test_several_heads_stay_below_the_sum_of_their_bounds(causal):
    generator = torch.Generator().manual_seed(11)
    parameters = AttentionParameters.random(4, n_heads=2, generator=generator)
    F = SelfAttention(parameters, causal=causal)
    points = sampling.sphere(3, 4, radius=1.5, generator=generator)
    start = ParticleMeasure.from_sequence(points) if causal else ParticleMeasure(points)
    found = lipschitz_lower(F, 1.5, n_atoms=3, n_pairs=8, start=start, generator=generator)
    theorem = bounds.masked_mean_field if causal else bounds.mean_field
    value = parameters.output @ parameters.value  # W^h V^h, as one matrix per head
    norms = (torch.linalg.matrix_norm(M, 2).tolist() for M in (parameters.A, value))
    total = sum(theorem(a, v, 1.5) for a, v in zip(*norms, strict=True))
    assert float(found) <= total
    assert float(found) >= 0.99 * float(found.constant.value)


def test_shrinking_steps_reach_the_worst_two_atoms_of_the_line():
    log_ratios = torch.linspace(-5, 0, 2001, dtype=F64)
    F = line(-1.0)
    every = sampling.two_diracs(1.0, log_ratios, [1.0])
    worst = every[int(local_lipschitz(F, every).value.argmax())]
    found = lipschitz_lower(F, 1.0, families=["direction"], start=worst)
    assert float(found.constant.value) == pytest.approx(3.0686796, rel=1e-5)
    assert float(found) >= float(found.constant.value) * (1 - 1e-3)
    # Certified: numerator from below, denominator from above.
    ratio = found.ratio
    quotient = float(ratio.numerator.lower / ratio.denominator.upper)
    assert quotient * (1 - 1e-8) <= float(found) <= quotient
    assert found.family == "direction"


@pytest.mark.slow
def test_without_a_start_the_worst_case_is_searched_for():
    found = lipschitz_lower(line(-1.0), 1.0, families=["direction"])
    assert float(found) >= 3.0686796 * (1 - 1e-3)


def test_a_transfer_at_a_zero_is_the_square_root_of_its_mass():
    # A = 0: Γ is V times the mean, which moves by m|x − y|; the input is √m |x − y| away.
    mu = ParticleMeasure([[1.0], [-1.0]], weights=[0.25, 0.75])
    pairs = transfer_pairs(mu)
    ratios = secant_ratio(line(0.0, 3.0), *pairs).value
    shares = torch.tensor([1.0, 0.5, 0.1, 1e-2, 1e-3], dtype=F64)
    expected = 3 * torch.cat([0.25 * shares, 0.75 * shares]).sqrt()
    torch.testing.assert_close(ratios, expected)


def test_a_masked_transfer_at_a_zero_moves_every_later_mean():
    # Mass ½ at each of s = ½, 1. A share m of all the mass changes place x → y at s = ½: the
    # means there move by 2mΔ and mΔ, so d₂² = ½·4m²Δ² + ½·m²Δ² = (5/2) m²Δ², the input mΔ².
    mu = ParticleMeasure(
        [[1.0], [-1.0], [0.0]], weights=[0.25, 0.25, 0.5], positions=[0.5, 0.5, 1.0]
    )
    pairs = transfer_pairs(mu)
    assert pairs.mu.batch_shape == (10,)  # two ordered pairs of tied atoms, five shares
    ratios = secant_ratio(line(0.0, causal=True), *pairs)
    assert ratios.conditional
    shares = 0.25 * torch.tensor([1.0, 0.5, 0.1, 1e-2, 1e-3], dtype=F64)
    torch.testing.assert_close(ratios.value, (2.5 * shares).sqrt().repeat(2))


def test_distinct_positions_and_single_places_have_nothing_to_transfer():
    assert transfer_pairs(ParticleMeasure.from_sequence(torch.randn(3, 2, dtype=F64))) is None
    assert transfer_pairs(ParticleMeasure([[1.0], [1.0]])) is None
    assert transfer_pairs(ParticleMeasure([[1.0]])) is None


@pytest.mark.parametrize("causal", [False, True])
def test_a_split_reaches_the_slope_of_the_field(causal):
    # Two atoms at 0 and R, attention t to the light one: Γ'(0) = A t(1 − t)R². At weight t.
    t, radius = 0.3, 2.0
    mu = ParticleMeasure(
        [[radius], [0.0]], weights=[t, 1 - t], positions=[0.5, 1.0] if causal else None
    )
    F = line(-1.0, causal=causal)
    constant = local_lipschitz(F, mu)
    slope = t * (1 - t) * radius**2
    assert int(constant.splitting_atom) == 1
    assert float(constant.splitting) == pytest.approx(slope)
    ratios = secant_ratio(F, *splitting_pairs(mu, constant, radius)).value
    steps = torch.tensor([1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6], dtype=F64).repeat(2)
    assert bool(((ratios - slope).abs() <= 5 * steps * slope).all())


def test_steps_along_the_direction_tend_to_the_particle_component():
    F = line(-1.0)
    mu = sampling.two_diracs(1.0, -2.0, [1.0])
    constant = local_lipschitz(F, mu)
    pairs = direction_pairs(mu, constant, 1.0)
    ratios = secant_ratio(F, *pairs).value
    steps = torch.tensor([1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6], dtype=F64).repeat(2)
    assert bool(((ratios / constant.particle - 1).abs() <= 10 * steps).all())


@pytest.mark.parametrize("positioned", [False, True])
def test_random_pairs_are_in_the_ball_and_near_ones_keep_their_weights(positioned):
    generator = torch.Generator().manual_seed(0)
    mu, nu = random_pairs(40, 3, 2, 1.5, positioned=positioned, generator=generator)
    for one in (mu, nu):
        assert float(torch.linalg.vector_norm(one.points, dim=-1).max()) <= 1.5
        assert one.is_positioned == positioned
    same = (mu.log_weights == nu.log_weights).all(-1)
    assert bool(same[1::2].all())
    assert bool(same.all()) == positioned


def test_light_atoms_do_not_break_the_search():
    mu = sampling.two_diracs(20.0, -800.0, [1.0])
    found = lipschitz_lower(line(-1.0), 20.0, n_pairs=4, start=mu)
    assert math.isfinite(float(found))
    assert float(found) > 0


def test_the_table_by_family_is_a_dataset():
    start = ParticleMeasure([[1.0], [-1.0]], weights=[0.1, 0.9])
    found = lipschitz_lower(line(-1.0), 1.0, n_pairs=8, start=start)
    ds = found.to_dataset()
    assert list(ds.family.values) == list(PAIR_FAMILIES)
    assert float(ds.secant_lower.max()) == float(found)
    assert bool((ds.secant_lower <= ds.secant).all())
    assert bool((ds.secant <= ds.secant_upper).all())
    assert all("long_name" in v.attrs for v in ds.variables.values())
    assert found.family in repr(found) and found.family in found._repr_html_()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"radius": -1.0}, "radius: expected a number > 0"),
        ({"families": ["moving"]}, "families: expected"),
        ({"families": []}, "families: expected"),
        ({"start": ParticleMeasure([[2.0]])}, "ball of radius 1"),
        ({"start": ParticleMeasure([[[0.5]]])}, "no batch axes"),
        ({"start": ParticleMeasure([[0.5]]), "families": ["transfer"], "n_atoms": 1}, "some pair"),
    ],
)
def test_bad_arguments_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        lipschitz_lower(line(-1.0), **({"radius": 1.0} | arguments))


def test_a_pair_that_is_not_provably_apart_alone_is_passed_over():
    """Batched, W₂ may be known to be positive where a single solve of the same pair knows less."""
    F = line(0.6614, 0.2669)
    found = lipschitz_lower(F, 2.0, n_atoms=8, n_pairs=2)
    assert 0 < float(found) <= bounds.mean_field(0.6614, 0.2669, 2.0)
    assert set(found.best) == set(PAIR_FAMILIES)


def test_one_distance_that_is_not_known_well_does_not_end_the_search():
    generator = torch.Generator().manual_seed(8)
    F = SelfAttention(AttentionParameters.random(3, std=1.0, generator=generator))
    found = lipschitz_lower(F, 0.5, n_atoms=8, n_pairs=8, generator=generator)
    assert 0 < float(found) <= bounds.table(F, 0.5).row("Thm 3.5").value
