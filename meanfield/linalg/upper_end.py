"""How much larger than what a Krylov iteration found the norm may be."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from meanfield.checks import to_host
from meanfield.linalg.bidiagonalisation import Steps

# The interval of possible norms is searched until it is this short, relative to σ.
_WIDTH = 1e-14
# Grid points per round of the search.
_PARTS = 256
# Entries of one such round over a whole batch (float64: 1 MiB).
_ROUND_ENTRIES = 2**17


def upper_end(sigma: Tensor, steps: Steps, tangent: float) -> Tensor:
    """The largest ‖J‖₂ that a bidiagonalisation leaves possible, (b,).

    φ is the angle between the start and the top right singular vectors of J, tan φ ≤ `tangent`. On
    the direction w of a singular value s that the start has a share of, the process acts by
    numbers: ⟨vⱼ, w⟩ = aⱼ(s) cos φ with

        a₁ = 1,   αⱼ bⱼ = s aⱼ − βⱼ₋₁ bⱼ₋₁,   βⱼ aⱼ₊₁ = s bⱼ − αⱼ aⱼ,

    and Bessel's inequality for v₁ … v_{k+1} leaves only the s with Σⱼ aⱼ(s)² ≤ 1/cos² φ. From σₖ
    on the sum, one over the Christoffel function of the start's spectral measure, grows with s:
    its root is sought below `worst_upper_end`. Bessel's inequality holds for the left vectors too,
    with the bⱼ. A remainder at rounding level, which ends the space, may hold a share of w all
    the same, no longer than that level: it stands for αⱼ or βⱼ here. The bound of one term,
    |a_{k+1}| ≤ 1/cos φ, is Hochstenbach's (Probabilistic upper bounds for the matrix two-norm,
    J. Sci. Comput. 57, 2013, 464–476).

    Args:
        sigma: the largest singular value of each bidiagonal matrix, (b,).
        steps: the entries of those matrices.
        tangent: tan φ at most.
    """
    top, alphas, betas = _in_units_of_sigma(sigma, steps)
    parts = max(2, min(_PARTS, _ROUND_ENTRIES // max(len(top), 1)))
    ends = np.arange(1, parts) / parts
    low, width = np.ones_like(top), worst_upper_end(tangent, alphas.shape[-1]) - 1.0
    while width > _WIDTH:
        possible = _are_possible(low + width * ends, alphas, betas, tangent)
        width = width / parts
        low = low + width * possible.sum(-1, keepdims=True)
    upper = (low + width) * top * (1 + torch.finfo(sigma.dtype).eps)
    return torch.from_numpy(upper[:, 0]).to(sigma)


def is_at_most(ends: Tensor, sigma: Tensor, steps: Steps, tangent: float) -> Tensor:
    """Whether `upper_end` is at most these, (b,): one sum in place of a search for the root."""
    top, alphas, betas = _in_units_of_sigma(sigma, steps)
    end = to_host(ends.double())[:, None]
    below = end >= worst_upper_end(tangent, alphas.shape[-1]) * top
    with np.errstate(all="ignore"):
        below |= ~_are_possible(end / top, alphas, betas, tangent)
    return torch.from_numpy(below[:, 0])


def _in_units_of_sigma(sigma: Tensor, steps: Steps) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """σ (b, 1), and what the αⱼ and βⱼ may be at most, beside σ where it is not 0."""
    # Small arrays and many steps: NumPy's are the cheaper ones.
    top = to_host(sigma.double())[:, None]
    scale = np.where(top > 0, top, 1.0)
    return top, to_host(steps.alpha_limits) / scale, to_host(steps.beta_limits) / scale


def _are_possible(
    s: np.ndarray, alphas: np.ndarray, betas: np.ndarray, tangent: float
) -> np.ndarray:
    """Which s (b, t) Bessel's inequality leaves."""
    with np.errstate(all="ignore"):
        return _bessel_sum(s, alphas, betas) <= 1.0 + tangent**2


def _bessel_sum(s: np.ndarray, alphas: np.ndarray, betas: np.ndarray) -> np.ndarray:
    """The larger of Σⱼ aⱼ(s)² and Σⱼ bⱼ(s)², for s (b, t)."""
    a, taken = np.ones_like(s), np.zeros_like(s)
    rights, lefts = a * a, np.zeros_like(s)
    for alpha, beta in zip(alphas.T[..., None], betas.T[..., None], strict=True):
        # Beyond the end of the space there are no vectors, and nothing more is learnt.
        b = np.where(alpha > 0, (s * a - taken) / alpha, 0.0)
        a = np.where(beta > 0, (s * b - alpha * a) / beta, 0.0)
        rights += a * a
        lefts += b * b
        taken = beta * b
    return np.maximum(rights, lefts)


def worst_upper_end(tangent: float, steps: int) -> float:
    """cosh(arsinh(tan φ) / (2k − 1)), the largest ‖J‖₂ / σₖ after k steps, whatever J is.

    With φ and σₖ as in `upper_end`. Derived here, in the manner of Kuczyński and Woźniakowski
    (SIAM J. Matrix Anal. Appl. 13, 1992, 1094–1122), who bound the probability: let ‖J‖ = 1 and
    1 − ε = σₖ². As σₖ² is the maximum of ⟨x, JᵀJx⟩/‖x‖² over x = q(JᵀJ)b with polynomials q of
    degree < k,

        ε q(1)² cos² φ ≤ sin² φ · max_{0 ≤ λ ≤ 1−ε} q(λ)² (1 − ε − λ)   for all of them.

    With λ = (1 − ε)(1 − t²), t q(λ) is an odd polynomial of degree 2k − 1 in t. Put the Chebyshev
    polynomial there: at λ = 1, t = i sinh α with ε = tanh² α, and what is left is
    tan φ ≥ sinh((2k − 1) α), while 1/σₖ = cosh α.
    """
    return math.cosh(math.asinh(tangent) / (2 * steps - 1))


def start_tangent(size: int, miss: float) -> float:
    """tan φ that the start of an iteration stays below with probability 1 − miss.

    The start r is uniform on the sphere of R^N: |⟨r, v⟩| ≤ t has probability at most
    t √(2(N−1)/π) for every unit vector v; for N = 2 it is 2 arcsin(t)/π, at most t.
    """
    if size == 1:
        return 0.0
    cosine = miss / max(1.0, math.sqrt(2 * (size - 1) / math.pi))
    return math.sqrt(1 - cosine**2) / cosine
