"""Particle measures: wrong arguments, and what pushforward, splitting and merging preserve."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from meanfield import AttentionParameters, SelfAttention, measures
from meanfield.attention import normalizations
from meanfield.layers import MLP, LayerNorm, Pointwise, Residual
from meanfield.measure_arguments import drawn
from meanfield.measures import (
    ParticleMeasure,
    disintegrate,
    merge,
    mixture,
    pushforward,
    split,
    stack,
)
from meanfield.transport import w2
from tests.strategies import Problem, problems

F64 = torch.float64
HALVES = torch.full((2,), 0.5, dtype=F64)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"points": [[math.nan], [1.0]]}, ValueError, r"points.*NaN.*\(0, 0\)"),
        ({"points": [[math.inf], [1.0]]}, ValueError, "points.*infinite"),
        ({"points": [0.0, 1.0]}, ValueError, r"points: expected shape.*got \(2,\)"),
        ({"points": torch.zeros(0, 3)}, ValueError, r"n ≥ 1.*got \(0, 3\)$"),
        ({"points": torch.zeros(2, 1, dtype=torch.bool)}, TypeError, "torch.bool"),
        ({"weights": [0.5, math.nan]}, ValueError, "weights.*NaN"),
        ({"weights": [1.5, -0.5]}, ValueError, "weights.*≥ 0.*-0.5"),
        ({"weights": [0.5, 0.6]}, ValueError, "mass of 1, got 1.1.*divide"),
        ({"weights": [0.0, 0.0]}, ValueError, "mass of 1, got 0; give one atom at least"),
        ({"weights": [1.0]}, ValueError, r"one number per particle.*got \(1,\)"),
        ({"weights": 1.0}, ValueError, r"one number per particle.*got \(\)"),
        ({"weights": [[0.5, 0.5], [0.25, 0.25]]}, ValueError, "mass of 1, got 0.5"),
        (
            {"points": np.zeros((2, 2, 1)), "weights": np.full((3, 2), 0.5)},
            ValueError,
            "broadcast",
        ),
        ({"points": torch.zeros(2, 1), "weights": HALVES}, TypeError, "float32.*float64"),
        ({"log_weights": [0.0, 0.0]}, ValueError, "log_weights.*logsumexp"),
        ({"log_weights": [0.0, math.inf]}, ValueError, "log_weights: expected numbers below"),
        ({"log_weights": [0.0, math.nan]}, ValueError, "log_weights.*NaN"),
        ({"weights": [0.5, 0.5], "log_weights": [0.0, -900.0]}, ValueError, "both"),
        ({"positions": [0.0, 1.5]}, ValueError, r"\[0, 1\].*1.5"),
        ({"positions": [-0.1, 1.0]}, ValueError, r"\[0, 1\].*-0.1"),
        ({"positions": [0.0, math.nan]}, ValueError, "positions.*NaN"),
        ({"positions": [0.5]}, ValueError, "positions: expected one number per particle"),
    ],
)
def test_bad_input_is_refused_with_expected_and_got(arguments, error, words):
    given_points = {"points": torch.tensor([[0.0], [1.0]], dtype=F64)}
    with pytest.raises(error, match=words):
        ParticleMeasure(**(given_points | arguments))


def test_tensors_on_different_devices_are_refused():
    with pytest.raises(ValueError, match="device of points, meta, got cpu"):
        ParticleMeasure(torch.zeros(2, 1, device="meta"), torch.full((2,), 0.5))


def test_a_weight_of_e_minus_900_is_stored_exactly():
    mu = ParticleMeasure([[0.0], [1.0]], log_weights=[0.0, -900.0])
    assert mu.log_weights.tolist() == [0.0, -900.0]
    assert ParticleMeasure([[0.0], [1.0]], weights=[1.0, 0.0]).log_weights[1] == -math.inf


def test_lists_become_float64_and_float32_stays():
    assert ParticleMeasure([[0.0], [1.0]]).dtype == F64
    assert ParticleMeasure(np.zeros((2, 1), np.float32)).dtype == torch.float32
    assert ParticleMeasure([[0], [1]]).dtype == F64


def test_a_sequence_is_uniform_with_positions_i_over_n():
    mu = ParticleMeasure.from_sequence(torch.arange(8.0, dtype=F64).reshape(4, 2))
    torch.testing.assert_close(mu.weights, torch.full((4,), 0.25, dtype=F64))
    assert mu.positions.tolist() == [0.25, 0.5, 0.75, 1.0]


def test_a_measure_is_frozen():
    mu = ParticleMeasure([[0.0], [1.0]])
    with pytest.raises(AttributeError):
        mu.points = torch.zeros(2, 1)


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
@pytest.mark.parametrize("name", ["__call__", "of", "from_sequence"])
def test_a_measure_owns_its_memory(kind, name):
    x = kind([[1.0], [2.0]])
    mu = ParticleMeasure(x) if name == "__call__" else getattr(ParticleMeasure, name)(x)
    x += 1
    assert mu.points.tolist() == [[1.0], [2.0]]


def test_weights_and_positions_are_copied_too():
    given = {name: torch.tensor([0.25, 0.75]) for name in ("weights", "positions")}
    mu = ParticleMeasure(torch.zeros(2, 1), **given)
    for each in given.values():
        each.zero_()
    assert mu.weights.tolist() == pytest.approx([0.25, 0.75])
    assert mu.positions.tolist() == [0.25, 0.75]


@pytest.mark.parametrize("part", ["all", "rows"])
def test_a_measure_made_before_a_step_of_an_optimiser_gives_no_gradient(part):
    """Its atoms stay where they were, and the same gradient would be added up in silence."""
    x, y = torch.randn(5, 2, dtype=F64, requires_grad=True), torch.randn(3, 2, dtype=F64)
    mu = ParticleMeasure(x if part == "all" else x[1:4])
    for _ in range(2):  # gradients add up as long as nothing changes
        mu.points.square().sum().backward()
    optimiser = torch.optim.SGD([x], lr=0.1)
    optimiser.step()
    with pytest.raises(RuntimeError, match="ParticleMeasure: .* some changed since"):
        w2(mu, y).backward()
    values = []
    for _ in range(2):
        optimiser.zero_grad()
        distance = w2(ParticleMeasure(x), y)
        distance.backward()
        optimiser.step()
        values.append(float(distance.detach()))
    assert values[1] < values[0]


def test_weights_normalised_in_single_precision_are_taken_beside_points_in_double():
    weights = np.full(11, 1 / 11, np.float32)
    assert 1e-8 < abs(weights.astype(float).sum() - 1) < 1e-5
    mu = ParticleMeasure(np.zeros((11, 1)), weights)
    assert mu.dtype == F64 and float(mu.weights.sum()) == pytest.approx(1, abs=1e-15)
    with pytest.raises(ValueError, match="expected a total mass of 1"):
        ParticleMeasure(np.zeros((11, 1)), weights.astype(float))


def test_axes_that_are_called_as_the_package_calls_them_are_found_by_name():
    X = np.arange(30.0).reshape(5, 2, 3)
    points = xr.DataArray(X, dims=("particle", "time", "feature"))
    logs = xr.DataArray(np.full((5, 2), 0.2), dims=("particle", "time"))
    mu = ParticleMeasure(points, logs)
    assert (mu.n_particles, mu.dim, mu.batch_shape) == (5, 3, (2,))
    assert mu.points[1].tolist() == X[:, 1].tolist()
    assert ParticleMeasure(points.isel(time=1).T).points.tolist() == X[:, 1].tolist()
    unnamed = xr.DataArray(X[0])
    assert ParticleMeasure(unnamed).points.tolist() == X[0].tolist()
    assert ParticleMeasure(unnamed.T).points.tolist() == X[0].T.tolist()
    assert ParticleMeasure(xr.DataArray(X)[1]).points.tolist() == X[1].tolist()
    with pytest.raises(
        ValueError, match="expected the dimensions particle, feature.*got feature, token"
    ):
        ParticleMeasure(unnamed.rename(dim_0="feature", dim_1="token"))


def test_indexing_and_iterating_reach_batch_axes_only():
    points = torch.randn(3, 2, 5, 4, dtype=F64)
    mu = ParticleMeasure.from_sequence(points)
    assert mu[1].batch_shape == (2,)
    torch.testing.assert_close(mu[1, 0].points, points[1, 0])
    torch.testing.assert_close(torch.stack([m.points for m in mu]), points)
    with pytest.raises(IndexError):
        mu[0, 0, 0]
    with pytest.raises(IndexError, match="expected a batch of measures"):
        mu[0, 0][0]


@given(problems())
def test_a_pushforward_moves_atoms_and_keeps_weights_and_positions(problem: Problem):
    mu = problem.measure
    nu = pushforward(lambda x: torch.cat([2 * x, x], -1), mu)
    assert nu.dim == 2 * mu.dim
    assert torch.equal(nu.log_weights, mu.log_weights)
    assert nu.positions is mu.positions
    torch.testing.assert_close(nu.mean()[: mu.dim], 2 * mu.mean())


def test_a_pushforward_may_use_positions_and_must_keep_the_particles():
    mu = ParticleMeasure([[1.0], [1.0]], positions=[0.25, 1.0])
    nu = pushforward(lambda x, s: x * s[..., None], mu, use_positions=True)
    assert nu.points.squeeze(-1).tolist() == [0.25, 1.0]
    with pytest.raises(ValueError, match="one point per particle"):
        pushforward(lambda x: x[:1], mu)
    with pytest.raises(ValueError, match="expected a measure with positions"):
        pushforward(lambda x, s: x, ParticleMeasure([[1.0]]), use_positions=True)


@given(problems(), st.integers(1, 4))
def test_splitting_and_merging_is_merging(problem: Problem, copies: int):
    mu = problem.measure
    once, again = merge(mu), merge(split(mu, copies))
    torch.testing.assert_close(again.points, once.points)
    torch.testing.assert_close(again.log_weights, once.log_weights)
    if mu.is_positioned:
        torch.testing.assert_close(again.positions, once.positions)


def test_merging_adds_the_weights_of_equal_points_and_drops_absent_atoms():
    mu = ParticleMeasure([[0.0], [3.0], [-0.0], [9.0]], weights=[0.2, 0.5, 0.3, 0.0])
    merged = merge(mu)
    assert merged.points.squeeze(-1).tolist() == [0.0, 3.0]
    torch.testing.assert_close(merged.weights, torch.tensor([0.5, 0.5], dtype=F64))
    assert measures.merge_labelled(mu, 0.0)[1].tolist() == [0, 1, 0, -1]


def test_atoms_that_coincide_do_not_move_where_they_are_merged():
    for place in (0.1, 1 / 3, 1e15 + 0.125, 1e308):
        merged = merge(ParticleMeasure([[place]] * 3, weights=[0.1, 0.2, 0.7]))
        assert merged.points.tolist() == [[place]]


def test_merged_atoms_stand_in_the_order_in_which_they_came():
    merged = merge(ParticleMeasure([[5.0], [1.0], [3.0], [1.0]], weights=[0.1, 0.2, 0.3, 0.4]))
    assert merged.points[:, 0].tolist() == [5.0, 1.0, 3.0]
    assert merged.weights.tolist() == pytest.approx([0.1, 0.6, 0.3])


def test_the_sum_of_a_group_without_mass_is_none():
    logs, groups = torch.tensor([-math.inf, -math.inf, 0.0]), torch.tensor([0, 0, 1])
    assert measures.log_sums(logs, groups, 3).tolist() == [-math.inf, 0.0, -math.inf]


def test_what_does_not_fit_a_measure_is_refused():
    mu, short = ParticleMeasure([[1.0], [2.0]]), ParticleMeasure(torch.zeros(2, 1))
    with pytest.raises(TypeError, match="float32.*float64|float64.*float32"):
        stack([mu, short])
    with pytest.raises(ValueError, match="weights"):
        mixture([mu, mu], [[0.5, 0.5]])
    with pytest.raises(IndexError, match="too many new axes"):
        stack([mu, mu])[None]
    for points in (short.points, mu.points.to_sparse(), mu.points.tolist()):
        with pytest.raises(TypeError, match="expected a dense tensor of torch.float64"):
            mu.replace(points)


@pytest.mark.parametrize("unit", [1e-200, 1e-300, 1e200])
def test_atoms_are_merged_where_squares_of_their_distances_are_no_numbers(unit):
    points = unit * torch.tensor([[0.0], [1.0], [3.0]], dtype=F64)
    merged = merge(ParticleMeasure(points), atol=1.5 * unit)
    torch.testing.assert_close(merged.points / unit, torch.tensor([[0.5], [3.0]], dtype=F64))


def test_what_a_map_has_lost_is_refused_where_it_counts_only():
    mu = ParticleMeasure([[1.0], [2.0]])
    lost = mu.replace(mu.points * math.nan)
    for found in (split(lost), stack([lost, mu])[0], pushforward(lambda x: x + 1, lost)):
        assert bool(found.points.isnan().all())
    with pytest.raises(ValueError, match="expected finite points"):
        merge(lost)


def test_one_call_makes_a_measure_of_what_stands_for_one():
    points, weights = np.array([[0.0], [2.0]]), [0.25, 0.75]
    mu = ParticleMeasure(points, weights)
    assert ParticleMeasure.of(mu) is mu
    for found in (ParticleMeasure.of((points, weights)), ParticleMeasure.of(points, weights)):
        assert torch.equal(found.points, mu.points)
        assert torch.equal(found.log_weights, mu.log_weights)
    assert ParticleMeasure.of(points.tolist()).weights.tolist() == [0.5, 0.5]
    for weighted in (mu, (points, weights)):
        with pytest.raises(ValueError, match="nu, which comes with its own"):
            ParticleMeasure.of(weighted, weights, name="nu")
    with pytest.raises(ValueError, match=r"nu: expected shape.*nu\[:, None\]"):
        ParticleMeasure.of([0.0, 2.0], name="nu")
    with pytest.raises(ValueError, match=r"nu: expected finite points.*at 1 atoms"):
        ParticleMeasure.of(mu.replace(mu.points / mu.points), name="nu")


def test_the_covariance_is_that_of_numpy_and_moves_with_the_cloud():
    mu = ParticleMeasure([[0.0, 1.0], [2.0, -1.0], [5.0, 0.5]], weights=[0.5, 0.3, 0.2])
    x, a = mu.points.numpy(), mu.weights.numpy()
    expected = torch.from_numpy(np.cov(x.T, aweights=a, bias=True))
    torch.testing.assert_close(mu.covariance(), expected)
    torch.testing.assert_close(stack([mu, mu]).covariance()[1], expected)
    # 2⁵⁰ away, in coordinates that are multiples of ½: every difference is exact.
    torch.testing.assert_close(mu.replace(mu.points + 2.0**50).covariance(), expected)


def test_merging_within_a_distance_keeps_the_mean():
    mu = ParticleMeasure([[0.0], [1.0], [2.0], [9.0]], weights=[0.1, 0.2, 0.3, 0.4])
    merged = merge(mu, atol=1.0)
    assert merged.n_particles == 2
    torch.testing.assert_close(merged.mean(), mu.mean())


@pytest.mark.parametrize(("far", "dtype"), [(1e300, F64), (1e307, F64), (3e38, torch.float32)])
def test_an_atom_far_away_does_not_join_those_that_are_apart(far, dtype):
    points = torch.tensor([[0.0], [1.0], [1.0 + 1e-5], [far], [far]], dtype=dtype)
    merged = merge(ParticleMeasure(points), atol=1e-4)
    assert merged.points[:, 0].tolist() == pytest.approx([0.0, 1.0, float(points[3])], rel=1e-5)
    assert merged.weights.tolist() == pytest.approx([0.2, 0.4, 0.4])


@pytest.mark.parametrize("block", [measures._BLOCK, 100])
def test_a_chain_of_short_steps_is_one_atom_whatever_the_blocks(monkeypatch, block):
    monkeypatch.setattr(measures, "_BLOCK", block)
    steps = torch.tensor([[0.0], [5.0], [0.5], [5.5], [1.0], [9.0]], dtype=F64)
    chain = torch.cat([steps, 20 + 0.5 * torch.arange(30, dtype=F64)[:, None]])
    merged = merge(ParticleMeasure(chain), atol=0.5)
    truth = torch.tensor([0.5, 5.25, 9.0, 27.25], dtype=F64)
    torch.testing.assert_close(merged.points[:, 0], truth)
    torch.testing.assert_close(merged.weights, torch.tensor([3, 2, 1, 30], dtype=F64) / 36)


def test_merging_keeps_atoms_at_different_positions_apart():
    mu = ParticleMeasure([[0.0], [0.0]], positions=[0.0, 1.0])
    assert merge(mu).n_particles == merge(mu, atol=5.0).n_particles == 2


@given(problems(causal=True))
def test_a_disintegration_integrates_back(problem: Problem):
    mu = problem.measure
    parts = disintegrate(mu)
    torch.testing.assert_close(parts.log_masses.logsumexp(0), torch.zeros((), dtype=F64))
    assert (parts.positions.diff() > 0).all()
    means = torch.stack([part.mean() for part in parts.conditionals])
    integral = (parts.log_masses.exp()[:, None] * means).sum(0)
    torch.testing.assert_close(integral, mu.mean(), rtol=1e-9, atol=1e-12)
    for s, part in zip(parts.positions, parts.conditionals, strict=True):
        present = (mu.positions == s) & (mu.log_weights > -math.inf)
        assert (part.points == mu.points[present]).all()
        logs = mu.log_weights[present]
        torch.testing.assert_close(part.log_weights, logs - logs.logsumexp(0))


def test_batches_are_refused_where_the_parts_would_differ_in_size():
    mu = ParticleMeasure(torch.zeros(3, 2, 1), positions=torch.zeros(2))
    for function in (merge, disintegrate):
        with pytest.raises(ValueError, match=r"without batch axes.*\(3,\)"):
            function(mu)
    with pytest.raises(ValueError, match="with positions"):
        disintegrate(ParticleMeasure([[0.0]]))
    with pytest.raises(ValueError, match="atol: expected"):
        merge(ParticleMeasure([[0.0]]), -1e-9)


def test_stacking_pads_with_weight_zero():
    small, large = ParticleMeasure([[1.0]]), ParticleMeasure([[2.0], [4.0]])
    both = stack([small, large])
    assert both.weights.tolist() == [[1.0, 0.0], [0.5, 0.5]]
    torch.testing.assert_close(both.mean(), torch.tensor([[1.0], [3.0]], dtype=F64))
    more = stack([large, ParticleMeasure([[5.0], [6.0], [7.0]])])
    assert more.points[0, :, 0].tolist() == [2.0, 4.0, 2.0]  # copies of the first atom
    with pytest.raises(ValueError, match="one dimension"):
        stack([small, ParticleMeasure([[1.0, 2.0]])])
    with pytest.raises(ValueError, match="one batch shape"):
        stack([large, both])
    with pytest.raises(TypeError, match="expected a list of measures"):
        stack(both)
    assert mixture(iter([small, large])).weights.tolist() == [0.5, 0.25, 0.25]
    with pytest.raises(ValueError, match="at least one"):
        stack([])


def test_moving_to_float32_keeps_extreme_weights():
    mu = ParticleMeasure([[0.0], [1.0]], log_weights=[0.0, -900.0], positions=[0.0, 1.0])
    moved = mu.to(torch.float32)
    assert moved.dtype == moved.positions.dtype == torch.float32
    assert moved.log_weights.tolist() == [0.0, -900.0]


def test_the_text_form_says_what_it_is():
    text = repr(
        ParticleMeasure(torch.zeros(3, 2, 1, dtype=F64), positions=torch.zeros(2).double())
    )
    shape = "n_particles=2, dim=1, batch_shape=(3,)"
    assert text == f"ParticleMeasure({shape}, dtype=float64, uniform, positioned)"
    light = ParticleMeasure([[0.0], [1.0]], log_weights=[-0.0, -900.0])
    assert "log_weights in [-900, 0]" in repr(light)


def test_a_mixture_has_the_atoms_of_all_at_their_shares():
    mu = ParticleMeasure([[0.0], [1.0]], log_weights=[0.0, -900.0], positions=[0.5, 1.0])
    nu = ParticleMeasure([[2.0]], positions=[0.25])
    found = mixture([mu, nu], [0.25, 0.75])
    assert found.points[:, 0].tolist() == [0.0, 1.0, 2.0]
    assert found.positions.tolist() == [0.5, 1.0, 0.25]
    logs = [math.log(0.25), math.log(0.25) - 900.0, math.log(0.75)]
    assert found.log_weights.tolist() == pytest.approx(logs, rel=1e-15)
    assert mixture([nu, nu, nu]).weights.tolist() == pytest.approx([1 / 3] * 3)
    with pytest.raises(ValueError, match="weights"):
        mixture([mu, nu], [0.5, 0.75])
    with pytest.raises(ValueError, match="positions"):
        mixture([mu, ParticleMeasure([[2.0]])])


def test_a_sample_is_drawn_from_the_atoms_that_have_mass():
    mu = ParticleMeasure([[[0.0], [1.0], [2.0]]] * 2, weights=[[0.25, 0.75, 0.0], [0.0, 0.0, 1.0]])
    drawn = mu.sample(4000, generator=3)
    shares = [(drawn.points[0, :, 0] == x).double().mean() for x in (0.0, 1.0, 2.0)]
    assert float(shares[0]) == pytest.approx(0.25, abs=0.03) and shares[2] == 0
    assert set(drawn.points[1, :, 0].tolist()) == {2.0} and drawn.log_weights.unique().numel() == 1
    torch.testing.assert_close(drawn.weights.sum(-1), torch.ones(2, dtype=F64))
    torch.testing.assert_close(mu.sample(9, generator=3).points, mu.sample(9, generator=3).points)
    torch.manual_seed(0)
    assert not torch.equal(mu.sample(50).points, mu.sample(50).points)
    tracked = ParticleMeasure(torch.ones(2, 1, requires_grad=True))
    assert tracked.points.requires_grad and not tracked.detach().points.requires_grad


def test_an_ellipsis_stands_for_batch_axes():
    mu = ParticleMeasure(torch.randn(2, 3, 4, 5), positions=torch.rand(4))
    for found, wanted in ((mu[..., 0], mu[:, 0]), (mu[...], mu), (mu[1, ...], mu[1])):
        for name in ("points", "log_weights", "positions"):
            assert torch.equal(getattr(found, name), getattr(wanted, name))


def test_a_function_that_overwrites_its_argument_leaves_the_measure_as_it_is():
    mu = ParticleMeasure([[1.0], [-1.0]])
    nu = pushforward(torch.nn.ReLU(inplace=True), mu)
    assert mu.points.tolist() == [[1.0], [-1.0]] and nu.points.tolist() == [[1.0], [0.0]]
    layer = Residual(Pointwise(torch.nn.ReLU(inplace=True)))
    assert layer(mu).points.tolist() == [[2.0], [-1.0]]
    assert float(Pointwise(torch.nn.ReLU(inplace=True)).local_upper(mu)) == pytest.approx(1.0)


def test_weights_of_arrays_keep_the_range_of_double_precision_beside_single():
    mu = ParticleMeasure(torch.zeros(2, 1), weights=np.array([1.0, 1e-50]))
    assert mu.dtype == mu.log_weights.dtype == torch.float32
    assert mu.log_weights.tolist() == pytest.approx([0.0, math.log(1e-50)], rel=1e-6)


def test_weights_in_single_precision_are_those_numbers_beside_points_in_double():
    weights = torch.tensor([0.1, 0.9])
    mu = ParticleMeasure(torch.zeros(2, 1, dtype=F64), weights)
    exact = weights.double() / weights.double().sum()
    torch.testing.assert_close(mu.weights, exact, rtol=1e-15, atol=0)


def test_weights_in_single_precision_are_the_same_in_another_order():
    weights = torch.rand(200, 10, generator=torch.Generator().manual_seed(0))
    weights /= weights.sum(-1, keepdim=True)
    mu, nu = (ParticleMeasure(torch.zeros(10, 1), t) for t in (weights, weights.flip(-1)))
    assert (mu.log_weights == nu.log_weights.flip(-1)).all()


def test_a_batch_of_no_measures_may_have_weights():
    mu = ParticleMeasure(np.zeros((0, 2, 1)), np.zeros((0, 2)))
    assert mu.batch_shape == (0,) and mu.log_weights.shape == (0, 2)


@pytest.mark.parametrize(
    ("masses", "uniform", "atom"),
    [
        ([0.0, 0.5, 0.5], 0.0, 1),  # not the absent atom
        ([0.1] * 10 + [0.0], 1 - 2**-53, 9),  # in double precision they add up to less than 1
        (torch.tensor([1.0, 1e-9]), 1 - 1e-10, 1),  # of which single precision keeps nothing
    ],
)
def test_the_last_number_below_1_and_0_are_draws_of_atoms_that_have_mass(
    monkeypatch, masses, uniform, atom
):
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.full(shape, uniform, dtype=F64))
    found = drawn(torch.as_tensor(masses, dtype=getattr(masses, "dtype", F64)), 3, 0)
    assert found.tolist() == [atom] * 3


def test_a_weight_that_underflowed_takes_no_gradient_from_the_others():
    x = torch.tensor([[1.0], [2.0], [5.0]], dtype=torch.float64)
    found = []
    for weights in (lambda t: t.softmax(-1), lambda t: None):
        t = torch.tensor([0.0, 1.0, -math.inf], dtype=torch.float64, requires_grad=True)
        given = weights(t)
        logs = None if given is not None else t.log_softmax(-1)
        ParticleMeasure(x, given, log_weights=logs).mean().sum().backward()
        found.append(t.grad)
    torch.testing.assert_close(*found)
    assert found[0].isfinite().all()


def test_arrays_given_to_layers_are_copied():
    W, scale, sink = np.eye(2), np.ones(2), np.zeros(())
    mu = ParticleMeasure(torch.randn(3, 2, dtype=torch.float64))
    par = AttentionParameters.random(2, generator=0)
    maps = [
        MLP(W, np.eye(2)),
        LayerNorm(scale),
        SelfAttention(par, normalization=normalizations.sink(sink)),
    ]
    before = [F(mu).points for F in maps]
    for array in (W, scale, sink):
        array += 5.0
    for F, image in zip(maps, before, strict=True):
        assert torch.equal(F(mu).points, image)


def test_an_image_that_is_no_number_stays_none_where_there_is_mass():
    mu = ParticleMeasure([[1.0], [-1.0], [-2.0]], weights=[0.5, 0.5, 0.0])
    assert pushforward(torch.log, mu).points.isnan()[:, 0].tolist() == [False, True, False]


def test_axes_of_a_batch_stand_in_the_same_places():
    dims = ["run", "layer", "particle", "feature"]
    X = xr.DataArray(np.arange(4.0).reshape(2, 2, 1, 1), dims=dims, coords={"run": [7, 8]})
    turned, sorted_ = X.transpose("layer", "run", ...), X.isel(run=[1, 0])
    for other in (turned, sorted_):
        with pytest.raises(ValueError, match="expected the axis '(run|layer)' of mu in the same"):
            w2(X, other)
        with pytest.raises(ValueError, match="expected the axis '(run|layer)' of points"):
            ParticleMeasure(X, xr.ones_like(other)[..., 0])
    assert float(w2(X, X).max()) == 0 and float(w2(X, X.isel(run=0, drop=True)).max()) > 0
    with pytest.raises(ValueError, match="the axis 'run' of mu in the same place"):
        w2(X, X.isel(layer=0))
    assert w2(X.isel(run=[0]), X).shape == (2, 2) == w2(X.drop_vars("run"), X).shape
    plain = xr.DataArray(np.arange(24.0).reshape(2, 3, 4))
    assert ParticleMeasure(plain, xr.DataArray(np.ones((2, 3)) / 3)).batch_shape == (2,)
    assert ParticleMeasure(plain, xr.DataArray(np.ones(3) / 3)).batch_shape == (2,)
    assert w2(xr.DataArray(plain.to_numpy()[:, None]), plain).shape == (2, 2)
    named = [f"dim_{k}" for k in range(2)] + ["particle", "feature"]
    two = xr.DataArray(np.ones((5, 2, 3, 4)), dims=named)
    one = xr.DataArray(np.ones((2, 3, 4)), dims=["dim_0", *named[2:]])
    assert w2(two, one).shape == (5, 2)
