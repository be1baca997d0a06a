"""The oracles against finite differences, known values and one another."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from mpmath import mp
from scipy.optimize import minimize

from tests import oracles
from tests.strategies import (
    CLOUDS,
    LIGHT,
    Problem,
    cloud,
    layer,
    light_atom_problem,
    log_weights,
    problems,
)
from tests.strategies import positions as random_positions

quick = settings(derandomize=True, deadline=None, max_examples=20)
# "clusters" and "offset" lose digits by cancellation in any float64 formula.
TAME = tuple(kind for kind in CLOUDS if kind not in ("clusters", "offset"))


def identity_layer(A: np.ndarray, V: np.ndarray | None = None) -> dict[str, object]:
    d = len(A)
    V = np.eye(d) if V is None else V
    return {"query": A[None], "key": np.eye(d)[None], "value": V[None], "scale": 1.0}


def made_exact(problem: Problem) -> Problem:
    return problem._replace(
        points=oracles.exact(problem.points),
        log_weights=oracles.exact(problem.log_weights),
        layer=oracles.exact_layer(problem.layer),
    )


def parts(problem: Problem) -> tuple[tuple, dict]:
    return (problem.points, problem.log_weights, problem.layer), problem.mask


def seeded(seed: int, kind: str, causal: bool, n: int = 4, d: int = 2) -> Problem:
    rng = np.random.default_rng(seed)
    points, logs = cloud(rng, n, d), log_weights(rng, n, "dirichlet")
    where = random_positions(rng, n, "ties") if causal else None
    return Problem(points, logs, where, layer(rng, d, kind), causal=causal)


# ------------------------------------------------------------------ map


@pytest.mark.parametrize("causal", [False, True])
def test_one_head_without_bias_is_the_softmax_formula(causal):
    rng = np.random.default_rng(1)
    A, V, X = rng.normal(size=(3, 3, 3))
    a, s = rng.dirichlet(np.ones(3)), np.array([0.7, 0.2, 0.7])
    seen = s[None, :] <= s[:, None] if causal else np.ones((3, 3), bool)
    kernel = a * np.exp(X @ A.T @ X.T) * seen
    expected = kernel / kernel.sum(1, keepdims=True) @ X @ V.T
    found = oracles.attention_map(X, np.log(a), identity_layer(A, V), positions=s, causal=causal)
    np.testing.assert_allclose(found, expected, rtol=1e-13)


@quick
@given(problems(cloud_kinds=TAME))
def test_the_map_in_float64_is_the_map_in_fifty_digits(problem):
    measure, mask = parts(problem)
    found = oracles.attention_map(*measure, **mask)
    with mp.workdps(oracles.DIGITS):
        measure, mask = parts(made_exact(problem))
        expected = oracles.attention_map(*measure, **mask).astype(float)
    size = np.abs(expected).max() + np.abs(problem.points).max()
    np.testing.assert_allclose(found, expected, atol=1e-11 * size)


def test_atoms_of_weight_zero_may_be_removed():
    problem = seeded(2, "biased", causal=True)
    logs = problem.log_weights.copy()
    logs[1] = -math.inf
    keep = np.array([True, False, True, True])
    mask = {"positions": problem.positions, "causal": True}
    kept = {"positions": problem.positions[keep], "causal": True}
    everything = oracles.attention_map(problem.points, logs, problem.layer, **mask)
    alive = oracles.attention_map(problem.points[keep], logs[keep], problem.layer, **kept)
    np.testing.assert_allclose(everything[keep], alive, rtol=1e-14)


# ------------------------------------------------------------------ Jacobian


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["bilinear", "biased", "rectangular"])
def test_the_jacobian_formula_is_the_difference_quotient_to_thirty_digits(kind, causal):
    problem = made_exact(seeded(3, kind, causal, n=3))
    (points, logs, fields), mask = parts(problem)
    with mp.workdps(oracles.DIGITS):
        formula = oracles.jacobian(points, logs, fields, **mask)
    quotient = oracles.jacobian_by_differences(
        lambda Y: oracles.attention_map(Y, logs, fields, **mask), points
    )
    assert np.abs(formula - quotient).max() < 1e-29


@quick
@given(problems(cloud_kinds=TAME))
def test_the_jacobian_formula_is_the_complex_step(problem):
    measure, mask = parts(problem)
    points, logs, fields = measure
    formula = oracles.jacobian(*measure, **mask)
    stepped = oracles.jacobian_by_complex_step(
        lambda Y: oracles.attention_map(Y, logs, fields, **mask), points
    )
    np.testing.assert_allclose(formula, stepped, atol=1e-10 * (1 + np.abs(formula).max()))


@quick
@given(problems(cloud_kinds=TAME))
def test_the_weighted_matrix_is_the_similar_one(problem):
    keep = problem.alive & (problem.log_weights > -300)
    points, logs = problem.points[keep], problem.log_weights[keep]
    mask = problem.mask | ({"positions": problem.positions[keep]} if problem.causal else {})
    plain = oracles.jacobian(points, logs, problem.layer, **mask)
    rows, columns = (np.repeat(np.exp(logs / 2), m // len(points)) for m in plain.shape)
    weighted = oracles.jacobian(points, logs, problem.layer, **mask, weighted=True)
    expected = rows[:, None] * plain / columns
    np.testing.assert_allclose(weighted, expected, rtol=1e-9, atol=1e-9 * np.abs(expected).max())


@pytest.mark.parametrize("causal", [False, True])
def test_the_slope_of_the_field_is_its_complex_step(causal):
    problem = seeded(4, "biased", causal)
    measure, mask = parts(problem)
    slopes = oracles.field_jacobians(*measure, **mask)
    for i, x in enumerate(problem.points):
        where = {"position": problem.positions[i] if causal else None, **mask}
        stepped = oracles.jacobian_by_complex_step(
            lambda y, where=where: oracles.field(y, *measure, **where), x
        )
        np.testing.assert_allclose(slopes[i], stepped, atol=1e-13)


# ------------------------------------------------------------------ constants


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.2, 0.5, 0.3), (1e-9, 1 - 1e-9)])
@quick
@given(problem=problems(max_particles=4, max_dim=3, cloud_kinds=TAME))
def test_the_larger_component_is_the_norm_on_split_atoms(shares, problem):
    measure, mask = parts(problem)
    constants = oracles.local_constants(*measure, **mask)
    points, logs = oracles.duplicated(problem.points, problem.log_weights, shares)
    if problem.causal:
        mask = {"positions": np.repeat(problem.positions, len(shares)), "causal": True}
    split = oracles.local_constants(points, logs, problem.layer, **mask)
    assert split.particle == pytest.approx(constants.wasserstein, rel=1e-9, abs=1e-12)
    assert split.splitting == pytest.approx(constants.splitting, rel=1e-9, abs=1e-12)


def near_and_far(radius: int) -> tuple[np.ndarray, np.ndarray]:
    """An atom near 0 and a light one at R, where splitting is most above the particle norm."""
    odds = {2: -1.42909123, 4: -2.74802834, 8: -4.15146166}[radius]
    inner = {2: -0.0712149, 4: -0.008317, 8: -9.93442e-4}[radius]
    return np.array([[radius], [inner]]), -np.logaddexp(0, [-odds, odds])


def secant(before: tuple[np.ndarray, np.ndarray], after: tuple[np.ndarray, np.ndarray]) -> float:
    """W₂(Fμ, Fν)/W₂(μ, ν) for d = 1, A = −1."""
    (x, u), (y, v) = before, after
    images = [
        oracles.attention_map(points, logs, identity_layer(-np.eye(1)))[:, 0]
        for points, logs in (before, after)
    ]
    a, b = np.exp(u), np.exp(v)
    moved = oracles.w2_on_the_line(x[:, 0], a, y[:, 0], b)
    return oracles.w2_on_the_line(images[0], a, images[1], b) / moved


@pytest.mark.parametrize(("radius", "ratio"), [(2, 1.470), (4, 3.698), (8, 7.844)])
def test_splitting_decides_by_an_unbounded_factor(radius, ratio):
    points, logs = near_and_far(radius)
    constants = oracles.local_constants(points, logs, identity_layer(-np.eye(1)))
    assert constants.splitting / constants.particle == pytest.approx(ratio, rel=1e-3)
    twice, halves = oracles.duplicated(points, logs)
    split = oracles.local_constants(twice, halves, identity_layer(-np.eye(1)))
    assert split.particle == pytest.approx(constants.splitting, rel=1e-12)
    apart = twice + 1e-4 * np.array([[0.0], [0.0], [-1.0], [1.0]])
    reached = secant((points, logs), (apart, halves))
    assert reached == pytest.approx(constants.splitting, rel=1e-5)


def test_a_vanishing_mass_that_moves_far_exceeds_the_constant_of_small_displacements():
    points, logs = near_and_far(8)
    fields = identity_layer(-np.eye(1))
    constants = oracles.local_constants(points, logs, fields)
    light, target = math.log(1e-8), points[1] - 1
    after = np.vstack([points, target]), np.append(logs, light)
    after[1][1] += math.log1p(-math.exp(light - logs[1]))
    slope = oracles.field(target, points, logs, fields) - oracles.field(
        points[1], points, logs, fields
    )
    reached = secant((points, logs), after)
    assert reached == pytest.approx(float(abs(slope[0])), rel=1e-3)
    assert reached > 7 * constants.wasserstein
    # The measure that already has that mass on its way has a larger constant still.
    on_the_way = np.vstack([points, points[1] - 0.5]), after[1]
    assert oracles.local_constants(*on_the_way, fields).wasserstein > reached


def test_w2_on_the_line_is_the_quantile_distance():
    rng = np.random.default_rng(18)
    x, y = rng.normal(size=4), rng.normal(size=6)
    a, b = rng.multinomial(12, np.ones(4) / 4) / 12, rng.multinomial(12, np.ones(6) / 6) / 12
    quantiles = [np.sort(np.repeat(p, np.rint(12 * w).astype(int))) for p, w in ((x, a), (y, b))]
    expected = math.sqrt(np.mean((quantiles[0] - quantiles[1]) ** 2))
    assert oracles.w2_on_the_line(x, a, y, b) == pytest.approx(expected, rel=1e-12)


def test_an_atom_of_tiny_weight_counts_and_an_absent_one_does_not():
    # The atom at 0 sees ±1 with equal attention, hence with covariance 1.
    fields, points = identity_layer(-np.eye(1)), np.array([[1.0], [-1.0], [0.0]])
    logs = np.array([0.0, 0.0, LIGHT]) - math.log(2)
    alone = oracles.local_constants(points[:2], logs[:2], fields)
    tiny = oracles.local_constants(points, logs, fields)
    logs[2] = -math.inf
    absent = oracles.local_constants(points, logs, fields)
    np.testing.assert_allclose(absent, alone, rtol=1e-15)
    assert alone.splitting == pytest.approx(1 / math.cosh(1) ** 2, rel=1e-14)
    assert tiny.splitting == pytest.approx(1, rel=1e-14)


def test_uniform_weights_have_equal_particle_and_euclidean_constants():
    rng = np.random.default_rng(5)
    logs = oracles.uniform_log_weights(5)
    constants = oracles.local_constants(cloud(rng, 5, 3), logs, layer(rng, 3, "multi_head"))
    assert constants.particle == pytest.approx(constants.euclidean, rel=1e-13)


@pytest.mark.parametrize(("n", "n_light"), [(2, 1), (3, 1), (3, 2)])
@pytest.mark.parametrize("d", [1, 2, 3])
def test_light_atoms_in_float64_agree_with_mpmath(n, n_light, d):
    problem = light_atom_problem(7, n, d, n_light)
    measure, _ = parts(problem)
    found = oracles.local_constants(*measure)
    with mp.workdps(oracles.DIGITS):
        measure, _ = parts(made_exact(problem))
        expected = oracles.local_constants(*measure)
    digits = 1200  # e^{−900} is 1e-391: enough for it beside 1 after a difference quotient
    points, logs, fields = measure
    quotient = oracles.jacobian_by_differences(
        lambda Y: oracles.attention_map(Y, logs, fields), points, digits
    )
    with mp.workdps(digits):
        direct = oracles.largest_singular_value(oracles.conjugated(quotient, logs))
        error = float(abs(expected.particle / direct - 1))
    assert error < 1e-40
    assert expected.particle > mp.mpf(10) ** 150
    # A logit near 900 carries an error of 900 ε into every exponential.
    assert float(found.particle / expected.particle) == pytest.approx(1, rel=1e-12)
    assert found.splitting == pytest.approx(float(expected.splitting), rel=1e-11)


# ------------------------------------------------------------------ two atoms


@pytest.mark.parametrize("gamma", [-1.5, -0.3, 0.8])
@pytest.mark.parametrize("log_light", [-0.7, -4.0, -30.0, LIGHT])
def test_the_two_atom_formula_is_the_dense_constant(gamma, log_light):
    rng = np.random.default_rng(8)
    basis = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    A = basis @ np.diag([gamma, 4.0, -2.5]) @ basis.T
    radius = 1.7
    points = radius * np.stack([basis[:, 0], -basis[:, 0]])
    with mp.workdps(oracles.DIGITS):
        light = mp.mpf(log_light)
        logs = np.array([light, mp.log1p(-mp.exp(light))])
        dense = oracles.local_constants(
            oracles.exact(points), logs, oracles.exact_layer(identity_layer(A))
        )
    particle, splitting = oracles.two_dirac_constants(gamma, radius, log_light)
    # The eigenvectors are those of A to float64 only.
    assert float(dense.particle / particle) == pytest.approx(1, rel=1e-12)
    assert float(dense.splitting / splitting) == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize(
    ("n", "expected"), [(5, 2.14486823), (50, 11.20224591), (200, 27.66448368)]
)
def test_one_against_many_has_the_reference_norms(n, expected):
    A = np.diag([0.5, -0.7, 0.2])
    assert float(oracles.two_dirac_constants(-0.7, 2.0, -math.log(n))[0]) == pytest.approx(
        expected, rel=1e-8
    )
    if n == 5:
        (_, points), _ = oracles.adversarial_configurations(A, 2.0, n)
        found = oracles.local_constants(points, oracles.uniform_log_weights(n), identity_layer(A))
        assert found.particle == pytest.approx(expected, rel=1e-8)


def best_at_the_ends(radius: float) -> float:
    """The largest norm over the light weight, golden section in log a, d = 1, A = −1."""
    low, high = -3 * radius**2 - 3, math.log(0.5)

    def norm(log_a: float) -> mp.mpf:
        return oracles.two_dirac_constants(-1, radius, log_a, one_dimensional=True)[0]

    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(40):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if norm(left) > norm(right) else (left, high)
    return float(norm((low + high) / 2))


@pytest.mark.parametrize(
    ("radius", "expected"),
    [(1, 3.068679561), (1.5, 18.17853104), (2, 165.8455191), (2.5, 2329.088241), (3, 50897.67091)],
)
def test_the_best_two_atoms_in_one_dimension_have_the_reference_constants(radius, expected):
    best = best_at_the_ends(radius)
    assert best == pytest.approx(expected, rel=1e-8)
    growth = oracles.two_dirac_growth(-1, radius)
    assert 0.97 * best < growth < best
    rng, layer_ = np.random.default_rng(9), identity_layer(-np.eye(1))
    for _ in range(100):
        points = radius * np.append(rng.uniform(-1, 1, (1, 1)), [[rng.choice([-1, 1])]], axis=0)
        odds = rng.uniform(-3 * radius**2, 3 * radius**2)
        logs = -np.logaddexp(0, [odds, -odds])
        assert oracles.local_constants(points, logs, layer_).wasserstein < best * (1 + 1e-9)


def test_two_atoms_in_a_small_ball_are_best_when_they_coincide():
    assert best_at_the_ends(0.5) < 1
    points, logs = np.full((2, 1), 0.3), np.log([0.2, 0.8])
    constants = oracles.local_constants(points, logs, identity_layer(-np.eye(1)))
    assert constants.wasserstein == pytest.approx(1, rel=1e-14)


@pytest.mark.parametrize("g", [0.01, 1.0, 30.0])
def test_the_growth_formula_is_largest_at_its_own_attention(g):
    best = oracles.two_dirac_growth(-g, 1)
    scanned = max(oracles.two_dirac_growth(-g, 1, t) for t in np.linspace(0, 1, 20001))
    assert best >= scanned * (1 - 1e-14)
    assert best == pytest.approx(scanned, rel=1e-7)
    if g == 30:
        assert best == pytest.approx(oracles.two_dirac_growth_limit(-g, 1), rel=0.03)


@quick
@given(problems(max_particles=1, layer_kinds=("bilinear",), causal=False))
def test_the_growth_formula_is_a_lower_bound_for_any_matrix(problem):
    A = problem.layer["query"][0]
    pairs = [pair for pair in oracles.real_eigenpairs(A) if pair[0] < 0]
    for gamma, u in pairs[:1]:
        radius, t = 1.3, 0.3
        log_odds = math.log(t / (1 - t)) + 2 * gamma * radius**2
        logs = -np.logaddexp(0, [-log_odds, log_odds])
        points = radius * np.stack([u, -u])
        norm = oracles.local_constants(points, logs, identity_layer(A)).particle
        assert norm >= oracles.two_dirac_growth(gamma, radius, t) * (1 - 1e-12)


# ------------------------------------------------------------------ Gaussians


def gaussian_grid(seed: int) -> tuple[np.ndarray, ...]:
    """The mean and covariance of a Gaussian of the plane, and the nodes and weights for it."""
    rng = np.random.default_rng(seed)
    mean, root = rng.normal(size=2), 0.3 * rng.normal(size=(2, 2))
    nodes, mass = np.polynomial.hermite_e.hermegauss(10)
    grid = np.stack(np.meshgrid(nodes, nodes), -1).reshape(-1, 2) @ root.T + mean
    return mean, root @ root.T, grid, np.outer(mass, mass).ravel() / mass.sum() ** 2


@pytest.mark.parametrize("kind", ["bilinear", "biased"])
def test_the_gaussian_image_is_the_quadrature(kind):
    mean, covariance, grid, weights = gaussian_grid(10)
    fields = layer(np.random.default_rng(10), 2, kind)
    image = oracles.attention_map(grid, np.log(weights), fields)
    found_mean = weights @ image
    found_covariance = (image - found_mean).T @ (weights[:, None] * (image - found_mean))
    expected_mean, expected_covariance = oracles.gaussian_image(mean, covariance, fields)
    np.testing.assert_allclose(found_mean, expected_mean, atol=1e-6)
    np.testing.assert_allclose(found_covariance, expected_covariance, atol=1e-6)
    velocity = image - image.mean(0)
    mixed = (weights[:, None] * (grid - mean)).T @ velocity
    mean_rate, covariance_rate = oracles.gaussian_rates(mean, covariance, fields)
    np.testing.assert_allclose(mean_rate, found_mean, atol=1e-6)
    np.testing.assert_allclose(covariance_rate, mixed + mixed.T, atol=1e-6)


# ------------------------------------------------------------------ bounds


@quick
@given(problems(layer_kinds=("bilinear",), cloud_kinds=("ball", "sphere", "duplicates")))
def test_no_local_constant_exceeds_its_upper_bounds(problem):
    measure, mask = parts(problem)
    constants = oracles.local_constants(*measure, **mask)
    radius = float(np.linalg.norm(problem.points, axis=1).max())
    norms = [np.linalg.norm(problem.layer[name][0], 2) for name in ("query", "value")]
    assume(norms[0] * radius**2 < 300)  # where the bound is a float
    uniform = oracles.local_constants(
        problem.points, oracles.uniform_log_weights(len(problem.points)), problem.layer, **mask
    )
    n = len(problem.points)
    assert uniform.euclidean <= oracles.general_bound(*norms, radius, n) * (1 + 1e-12)
    # Hardy's inequality gives masked layers at most twice the bound of plain ones.
    hardy = 2 if problem.causal else 1
    bound = oracles.mean_field_bound(*norms, radius)
    assert constants.wasserstein <= hardy * bound * (1 + 1e-12)


def test_the_mean_field_bound_is_attained_by_a_point_at_the_origin():
    points, logs = np.zeros((1, 2)), np.zeros(1)
    V = np.array([[1.0, 2.0], [0.0, 1.0]])
    constants = oracles.local_constants(points, logs, identity_layer(np.eye(2), V))
    bound = oracles.mean_field_bound(1.0, float(np.linalg.norm(V, 2)), 0.0)
    assert constants.wasserstein == pytest.approx(bound, rel=1e-14)


@pytest.mark.parametrize("seed", range(12))
def test_the_adversarial_inputs_reach_the_lower_bound(seed):
    rng = np.random.default_rng(seed)
    d, n, radius = 1 + seed % 4, 6, float(rng.choice([0.5, 1.5, 3.0]))
    A = rng.normal(size=(d, d))
    reached = 0.0
    for gamma, points in oracles.adversarial_configurations(A, radius, n):
        logs = oracles.uniform_log_weights(n)
        norm = oracles.local_constants(points, logs, identity_layer(A)).euclidean
        branch = math.sqrt(n - 1) / (1 + (n - 1) * math.exp(-2 * gamma * radius**2))
        assert norm >= branch * (1 - 1e-12)
        assert np.linalg.norm(points, axis=1).max() <= radius * (1 + 1e-12)
        reached = max(reached, branch)
    assert reached == pytest.approx(oracles.tightness_lower_bound(A, radius, n), rel=1e-12)


def test_a_rotation_has_no_real_eigenvalue_and_no_lower_bound():
    A = np.array([[0.0, -1.0], [1.0, 0.0]])
    assert oracles.adversarial_configurations(A, 1.0, 5) == []
    assert oracles.tightness_lower_bound(A, 1.0, 5) == 0


# ------------------------------------------------------------------ Sinkhorn attention


def test_the_sinkhorn_plan_is_the_solution_of_the_dual_problem():
    rng = np.random.default_rng(15)
    a, scores = rng.dirichlet(np.ones(4)), rng.normal(size=(4, 4))

    def dual(f_and_g: np.ndarray) -> tuple[float, np.ndarray]:
        f, g = np.split(f_and_g, 2)
        plan = np.outer(a, a) * np.exp(f[:, None] + scores + g)
        gradient = np.concatenate([plan.sum(1) - a, plan.sum(0) - a])
        return plan.sum() - a @ f - a @ g, gradient

    answer = minimize(dual, np.zeros(8), jac=True, method="BFGS", options={"gtol": 1e-9})
    f, g = np.split(answer.x, 2)
    expected = np.outer(a, a) * np.exp(f[:, None] + scores + g)
    plan = oracles.sinkhorn_plan(scores, np.log(a), sweeps=300)
    np.testing.assert_allclose(plan.sum(0), a, rtol=1e-13)
    np.testing.assert_allclose(plan.sum(1), a, rtol=1e-12)
    np.testing.assert_allclose(plan, expected, rtol=1e-6)


# ------------------------------------------------------------------ L2 attention


def test_l2_attention_is_dot_product_attention_with_key_weights():
    rng = np.random.default_rng(13)
    (n, d, k), W, V = (5, 4, 2), rng.normal(size=(2, 4, 2)), rng.normal(size=(2, 4, 2))
    X, output = rng.normal(size=(n, d)), rng.normal(size=(4, 3))
    expected = np.zeros((n, 3))
    for h in range(2):
        A = W[h] @ W[h].T / math.sqrt(k)
        reweighted = -np.array([y @ A @ y for y in X])
        M = (A @ V[h] @ output[2 * h : 2 * h + 2]).T
        fields = {
            "query": 2 * A[None],
            "key": np.eye(d)[None],
            "value": np.eye(d)[None],
            "output": M[None],
            "scale": 1.0,
        }
        expected += oracles.attention_map(X, reweighted, fields)
    np.testing.assert_allclose(oracles.l2_attention(X, W, V, output), expected, rtol=1e-11)


def test_l2_attention_is_the_map_with_the_l2_kernel():
    rng = np.random.default_rng(17)
    W, V, output, X = (rng.normal(size=s) for s in [(2, 4, 2), (2, 4, 2), (4, 4), (3, 4)])
    values = np.stack([(W[h] @ W[h].T @ V[h] / math.sqrt(2)).T for h in range(2)])
    keys = W.transpose(0, 2, 1)
    outputs = np.stack([output[:2].T, output[2:].T])
    fields = {"query": keys, "key": keys, "value": values, "output": outputs}
    logs = oracles.uniform_log_weights(3)
    found = oracles.attention_map(X, logs, fields, kernel="l2")
    np.testing.assert_allclose(oracles.l2_attention(X, W, V, output), found, rtol=1e-11)


@pytest.mark.parametrize(
    ("n", "a", "b", "expected"),
    [
        (2, 1.4073, 0, 1.6016),
        (5, 1.4237, 1.4237, 3.1078),
        (10, 1.5601, 1.5072, 4.4074),
        (20, 1.6663, 1.6403, 5.9333),
        (50, 1.8223, 1.8123, 8.2098),
    ],
)
def test_l2_attention_has_the_reference_norms(n, a, b, expected):
    # The worst input in one dimension: a token at 0 amid two clusters, at a and −b.
    points = np.array([0.0] + [a] * (n // 2) + [-b] * ((n - 1) // 2))[:, None]
    logs, fields = oracles.uniform_log_weights(n), identity_layer(np.eye(1))
    row = oracles.jacobian_by_complex_step(
        lambda Y: oracles.field(Y[0], Y, logs, fields, kernel="l2"), points
    )
    assert np.abs(row).sum() == pytest.approx(expected, abs=1e-4)
    assert expected < oracles.l2_bound_inf(n, *np.ones((2, 1, 1, 1)), np.ones((1, 1)))


def test_the_l2_bounds_have_the_reference_values():
    one = np.ones((1, 1, 1))
    found = [oracles.l2_bound_inf(n, one, one, one[0]) for n in (2, 5, 10, 20, 50)]
    np.testing.assert_allclose(found, [2.11, 3.87, 5.40, 7.09, 9.54], atol=0.006)


@pytest.mark.parametrize("seed", range(30))
def test_l2_attention_stays_below_its_bounds(seed):
    rng = np.random.default_rng(seed)
    n, k, n_heads = int(rng.integers(2, 7)), int(rng.integers(1, 3)), int(rng.integers(1, 3))
    d = k * n_heads
    W, V = rng.normal(size=(2, n_heads, d, k))
    output = rng.normal(size=(d, d))
    X = rng.choice([0.3, 1.0, 3.0]) * rng.normal(size=(n, d))
    J = oracles.jacobian_by_complex_step(lambda Y: oracles.l2_attention(Y, W, V, output), X)
    assert np.abs(J).sum(1).max() <= oracles.l2_bound_inf(n, W, V, output)
    assert np.linalg.norm(J, 2) <= oracles.l2_bound_2(n, W, V, output)
