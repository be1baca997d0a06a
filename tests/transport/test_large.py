"""Column generation, bounds and certificates against the dense solvers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from meanfield.measures import ParticleMeasure
from meanfield.transport import certificate, solve_w2
from meanfield.transport.certificate import Interval
from meanfield.transport.plans import c_transform, clusters, columns
from meanfield.transport.plans.c_transform import CTransform, halved
from meanfield.transport.plans.exact import solve_dense, sparse_simplex
from meanfield.transport.problem import Problem


def pair(kind: str, n: int, m: int, d: int) -> tuple[ParticleMeasure, ParticleMeasure]:
    rng = np.random.default_rng(7)
    x, y = rng.normal(size=(n, d)), 1.3 * rng.normal(size=(m, d)) + 0.5
    a, b = np.ones(n) / n, np.ones(m) / m
    if kind == "dirichlet":
        a, b = rng.dirichlet(np.ones(n)), rng.dirichlet(np.ones(m))
    elif kind == "softmax":
        a, b = np.exp(3 * rng.normal(size=n)), np.exp(3 * rng.normal(size=m))
        a, b = a / a.sum(), b / b.sum()
    return ParticleMeasure(x, a), ParticleMeasure(y, b)


def problem_of(kind: str, n: int, m: int, d: int) -> Problem:
    mu, nu = pair(kind, n, m, d)
    arrays = (mu.points, nu.points, mu.log_weights, nu.log_weights)
    return Problem.of(*(t.numpy() for t in arrays))


@pytest.mark.parametrize("kind", ["uniform", "dirichlet", "softmax"])
@pytest.mark.parametrize(("n", "m", "d"), [(700, 700, 2), (600, 800, 16)])
def test_column_generation_agrees_with_the_dense_simplex(
    kind: str, n: int, m: int, d: int
) -> None:
    mu, nu = pair(kind, n, m, d)
    found = solve_w2(mu, nu, method="column generation")
    dense = solve_w2(mu, nu, method="simplex")
    assert float(found.relative_width) < 1e-9
    torch.testing.assert_close(found.value, dense.value, rtol=1e-9, atol=0)
    assert found.coupling is not None
    mine, theirs = found.coupling.marginals()
    torch.testing.assert_close(mine, mu.weights, rtol=0, atol=1e-14)
    torch.testing.assert_close(theirs, nu.weights, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("n", "d", "size"), [(1, 2, 4), (7, 1, 4), (1000, 3, 4), (333, 8, 32), (600, 40, 4)]
)
def test_halving_puts_every_point_into_one_small_group_of_neighbours(
    n: int, d: int, size: int
) -> None:
    points = np.random.default_rng(n).normal(size=(n, d))
    points[:, 0] *= 5
    order, starts = halved(points, size)
    below, above = np.split(points[order, 0], [n // 2])
    assert below.max(initial=-np.inf) <= above.min()
    assert sorted(order) == list(range(n))
    groups = np.split(order, starts[1:])
    assert min(n - 1, size / 2) < max(map(len, groups)) <= size
    assert max(map(len, groups)) - min(map(len, groups)) <= 1
    # Halved along the widest axis, so no two groups overlap along all axes.
    first, second = groups[0], groups[-1]
    if len(groups) > 1:
        low, high = (fn(axis=0) for fn in (points[first].max, points[second].min))
        back, forth = (fn(axis=0) for fn in (points[second].max, points[first].min))
        assert ((low <= high) | (back <= forth)).any()


@pytest.mark.parametrize("kind", ["uniform", "softmax"])
def test_coarser_levels_keep_masses_and_means(kind: str) -> None:
    problem = problem_of(kind, 900, 150, 3)
    levels = columns._levels(problem)
    assert [level.n for level in levels] == [256, 900]
    assert [level.m for level in levels] == [150, 150]  # small enough as it is
    coarse = levels[0]
    order, starts = halved(problem.x, 4)
    masses = np.add.reduceat(problem.a[order], starts)
    np.testing.assert_allclose(coarse.a, masses, rtol=0, atol=1e-15)
    np.testing.assert_allclose(coarse.a @ coarse.x, problem.a @ problem.x, rtol=0, atol=1e-14)
    assert coarse.y is problem.y


def carried_over(kind: str, n: int, d: int) -> tuple[Problem, certificate.Interval, np.ndarray]:
    """A problem, and what its coarser level says of it."""
    coarse, fine = columns._levels(problem_of(kind, n, n, d))[-2:]
    answer = solve_dense(coarse, rtol=1e-9)
    return fine, *columns._carried(coarse, answer, fine, "cpu")


@pytest.mark.parametrize("kind", ["uniform", "dirichlet"])
@pytest.mark.parametrize("d", [2, 3, 16])
def test_sinkhorn_on_the_arcs_takes_the_gap_of_carried_potentials_to_a_tenth(
    kind: str, d: int
) -> None:
    problem, carried, arcs = carried_over(kind, 1000, d)
    truth = float(solve_dense(problem, rtol=1e-9).value) ** 2
    f, g = columns._sharpened(problem, carried, arcs)
    rows, cols = np.divmod(arcs, problem.m)
    assert (problem.costs[rows, cols] - f[rows] - g[cols]).min() > -1e-14
    before = problem.a @ carried.f + problem.b @ carried.g
    after = problem.a @ (problem.costs - g).min(1) + problem.b @ g
    assert 0 <= truth - after < (truth - before) / 10


@pytest.mark.parametrize("factor", [1.0, 1e200])
def test_sinkhorn_on_arcs_that_cannot_carry_the_weights_ends_with_numbers(factor: float) -> None:
    problem, carried, arcs = carried_over("softmax", 900, 2)
    f, g = columns._sharpened(problem, replace(carried, f=factor * carried.f), arcs)
    assert np.isfinite(f).all()
    assert np.isfinite(g).all()


def test_a_start_from_potentials_changes_nothing_but_the_time() -> None:
    rng = np.random.default_rng(3)
    costs, a = rng.random((40, 50)), rng.dirichlet(np.ones(40))
    b, (rows, cols) = rng.dirichlet(np.ones(50)), np.indices((40, 50)).reshape(2, -1)
    _, f, g = sparse_simplex(a, b, (rows, cols, costs.ravel()))
    reduced = np.maximum(costs - f[:, None] - g, 0)
    plan, f, g = sparse_simplex(a, b, (rows, cols, reduced.ravel()), is_warm=True)
    # Potentials in the core are offsets of the order of n + m, and are rounded there.
    assert np.exp(plan.log_mass) @ reduced[plan.rows, plan.cols] < 1e-13
    assert (reduced - f[:, None] - g).min() > -1e-13


@pytest.mark.parametrize(
    ("kind", "d"),
    [
        ("uniform", 2),
        ("softmax", 16),
        pytest.param("softmax", 2, marks=pytest.mark.slow),
        pytest.param("uniform", 16, marks=pytest.mark.slow),
    ],
)
def test_a_time_limit_gives_the_interval_so_far(kind: str, d: int) -> None:
    mu, nu = pair(kind, 1300, 1200, d)
    exact = solve_w2(mu, nu)
    early = solve_w2(mu, nu, method="column generation", time_limit=1e-9, strict=False)
    assert not early.converged
    assert float(early.lower) <= float(exact.value) <= float(early.upper)
    # Potentials of 40 groups, and a plan that looks at one direction.
    assert float(early.relative_width) < 0.6
    assert early.coupling is not None
    mine, theirs = early.coupling.marginals()
    torch.testing.assert_close(mine, mu.weights, rtol=0, atol=1e-14)
    torch.testing.assert_close(theirs, nu.weights, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("share", "inside"), [(-1.0, 8), (2.0, 8), (2.0, 2)], ids=["blocks", "cells", "cells in cells"]
)
@pytest.mark.parametrize("d", [1, 2, 3, 7])
def test_minima_are_the_smallest_of_all_pairs(
    monkeypatch: pytest.MonkeyPatch, share: float, inside: int, d: int
) -> None:
    monkeypatch.setattr(c_transform, "_SHARE", share)
    monkeypatch.setattr(c_transform, "_SMALL_CELL", 16)
    monkeypatch.setattr(c_transform, "_INSIDE", inside)
    monkeypatch.setattr(c_transform, "_BLOCK", 1 << 15)
    rng = np.random.default_rng(d)
    x, y = 3 + rng.normal(size=(900, d)), 3 + rng.normal(size=(700, d))
    g = np.sin(4 * y[:, 0]) + rng.normal(size=700) * 0.3
    costs = np.square(x[:, None] - y[None]).sum(-1) - g
    least = np.sort(costs, axis=1)

    found = CTransform(x, y)(g, 6)
    np.testing.assert_allclose(found.minima, least[:, 0], rtol=0, atol=found.slack)
    assert found.slack < 1e-11
    np.testing.assert_allclose(found.values, costs[found.rows, found.cols], atol=found.slack)
    assert (np.bincount(found.rows, minlength=900) == 6).all()
    if share < 0:
        values = np.sort(found.values.reshape(900, 6), axis=1)
        np.testing.assert_allclose(values, least[:, :6], rtol=0, atol=found.slack)

    ceiling = least[:, 0] + np.where(np.arange(900) % 2, 0.05, -0.05)
    below = CTransform(x, y)(g, 6, ceiling)
    np.testing.assert_allclose(below.minima, least[:, 0], rtol=0, atol=below.slack)
    assert set(below.rows) == set(range(1, 900, 2))
    assert (below.values < ceiling[below.rows]).all()


@pytest.mark.parametrize("share", [-1.0, 2.0], ids=["blocks", "cells"])
def test_of_few_columns_all_are_arcs(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    monkeypatch.setattr(c_transform, "_SHARE", share)
    monkeypatch.setattr(c_transform, "_BLOCK", 2)  # not as much as one row
    rng = np.random.default_rng(0)
    x, y, g = rng.normal(size=(1100, 2)), rng.normal(size=(3, 2)), rng.normal(size=3)
    found = CTransform(x, y)(g, 8)
    order = np.lexsort((found.cols, found.rows))
    rows, cols = np.indices((1100, 3)).reshape(2, -1)
    assert (found.rows[order] == rows).all() and (found.cols[order] == cols).all()
    costs = np.square(x[:, None] - y).sum(-1) - g
    np.testing.assert_allclose(found.values[order], costs.ravel(), rtol=0, atol=found.slack)
    np.testing.assert_allclose(found.minima, costs.min(1), rtol=0, atol=found.slack)


@pytest.mark.parametrize("far", ["potentials", "columns"])
def test_minima_far_from_zero_are_known_less_well_and_say_so(far: str) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(50, 2)), rng.normal(size=(60, 2))
    y += 1e3 * (far == "columns")
    g = 1e6 * (far == "potentials") + rng.normal(size=60)
    wide = (t.astype(np.longdouble) for t in (x, y, g))
    truth = (lambda x, y, g: (np.square(x[:, None] - y[None]).sum(-1) - g).min(1))(*wide)
    found = CTransform(x, y)(g, 6)
    errors = np.abs(found.minima - truth)
    assert 1e-11 < errors.max() <= found.slack < 1e-7


def test_precise_minima_lose_no_digit_of_small_displacements() -> None:
    """Centring rounds coordinates by 1e-16: of a displacement of 1e-9 that is 1e-7."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=(300, 3))
    y = x + 1e-9 * rng.normal(size=x.shape)
    moved = np.square(x - y).sum(-1)
    found = CTransform(x, y).precise(np.zeros(300), 2, np.full(300, np.inf))
    np.testing.assert_allclose(found.minima, moved, rtol=1e-14)
    assert found.slack == 0
    # Five columns too near to each other for products to tell which is the nearest.
    crowded = np.repeat(x, 5, axis=0) + 1e-9 * rng.normal(size=(1500, 3))
    one = CTransform(x, crowded).precise(np.zeros(1500), 1, np.full(300, np.inf))
    truth = np.square(x[:, None] - crowded[None]).sum(-1).min(1)
    assert (one.minima <= truth).all()
    # No column is left that could be nearer.
    only = CTransform(x, y[:1]).precise(np.zeros(1), 1, np.full(300, np.inf))
    np.testing.assert_allclose(only.minima, np.square(x - y[0]).sum(-1), rtol=1e-14)


def test_a_small_perturbation_of_many_points_is_certified_by_nearest_neighbours() -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(5_000, 16))
    y = x + 0.01 * rng.normal(size=x.shape)
    weights = rng.dirichlet(np.ones(len(x)))
    result = solve_w2((x, weights), (y, weights))
    truth = np.sqrt(weights @ ((x - y) ** 2).sum(-1))
    assert result.method == "identity"
    assert float(result.value) == pytest.approx(truth, rel=1e-13)


@pytest.mark.parametrize("part", [0.5, 0.02])
def test_column_generation_has_converged_where_the_width_is_what_was_asked(part: float) -> None:
    mu, nu = pair("softmax", 900, 800, 3)
    settings = {"method": "column generation", "time_limit": 1e-9, "strict": False}
    first = solve_w2(mu, nu, **settings)
    again = solve_w2(mu, nu, **settings, rtol=part * float(first.relative_width))
    assert float(again.relative_width) == pytest.approx(float(first.relative_width))
    assert not again.converged
    assert solve_w2(mu, nu, **settings, rtol=min(2 * float(first.relative_width), 0.99)).converged


@pytest.mark.gpu
@pytest.mark.parametrize("d", [2, 16])
def test_c_transforms_on_the_device_give_the_answer_of_the_cpu(d: int, device: str) -> None:
    mu, nu = pair("dirichlet", 4000, 3500, d)
    here = solve_w2(mu, nu, method="column generation")
    there = solve_w2(mu.to(device), nu.to(device), method="column generation")
    assert there.value.device.type == torch.device(device).type
    assert float(there.relative_width) < 1e-9
    assert float(there.value) == pytest.approx(float(here.value), rel=1e-9)


def test_rounds_are_logged(caplog) -> None:
    mu, nu = pair("uniform", 700, 700, 2)
    with caplog.at_level("INFO", logger="meanfield.transport"):
        solve_w2(mu, nu, method="column generation")
    assert "700 × 700 atoms, round 1:" in caplog.text
    assert "relative width" in caplog.text


def test_rounds_end_where_the_ends_meet_within_a_quarter_of_what_is_asked(monkeypatch) -> None:
    """So that the interval, rounding included, is narrower than rtol; on coarser levels too."""
    asked, narrower = [], columns.narrower

    def noted(one: Interval, other: Interval | None, rtol: float) -> Interval:
        asked.append(rtol)
        return narrower(one, other, rtol)

    monkeypatch.setattr(columns, "narrower", noted)
    mu, nu = pair("uniform", 2100, 2100, 2)
    found = solve_w2(mu, nu, method="column generation", rtol=1e-6)
    assert {*asked} == {columns._COARSE_GAP / 4, 1e-6 / 4}
    assert float(found.relative_width) <= 1e-6


@pytest.mark.parametrize(("k", "n"), [(2, 2000), (40, 2000), (3, 3000)])
def test_clusters_of_one_atom_and_of_few_are_seen(k: int, n: int) -> None:
    rng = np.random.default_rng(k)
    centres = 10.0 * rng.permutation(np.stack(np.meshgrid(*[np.arange(8)] * 2), -1).reshape(-1, 2))
    sizes = np.r_[1, np.full(k - 2, 5), n - 1 - 5 * (k - 2)]  # one atom, few atoms, the rest
    which = np.repeat(np.arange(k), sizes)
    points = centres[which] + 0.1 * rng.uniform(-1, 1, size=(n, 2))
    shuffled = points[rng.permutation(n)]
    labels = clusters._separated(shuffled[: n // 3], shuffled[n // 3 :])
    assert labels is not None
    assert sorted(np.bincount(labels)) == sorted(sizes)
    assert clusters._separated(*rng.normal(size=(2, n, 2))) is None


@pytest.mark.parametrize(("seed", "radius"), [(0, 2), (1, 3)])
def test_points_of_a_lattice_have_columns_at_the_edge_of_cells(seed: int, radius: int) -> None:
    """In single precision radii of cells left out columns that tie there."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-radius, radius + 1, (1300, 2))
    y = (x + rng.integers(-1, 2, x.shape))[rng.permutation(1300)].astype(float)
    g = np.round(rng.normal(size=1300), 1)
    minima = (((x[:, None] - y) ** 2).sum(-1) - g).min(1)
    assert np.abs(CTransform(x.astype(float), y)(g, 6).minima - minima).max() < 1e-14
    assert solve_w2(x.astype(float), y).relative_width < 1e-9


def test_arcs_that_only_rounding_takes_below_the_ceiling_are_none() -> None:
    """Of each row the exact minimum is the ceiling: no arc is below it."""
    rng = np.random.default_rng(0)
    x, y, g = (
        1e3 * rng.normal(size=(300, 2)),
        1e3 * rng.normal(size=(400, 2)),
        rng.normal(size=400),
    )
    wide = (t.astype(np.longdouble) for t in (x, y, g))
    least = (lambda x, y, g: (np.square(x[:, None] - y[None]).sum(-1) - g).min(1))(*wide)
    found = CTransform(x, y)(g, 3, least.astype(float))
    assert not len(found.rows)
    assert np.abs(found.minima - least).max() > 0  # which rounding takes on either side
    ceiling = least.astype(float) + np.where(np.arange(300) % 2, 1.0, -1.0)
    precise = CTransform(x, y).precise(g, 3, ceiling)
    assert {*precise.rows} == {*range(1, 300, 2)}
    assert (precise.values < ceiling[precise.rows]).all()
