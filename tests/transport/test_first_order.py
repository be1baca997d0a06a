"""W₁: certified intervals against SciPy, nearest neighbours, and what an answer says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meanfield.measures import ParticleMeasure
from tests.transport.transport_oracles import solve_w1

seeds = st.integers(0, 2**31)


def measure(points: np.ndarray, weights: np.ndarray) -> ParticleMeasure:
    return ParticleMeasure(torch.as_tensor(points), torch.as_tensor(weights))


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
