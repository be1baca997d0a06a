"""Secant ratios and Lemma 3.2: what is certified, what coincides, and where splitting differs."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.layers import Pointwise
from meanfield.lipschitz import (
    compare_lemma_3_2,
    comparison,
    local_lipschitz,
    secant,
    secant_ratio,
)
from meanfield.lipschitz.secant import euclidean_secant_ratio
from meanfield.measures import ParticleMeasure, split
from meanfield.transport import solve_w2

F64 = torch.float64


def random_layer(seed: int, d: int, *, heads: int = 1, causal: bool = False) -> SelfAttention:
    generator = torch.Generator().manual_seed(seed)
    par = AttentionParameters.random(d, n_heads=heads, head_dim=d, std=0.8, generator=generator)
    return SelfAttention(par, causal=causal)


@given(seed=st.integers(0, 10**6), n=st.integers(2, 6), causal=st.booleans())
def test_wasserstein_and_euclidean_secants_coincide_below_half_the_separation(seed, n, causal):
    F = random_layer(seed, 3, heads=2, causal=causal)
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 3, dtype=F64, generator=generator)
    gap = float(torch.pdist(X).min())
    image_gap = float(torch.pdist(F(ParticleMeasure.from_sequence(X)).points).min())
    step = torch.randn(n, 3, dtype=F64, generator=generator)
    size = 1e-3 * min(gap, image_gap) / float(step.norm())
    Y = X + size * step
    mu, nu = ParticleMeasure.from_sequence(X), ParticleMeasure.from_sequence(Y)
    if not causal:
        mu, nu = ParticleMeasure(X), ParticleMeasure(Y)
    found = secant_ratio(F, mu, nu)
    discrete = float(euclidean_secant_ratio(lambda x: F(mu.replace(x)).points, X, Y))
    assert found.conditional == causal
    assert float(found.value) == pytest.approx(discrete, rel=1e-9)
    assert float(found.lower) <= discrete * (1 + 1e-12)
    assert float(found.upper) >= discrete * (1 - 1e-12)


def test_a_small_share_of_mass_that_moves_far_has_a_larger_ratio_than_the_constant():
    """The numbers of the page of evidence; near in W₂, not in W∞."""
    F = SelfAttention(AttentionParameters.from_bilinear([[10.0]], [[1.0]]))
    mu, share = ParticleMeasure([[1.0], [-1.0]]), 1e-8
    nu = ParticleMeasure([[1.0], [-1.0], [-0.1]], weights=[0.5 - share, 0.5, share])
    found = secant_ratio(F, mu, nu)
    assert float(found.denominator) == pytest.approx(1.1e-4)
    assert float(found.lower) == pytest.approx(1.60, abs=0.005)
    assert float(local_lipschitz(F, mu).upper) == pytest.approx(1.0, abs=1e-6)


@given(seed=st.integers(0, 10**6), n=st.integers(1, 5), causal=st.booleans())
@settings(max_examples=15)
def test_a_secant_stays_below_the_largest_constant_on_the_path(seed, n, causal):
    # One atom per position (or a path of few atoms): the displacement path is the geodesic.
    F = random_layer(seed, 2, causal=True)
    generator = torch.Generator().manual_seed(seed)
    X, Y = (torch.randn(n, 2, dtype=F64, generator=generator) for _ in range(2))
    logs = torch.randn(n, dtype=F64, generator=generator).log_softmax(-1)
    positions = torch.arange(1, n + 1, dtype=F64) / n
    mu = ParticleMeasure(X, log_weights=logs, positions=positions)
    found = secant_ratio(F, mu, mu.replace(Y))
    times = torch.linspace(0, 1, 400, dtype=F64)[:, None, None]
    path = ParticleMeasure(X + times * (Y - X), log_weights=logs, positions=positions)
    largest = float(local_lipschitz(F, path).value.max())
    # The grid of times may miss the maximum by a little.
    assert float(found.lower) <= largest * (1 + 1e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_the_comparison_shows_lemma_3_2(causal):
    F = random_layer(0, 3, causal=causal)
    X = torch.randn(5, 3, dtype=F64)
    ds = compare_lemma_3_2(F, X, steps=(1e-2, 1e-4, 1e-6))
    top = ds.sel(perturbation="top")
    assert float(top.euclidean_secant[-1]) == pytest.approx(float(ds.euclidean), rel=1e-4)
    np.testing.assert_allclose(ds.euclidean_secant[:, 1:], ds.wasserstein_secant[:, 1:], rtol=1e-8)
    assert (ds.wasserstein_secant_lower <= ds.wasserstein_secant).all()
    assert (ds.wasserstein_secant <= ds.wasserstein_secant_upper).all()
    last = ds.isel(step=-1)
    split_value = float(last.sel(perturbation="splitting").wasserstein_secant)
    assert split_value == pytest.approx(float(ds.splitting), rel=1e-4)
    random = float(last.sel(perturbation="random").wasserstein_secant)
    assert random <= float(ds.euclidean) * (1 + 1e-6)
    assert bool(ds.euclidean_converged)
    assert float(ds.wasserstein) == max(float(ds.particle), float(ds.splitting))
    assert all("long_name" in v.attrs for v in ds.variables.values())


def test_steps_are_in_units_of_the_token_that_is_farthest_out():
    """Of x ↦ x² at 1 and 3: √2 · 3h of the second token, or halves that move 3h apart."""
    square = Pointwise(lambda x: x**2)
    ds = compare_lemma_3_2(square, torch.tensor([[1.0], [3.0]], dtype=F64), steps=(0.1, 0.01))
    top, halves = (ds.euclidean_secant.sel(perturbation=way) for way in ("top", "splitting"))
    moved = 3 * ds.step
    np.testing.assert_allclose(top, 6 + 2**0.5 * moved, rtol=1e-12)
    np.testing.assert_allclose(halves, (36 + moved**2) ** 0.5, rtol=1e-12)
    origin = compare_lemma_3_2(square, torch.zeros(1, 1, dtype=F64), steps=(0.5,))
    assert float(origin.euclidean_secant.sel(perturbation="top")[0]) == pytest.approx(0.5)
    alone = compare_lemma_3_2(square, torch.tensor([[3.0]], dtype=F64), steps=(0.1,))
    random = float(alone.euclidean_secant.sel(perturbation="random")[0])
    assert abs(random - 6) == pytest.approx(0.3)


def test_tokens_change_places_in_a_wasserstein_secant_unless_positions_hold_them():
    """Of x ↦ x² at −3 and 1, as the first token steps past the second."""
    square, X = Pointwise(lambda x: x**2), torch.tensor([[-3.0], [1.0]], dtype=F64)
    place = 3 * 2**0.5 - 3
    for conditional, below in ((None, (16 + (place - 1) ** 2) ** 0.5), (True, place + 3)):
        ds = compare_lemma_3_2(square, X, steps=(1.0,), conditional=conditional)
        found = float(ds.wasserstein_secant.sel(perturbation="top")[0])
        assert found == pytest.approx((9 - place**2) / below)


def test_an_atom_that_splits_raises_the_wasserstein_constant_alone():
    def less_half_the_mean(mu):
        return mu.replace(mu.points - mu.mean()[..., None, :] / 2)

    ds = compare_lemma_3_2(less_half_the_mean, torch.tensor([[2.0]], dtype=F64), steps=(0.1,))
    assert (float(ds.euclidean), float(ds.wasserstein)) == pytest.approx((0.5, 1.0))
    ways = ["top", "splitting"]
    np.testing.assert_allclose(ds.wasserstein_secant.sel(perturbation=ways)[:, 0], [0.5, 1.0])


@pytest.mark.parametrize("swapped", [False, True])
def test_a_batch_has_a_ratio_to_one_measure_for_each_of_its_own(swapped):
    F = random_layer(0, 3)
    x = torch.randn(4, 5, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    many, one = ParticleMeasure(x[:3]), ParticleMeasure(x[3])
    found = secant_ratio(F, one, many) if swapped else secant_ratio(F, many, one)
    alone = [secant_ratio(F, mu, one) for mu in many]
    for name in ("value", "lower", "upper"):
        wanted = torch.stack([getattr(ratio, name) for ratio in alone])
        torch.testing.assert_close(getattr(found, name), wanted, rtol=1e-9, atol=0.0)


def test_no_measures_have_no_ratios():
    none = ParticleMeasure(torch.zeros(0, 3, 2, dtype=F64))
    assert secant_ratio(lambda mu: mu, none, none.replace(none.points + 1)).value.shape == (0,)


def test_bad_pairs_are_refused():
    F = random_layer(0, 2)
    mu = ParticleMeasure([[0.0, 1.0], [1.0, 0.0]])
    positioned = ParticleMeasure(mu.points, positions=[0.0, 1.0])
    other = ParticleMeasure(mu.points, positions=[0.0, 0.5])
    with pytest.raises(ValueError, match="distance of 0"):
        secant_ratio(F, mu, mu)
    with pytest.raises(ValueError, match="one of each"):
        secant_ratio(F, mu, positioned)
    with pytest.raises(ValueError, match="different laws of positions"):
        secant_ratio(F, positioned, other)
    with pytest.raises(ValueError, match="X ≠ Y"):
        euclidean_secant_ratio(lambda x: x, mu.points, mu.points)
    with pytest.raises(ValueError, match="one shape"):
        euclidean_secant_ratio(lambda x: x, mu.points, mu.points[:1])
    with pytest.raises(ValueError, match=r"one sequence \(n, d\)"):
        compare_lemma_3_2(F, mu.points[None])


def test_secants_of_tiny_steps_do_not_underflow():
    X = torch.zeros(2, 1, dtype=F64)
    Y = X + 1e-170
    assert float(euclidean_secant_ratio(lambda x: 2 * x, X, Y)) == pytest.approx(2.0)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=15)
def test_the_ends_of_a_ratio_are_rounded_outward(seed):
    F = random_layer(seed, 2)
    X = torch.randn(2, 4, 2, dtype=F64, generator=torch.Generator().manual_seed(seed))
    found = secant_ratio(F, ParticleMeasure(X[0]), ParticleMeasure(X[1]))
    above, below = found.numerator, found.denominator
    exact = [Fraction(float(end)) for end in (above.lower, above.upper, below.lower, below.upper)]
    assert Fraction(float(found.lower)) < exact[0] / exact[3]
    assert Fraction(float(found.upper)) > exact[1] / exact[2]


def test_measures_that_are_not_provably_apart_are_refused(monkeypatch):
    """An interval [0, u] of their distance bounds the ratio by nothing, as of one of a batch."""
    pairs = (
        ParticleMeasure(torch.tensor(x).double()) for x in ([[[0.0]]] * 2, [[[0.0]], [[1.0]]])
    )
    with pytest.raises(ValueError, match="provably apart"):
        secant_ratio(random_layer(0, 1), *pairs)

    def unsure(mu, nu, **settings):
        found = solve_w2(mu, nu, **settings)
        return replace(found, lower=torch.zeros_like(found.lower))

    monkeypatch.setattr(secant, "solve_w2", unsure)
    with pytest.raises(ValueError, match="provably apart"):
        secant_ratio(random_layer(0, 1), ParticleMeasure([[0.0]]), ParticleMeasure([[1.0]]))


def test_rounding_of_images_raises_no_lower_bound():
    x = torch.linspace(-1.0, 1.0, 200, dtype=torch.float64)[:, None, None]
    mu, nu = ParticleMeasure(x), ParticleMeasure(x + 1e-15)
    found = secant_ratio(Pointwise(lambda y: 1000 + y / 3), mu, nu)
    # The quotients themselves are 0 or in the hundreds.
    assert float(found.value.max()) > 50
    assert float(found.lower.max()) <= 1 / 3 <= float(found.upper.min())


def test_the_rounding_of_either_image_counts():
    near, far = (ParticleMeasure(size * torch.ones(3, 1, dtype=F64)) for size in (1e-9, 1.0))
    one, other = (secant_ratio(lambda mu: mu, *pair) for pair in ((near, far), (far, near)))
    for end in ("lower", "upper"):
        torch.testing.assert_close(getattr(one, end), getattr(other, end), rtol=1e-16, atol=0.0)
    assert float(one.upper - one.lower) > torch.finfo(F64).eps * 8


SHARES = torch.tensor([1.0, 0.5, 0.1, 1e-2, 1e-3], dtype=F64)


def test_mass_that_changes_place_under_a_mean_moves_it_by_the_root_of_that_mass():
    # A = 0: Γ is V times the mean, which moves by m|x − y|; the input is √m |x − y| away.
    F = SelfAttention(AttentionParameters.from_bilinear([[0.0]], [[3.0]]))
    mass = 0.25 * SHARES
    points = torch.tensor([[1.0], [-1.0]], dtype=F64).expand(5, 2, 1)
    before = ParticleMeasure(points, weights=torch.tensor([0.25, 0.75], dtype=F64).expand(5, 2))
    after = ParticleMeasure(points, weights=torch.stack([0.25 - mass, 0.75 + mass], -1))
    torch.testing.assert_close(secant_ratio(F, before, after).value, 3 * mass.sqrt())


def test_mass_that_changes_place_at_one_position_moves_every_later_mean():
    # Mass ½ at each of s = ½, 1. A share m of all the mass changes place x → y at s = ½: the
    # means there move by 2mΔ and mΔ, so d₂² = ½·4m²Δ² + ½·m²Δ² = (5/2) m²Δ², the input mΔ².
    F = SelfAttention(AttentionParameters.from_bilinear([[0.0]], [[1.0]]), causal=True)
    mass, positions = 0.25 * SHARES, torch.tensor([0.5, 0.5, 1.0], dtype=F64)
    points = torch.tensor([[1.0], [-1.0], [0.0]], dtype=F64).expand(5, 3, 1)
    before, after = (
        ParticleMeasure(
            points,
            weights=torch.stack([0.25 - moved, 0.25 + moved, 0.5 + 0 * moved], -1),
            positions=positions,
        )
        for moved in (0 * mass, mass)
    )
    found = secant_ratio(F, before, after)
    assert found.conditional
    torch.testing.assert_close(found.value, (2.5 * mass).sqrt())


def test_a_direction_and_its_opposite_are_one():
    v = torch.tensor([[0.1, -0.7], [0.7 * (1 + 1e-9), 0.1]], dtype=F64)
    expected = torch.tensor([[-0.1, 0.7], [-0.7 * (1 + 1e-9), -0.1]], dtype=F64)
    for one in (v, -v):
        torch.testing.assert_close(comparison.oriented(one), expected)


def test_a_map_that_draws_noise_or_leaves_the_numbers_has_no_secant():
    mu = ParticleMeasure([[1.0, 2.0], [3.0, 4.0]])
    nu, dropout = mu.replace(mu.points + 0.1), torch.nn.Dropout(0.5)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        with pytest.raises(ValueError, match="the same image of the same measure.*eval"):
            secant_ratio(lambda m: m.replace(dropout(m.points)), mu, nu)
    assert float(secant_ratio(lambda m: m.replace(dropout.eval()(m.points)), mu, nu)) == 1
    with pytest.raises(ValueError, match="expected a finite image"):
        secant_ratio(lambda m: m.replace(m.points.exp() ** 999), mu, nu)


def test_a_map_may_change_how_many_atoms_there_are():
    mu = ParticleMeasure([[1.0], [3.0]], weights=[0.0, 1.0])
    found = secant_ratio(lambda m: split(m, 3), mu, mu.replace(mu.points + 0.5))
    assert float(found) == pytest.approx(1.0, rel=1e-12)
