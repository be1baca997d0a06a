"""Running averages: the steps by hand that lead from norms of one kernel to d_p constants."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from meanfield import AttentionParameters, SelfAttention, bounds, sampling


@pytest.mark.parametrize("p", [1.3, 2.0, 4.0])
def test_slopes_of_tangents_have_the_norm_that_is_claimed(p):
    """∫₀^∞ M^p = (1/(p−1)) ∫f^p for M(g) = sup_y F(y)/(y+g), F = ∫₀f, f decreasing."""
    rng = np.random.default_rng(0)
    for _ in range(3):
        widths, heights = rng.exponential(size=6), np.sort(rng.exponential(size=6))[::-1]
        y, F = np.cumsum(widths), np.cumsum(widths * heights)

        log_g = np.linspace(-30, 20, 400_001)
        slopes = np.zeros_like(log_g)
        for corner, value in zip(y, F, strict=True):  # where the maximum is, on a step function
            slopes = np.maximum(slopes, value / (corner + np.exp(log_g)))
        found = np.trapezoid(slopes**p * np.exp(log_g), log_g)
        found += F[-1] ** p * math.exp(20 * (1 - p)) / (p - 1)  # beyond, M = F(∞)/g
        assert found == pytest.approx((widths * heights**p).sum() / (p - 1), rel=1e-5)


def laws(count: int, seed: int):
    """Random laws P of the attention at one query: c, weights, points in the ball, a unit e."""
    rng = np.random.default_rng(seed)
    for k in range(count):
        d, n = 1 + k % 3, int(rng.integers(2, 6))
        weight = rng.dirichlet(np.full(n, 0.4))
        y = rng.normal(size=(n, d))
        y /= np.linalg.norm(y, axis=1, keepdims=True)
        if k % 4 == 0:
            y *= rng.uniform(size=(n, 1))
        if k % 5 == 0:
            y = np.sign(y[:, :1]) * np.eye(d)[:1]
        e = rng.normal(size=d)
        e = np.eye(d)[0] if k % 5 == 0 else e / np.linalg.norm(e)
        yield float(np.exp(rng.uniform(-2, 2.5))), weight, y, e


def kernel(c: float, weight: np.ndarray, y: np.ndarray, e: np.ndarray):
    """w, its infimum over the ball, e + su and the mean of y, u = c times the first axis."""
    light = weight @ np.exp(-c * y[:, 0])
    mean = weight @ y
    turned = e + ((y - mean) @ e)[:, None] * c * np.eye(len(e))[0]
    return np.exp(c * y[:, 0]) * light, light * math.exp(-c), turned, mean


def test_the_two_norms_of_one_law_are_bounded_together():
    worst_mean = worst_top = 0.0
    for c, weight, y, e in laws(4000, 0):
        w, least, turned, mean = kernel(c, weight, y, e)
        assert weight @ (1 / w) == pytest.approx(1)  # μ has mass 1
        size, kappa = np.linalg.norm(turned, axis=1), 1 + 2 * c
        rho = np.linalg.norm(mean)
        above = weight @ np.maximum(size - kappa / w, 0)
        bound = math.sqrt(max((1 - least) * (1 + c * c * (1 - rho**2)), 0))
        assert above <= bound * (1 + 1e-9) + 1e-12
        top = least * math.exp(2 * c) * (1 + c * (1 + rho))
        assert (w * size).max() <= top * (1 + 1e-9)
        worst_mean, worst_top = (
            max(worst_mean, above / max(bound, 1e-9)),
            max(worst_top, (w * size / top).max()),
        )
    assert worst_mean > 0.9 and worst_top > 0.9


def test_on_the_line_the_parts_of_the_kernel_are_bounded_together():
    reached = np.zeros(4)
    for c, weight, y, e in laws(4000, 1):
        if len(e) > 1:
            continue
        w, _, turned, mean = kernel(c, weight, y, e)
        t, signed = (1 + mean[0]) / 2, turned[:, 0] * e[0]
        plus, minus = np.maximum(signed, 0), np.maximum(-signed, 0)
        found = np.array([weight @ plus, (w * plus).max(), weight @ minus, (w * minus).max()])
        bound = np.array(
            [
                t * (1 + 2 * (1 - t) * c) + (1 - t) * max(1 - 2 * t * c, 0),
                ((1 - t) * math.exp(2 * c) + t) * (1 + 2 * (1 - t) * c),
                max(2 * c - 1, 0) ** 2 / (8 * c),
                max(1.0, math.exp(-2) * (math.exp(2 * c - 1) / (2 * c) + 1)),
            ]
        )
        assert (found <= bound * (1 + 1e-9) + 1e-12).all()
        reached = np.maximum(reached, found / np.maximum(bound, 1e-300) * (bound > 0))
    assert (reached > 0.3).all() and (reached[:2] > 0.99).all()


def test_masked_lower_bounds_near_order_one_are_infinite_where_they_leave_the_range():
    assert bounds.masked_two_dirac_lower(350.0, 1.0, p=1 + 1e-12) == math.inf


@pytest.mark.parametrize("p", [1.5, 2.0, 3.0])
def test_knowing_more_of_a_layer_never_loosens_its_bound(p):
    c = np.linspace(0, 15, 301)
    anywhere, line = (bounds.masked_mean_field(c, 1.0, 1.0, p=p, dim=d) for d in (None, 1))
    lower = bounds.masked_two_dirac_lower(c, 1.0, p=p)
    assert (lower <= line).all() and (line <= anywhere).all() and (line < anywhere).any()
    np.testing.assert_array_equal(anywhere, bounds.masked_mean_field(c, 1.0, 1.0, p=p, dim=7))


def test_a_cap_that_does_not_cut_is_no_better_than_the_scores_without_it():
    c = np.linspace(0, 15, 301)
    capped = bounds.capped_mean_field(c, 1.0, 1.0, 1e9, causal=True)
    assert (bounds.masked_mean_field(c, 1.0, 1.0) <= capped * (1 + 1e-6)).all()


def order_norm(J: np.ndarray, weights: np.ndarray, p: float) -> float:
    """max ‖Jf‖_p/‖f‖_p, 1 < p < ∞, over what Boyd's power iteration finds from three starts."""
    root, rng, best = weights ** (1 / p), np.random.default_rng(0), 0.0
    M = root[:, None] * J / root
    for _ in range(3):
        f = rng.normal(size=len(weights))
        for _ in range(60):
            g = M @ f
            dual = M.T @ (np.sign(g) * np.abs(g) ** (p - 1))
            f = np.sign(dual) * np.abs(dual) ** (1 / (p - 1))
            f /= max(np.linalg.norm(f, p), 1e-300)
        best = max(best, float(np.linalg.norm(M @ f, p)))
    return best


@pytest.mark.parametrize("p", [1.5, 2.0, 3.0])
def test_the_interleaved_family_comes_near_and_exceeds_nothing(p):
    F = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]), causal=True)
    for c, share in ((1.0, 0.4), (4.0, 0.75), (9.0, 0.8)):
        ratio = bounds.two_dirac_best_log_ratio(1.0, math.sqrt(c), p=p)
        mu = sampling.interleaved_diracs(math.sqrt(c), ratio, [1.0], scales=60, growth=1.5)
        J = torch.func.jacrev(lambda y, mu=mu: F(mu.replace(y)).points)(mu.points)[:, 0, :, 0]
        found = order_norm(J.numpy(), mu.weights.numpy(), p)
        upper = bounds.masked_mean_field(c, 1.0, 1.0, p=p, dim=1)
        assert share * bounds.masked_two_dirac_lower(c, 1.0, p=p) < found <= upper
