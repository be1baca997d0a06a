"""Small clusters far apart, where solvers with absolute tolerances are silently wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meanfield.measures import ParticleMeasure
from meanfield.transport import solve_w2, solve_wp
from meanfield.transport.certificate import Interval, SparsePlan, certified
from meanfield.transport.plans.clusters import solve_clusters
from meanfield.transport.plans.exact import solve_dense, solve_finely
from meanfield.transport.problem import Problem
from tests.transport.transport_oracles import exact_transport

seeds = st.integers(0, 2**32 - 1)


class Clusters:
    """Two clouds of `count` clusters of spread `spread`; offsets inside are exact differences."""

    def __init__(self, seed: int, count: int, size: int, dim: int, spread: float) -> None:
        rng = np.random.default_rng(seed)
        centres = 2.0 * np.stack([rng.permutation(4 * count)[:count] for _ in range(dim)], -1)
        self.labels = np.repeat(np.arange(count), size)
        rng.shuffle(self.labels)
        home = centres[self.labels]
        self.x = home + spread * rng.normal(size=home.shape)
        self.y = home + spread * rng.normal(size=home.shape)
        self.inner_x, self.inner_y = self.x - home, self.y - home
        self.rng = rng

    def blockwise(self, a: np.ndarray, b: np.ndarray) -> float:
        """Cluster by cluster with the network simplex, each scaled to order one."""
        import ot

        total = 0.0
        for k in np.unique(self.labels):
            own = self.labels == k
            cost = ((self.inner_x[own][:, None] - self.inner_y[own][None]) ** 2).sum(-1)
            mass, other = a[own] / a[own].sum(), b[own] / b[own].sum()
            total += a[own].sum() * ot.emd2(mass, other, cost / cost.max()) * cost.max()
        return float(np.sqrt(total))


@pytest.mark.parametrize("exponent", [-2, -4, -6, -7, -8, -10])
@pytest.mark.parametrize(("count", "size", "dim"), [(2, 100, 2), (5, 30, 16), (2, 200, 16)])
def test_uniform_clusters_match_the_blockwise_answer(
    exponent: int, count: int, size: int, dim: int
) -> None:
    clouds = Clusters(exponent % 10, count, size, dim, 10.0**exponent)
    uniform = np.full(len(clouds.x), 1 / len(clouds.x))
    result = solve_w2(torch.as_tensor(clouds.x), torch.as_tensor(clouds.y))
    truth = clouds.blockwise(uniform, uniform)
    assert float(result.value) == pytest.approx(truth, rel=1e-9)
    assert float(result.relative_width) < 1e-6
    assert float(result.lower) * (1 - 1e-9) <= truth <= float(result.upper) * (1 + 1e-9)


@given(seeds, st.integers(2, 4), st.integers(2, 12), st.integers(2, 10))
@settings(max_examples=60)
def test_shared_weights_down_to_1e_12_stay_within_a_narrow_interval(
    seed: int, count: int, size: int, collapse: int
) -> None:
    clouds = Clusters(seed, count, size, 2, 10.0**-collapse)
    a = 10.0 ** clouds.rng.uniform(-12, 0, size=len(clouds.x))
    a /= a.sum()
    result = solve_w2(
        ParticleMeasure(torch.as_tensor(clouds.x), torch.as_tensor(a)),
        ParticleMeasure(torch.as_tensor(clouds.y), torch.as_tensor(a)),
    )
    truth = clouds.blockwise(a, a)
    assert float(result.lower) * (1 - 1e-6) <= truth <= float(result.upper) * (1 + 1e-6)
    assert float(result.relative_width) < 1e-3


@given(seeds, st.integers(2, 4), st.integers(2, 12), st.integers(2, 8))
@settings(max_examples=60)
def test_independent_weights_are_inside_the_interval(
    seed: int, count: int, size: int, collapse: int
) -> None:
    clouds = Clusters(seed, count, size, 2, 10.0**-collapse)
    a, b = (10.0 ** clouds.rng.uniform(-6, 0, size=len(clouds.x)) for _ in range(2))
    for k in range(count):
        own = clouds.labels == k
        a[own] /= a[own].sum() * count
        b[own] /= b[own].sum() * count
    result = solve_w2(
        ParticleMeasure(torch.as_tensor(clouds.x), torch.as_tensor(a)),
        ParticleMeasure(torch.as_tensor(clouds.y), torch.as_tensor(b)),
        strict=False,
    )
    truth = clouds.blockwise(a, b)
    assert float(result.lower) * (1 - 1e-6) <= truth <= float(result.upper) * (1 + 1e-6)
    assert float(result.relative_width) < 1e-3


def test_mass_that_crosses_between_collapsed_clusters_is_paid_for() -> None:
    spread, crossing = 1e-7, 2.0**-30
    rng = np.random.default_rng(0)
    x = spread * rng.normal(size=(40, 2)) + np.repeat([[0.0, 0.0], [8.0, 0.0]], 20, axis=0)
    y = spread * rng.normal(size=(40, 2)) + np.repeat([[0.0, 0.0], [8.0, 0.0]], 20, axis=0)
    a = np.full(40, 1 / 40)
    b = a + np.repeat([crossing / 20, -crossing / 20], 20)
    result = solve_w2(
        ParticleMeasure(torch.as_tensor(x), torch.as_tensor(a)),
        ParticleMeasure(torch.as_tensor(y), torch.as_tensor(b)),
    )
    # What crosses costs 64 a unit of mass; what stays at most (10 spread)².
    assert float(result.lower) ** 2 == pytest.approx(64 * crossing, rel=1e-5)
    assert float(result.upper) ** 2 == pytest.approx(64 * crossing, rel=1e-5)


def test_what_crosses_may_have_been_the_dear_part_of_its_clusters() -> None:
    """Without the atom that leaves, a cluster costs nothing: what it cost there is no bound.

    Two clusters of radius 1, 40 apart; the masses agree but for 1e-7, on the sides that face each
    other. Inside the clusters that mass would go from one side to the other, 2 · 4e-7.
    """
    edge, tiny, extra = 19.0, 1e-9, 1e-7
    x = np.array([[-20.0], [-21.0], [20.0], [21.0], [-edge]])
    y = np.array([[-20.0], [-21.0], [20.0], [21.0], [edge]])
    x, y = (np.pad(t, ((0, 0), (0, 1))) for t in (x, y))
    a = np.log([tiny, 0.5, tiny, 0.5 - 2 * tiny - extra, extra])
    problem = Problem.of(x, y, a, a)
    dense = lambda part: solve_dense(part[None], rtol=1e-9)[0]  # noqa: E731
    answer = solve_clusters(problem, dense, rtol=1e-9, snap=False)
    assert answer is not None
    truth = math.sqrt(exact_transport(x, y, a, a)) / 2.0 ** int(problem.exponent)
    assert truth == pytest.approx(38 * math.sqrt(extra) / 2.0 ** int(problem.exponent))
    assert 0.99 * truth < float(answer.lower) <= truth <= float(answer.upper) < 1.15 * truth


def test_what_crosses_may_go_from_far_side_to_far_side() -> None:
    """All mass is on the far sides of clusters of radius 1 whose centres are 40 apart."""
    tiny, extra = 1e-13, 1e-7
    x = np.array([[-20.0, 0.0], [20.0, 0.0], [-21.0, 0.0], [21.0, 0.0]])
    a, b = (np.log([tiny, tiny, 0.5 + t, 0.5 - t - 2 * tiny]) for t in (extra / 2, -extra / 2))
    problem = Problem.of(x, x, a, b)
    dense = lambda part: solve_dense(part[None], rtol=1e-9)[0]  # noqa: E731
    answer = solve_clusters(problem, dense, rtol=1e-9, snap=False)
    assert answer is not None
    truth = math.sqrt(exact_transport(x, x, a, b)) / 2.0 ** int(problem.exponent)
    assert truth == pytest.approx(42 * math.sqrt(extra) / 2.0 ** int(problem.exponent), rel=1e-5)
    assert 0.8 * truth < float(answer.lower) <= truth <= float(answer.upper) < 1.01 * truth


def test_potentials_of_clusters_are_feasible_across_them_and_optimal() -> None:
    """Whatever constant the potentials of a cluster come with."""
    rng = np.random.default_rng(2)
    home = np.repeat([[0.0, 0.0], [40.0, 0.0], [0.0, 40.0]], 5, axis=0)
    x, y = home + rng.uniform(-0.5, 0.5, size=(2, 15, 2))
    problem = Problem.of(x, y, np.zeros(15), np.zeros(15))

    def shifted(part: Problem) -> Interval:
        answer, shift = solve_dense(part[None], rtol=1e-9)[0], 1e4 * rng.normal()
        assert answer.f is not None
        assert answer.g is not None
        return replace(answer, f=answer.f - shift, g=answer.g + shift)

    answer = solve_clusters(problem, shifted, rtol=1e-9, snap=True)
    assert answer is not None
    assert answer.f is not None
    assert answer.g is not None
    assert float((answer.f[:, None] + answer.g - problem.costs).max()) < 1e-11
    dual = float(answer.f.mean() + answer.g.mean())
    assert dual == pytest.approx(float(answer.value) ** 2, rel=1e-9)


def test_what_crosses_may_pass_through_a_third_cluster_and_pay_for_its_way_inside() -> None:
    """Three clusters in a row; 1e-7 goes from the first to the last, by way of the middle one.

    One atom arrives at the near side of the middle cluster and another leaves from its far side:
    that costs two short ways and not a long one, and saves what the two atoms cost each other.
    """
    half, tiny, extra = 50.0, 1e-9, 1e-7
    thirds = [1 / 3 - 2 * tiny] * 3
    x = [-half, 0, half, -half - 1, 1, half + 1, 1 - half]
    y = [-half, 0, half, -half - 1, 1, half + 1, half - 1, -1]
    a = np.log([tiny, tiny, tiny, *thirds, extra])
    b = np.log([tiny, tiny, tiny, thirds[0], thirds[1] - extra, thirds[2], extra, extra])
    x, y = (np.pad(np.array(t)[:, None], ((0, 0), (0, 1))) for t in (x, y))
    problem = Problem.of(x, y, a, b)
    dense = lambda part: solve_dense(part[None], rtol=1e-9)[0]  # noqa: E731
    answer = solve_clusters(problem, dense, rtol=1e-9, snap=False)
    assert answer is not None
    unit = 2.0 ** int(problem.exponent)
    truth = math.sqrt(exact_transport(x, y, a, b)) / unit
    assert truth == pytest.approx((half - 2) * math.sqrt(2 * extra) / unit)
    assert 0.999 * truth < float(answer.lower) <= truth <= float(answer.upper) < 1.6 * truth


@pytest.mark.parametrize("extra", [1e-7, 1e-12])
def test_clusters_that_exchange_mass_are_not_converged_by_a_bound_of_what_crosses(
    extra: float,
) -> None:
    """More than rounding of the weights crosses: to bound its way is not to know it."""
    rng = np.random.default_rng(0)
    x, y = rng.uniform(-0.5, 0.5, size=(2, 600, 2)) + np.repeat([[40.0], [0.0]], 300, axis=0)
    a, b = rng.dirichlet(np.ones(600), size=2)
    for weights, more in ((a, extra), (b, 0.0)):
        weights[:300] *= (0.5 + more) / weights[:300].sum()
        weights[300:] *= (0.5 - more) / weights[300:].sum()
    found = solve_w2((x, a), (y, b))
    assert found.converged
    assert found.relative_width < 1e-8  # rounding of the weights over a distance of 40


@pytest.mark.parametrize("log_weight", [-20.0, -25.0, -30.0, -33.0])
def test_the_value_is_that_of_the_weights_as_they_stand(log_weight: float) -> None:
    """A little mass leaves one of three far atoms: the ends allow for its rounding, no more."""

    def logs(light: float) -> list[float]:
        return [light] + 2 * [math.log((1 - math.exp(light)) / 2)]

    points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    mu = ParticleMeasure(points, log_weights=logs(log_weight))
    nu = ParticleMeasure(points, log_weights=logs(log_weight - 1))
    with mpmath.workdps(50):
        a, b = ([mpmath.exp(float(t)) for t in m.log_weights] for m in (mu, nu))
        gains = [y / sum(b) - x / sum(a) for x, y in zip(a, b, strict=True)]
        true = float(mpmath.sqrt(gains[1] + 4 * gains[2]))
    found = solve_w2(mu, nu)
    assert float(found.value) == pytest.approx(true, rel=1e-6)
    assert float(found.lower) <= true <= float(found.upper)


def test_a_light_cluster_that_is_all_of_the_distance_has_room_for_the_rounding_of_its_mass() -> (
    None
):
    """The logarithm of its mass is rounded: at −600 by up to 512 units of the mass."""
    rng = np.random.default_rng(0)
    dense = lambda part: solve_dense(part[None], rtol=1e-9)[0]  # noqa: E731
    x = np.array([[0.0, 0.0], [0.001, 0.0], [1.0, 0.0]])
    y = x.copy()
    y[2, 1] = 2.0**-10
    with mpmath.workdps(40):
        for _ in range(40):
            light = rng.uniform(-690, -520)
            logs = rng.uniform(-5, 5) + np.array([-1.0, -0.5, light])
            problem = Problem.of(x, y, logs, logs)
            answer = solve_clusters(problem, dense, rtol=1e-9, snap=True)
            assert answer is not None
            masses = [mpmath.exp(mpmath.mpf(float(t))) for t in logs]
            truth = mpmath.sqrt(masses[2] / sum(masses)) / 2 ** (10 + int(problem.exponent))
            assert mpmath.mpf(float(answer.lower)) <= truth <= mpmath.mpf(float(answer.upper))
            assert float(answer.width) < 1e-12


def test_far_clusters_equal_up_to_rounding_do_not_raise_the_floor_of_others() -> None:
    """Two of four exchange 2e-15 over a distance of 1, the others 2e-16, or nothing, over 10."""
    x = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 10.0], [10.0, 10.0]])
    a = np.log(np.full(4, 0.25))
    b = np.log(0.25 + np.array([2e-15, -2e-15, 0.0, 0.0]))
    equal = math.sqrt(exact_transport(x, x, a, b))
    b[2] -= 4 * np.spacing(a[2])
    truth = math.sqrt(exact_transport(x, x, a, b))
    assert truth > 2 * equal
    problem = Problem.of(x, x, a, b)
    dense = lambda part: solve_dense(part[None], rtol=1e-9)[0]  # noqa: E731
    meant, stored = (solve_clusters(problem, dense, rtol=1e-9, snap=t) for t in (True, False))
    assert meant is not None
    assert stored is not None
    unit = 2.0 ** int(problem.exponent)
    assert 0.9 * truth < float(stored.lower) * unit <= truth <= float(stored.upper) * unit
    assert float(meant.lower) * unit <= equal <= float(meant.upper) * unit


def test_clusters_of_clusters_are_solved_level_by_level() -> None:
    rng = np.random.default_rng(1)
    top = np.repeat([[0.0, 0.0], [4.0, 4.0]], 20, axis=0)
    middle = np.tile(np.repeat([[0.0, 0.0], [2.0**-20, 0.0]], 10, axis=0), (2, 1))
    inner = 2.0**-44 * np.round(rng.normal(size=(2, 40, 2)) * 8) / 8
    x, y = (top + middle + t for t in inner)
    exact = (top + middle)[None] + inner
    truth = 0.0
    for k in range(4):
        own = slice(10 * k, 10 * k + 10)
        u, v = (t[own] - (top + middle)[own] for t in exact)
        truth += float(solve_w2(torch.as_tensor(u), torch.as_tensor(v)).value) ** 2 / 4
    result = solve_w2(torch.as_tensor(x), torch.as_tensor(y))
    assert float(result.value) == pytest.approx(truth**0.5, rel=1e-9)
    assert float(result.relative_width) < 1e-6


def test_a_batch_keeps_its_order_where_some_of_its_pairs_are_collapsed() -> None:
    """What closes in arrays and what is solved by itself come back to their places."""
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(2, 6, 12, 2))
    home = np.repeat([[0.0, 0.0], [8.0, 0.0]], 6, axis=0)
    for k in (1, 4):
        x[k], y[k] = home + 1e-9 * (1 + k) * x[k], home + 1e-9 * y[k]
    a, b = rng.dirichlet(np.ones(6), size=(2, 2, 6)).transpose(0, 2, 1, 3).reshape(2, 6, 12) / 2
    found = solve_w2((x, a), (y, b), strict=False)
    f, g = found.potentials or (None, None)
    mass = found.coupling.dense()
    np.testing.assert_allclose(mass.sum(-1), a, atol=1e-12)
    for k in range(6):
        alone = solve_w2((x[k], a[k]), (y[k], b[k]), strict=False)
        assert found.value[k] == pytest.approx(alone.value, rel=1e-6)
        if f is not None:
            cost = np.square(x[k][:, None] - y[k]).sum(-1)
            assert (f[k][:, None] + g[k] - cost).max() <= 1e-12 * cost.max()


@pytest.mark.slow
@given(seeds, st.integers(2, 3), st.integers(2, 60), st.integers(2, 10))
@settings(max_examples=1500)
def test_thousands_of_collapsed_clusters(seed: int, count: int, size: int, collapse: int) -> None:
    clouds = Clusters(seed, count, size, 2 + seed % 3, 10.0**-collapse)
    uniform = np.full(len(clouds.x), 1 / len(clouds.x))
    result = solve_w2(torch.as_tensor(clouds.x), torch.as_tensor(clouds.y))
    truth = clouds.blockwise(uniform, uniform)
    assert float(result.value) == pytest.approx(truth, rel=1e-6)
    assert float(result.lower) * (1 - 1e-9) <= truth <= float(result.upper) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("order", "size", "uniform"), [(2, 1e-6, False), (2, 1e-8, True), (3, 1e-6, True)]
)
def test_small_moves_of_many_shuffled_atoms_are_known_to_their_own_digits(
    order: int, size: float, uniform: bool
) -> None:
    """Potentials as large as the clouds would leave 1e-4 of the first open, all of the others.

    Atoms that move by less than half of what is between them go to their nearest.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(450, 2))
    sigma, moves = rng.permutation(450), size * rng.normal(size=(450, 2))
    a = np.full(450, 1 / 450) if uniform else rng.dirichlet(np.ones(450))
    y, b = (x + moves)[sigma], a[sigma]
    found = solve_wp((x, a), (y, b), order)
    lengths = np.linalg.norm(x[sigma] - y, axis=-1)
    truth = (b @ lengths**order) ** (1 / order)
    assert float(found.relative_width) < 1e-12
    assert float(found.value) == pytest.approx(truth, rel=1e-13)


@pytest.mark.parametrize("uniform", [True, False])
def test_rough_potentials_are_made_fine(uniform: bool) -> None:
    """Those of a solver that stopped early, off by 1e-3 and by 1e-7 of the largest cost."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(2, 40, 3))
    logs = np.zeros((2, 40)) if uniform else np.log(rng.dirichlet(np.ones(40), size=2))
    problem = Problem.of(x, y, *logs)
    best = solve_dense(problem, rtol=1e-9, by_simplex=True)
    assert best.g is not None
    for size in (1e-3, 1e-7):
        rough = best.g + size * rng.normal(size=40)
        plan = SparsePlan(best.rows, best.cols, best.log_mass)
        answer = certified(problem, plan, rough, method="early", rtol=1e-9)
        assert answer.width > 1e-2 * size
        fine = solve_finely(problem, rtol=1e-9, answer=answer)
        assert fine.width < 1e-12
        assert float(fine.value) == pytest.approx(float(best.value), rel=1e-13)
