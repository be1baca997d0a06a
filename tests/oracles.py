"""Slow, dense answers written from the formulas alone, for the library to be compared with.

Nothing here knows the library. Arrays are numpy arrays of float64, of complex128 (complex steps)
or of `mpmath` numbers (dtype object, made by `exact`); the same loops serve all three. A layer is
a mapping with the entries query (H, k, d), key (H, k, d), value (H, v, d), output (H, d_out, v),
query_bias (H, k), value_bias (H, v), output_bias (d_out), scale; only the first three are needed.
A measure is a triple points (n, d), log_weights (n,), positions (n,); weight 0 (log-weight −inf)
is absence. The map itself, of these layers too, is in `attention/kernel_oracles.py`.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from mpmath import mp
from scipy.special import lambertw

Layer = Mapping[str, Any]
Scalar = Any  # float, complex, mp.mpf or mp.mpc

DIGITS = 50


# ------------------------------------------------------------------ numbers of three kinds


def exact(array: Any) -> np.ndarray:
    """The array with each number replaced by the `mpmath` number of the same value."""
    return np.vectorize(mp.mpf, otypes=[object])(np.asarray(array))


def exact_layer(layer: Layer) -> dict[str, Any]:
    """The layer with its arrays made `exact`."""
    kept = {name: value for name, value in layer.items() if value is not None}
    return {name: value if name == "scale" else exact(value) for name, value in kept.items()}


def evaluated(name: str, t: Scalar) -> Scalar:
    """The function of that name, at a number of any of the three kinds."""
    module = mp if isinstance(t, mp.mpf | mp.mpc) else cmath if isinstance(t, complex) else math
    return getattr(module, name)(t)


def exp(t: Scalar) -> Scalar:
    """e^t."""
    return evaluated("exp", t)


def log(t: Scalar) -> Scalar:
    """log t."""
    return evaluated("log", t)


def largest_singular_value(matrix: np.ndarray) -> Scalar:
    """‖M‖₂, in the precision of the entries."""
    if matrix.dtype == object:
        return mp.svd_r(mp.matrix(matrix.tolist()), compute_uv=False)[0]
    return float(np.linalg.svd(matrix, compute_uv=False)[0])


# ------------------------------------------------------------------ a layer


class Heads(NamedTuple):
    """A layer with its defaults filled in."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    output: np.ndarray
    query_bias: np.ndarray
    value_bias: np.ndarray
    output_bias: np.ndarray
    scale: np.ndarray


def heads(layer: Layer) -> Heads:
    """Fill in: output W = identity, biases 0, scale 1/√k."""
    given = {name: value for name, value in layer.items() if value is not None}
    query, key, value = (np.asarray(given[name]) for name in ("query", "key", "value"))
    n_heads, k, _ = query.shape
    v = value.shape[1]
    output = np.asarray(given.get("output", np.broadcast_to(np.eye(v), (n_heads, v, v))))
    return Heads(
        query,
        key,
        value,
        output,
        np.asarray(given.get("query_bias", np.zeros((n_heads, k)))),
        np.asarray(given.get("value_bias", np.zeros((n_heads, v)))),
        np.asarray(given.get("output_bias", np.zeros(output.shape[1]))),
        np.broadcast_to(np.asarray(given.get("scale", 1 / math.sqrt(k))), (n_heads,)),
    )


# ------------------------------------------------------------------ derivatives of any map


def jacobian_by_complex_step(
    function: Callable[[np.ndarray], np.ndarray], at: np.ndarray
) -> np.ndarray:
    """The matrix of DF(X) from Im F(X + i h ε)/h, output entries × input entries.

    Nothing is subtracted, so that h = 1e-30 leaves only rounding. `mpmath` numbers stay such.
    """
    is_exact = at.dtype == object
    step = mp.mpc(0, mp.mpf(10) ** -30) if is_exact else 1e-30j
    columns = []
    for index in np.ndindex(at.shape):
        moved = at + (mp.mpc(0) if is_exact else 0j)
        moved[index] += step
        columns.append([(entry / step.imag).imag for entry in function(moved).ravel()])
    return np.array(columns, dtype=object if is_exact else float).T


# ------------------------------------------------------------------ the Jacobian, from A, b and M


def bilinear(layer: Layer) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Per head A = scale KᵀQ, b = scale Kᵀ b_Q and M = W V: scores ⟨Ax + b, y⟩, values My."""
    p = heads(layer)
    return [
        (
            p.scale[h] * (p.key[h].T @ p.query[h]),
            p.scale[h] * (p.key[h].T @ p.query_bias[h]),
            p.output[h] @ p.value[h],
        )
        for h in range(len(p.query))
    ]


def _log_attention(
    queries: np.ndarray,
    points: np.ndarray,
    log_weights: np.ndarray,
    positions: np.ndarray | None,
    causal: bool,
) -> list[dict[int, Scalar]]:
    """log P_ij for the visible j, row by row; queries are Axᵢ + b."""
    rows = []
    for i in range(len(points)):
        seen = [j for j in range(len(points)) if log_weights[j] > -math.inf]
        if causal:
            seen = [j for j in seen if positions[j] <= positions[i]]
        logits = {j: log_weights[j] + queries[i] @ points[j] for j in seen}
        top = max(logits.values(), default=0.0)
        mass = sum(exp(logit - top) for logit in logits.values())
        rows.append({j: logit - top - log(mass) for j, logit in logits.items()})
    return rows


def _mean_and_covariance(
    log_row: dict[int, Scalar], points: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """mᵢ = Σ_j P_ij x_j and Covᵢ = Σ_j P_ij (x_j − mᵢ)(x_j − mᵢ)ᵀ."""
    mean = sum(exp(log_p) * points[j] for j, log_p in log_row.items())
    covariance = sum(
        exp(log_p) * np.outer(points[j] - mean, points[j] - mean) for j, log_p in log_row.items()
    )
    return mean, covariance


def jacobian(
    points: np.ndarray,
    log_weights: np.ndarray,
    layer: Layer,
    *,
    positions: np.ndarray | None = None,
    causal: bool = False,
    weighted: bool = False,
) -> np.ndarray:
    """Df(X) at fixed weights, shape (n d_out, n d), or D^½ Df(X) D^−½.

    Block (i, j) is Σ_h M {P_ij (I + (x_j − mᵢ)(Axᵢ + b)ᵀ) + δ_ij Covᵢ A}. The weighted factor
    √(aᵢ/a_j) P_ij is formed as one exponential, right for weights far below the smallest float.
    Atoms without mass are absent from the weighted matrix: their rows and columns are 0.
    """
    (n, d), maps = points.shape, bilinear(layer)
    blocks = np.zeros((n, maps[0][2].shape[0], n, d), dtype=points.dtype)
    for A, b, M in maps:
        queries = np.stack([A @ x + b for x in points])
        log_rows = _log_attention(queries, points, log_weights, positions, causal)
        for i, log_row in enumerate(log_rows):
            if not log_row or (weighted and log_weights[i] == -math.inf):
                continue
            mean, covariance = _mean_and_covariance(log_row, points)
            blocks[i, :, i, :] += M @ covariance @ A
            for j, log_p in log_row.items():
                shift = (log_weights[i] - log_weights[j]) / 2 if weighted else 0
                inner = np.eye(d) + np.outer(points[j] - mean, queries[i])
                blocks[i, :, j, :] += exp(log_p + shift) * (M @ inner)
    return blocks.reshape(n * blocks.shape[1], n * d)


def field_jacobians(
    points: np.ndarray,
    log_weights: np.ndarray,
    layer: Layer,
    *,
    positions: np.ndarray | None = None,
    causal: bool = False,
) -> np.ndarray:
    """D_xΓ_μ(sᵢ, xᵢ) = Σ_h M Covᵢ A at fixed μ, shape (n, d_out, d)."""
    total: Any = 0
    for A, b, M in bilinear(layer):
        queries = np.stack([A @ x + b for x in points])
        log_rows = _log_attention(queries, points, log_weights, positions, causal)
        parts = [_mean_and_covariance(row, points)[1] for row in log_rows]
        total = total + np.stack([M @ covariance @ A for covariance in parts])
    return total


# ------------------------------------------------------------------ local constants


class LocalConstants(NamedTuple):
    """‖D^½JD^−½‖, maxᵢ ‖D_xΓ_μ(xᵢ)‖ and ‖J‖ at one measure."""

    particle: Scalar
    splitting: Scalar
    euclidean: Scalar

    @property
    def wasserstein(self) -> Scalar:
        """The larger of the first two: the local constant for uniformly small displacements.

        Not the limit of all W₂ ratios at μ: a vanishing mass may also move far, and pays the
        secant slope of Γ_μ there. The supremum over all measures of a ball is the same.
        """
        return max(self.particle, self.splitting)


def local_constants(
    points: np.ndarray,
    log_weights: np.ndarray,
    layer: Layer,
    *,
    positions: np.ndarray | None = None,
    causal: bool = False,
) -> LocalConstants:
    """The three constants by dense singular value decompositions; atoms of weight 0 dropped."""
    alive = np.array([log_weight > -math.inf for log_weight in log_weights])
    measure = (points[alive], log_weights[alive], layer)
    mask = {"positions": None if positions is None else positions[alive], "causal": causal}
    slopes = field_jacobians(*measure, **mask)
    return LocalConstants(
        largest_singular_value(jacobian(*measure, **mask, weighted=True)),
        max(largest_singular_value(slope) for slope in slopes),
        largest_singular_value(jacobian(*measure, **mask)),
    )


# ------------------------------------------------------------------ two atoms at ±Ru


def two_dirac_constants(
    gamma: float, radius: float, log_light: float, *, one_dimensional: bool = False
) -> tuple[mp.mpf, mp.mpf]:
    """(particle, splitting) for V = I, symmetric A, Au = γu, light atom at Ru, heavy at −Ru.

    Along u the 2×2 matrix is the one of d = 1, A = γ. Across u only D^½PD^−½ is left, whatever
    the other eigenvalues, since Covᵢ A and ⟨Axᵢ, ·⟩ vanish there. So the answer depends on (γ, R,
    log a) only. Both 2×2 norms come from σ² = (T + √(T² − 4Δ²))/2, T = ‖·‖_F², Δ = det.
    """
    with mp.workdps(DIGITS):
        g = mp.mpf(gamma) * mp.mpf(radius) ** 2
        log_a = mp.mpf(log_light)
        log_odds = log_a - mp.log1p(-mp.exp(log_a))  # log(a/(1 − a))
        # Attention paid to the light atom: p by itself, t by the heavy atom.
        p, t = 1 / (1 + mp.exp(-log_odds - 2 * g)), 1 / (1 + mp.exp(-log_odds + 2 * g))
        heavy_p, heavy_t = 1 / (1 + mp.exp(log_odds + 2 * g)), 1 / (1 + mp.exp(log_odds - 2 * g))
        root = mp.exp(log_odds / 2)
        across = (p, root * heavy_p, t / root, heavy_t)
        along = (
            p * (1 + 2 * g * heavy_p) + 4 * g * p * heavy_p,
            root * heavy_p * (1 - 2 * g * p),
            t / root * (1 - 2 * g * heavy_t),
            heavy_t * (1 + 2 * g * t) + 4 * g * t * heavy_t,
        )
        norms = [_norm_2x2(*along)] + ([] if one_dimensional else [_norm_2x2(*across)])
        return max(norms), 4 * abs(g) * max(p * heavy_p, t * heavy_t)


def _norm_2x2(a: mp.mpf, b: mp.mpf, c: mp.mpf, d: mp.mpf) -> mp.mpf:
    trace, det = a * a + b * b + c * c + d * d, a * d - b * c
    return mp.sqrt((trace + mp.sqrt(max(trace * trace - 4 * det * det, 0))) / 2)


def two_dirac_growth(gamma: float, radius: float, t: float | None = None) -> float:
    """√(t(1 − t)) (1 + 2(1 − t)|γ|R²) e^{|γ|R²}, γ < 0; without t, at the t where it is largest.

    It is the u-u entry (heavy, light) of D^½JD^−½, exactly, hence a lower bound of the norm for
    any A with Au = γu. The best t solves 8g t² − (10g + 2)t + 1 + 2g = 0 with g = |γ|R².
    """
    g = abs(gamma) * radius**2
    if t is None:
        # The smaller root, written without cancellation for small g.
        t = (1 + 2 * g) / (5 * g + 1 + math.sqrt(9 * g * g + 2 * g + 1))
    return math.sqrt(t * (1 - t)) * (1 + 2 * (1 - t) * g) * math.exp(g)


def two_dirac_growth_limit(gamma: float, radius: float) -> float:
    """(3√3/8)|γ|R² e^{|γ|R²}, the leading term of the best growth as |γ|R² → ∞."""
    g = abs(gamma) * radius**2
    return 3 * math.sqrt(3) / 8 * g * math.exp(g)


# ------------------------------------------------------------------ adversarial inputs


def real_eigenpairs(A: np.ndarray) -> list[tuple[float, np.ndarray]]:
    """Real eigenvalues of a general A, increasing, with unit eigenvectors."""
    values, vectors = np.linalg.eig(A)
    pairs = [
        (float(value.real), vectors[:, i].real / np.linalg.norm(vectors[:, i].real))
        for i, value in enumerate(values)
        if value.imag == 0
    ]
    return sorted(pairs, key=lambda pair: pair[0])


def adversarial_configurations(
    A: np.ndarray, radius: float, n: int
) -> list[tuple[float, np.ndarray]]:
    """The witnesses of [CAP24 Prop 3.4] that A allows, as (γ of the branch, points (n, d))."""
    pairs, found = real_eigenpairs(A), []
    if pairs and pairs[0][0] < 0:
        value, u = pairs[0]
        found.append((-value, radius * np.stack([u] + (n - 1) * [-u])))
    if pairs and pairs[-1][0] > 0:
        value, u = pairs[-1]
        found.append((value / 8, radius * np.stack([u] + (n - 1) * [u / 2])))
    return found


# ------------------------------------------------------------------ Gaussians


def gaussian_image(
    mean: np.ndarray, covariance: np.ndarray, layer: Layer
) -> tuple[np.ndarray, np.ndarray]:
    """F(N(m, Σ)) = N(m', Σ') since Γ(x) = c + Σ_h M(m + Σ(Ax + b)) is affine, c of the biases."""
    p = heads(layer)
    constant = p.output_bias + sum(p.output[h] @ p.value_bias[h] for h in range(len(p.output)))
    slope: Any = 0
    for A, b, M in bilinear(layer):
        constant = constant + M @ (mean + covariance @ b)
        slope = slope + M @ covariance @ A
    return constant + slope @ mean, slope @ covariance @ slope.T


def gaussian_rates(
    mean: np.ndarray, covariance: np.ndarray, layer: Layer
) -> tuple[np.ndarray, np.ndarray]:
    """(dm/dt, dΣ/dt) of N(m, Σ) under ẋ = Γ_μ(x): Γ(m) and DΣ + ΣDᵀ, D = Σ_h M Σ A."""
    slope = sum(M @ covariance @ A for A, _, M in bilinear(layer))
    return gaussian_image(mean, covariance, layer)[0], slope @ covariance + covariance @ slope.T


# ------------------------------------------------------------------ L2 attention [KPM21]


def outputs_by_inputs(query: Any, value: Any, output: Any) -> tuple[Any, Any, Any]:
    """The matrices of `l2_attention` as `AttentionParameters.tied_l2` takes them."""
    heads = output.reshape(len(query), -1, output.shape[-1])
    return tuple(matrix.swapaxes(-1, -2) for matrix in (query, value, heads))


def l2_attention(
    points: np.ndarray, query: np.ndarray, value: np.ndarray, output: np.ndarray
) -> np.ndarray:
    """Concatenated heads P X A_h W^V, times W^O; tied keys, A_h = W^Q W^Qᵀ/√k.

    query, value: (H, D, k); output: (H k, D_out). P_ij ∝ exp(−‖W^Qᵀ(xᵢ − x_j)‖²/√k).
    """
    scale = 1 / math.sqrt(query.shape[2])
    rows = []
    for x in points:
        parts = []
        for W, V in zip(query, value, strict=True):
            offsets = [W.T @ (x - y) for y in points]
            p = np.exp(np.array([-scale * (offset @ offset) for offset in offsets]))
            parts.append(p @ np.stack([(y @ W) @ W.T @ V * scale for y in points]) / p.sum())
        rows.append(np.concatenate(parts) @ output)
    return np.stack(rows)


# ------------------------------------------------------------------ bounds


def general_bound(norm_A: float, norm_V: float, radius: float, n: int) -> float:
    """[CAP24 Thm 3.3 and 4.3]: √3 ‖V‖ (‖A‖²R⁴(4n + 1) + n)^½."""
    return math.sqrt(3) * norm_V * math.sqrt(norm_A**2 * radius**4 * (4 * n + 1) + n)


def tightness_lower_bound(A: np.ndarray, radius: float, n: int) -> float:
    """[CAP24 Prop 3.4], V = I: √(n−1)/(1 + (n−1)e^{−2γR²}); 0 if A has no real eigenvalue."""
    values = [value for value, _ in real_eigenpairs(A)]
    if not values:
        return 0.0
    gamma = max(-values[0], values[-1] / 8)
    return math.sqrt(n - 1) / (1 + (n - 1) * math.exp(-2 * gamma * radius**2))


def mean_field_bound(norm_A: float, norm_V: float, radius: float) -> float:
    """[CAP24 Thm 3.5]: ‖V‖ (1 + 3‖A‖R²) e^{2‖A‖R²}."""
    g = norm_A * radius**2
    return norm_V * (1 + 3 * g) * math.exp(2 * g)


def _phi_inverse(y: float) -> float:
    """The x with x e^{x+1} = y."""
    return float(lambertw(y / math.e).real)


def l2_bound_inf(n: int, query: np.ndarray, value: np.ndarray, output: np.ndarray) -> float:
    """[KPM21], ∞-norm; shapes as in `l2_attention`."""
    norm = lambda matrix: float(np.abs(matrix).sum(1).max())  # noqa: E731
    head = 4 * _phi_inverse(n - 1) + 1 / math.sqrt(query.shape[2])
    queries = max(norm(W) * norm(W.T) for W in query)
    return head * norm(output.T) * queries * max(norm(W.T) for W in value)


def l2_bound_2(n: int, query: np.ndarray, value: np.ndarray, output: np.ndarray) -> float:
    """[KPM21], 2-norm, corrected: (√N/√k)(4φ⁻¹(N−1) + 1)(Σ‖W^Q‖⁴‖W^V‖²)^½ ‖W^O‖."""
    norm = lambda matrix: float(np.linalg.norm(matrix, 2))  # noqa: E731
    head = math.sqrt(n / query.shape[2]) * (4 * _phi_inverse(n - 1) + 1)
    pairs = zip(query, value, strict=True)
    return head * math.sqrt(sum(norm(W) ** 4 * norm(V) ** 2 for W, V in pairs)) * norm(output)


# ------------------------------------------------------------------ shares of heads


def head_shares(
    points: np.ndarray,
    log_weights: np.ndarray,
    layer: Layer,
    v: np.ndarray,
    *,
    weighted: bool = False,
    **mask: Any,
) -> np.ndarray:
    """⟨J_h v, J v⟩ / ‖J v‖² per head, from dense Jacobians of one head at a time."""
    p = heads(layer)
    images = []
    for h in range(len(p.query)):
        one = slice(h, h + 1)
        alone = {
            "query": p.query[one],
            "key": p.key[one],
            "value": p.value[one],
            "output": p.output[one],
            "query_bias": p.query_bias[one],
            "value_bias": p.value_bias[one],
            "scale": p.scale[one],
        }
        images.append(jacobian(points, log_weights, alone, weighted=weighted, **mask) @ v)
    total = np.sum(images, axis=0)
    return np.array([image @ total for image in images]) / (total @ total)
