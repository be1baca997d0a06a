"""W₁: certified intervals against linear programming, SciPy and clusters solved by themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meanfield.measures import ParticleMeasure
from meanfield.transport import w1
from tests.transport.transport_oracles import linear_program_w1, solve_w1

seeds = st.integers(0, 2**31)


def measure(points: np.ndarray, weights: np.ndarray) -> ParticleMeasure:
    return ParticleMeasure(torch.as_tensor(points), torch.as_tensor(weights))


@given(seeds, st.integers(1, 6), st.integers(1, 6), st.integers(1, 3), st.booleans())
@settings(max_examples=60)
def test_it_agrees_with_linear_programming(
    seed: int, n: int, m: int, d: int, duplicates: bool
) -> None:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(n, d)), rng.normal(size=(m, d))
    if duplicates:
        x, y = np.round(x), np.round(y)
    a, b = rng.dirichlet(np.ones(n)), rng.dirichlet(np.ones(m))
    result = solve_w1(measure(x, a), measure(y, b))
    truth = linear_program_w1(x, y, a, b)
    assert float(result.value) == pytest.approx(truth, rel=1e-9, abs=1e-12)
    assert float(result.lower) <= truth * (1 + 1e-9) + 1e-12
    assert float(result.upper) >= truth * (1 - 1e-9) - 1e-12
    assert result.order == 1
    if result.potentials is not None:
        f, g = (t.numpy() for t in result.potentials)
        cost = np.sqrt(((x[:, None] - y[None]) ** 2).sum(-1))
        assert (f[:, None] + g[None] <= cost + 1e-12).all()


@given(seeds, st.integers(1, 400), st.integers(1, 400))
@settings(max_examples=25)
def test_on_the_line_it_is_scipys(seed: int, n: int, m: int) -> None:
    from scipy.stats import wasserstein_distance

    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=n), 2 * rng.normal(size=m)
    a, b = rng.dirichlet(np.ones(n)), rng.dirichlet(np.ones(m))
    result = solve_w1(measure(x[:, None], a), measure(y[:, None], b))
    truth = wasserstein_distance(x, y, a, b)
    assert float(result.lower) <= truth * (1 + 1e-12)
    assert float(result.upper) >= truth * (1 - 1e-12)
    assert float(result.relative_width) < 1e-9


def test_uniform_points_of_the_line_hardly_moved() -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(500, 1))
    moves = 1e-9 * rng.uniform(size=(500, 1))
    y = (x + moves)[rng.permutation(500)]
    result = solve_w1(torch.as_tensor(x), torch.as_tensor(y))
    assert float(result.value) == pytest.approx(float((np.sort(y, 0) - np.sort(x, 0)).mean()))
    assert float(result.relative_width) < 1e-6
    light = np.append(np.full(499, 1.0), 1e-18) / 499
    held = solve_w1(measure(x, light), measure(y, light[::-1].copy()))
    # Weights of 1e-21 are below the rounding of the others: the interval says so.
    assert float(held.lower) < float(held.upper)


@given(seeds, st.integers(1, 10), st.booleans())
@settings(max_examples=60)
def test_collapsed_clusters(seed: int, collapse: int, permuted: bool) -> None:
    rng = np.random.default_rng(seed)
    centres = np.repeat([[0.0, 0.0], [8.0, 0.0], [0.0, 8.0]], 8, axis=0)
    moves = 10.0**-collapse * rng.normal(size=(2, 24, 2))
    x, y = centres + moves
    weights = np.full(24, 1 / 24)
    blocks = [
        linear_program_w1(x[k : k + 8] - c, y[k : k + 8] - c, np.full(8, 0.125), np.full(8, 0.125))
        for k, c in ((0, centres[0]), (8, centres[8]), (16, centres[16]))
    ]
    truth = float(np.mean(blocks))
    if permuted:
        y = y[rng.permutation(24)]
    result = solve_w1(measure(x, weights), measure(y, weights), strict=False)
    allowed = 1e-6 * truth  # of the linear program, and of centres taken off
    assert float(result.lower) <= truth + allowed
    assert float(result.upper) >= truth - allowed
    assert float(result.value) == pytest.approx(truth, rel=1e-5)
    assert float(result.relative_width) < 1e-4


def test_scales_translations_and_absent_atoms() -> None:
    rng = np.random.default_rng(4)
    x, y = rng.normal(size=(30, 3)), rng.normal(size=(40, 3))
    a, b = rng.dirichlet(np.ones(30)), rng.dirichlet(np.ones(40))
    a[3] = 0
    a /= a.sum()
    base = float(w1(measure(x, a), measure(y, b)))
    for scale in (1e-12, 1e12):
        scaled = solve_w1(measure(x * scale, a), measure(y * scale, b))
        assert float(scaled.value) == pytest.approx(base * scale, rel=1e-12)
    assert scaled.potentials is not None
    f, g = (t.numpy() for t in scaled.potentials)
    cost = np.sqrt(((x[:, None] - y[None]) ** 2).sum(-1)) * 1e12
    assert (f[:, None] + g[None] <= cost * (1 + 1e-12)).all()
    left_out = float(w1(measure(np.delete(x, 3, 0), np.delete(a, 3)), measure(y, b)))
    assert base == pytest.approx(left_out, rel=1e-12)
    # Not above W₂, and a batch is its entries.
    batch = torch.as_tensor(np.stack([x, x + 1.0]))
    both = w1(batch, torch.as_tensor(np.stack([x + 1.0, x])))
    assert both.tolist() == pytest.approx([3**0.5, 3**0.5], rel=1e-12)


def test_a_pair_of_ten_thousand_is_exact_by_nearest_neighbours() -> None:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(10_000, 4))
    y = x + 0.001 * rng.normal(size=x.shape)
    weights = rng.dirichlet(np.ones(len(x)))
    result = solve_w1(measure(x, weights), measure(y, weights))
    truth = float(weights @ np.sqrt(((x - y) ** 2).sum(-1)))
    assert result.method == "identity"
    assert float(result.value) == pytest.approx(truth, rel=1e-12)


def test_what_it_says_of_itself() -> None:
    x = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = x.flip(0) * 2
    assert "order p of Wₚ</th><td>1</td>" in solve_w1(x, y)._repr_html_()
    assert solve_w1(x.float(), y.float()).value.dtype == torch.float32
    with pytest.raises(ValueError, match="rtol"):
        solve_w1(x, y, rtol=2.0)
