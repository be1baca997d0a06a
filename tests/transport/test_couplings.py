"""Couplings: marginals, barycentric maps, geodesics; gradients that follow from them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from meanfield.measures import ParticleMeasure
from meanfield.transport import Coupling, conditional_w2, solve_conditional_w2, solve_w2, w2


def measures(n: int, m: int, seed: int = 0) -> tuple[ParticleMeasure, ParticleMeasure]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(k, 2, dtype=torch.float64, generator=generator) for k in (n, m))
    a, b = (
        torch.randn(k, dtype=torch.float64, generator=generator).log_softmax(-1) for k in (n, m)
    )
    return ParticleMeasure(x, log_weights=a), ParticleMeasure(y, log_weights=b)


def coupling_of(mu: ParticleMeasure, nu: ParticleMeasure) -> Coupling:
    found = solve_w2(mu, nu).coupling
    assert found is not None
    return found


@pytest.mark.parametrize(("n", "m"), [(6, 6), (5, 8), (2, 2), (1, 4)])
def test_interpolation_moves_at_constant_speed(n: int, m: int) -> None:
    mu, nu = measures(n, m, seed=n)
    coupling = coupling_of(mu, nu)
    length = float(w2(mu, nu))
    times = [0.0, 0.2, 0.5, 0.9, 1.0]
    for s, t in itertools.combinations(times, 2):
        between = float(w2(coupling.interpolate(s), coupling.interpolate(t)))
        assert between == pytest.approx((t - s) * length, rel=1e-10)
    assert float(w2(coupling.interpolate(0.0), mu)) < 1e-7
    assert float(w2(coupling.interpolate(1.0), nu)) < 1e-7


def test_an_interpolation_inside_conditions_has_the_positions_of_its_first_atoms() -> None:
    places = torch.tensor([0.0, 0.5, 0.5, 1.0, 1.0], dtype=torch.float64)
    mu, nu = (ParticleMeasure(t.points, positions=places) for t in measures(5, 5))
    found = solve_conditional_w2(mu, nu)
    middle = found.coupling.interpolate(0.25)
    middle = ParticleMeasure(
        middle.points,
        log_weights=middle.log_weights,
        positions=mu.positions[found.coupling.rows],
    )
    assert float(conditional_w2(mu, middle)) == pytest.approx(0.25 * float(found), rel=1e-10)
    assert float(conditional_w2(middle, nu)) == pytest.approx(0.75 * float(found), rel=1e-10)


def test_a_pair_without_a_plan_has_an_infinite_cost_and_no_interpolation() -> None:
    pairs = [measures(3, 3, seed=k) for k in range(2)]
    x, y = (torch.stack([pair[k].points for pair in pairs]) for k in range(2))
    s = torch.tensor([[0.1, 0.5, 1.0], [0.1, 0.5, 1.0]], dtype=torch.float64)
    t = torch.tensor([[0.1, 0.5, 1.0], [0.2, 0.5, 1.0]], dtype=torch.float64)
    found = solve_conditional_w2(ParticleMeasure(x, positions=s), ParticleMeasure(y, positions=t))
    torch.testing.assert_close(found.coupling.cost(), found.value.square())
    assert found.value[1] == torch.inf
    for use in (lambda pi: pi.interpolate(0.5), lambda pi: pi.sample(3)):
        with pytest.raises(ValueError, match=r"none of pair \(1,\), whose distance is infinite"):
            use(found.coupling)


def test_an_interpolation_has_the_mass_that_its_coupling_lost() -> None:
    thin = Coupling(
        *torch.zeros(2, 2, 1), *torch.tensor([[0, 1], [1, 0]]), torch.tensor([-1, -2.0])
    )
    share = math.e / (1 + math.e)
    assert thin.interpolate(0.5).weights.tolist() == pytest.approx([share, 1 - share], rel=1e-6)


def test_the_barycentric_map_is_the_optimal_map_where_there_is_one() -> None:
    x = torch.randn(40, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = x * torch.tensor([2.0, 0.5], dtype=torch.float64) + 1
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    found = solve_w2(x, y[order]).coupling
    assert found is not None
    torch.testing.assert_close(found.barycentric_map(), y, rtol=1e-13, atol=1e-13)


def test_the_barycentric_map_averages_where_mass_splits() -> None:
    mu, nu = measures(4, 9, seed=3)
    coupling = coupling_of(mu, nu)
    plan = coupling.dense()
    mean = plan @ nu.points / plan.sum(1, keepdim=True)
    torch.testing.assert_close(coupling.barycentric_map(), mean, rtol=1e-13, atol=1e-13)


def test_the_barycentric_map_of_a_light_atom_does_not_underflow() -> None:
    points = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    logs = torch.tensor([0.0, -900.0], dtype=torch.float64)
    mu = ParticleMeasure(points, log_weights=logs)
    coupling = coupling_of(mu, mu.replace(points + 0.25))
    torch.testing.assert_close(coupling.barycentric_map(), points + 0.25)


def test_times_outside_the_unit_interval_are_refused() -> None:
    with pytest.raises(ValueError, match="≥ 0 and ≤ 1, got 1.5"):
        coupling_of(*measures(3, 3)).interpolate(1.5)


def test_what_pads_a_plan_is_no_entry_and_moves_nothing() -> None:
    x, y = torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([[5.0], [7.0]])
    logs = torch.tensor([0.5, 0.5, 0.0, 0.0]).log()
    plan = Coupling(x, y, torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1, 0, 1]), logs)
    assert plan.to_scipy().nnz == 2
    assert plan.barycentric_map().tolist() == [[5.0], [7.0], [2.0]]
    assert plan.interpolate(0.5).mean().tolist() == [3.25]


def test_a_coupling_of_numpy_gives_numpy() -> None:
    x, y = (t.points.numpy() for t in measures(4, 5))
    found = solve_w2(x, y)
    plan = found.coupling
    assert plan is not None
    parts = *plan.marginals(), plan.dense(), plan.mass, plan.barycentric_map(), *plan.sample(3)
    assert {type(t) for t in parts} == {np.ndarray}
    assert isinstance(found.relative_width, np.ndarray | np.generic)
    assert isinstance(plan.cost(), np.ndarray | np.generic)


def test_a_batch_of_couplings_is_told_and_no_sparse_matrix() -> None:
    x, y = torch.zeros(2, 3, 1, dtype=torch.float64), torch.ones(2, 4, 1, dtype=torch.float64)
    plan = solve_w2(x, y).coupling
    assert plan is not None
    assert "batch_shape=(2,)" in repr(plan) and "batch_shape" not in repr(
        solve_w2(x[0], y[0]).coupling
    )
    with pytest.raises(ValueError, match=r"a batch of shape \(2,\)"):
        plan.to_scipy()
