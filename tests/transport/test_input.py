"""Bad input is refused: the error says what was expected and what it got."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from meanfield.habits import Hinted
from meanfield.measures import ParticleMeasure, stack
from meanfield.transport import (
    conditional_w2,
    sinkhorn_divergence,
    solve_conditional_w2,
    solve_w2,
    w1,
    w2,
)

GOOD = torch.zeros(3, 2, dtype=torch.float64)
CALLS = [w2, w1, solve_w2, sinkhorn_divergence]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        (torch.full((3, 2), torch.nan, dtype=torch.float64), ValueError, "finite"),
        (torch.full((3, 2), torch.inf, dtype=torch.float64), ValueError, "finite"),
        (torch.zeros(3, 5, dtype=torch.float64), ValueError, "d = 2.*d = 5"),
        (torch.zeros(0, 2, dtype=torch.float64), ValueError, "n ≥ 1"),
        (torch.zeros(2, dtype=torch.float64), ValueError, "shape"),
        (torch.zeros(3, 2, dtype=torch.bool), TypeError, "torch.bool"),
        (torch.zeros(3, 2, dtype=torch.float32), TypeError, "float32"),
    ],
)
def test_points_that_mean_nothing_are_refused(call, bad, error, match) -> None:
    with pytest.raises(error, match=match):
        call(GOOD, bad)
    with pytest.raises(error, match=match.replace("torch.bool", "numbers")):
        call(GOOD.numpy(), bad.numpy())


def test_clouds_of_one_and_of_several_coordinates_are_no_pair() -> None:
    line, space = np.zeros((3, 1)), np.zeros((3, 3))
    for pair in ((line, space), (space, line)):
        with pytest.raises(ValueError, match="in the dimension of mu"):
            w2(*pair)


@pytest.mark.parametrize("excess", [1e-6, -1e-6, -0.5])
def test_weights_of_another_mass_are_refused_in_arrays_and_tensors(excess) -> None:
    weights = np.array([0.25, 0.25, 0.5 + excess])
    for points, each in ((GOOD, torch.tensor(weights)), (GOOD.numpy(), weights)):
        with pytest.raises(ValueError, match="total mass of 1"):
            w2((points, each), points)


def test_numpy_goes_back_where_both_are_numpy() -> None:
    t, x = GOOD, GOOD.numpy()
    frame, weights = pd.DataFrame(x), np.array([0.25, 0.25, 0.5])
    arrays = [x, frame, (x, weights), (frame, [0.25, 0.25, 0.5]), [x, x[:1]], [x, (x, weights)]]
    tensors = [t, ParticleMeasure(x), (x, torch.tensor(weights)), [x, t[:1]], x.tolist()]
    for mu in arrays + tensors:
        for nu in arrays + tensors:
            is_numpy = any(mu is each for each in arrays) and any(nu is each for each in arrays)
            assert isinstance(w2(mu, nu), torch.Tensor) != is_numpy


def test_lists_of_batches_are_no_batch() -> None:
    batch = ParticleMeasure(GOOD.expand(2, 3, 2))
    for bad in ([batch], [batch, batch], [GOOD[None], GOOD[None, :2]], [GOOD, GOOD[None]]):
        with pytest.raises((TypeError, ValueError), match="mu: expected"):
            w2(bad, GOOD)


def test_traced_measures_on_either_side_are_refused() -> None:
    for call in (lambda y: w2(y, GOOD), lambda y: w2(GOOD, y)):
        with pytest.raises(RuntimeError, match="expected measures with values, got traced"):
            torch.func.vmap(call)(GOOD.expand(2, 3, 2))


def test_masses_are_looked_at_in_every_case_of_a_batch() -> None:
    points = np.zeros((2, 2, 1))
    for last in (0.5001, 0.6):
        weights = np.array([[0.5, 0.5], [0.5, last]])
        with pytest.raises(ValueError, match=f"total mass of 1, got {0.5 + last:g}"):
            w2(points, points, weights=(weights, None))
    assert w2(points[:0], points[:0], weights=(weights[:0], None)).shape == (0,)


def test_batches_that_do_not_broadcast_are_refused() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        w2(GOOD.expand(2, 3, 2), GOOD.expand(4, 3, 2))


@pytest.mark.parametrize(
    ("call", "settings"),
    [
        (solve_w2, {"method": "magic"}),
        (solve_w2, {"rtol": 0.0}),
        (solve_w2, {"time_limit": -1.0}),
        (sinkhorn_divergence, {"blur": 0.0}),
        (sinkhorn_divergence, {"scaling": 1.0}),
    ],
)
def test_settings_that_mean_nothing_are_refused(call, settings: dict) -> None:
    (name,) = settings
    with pytest.raises(ValueError, match=f"{name}: expected"):
        call(GOOD, GOOD, **settings)


def test_an_empty_batch_has_no_distances() -> None:
    none = GOOD.expand(0, 3, 2)
    result = solve_w2(none, none)
    assert result.value.numel() == 0
    assert result.converged.shape == (0,) and result.converged.dtype == torch.bool
    positioned = ParticleMeasure(none, positions=torch.zeros(0, 3, dtype=torch.float64))
    assert conditional_w2(positioned, positioned).numel() == 0


def test_a_result_shows_its_interval_in_a_notebook() -> None:
    shown = solve_w2(torch.tensor([[0.0]]), torch.tensor([[3.0]]))._repr_html_()
    assert "<table" in shown
    assert "certified lower bound" in shown
    assert "<td>3</td>" in shown


@pytest.mark.parametrize("call", [*CALLS, solve_conditional_w2])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_atoms_that_a_map_has_lost_are_refused(call, bad: float) -> None:
    """Maps are free to leave the number range; an interval about NaN would certify nothing."""
    mu = ParticleMeasure(GOOD, positions=[0.0, 0.5, 1.0] if call is solve_conditional_w2 else None)
    points = GOOD.clone()
    points[1, 0] = bad
    for pair in ((mu.replace(points), mu), (mu, mu.replace(points))):
        with pytest.raises(ValueError, match=r"finite.*1 atoms \(the first at index \(1,\)\)"):
            call(*pair)


def test_a_list_of_clouds_of_different_sizes_is_a_batch() -> None:
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(n, 2)) for n in (4, 6, 1)]
    ys = [(rng.normal(size=(n, 2)), rng.dirichlet(np.ones(n))) for n in (5, 5, 7)]
    found = solve_w2(xs, ys)
    assert isinstance(found.value, np.ndarray)
    assert isinstance(solve_w2([torch.as_tensor(x) for x in xs], ys).value, torch.Tensor)
    each = [float(w2(x, y)) for x, y in zip(xs, ys, strict=True)]
    np.testing.assert_allclose(found.value, each, rtol=1e-13)
    np.testing.assert_allclose(w2(xs, ys[0]), [float(w2(x, ys[0])) for x in xs], rtol=1e-13)
    measures = [ParticleMeasure(x) for x in xs]
    np.testing.assert_allclose(w2(measures, ys), each, rtol=1e-13)
    assert w2([xs[0], xs[0]], [ys[0][0]] * 2).shape == (2,)


def test_a_list_of_pairs_measures_and_clouds_of_one_size_is_a_batch_too() -> None:
    rng = np.random.default_rng(1)
    x, y, z = rng.normal(size=(3, 4, 2))
    a, b = rng.dirichlet(np.ones(4), size=2)
    mu, nu = ParticleMeasure(x, a), ParticleMeasure(y, b)
    weighted, uniform = float(w2(mu, z)), float(w2(y, z))
    for batch in ([(x, a), (y, b)], [mu, nu], [mu, (y, b)], [(x, a), nu]):
        torch.testing.assert_close(torch.as_tensor(w2(batch, z)), w2(stack([mu, nu]), z))
    for batch in ([(x, a), y], [mu, y]):
        np.testing.assert_allclose(w2(batch, z), [weighted, uniform], rtol=1e-13)
        np.testing.assert_allclose(w2(batch[::-1], z), [uniform, weighted], rtol=1e-13)
    assert w2([(x, a)], z).shape == (1,)


def test_pairs_in_the_wrong_order_and_weights_as_columns_are_told() -> None:
    x, a = np.eye(3), np.full(3, 1 / 3)
    with pytest.raises(ValueError, match="weights come second"):
        w2((a, x), (a, x))
    with pytest.raises(ValueError, match=r"one number per particle.*got \(3, 1\)"):
        w2((x, a[:, None]), x)
    with pytest.raises(ValueError, match="a list of clouds"):
        w2([x, x[:2]], x, weights=(a, a))


def test_no_measure_is_asked_for_a_member_that_it_lacks(monkeypatch):
    # Each question cost 0.2 ms, for the sentence of an error that nobody saw.
    asked = []

    def missing(self, name):
        asked.append(name)
        raise AttributeError(name)

    monkeypatch.setattr(Hinted, "__getattr__", missing)
    mu = ParticleMeasure.from_sequence([[0.0], [1.0]])
    w2(mu, mu.replace(mu.points + 1))
    conditional_w2(mu, mu.replace(mu.points + 1))
    sinkhorn_divergence(mu, mu.replace(mu.points + 1))
    assert not asked
