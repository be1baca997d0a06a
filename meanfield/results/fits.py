"""Power laws y ≈ C xᵖ, fitted in logarithms, with bootstrap intervals and an envelope."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from meanfield.results.labels import Variable, dataset

__all__ = ["fit_power"]

_BLOCK = 2_000_000  # resampled weights held at once

_FITTED = (
    Variable("constant", "constant C of y ≈ C xᵖ"),
    Variable("constant_lower", "lower end of the bootstrap interval of C"),
    Variable("constant_upper", "upper end of the bootstrap interval of C"),
    Variable("exponent", "exponent p of y ≈ C xᵖ"),
    Variable("exponent_lower", "lower end of the bootstrap interval of p"),
    Variable("exponent_upper", "upper end of the bootstrap interval of p"),
    Variable("envelope", "largest y / xᵖ"),
    Variable("r_squared", "share of the variance of log y explained"),
    Variable("x_min", "smallest x of the fit"),
    Variable("x_max", "largest x of the fit"),
    Variable("n_points", "points of the fit", dtype="int64"),
)


def fit_power(
    x: Any,
    y: Any,
    *,
    exponent: float | None = None,
    groups: Any = None,
    n_boot: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> xr.Dataset:
    """Fit y ≈ C xᵖ by least squares on log y = log C + p log x.

    Pairs with a NaN are left out (failed cases). The interval is the percentile bootstrap over
    points, or over whole groups when points of a group share their randomness: one text, one
    input. The fit is a mean and bounds nothing; `envelope`, max y / xᵖ, is the constant of the
    smallest power law with this exponent above all the points.

    Args:
        x: positive numbers, any shape.
        y: positive numbers, the same shape.
        exponent: p if it is known (1/2, 1/4 …); fitted if None.
        groups: labels of the same shape, resampled as a whole; each point its own group if None.
        n_boot: bootstrap samples; 0 leaves the intervals NaN.
        level: coverage of the intervals.
        seed: of the resampling.

    Returns:
        A Dataset of scalars: constant, exponent (both with _lower, _upper), envelope, r_squared,
        x_min, x_max, n_points.

    Raises:
        ValueError: shapes differ, numbers that are not positive, fewer than two points, or a
            single x when the exponent is to be fitted.

    Example:
        >>> fit = fit_power([1.0, 4.0, 9.0], [3.0, 6.0, 9.0])
        >>> round(float(fit.exponent), 12), round(float(fit.constant), 12)
        (0.5, 3.0)
    """
    x, y, group = _points(x, y, groups)
    if exponent is None and np.ptp(x) == 0:
        raise ValueError(f"x: expected at least two different values to fit p, got only {x[0]!r}")
    log_x, log_y = np.log(x), np.log(y)
    log_c, p = _solve(log_x, log_y, np.ones((1, len(x))), exponent)
    resampled = _bootstrap(log_x, log_y, group, exponent, n_boot, np.random.default_rng(seed))
    tails = ((1 - level) / 2, (1 + level) / 2)
    lower, upper = np.nanquantile(resampled, tails, axis=1) if n_boot else np.full((2, 2), np.nan)
    residual = log_y - log_c - p * log_x
    total = np.sum((log_y - log_y.mean()) ** 2)
    values = {
        "constant": np.exp(log_c[0]),
        "constant_lower": np.exp(lower[0]),
        "constant_upper": np.exp(upper[0]),
        "exponent": p[0],
        "exponent_lower": lower[1],
        "exponent_upper": upper[1],
        "envelope": np.exp(np.max(log_y - p[0] * log_x)),
        "r_squared": 1 - np.sum(residual**2) / total if total else np.nan,
        "x_min": x.min(),
        "x_max": x.max(),
        "n_points": len(x),
    }
    fixed = int(exponent is not None)
    return dataset(_FITTED, values, attrs={"level": level, "exponent_fixed": fixed})


def _points(x: Any, y: Any, groups: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The pairs without a NaN, flat, with the number of the group of each."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    labels = np.arange(x.size).reshape(x.shape) if groups is None else np.asarray(groups)
    if not x.shape == y.shape == labels.shape:
        raise ValueError(
            f"x, y, groups: expected equal shapes, got {x.shape}, {y.shape}, {labels.shape}"
        )
    kept = ~(np.isnan(x) | np.isnan(y))
    x, y = x[kept], y[kept]
    for name, values in (("x", x), ("y", y)):
        bad = ~(np.isfinite(values) & (values > 0))
        if bad.any():
            raise ValueError(
                f"{name}: expected positive finite numbers, got {int(bad.sum())} others "
                f"(the first is {values[bad][0]}); a power law has none, leave them out"
            )
    if len(x) < 2:
        raise ValueError(f"x, y: expected at least 2 points without NaN, got {len(x)}")
    return x, y, np.unique(labels[kept], return_inverse=True)[1].reshape(-1)


def _solve(
    log_x: np.ndarray, log_y: np.ndarray, weights: np.ndarray, exponent: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """Weighted least squares, one answer per row of weights (b, n): log C and p, each (b,)."""
    mass = weights.sum(axis=1)
    mean_x, mean_y = weights @ log_x / mass, weights @ log_y / mass
    if exponent is not None:
        p = np.full(len(weights), float(exponent))
    else:
        dx = log_x - mean_x[:, None]
        variance = np.sum(weights * dx**2, axis=1)
        covariance = np.sum(weights * dx * (log_y - mean_y[:, None]), axis=1)
        # A resample with a single x has no slope: NaN, which the quantiles pass over.
        p = np.divide(covariance, variance, out=np.full_like(mass, np.nan), where=variance > 0)
    return mean_y - p * mean_x, p


def _bootstrap(
    log_x: np.ndarray,
    log_y: np.ndarray,
    group: np.ndarray,
    exponent: float | None,
    n_boot: int,
    generator: np.random.Generator,
) -> np.ndarray:
    """Resampled (log C, p), shape (2, n_boot)."""
    n_groups = int(group.max()) + 1
    block = max(1, _BLOCK // len(log_x))
    answers = [np.empty((2, 0))]
    for start in range(0, n_boot, block):
        size = min(block, n_boot - start)
        counts = generator.multinomial(n_groups, np.full(n_groups, 1 / n_groups), size=size)
        answers.append(np.stack(_solve(log_x, log_y, counts[:, group].astype(float), exponent)))
    return np.concatenate(answers, axis=1)
