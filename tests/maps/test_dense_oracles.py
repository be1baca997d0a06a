"""The oracles of attention against complex steps, high precision and quadrature."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from mpmath import mp

from tests import oracles
from tests.attention import kernel_oracles as slow
from tests.strategies import (
    CLOUDS,
    Problem,
    layer,
    light_atom_problem,
    problems,
)

quick = settings(derandomize=True, deadline=None, max_examples=20)
# "clusters" and "offset" lose digits by cancellation in any float64 formula.
TAME = tuple(kind for kind in CLOUDS if kind not in ("clusters", "offset"))


def made_exact(problem: Problem) -> Problem:
    return problem._replace(
        points=oracles.exact(problem.points),
        log_weights=oracles.exact(problem.log_weights),
        layer=oracles.exact_layer(problem.layer),
    )


def parts(problem: Problem) -> tuple[tuple, dict]:
    return (problem.points, problem.log_weights, problem.layer), problem.mask


def attention_map(problem: Problem, points: np.ndarray) -> np.ndarray:
    case = slow.Case(points, *problem[1:4], ("dot",), ("softmax",), problem.causal)
    return slow.attention_map(case)


@quick
@given(problems(cloud_kinds=TAME))
def test_the_jacobian_formula_is_the_complex_step(problem):
    measure, mask = parts(problem)
    formula = oracles.jacobian(*measure, **mask)
    stepped = oracles.jacobian_by_complex_step(lambda Y: attention_map(problem, Y), problem.points)
    np.testing.assert_allclose(formula, stepped, atol=1e-10 * (1 + np.abs(formula).max()))


@pytest.mark.parametrize(("n", "n_light"), [(2, 1), (3, 1), (3, 2)])
@pytest.mark.parametrize("d", [1, 3])
def test_light_atoms_in_float64_agree_with_mpmath(n, n_light, d):
    problem = light_atom_problem(7, n, d, n_light)
    measure, _ = parts(problem)
    found = oracles.local_constants(*measure)
    with mp.workdps(oracles.DIGITS):
        exact = made_exact(problem)
        measure, _ = parts(exact)
        expected = oracles.local_constants(*measure)
    with mp.workdps(800):  # e^{−900} is 1e-391: enough for it beside 1 in sums that cancel
        stepped = oracles.jacobian_by_complex_step(lambda Y: attention_map(exact, Y), exact.points)
        direct = oracles.largest_singular_value(slow.weighted(stepped, exact.log_weights))
        error = float(abs(expected.particle / direct - 1))
    assert error < 1e-40
    assert expected.particle > mp.mpf(10) ** 150
    # A logit near 900 carries an error of 900 ε into every exponential.
    assert float(found.particle / expected.particle) == pytest.approx(1, rel=1e-12)
    assert found.splitting == pytest.approx(float(expected.splitting), rel=1e-11)


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
    problem = Problem(grid, np.log(weights), None, fields, causal=False)
    image = attention_map(problem, grid)
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
