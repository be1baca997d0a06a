"""How much larger than what a Krylov iteration found the norm may be."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meanfield.checks import to_host
from meanfield.linalg.bidiagonalisation import Steps

# The interval of possible norms is searched until it is this short, relative to σ, in at most so
# many rounds; mostly it takes ten.
_WIDTH, _ROUNDS = 1e-14, 100
# Logarithms of larger sums may leave the number range.
_MOST = 700.0
# Entries of B, relative to σ, that stand for smaller ones: their inverses stay in range.
_LEAST = 1e-290

# The entries of B and their inverses, one after another: each a number, or one for each map.
_Links = list[tuple[Any, Any]]


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
    top, links = _in_units_of_sigma(sigma, steps)
    low, high = np.full_like(top, _WIDTH / 4), np.full_like(top, _worst_excess(tangent, links))
    with np.errstate(all="ignore"):
        below, above = (_log_sum(1 + end, links, tangent) for end in (low, high))
        high, last = np.where(below > 0, low, high), np.zeros_like(top)
        for _ in range(_ROUNDS):
            if not (high - low > _WIDTH).any():
                break
            # The secant in log (s − 1), in which the logarithm of the sum is nearly straight; an
            # end that stays counts half (Illinois), and the next point comes nearer to it.
            point = np.log(low) * above - np.log(high) * below
            point = np.exp(point / (above - below)) - last * _WIDTH / 2
            point = np.fmin(np.fmax(point, low + _WIDTH / 4), high - _WIDTH / 4)
            found = _log_sum(1 + point, links, tangent)
            side = np.where(found > 0, 1.0, -1.0)
            again = np.where(side == last, 0.5, 1.0)
            below, above = np.where(side > 0, (again * below, found), (found, again * above))
            low, high = np.where(side > 0, (low, point), (point, high))
            last = side
    upper = (1 + high) * top * (1 + torch.finfo(sigma.dtype).eps)
    return torch.from_numpy(upper).to(sigma)


def is_at_most(ends: Tensor, sigma: Tensor, steps: Steps, tangent: float) -> Tensor:
    """Whether `upper_end` is at most these, (b,): one sum in place of a search for the root."""
    top, links = _in_units_of_sigma(sigma, steps)
    end = to_host(ends.double())
    with np.errstate(all="ignore"):
        below = end >= (1 + _worst_excess(tangent, links)) * top
        return torch.from_numpy(below | (_log_sum(end / top, links, tangent) > 0))


def _in_units_of_sigma(sigma: Tensor, steps: Steps) -> tuple[np.ndarray, _Links]:
    """σ (b,), and what the αⱼ and βⱼ may be at most, beside σ where it is not 0."""
    top = to_host(sigma.double())
    links = steps.limits / np.where(top > 0, top, 1.0)[:, None]
    inverses = np.where(links > 0, 1 / np.maximum(links, _LEAST), 0.0)
    if len(top) == 1:  # Python's numbers take a tenth of the time of arrays of one
        return top, list(zip(links[0].tolist(), inverses[0].tolist(), strict=True))
    return top, list(zip(links.T, inverses.T, strict=True))


def _worst_excess(tangent: float, links: _Links) -> float:
    return worst_upper_end(tangent, len(links) // 2) - 1.0


def _log_sum(s: np.ndarray, links: _Links, tangent: float) -> np.ndarray:
    """log of the larger of Σⱼ aⱼ(s)² and Σⱼ bⱼ(s)² over 1/cos² φ, for s (b,): if > 0 not possible.

    With α₁, β₁, α₂ … and a₁, b₁, a₂ … in one row each both recurrences are one.
    """
    at: Any = s.item() if s.size == 1 else s
    x, before, link = 1.0 + 0 * at, 0.0, 0.0
    sums: list[Any] = [1.0, 0.0]
    for index, (length, inverse) in enumerate(links, 1):
        # Beyond the end of the space, where the inverse is 0, nothing more is learnt.
        x, before, link = (at * x - link * before) * inverse, x, length
        sums[index % 2] = sums[index % 2] + x * x
    log = np.log(np.maximum(*sums) / (1.0 + tangent**2))
    # A sum that left the number range, and then perhaps is no number, is large.
    return np.where(log < _MOST, log, _MOST).reshape(s.shape)


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
    cosine = miss / per_share(size)
    return math.sqrt(1 - cosine**2) / cosine


def per_share(size: int) -> float:
    """The probability that |⟨r, v⟩| ≤ t is at most this times t, see `start_tangent`."""
    return max(1.0, math.sqrt(2 * (size - 1) / math.pi))
