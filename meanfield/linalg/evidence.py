"""What comes back beside a norm: the evidence for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from meanfield.errors import ConvergenceError

__all__ = ["MISS", "NormEstimate", "checked", "start_tangent", "upper_end"]

# The probability, over the random start, that `NormEstimate.upper` is below the norm.
MISS = 1e-3


@dataclass(frozen=True, eq=False)
class NormEstimate:
    """An estimate of ‖J‖₂ and its evidence; every tensor has the map's batch shape.

    Attributes:
        value: σ = ‖J v‖ for the unit vector v = `direction`: a lower bound of the norm up to
            rounding, whatever the iteration did.
        residual: ‖Jᵀu − σv‖/σ with u = Jv/σ (relative): a singular value of J lies within
            residual · value of `value`.
        error: relative distance to that singular value, at most the residual r, and at most
            r²/(2·gap) (Kato–Temple) with the relative gap to the second singular value. The
            gap is taken from the second Ritz value and its residual.
        upper: ‖J‖₂ is at most this, up to rounding. After a factorisation that is certain;
            after a Krylov iteration it holds with probability 1 − 10⁻³ over the random start,
            whatever J is, see `upper_end`. Residuals speak of the nearest singular value only;
            this tells how much larger a one may have been missed.
        converged: whether the error is at most the rtol asked for.
        n_matvecs: products with J; as many with Jᵀ were made. 0 for a dense factorisation.
        direction: v, shape (*batch, n, d).
    """

    value: Tensor
    residual: Tensor
    error: Tensor
    upper: Tensor
    converged: Tensor
    n_matvecs: int
    direction: Tensor


def checked(estimate: NormEstimate, rtol: float, strict: bool) -> NormEstimate:
    """The estimate, refused when it has not converged and `strict`."""
    if strict and not bool(estimate.converged.all()):
        raise ConvergenceError(
            f"operator_norm: relative error {float(estimate.error.max()):.2e} is above "
            f"rtol = {rtol:.2e} after {estimate.n_matvecs} products; raise max_steps or rtol, "
            "or pass strict=False for the flagged estimate"
        )
    return estimate


def upper_end(tangent: float, steps: int) -> float:
    """cosh(arsinh(tan φ) / (2k − 1)), the largest ‖J‖₂ / σₖ after k steps.

    φ is the angle between the start b and the top right singular vectors of J, σₖ the largest
    singular value of the bidiagonal matrix. Derived here, in the manner of Kuczyński and
    Woźniakowski (SIAM J. Matrix Anal. Appl. 13, 1992, 1094–1122), who bound the probability: let
    ‖J‖ = 1 and 1 − ε = σₖ². As σₖ² is the maximum of ⟨x, JᵀJx⟩/‖x‖² over x = q(JᵀJ)b with
    polynomials q of degree < k,

        ε q(1)² cos² φ ≤ sin² φ · max_{0 ≤ λ ≤ 1−ε} q(λ)² (1 − ε − λ)   for all of them.

    With λ = (1 − ε)(1 − t²), t q(λ) is an odd polynomial of degree 2k − 1 in t. Put the Chebyshev
    polynomial there: at λ = 1, t = i sinh α with ε = tanh² α, and what is left is
    tan φ ≥ sinh((2k − 1) α), while 1/σₖ = cosh α.
    """
    ratio = math.asinh(tangent) / (2 * steps - 1)
    return math.cosh(ratio) if ratio < 700 else math.inf


def start_tangent(size: int, hinted: bool, miss: float) -> float:
    """tan φ that the start of an iteration stays below with probability 1 − miss.

    The random part r is uniform on the sphere of R^N: |⟨r, v⟩| ≤ t has probability at most
    t √(2(N−1)/π), and for N ≥ 3 shifting the interval by a hint makes it no likelier. Beside a
    hint of the same length, cos φ ≥ t/2. For N ≤ 2 hints are not used.
    """
    if size == 1:
        return 0.0
    cosine = miss / math.sqrt(2 * (size - 1) / math.pi) / (2 if hinted and size > 2 else 1)
    return math.sqrt(1 - cosine**2) / cosine
