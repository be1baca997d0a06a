"""What comes back beside a norm: the evidence for it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from meanfield.errors import ConvergenceError

__all__ = ["NormEstimate", "checked"]


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
        converged: whether the error is at most the rtol asked for.
        n_matvecs: products with J; as many with Jᵀ were made. 0 for a dense factorisation.
        direction: v, shape (*batch, n, d).
    """

    value: Tensor
    residual: Tensor
    error: Tensor
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
