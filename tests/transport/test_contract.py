"""W₂ or its square: ours, POT's, GeomLoss's and SciPy's for two points at distance 3."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meanfield.measures import ParticleMeasure
from meanfield.transport import (
    conditional_w2,
    sinkhorn_divergence,
    solve_conditional_w2,
    solve_w2,
    w1,
    w2,
)

HERE = torch.zeros(1, 1, dtype=torch.float64)
THERE = torch.full((1, 1), 3.0, dtype=torch.float64)


def test_two_points_at_distance_3_are_at_distance_3() -> None:
    assert float(w2(HERE, THERE)) == 3.0
    assert float(solve_w2(HERE, THERE).value) == 3.0
    assert float(w1(HERE, THERE)) == 3.0
    assert float(w2(HERE, THERE)) ** 2 == 9.0
    positioned = (ParticleMeasure(p, positions=[1.0]) for p in (HERE, THERE))
    assert float(conditional_w2(*positioned)) == 3.0


def test_a_distance_of_0_and_an_infinite_one_have_no_width() -> None:
    here, there = (ParticleMeasure(HERE, positions=[s]) for s in (0.5, 1.0))
    for other, value in ((here, 0.0), (there, np.inf)):
        found = solve_conditional_w2(here, other)
        assert float(found.value) == value and float(found.relative_width) == 0


def test_of_two_atoms_that_move_together_nothing_crosses() -> None:
    x = torch.tensor([[0.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    plan = solve_w2(x, x + 1).coupling
    assert plan is not None
    assert plan.rows.tolist() == plan.cols.tolist() == [0, 1]


def test_an_answer_carries_no_gradient() -> None:
    x = torch.randn(4, 2, dtype=torch.float64).requires_grad_()
    found = solve_w2(ParticleMeasure(x), ParticleMeasure(x.detach() + 1))
    assert found.coupling is not None and found.potentials is not None
    plan = found.coupling
    held = found.value, found.lower, plan.source, plan.target, plan.cost(), *found.potentials
    assert not any(t.requires_grad for t in held)


def test_pot_returns_the_square() -> None:
    import ot

    x, y = HERE.numpy(), THERE.numpy()
    one = np.ones(1)
    assert ot.emd2(one, one, ot.dist(x, y)) == pytest.approx(9.0)
    assert ot.wasserstein_1d(x, y, p=2) == pytest.approx(9.0)


def test_geomloss_returns_half_the_square_and_we_twice_that() -> None:
    from geomloss import SamplesLoss

    x, y = HERE.expand(2, 1), THERE.expand(2, 1)  # GeomLoss cannot take one point
    half = SamplesLoss("sinkhorn", p=2, blur=0.01)(x, y)
    assert float(half) == pytest.approx(4.5, rel=1e-6)
    assert float(sinkhorn_divergence(x, y, blur=0.01)) == pytest.approx(9.0, rel=1e-6)


def test_scipy_has_the_first_distance_on_the_line() -> None:
    from scipy.stats import wasserstein_distance

    assert wasserstein_distance([0.0], [3.0]) == pytest.approx(3.0)
