"""The entropic plan and its potentials: marginals, an oracle, and what carries no gradient."""

from __future__ import annotations

import math

import numpy as np
import ot
import pytest
import torch

from meanfield.measures import ParticleMeasure
from meanfield.transport import certify, entropic, sinkhorn_divergence, sinkhorn_plan, w2

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(30, 2)), 1.3 * RNG.normal(size=(20, 2)) + 0.5
A, B = RNG.dirichlet(np.ones(30)), RNG.dirichlet(np.ones(20))


@pytest.mark.parametrize("blur", [1.0, 0.4])
def test_the_plan_and_the_potentials_are_those_of_pot(blur: float) -> None:
    costs, epsilon = np.square(X[:, None] - Y).sum(-1), 2 * blur**2
    steps = {"method": "sinkhorn_log", "numItermax": 20_000, "stopThr": 1e-13, "log": True}
    plan, log = ot.sinkhorn(A, B, costs, epsilon, **steps)
    f, g = epsilon * (log["log_u"] - np.log(A)), epsilon * (log["log_v"] - np.log(B))
    found = sinkhorn_plan((X, A), (Y, B), blur=blur, steps=20_000)
    assert found.misplaced < 1e-9
    np.testing.assert_allclose(found.plan, plan, rtol=0, atol=1e-9)
    mine, theirs = found.potentials
    shift = (mine - f).mean()  # they are known up to a constant
    np.testing.assert_allclose(mine, f + shift, rtol=0, atol=1e-6)
    np.testing.assert_allclose(theirs, g - shift, rtol=0, atol=1e-6)
    primal = (plan * costs).sum() + epsilon * (plan * np.log(plan / np.outer(A, B))).sum()
    assert float(found.value) == pytest.approx(primal, rel=1e-8)


@pytest.mark.parametrize("blur", [2.0, 0.3, 0.05, 0.01])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e6])
def test_columns_are_right_and_rows_are_off_by_what_is_said(blur: float, scale: float) -> None:
    found = sinkhorn_plan((scale * X, A), (scale * Y, B), blur=scale * blur, steps=200)
    rows, cols = found.coupling.marginals()
    np.testing.assert_allclose(cols, B, rtol=1e-9)
    assert np.abs(rows - A).sum() / 2 == pytest.approx(float(found.misplaced), rel=1e-6, abs=1e-14)
    assert found.misplaced < (1e-3 if blur > 0.1 else 0.05)


def test_a_small_blur_gives_a_narrow_interval_of_the_distance() -> None:
    found = sinkhorn_plan((X, A), (Y, B), blur=0.05)
    graded = certify((X, A), (Y, B), plan=found.coupling, potentials=found.potentials)
    truth = w2((X, A), (Y, B))
    assert graded.lower <= truth <= graded.upper < graded.lower * 1.01
    assert float(found.value) == pytest.approx(truth**2, rel=0.1)


def test_a_batch_is_its_entries_in_the_kind_and_precision_of_the_clouds() -> None:
    x, y = (torch.as_tensor(t) for t in (X, Y))
    clouds = torch.stack([x, x + 1, 0 * x])  # of the last the first steps are the plan
    batch = sinkhorn_plan(clouds, y, blur=0.5)
    assert batch.value.shape == batch.misplaced.shape == (3,)
    assert batch.plan.shape == (3, 30, 20)
    for k, cloud in enumerate(clouds):
        alone = sinkhorn_plan(cloud, y, blur=0.5)
        torch.testing.assert_close(batch.plan[k], alone.plan)
        torch.testing.assert_close(batch.value[k], alone.value)
    single = sinkhorn_plan(X.astype(np.float32), Y.astype(np.float32), blur=0.5)
    kept = (single.value, single.misplaced, single.plan, *single.potentials)
    assert {type(t) for t in kept} <= {np.ndarray, np.float32}
    assert {t.dtype for t in kept} == {np.dtype("float32")}
    np.testing.assert_allclose(single.plan, sinkhorn_plan(X, Y, blur=0.5).plan, atol=1e-5)
    short = [t.astype(np.float32) for t in (X, Y)]  # costs beside ε are right to its last digits
    single, double = (sinkhorn_plan(*t).plan for t in (short, [t.astype(float) for t in short]))
    np.testing.assert_allclose(single, double, rtol=1e-6, atol=1e-9)
    assert sinkhorn_plan(torch.zeros(0, 3, 2), torch.zeros(0, 3, 2)).value.shape == (0,)


@pytest.mark.parametrize("steps", [10, 1000])
def test_a_pair_does_not_depend_on_what_is_beside_it_in_a_batch(steps: int) -> None:
    x, y = np.random.default_rng(4).normal(size=(2, 1, 12, 2))
    sizes = np.array([1.0, 1e4, 1e-3, 0.0])[:, None, None]
    both = sinkhorn_plan(sizes * x, sizes * y, steps=steps)
    for k, size in enumerate(sizes):
        alone = sinkhorn_plan(size * x[0], size * y[0], steps=steps)
        for name in ("value", "misplaced", "plan"):
            found, known = getattr(both, name)[k], getattr(alone, name)
            np.testing.assert_allclose(found, known, rtol=1e-9, atol=1e-14)


def test_light_and_absent_atoms_and_single_ones() -> None:
    logs = torch.tensor([math.log(0.5), math.log(0.5), -300.0, -math.inf], dtype=torch.float64)
    points = torch.tensor([[0.0], [1.0], [0.5], [math.nan]], dtype=torch.float64)
    mu = ParticleMeasure(points.nan_to_num(), log_weights=logs).replace(points)
    found = sinkhorn_plan(mu, torch.tensor([[0.0], [1.0]], dtype=torch.float64), blur=0.1)
    assert float(found.misplaced) < 1e-12
    assert found.plan[3].tolist() == [0.0, 0.0]
    light = found.coupling.log_mass.reshape(4, 2)[2].logsumexp(0)
    assert float(light) == pytest.approx(-300.0, abs=1e-6)  # what is counted is mass
    one = sinkhorn_plan([[0.0]], [[3.0]])
    assert float(one.value) == pytest.approx(9.0, rel=1e-14)
    assert one.plan.tolist() == [[1.0]]


def test_no_gradient_flows_and_a_common_shift_changes_nothing() -> None:
    x = torch.as_tensor(X).requires_grad_()
    found = sinkhorn_plan(ParticleMeasure(x), Y, blur=0.5)
    with pytest.raises(RuntimeError, match="does not require grad"):
        found.value.backward()
    kept = (found.plan, found.coupling.source, *found.potentials)
    assert not any(t.requires_grad for t in kept)
    far = sinkhorn_plan(np.round(X * 2**20) / 2**20 + 1e6, np.round(Y * 2**20) / 2**20 + 1e6)
    near = sinkhorn_plan(np.round(X * 2**20) / 2**20, np.round(Y * 2**20) / 2**20)
    np.testing.assert_array_equal(far.plan, near.plan)


def test_conditions_are_refused_and_a_price_is_that_of_longer_points() -> None:
    s, t = RNG.integers(2, size=(30, 1)), RNG.integers(2, size=(20, 1))
    with pytest.raises(TypeError, match="sinkhorn_plan: expected some of mu, nu, blur, steps"):
        sinkhorn_plan(X, Y, conditions=(s, t))  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="penalty"):
        sinkhorn_plan(X, Y, penalty=1.0)  # type: ignore[call-arg]
    dear = sinkhorn_plan(np.c_[X, 30 * s], np.c_[Y, 30 * t], blur=0.2).plan
    share = np.abs(s - t.T) * dear
    assert share.sum() <= abs(s.mean() - t.mean()) + 1e-3  # no more than has to change


def test_what_memory_does_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entropic, "_MEMORY", 1e4)
    with pytest.raises(ValueError, match="at most 250 pairs of atoms.* got 600"):
        sinkhorn_plan(X, Y)
    with pytest.raises(ValueError, match="got 300"):
        sinkhorn_plan(np.stack([X[:10]] * 3), Y[:10])
    for bad in ({"blur": 0.0}, {"steps": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            sinkhorn_plan(X[:3], Y[:3], **bad)


@pytest.mark.parametrize("blur", [1e-7, 1e-9, 1e-20])
def test_mass_that_rounding_puts_elsewhere_is_misplaced(blur: float) -> None:
    x, y = np.array([[0.0, 0.0], [1.0, 0.0]]), np.array([[0.0, 1.0], [3.0, 0.0]])
    found = sinkhorn_plan(x, y, blur=blur, steps=50)
    off = sum(np.abs(found.plan.sum(axis) - 0.5).sum() / 2 for axis in (0, 1))
    assert float(found.misplaced) == pytest.approx(off, rel=1e-12, abs=1e-15)
    assert blur > 1e-8 or off > 0.4


@pytest.mark.parametrize("call", [sinkhorn_plan, sinkhorn_divergence])
@pytest.mark.parametrize(
    ("size", "blur"),
    [(1.0, 1e-200), (1e-160, 1e-161), (1e200, 1e198), (1e200, 1.0), (1.0, 1e200), (1.0, 1e154)],
)
def test_lengths_whose_squares_leave_the_number_range_are_refused(call, size, blur) -> None:
    with pytest.raises(ValueError, match="blur: expected lengths whose squares torch.float64"):
        call(size * X, size * Y, blur=blur)
    for pair in ((X, 1e200 * Y), (1e200 * X, Y)):
        with pytest.raises(ValueError, match="lengths whose squares"):
            call(*pair, blur=1.0)
    with pytest.raises(ValueError, match="torch.float32 holds"):
        sinkhorn_divergence(X.astype(np.float32), Y.astype(np.float32), blur=1e-25)
