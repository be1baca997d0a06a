"""The operator norm of linear maps."""

from __future__ import annotations

import torch
from torch import Tensor

from meanfield.checks import as_bool, as_generator, choice, count, describe, number
from meanfield.linalg.evidence import NormEstimate, checked
from meanfield.linalg.factorisation import dense_norm, largest_dense
from meanfield.linalg.krylov import krylov_norm
from meanfield.linalg.linear_map import LinearMap

__all__ = ["METHODS", "check_settings", "largest_block_norm", "operator_norm"]

METHODS = ("auto", "dense", "lanczos")

# Below this many rows or columns a factorisation costs less than a Krylov iteration.
DENSE_LIMIT = 192


def operator_norm(
    linear_map: LinearMap,
    *,
    rtol: float = 1e-4,
    upper_rtol: float = 0.01,
    max_steps: int = 300,
    method: str = "auto",
    generator: torch.Generator | None = None,
    strict: bool = True,
    max_basis: int | None = None,
) -> NormEstimate:
    """‖J‖₂ = max ‖Jε‖ / ‖ε‖ (Frobenius norms) of each map in the batch.

    ``"dense"`` assembles the matrices and takes the top eigenpair of their Gram matrices, scaled
    so that entries up to the end of the number range do not overflow. ``"lanczos"`` is
    Golub–Kahan–Lanczos bidiagonalisation with full re-orthogonalisation from a random start,
    restarted when its bases would not fit in memory. It goes on until both hold: the relative
    error of σ, by the residual of its singular triple and the gap below it, is at most `rtol`;
    and `upper` is at most (1 + `upper_rtol`) · σ. The first is about the singular value that
    the iteration has found, the second about the norm, which is the largest of all.

    Gradients go through "dense" only; an iteration records nothing.

    Args:
        linear_map: J.
        rtol: largest estimated relative error that counts as converged; the residual must be at
            most four times that.
        upper_rtol: how far `upper` may be above the value, relatively; `math.inf` to ask for
            the value alone.
        max_steps: largest number of products with J; one more measures the residual.
        method: "dense", "lanczos", or "auto": dense for small matrices.
        generator: of the random start; a fixed seed if None.
        strict: raise when not converged; otherwise the estimate comes back flagged.
        max_basis: vectors kept on either side, at least 2; the iteration then restarts with the
            better half of them. As many as 4 GiB hold if None.

    Raises:
        ValueError: an unknown method, or settings that mean nothing.
        ConvergenceError: not converged after `max_steps` products, if strict.
        OverflowError: the map leaves the number range of its dtype.
    """
    _check_linear_map(linear_map)
    rtol, upper_rtol = check_settings(rtol, upper_rtol, max_steps, generator, strict)
    choice(method, "method", METHODS)
    if max_basis is not None:
        max_basis = count(max_basis, "max_basis", least=2)
    if method == "auto":
        method = "dense" if min(linear_map.rows, linear_map.columns) <= DENSE_LIMIT else "lanczos"
    if method == "dense":
        estimate = dense_norm(linear_map, rtol)
    else:
        estimate = krylov_norm(
            linear_map,
            rtol=rtol,
            upper_rtol=upper_rtol,
            max_steps=max_steps,
            generator=generator,
            max_basis=max_basis,
        )
    return checked(estimate, rtol, upper_rtol, strict)


def largest_block_norm(
    linear_map: LinearMap,
    *,
    rtol: float = 1e-4,
    upper_rtol: float = 0.01,
    max_steps: int = 300,
    method: str = "dense",
    generator: torch.Generator | None = None,
    strict: bool = True,
) -> tuple[NormEstimate, Tensor]:
    """Norm of a block-diagonal map whose blocks are the last batch axis, and the block it is in.

    Args:
        linear_map: the blocks, batch shape ``(*batch, n)``.
        rtol: as for `operator_norm`.
        upper_rtol: as for `operator_norm`.
        max_steps: as for `operator_norm`.
        method: "dense" or "lanczos" (every block at once, until those that may be the largest
            have converged).
        generator: as for `operator_norm`.
        strict: as for `operator_norm`.

    Returns:
        An estimate of batch shape ``(*batch,)``, whose direction ``(*batch, *in_shape)`` lives in
        the block of the index returned beside it, ``(*batch,)``.
    """
    _check_linear_map(linear_map)
    rtol, upper_rtol = check_settings(rtol, upper_rtol, max_steps, generator, strict)
    choice(method, "method", METHODS[1:])
    if method == "dense":
        estimate, block = largest_dense(linear_map, rtol)
    else:
        every = krylov_norm(
            linear_map,
            rtol=rtol,
            upper_rtol=upper_rtol,
            max_steps=max_steps,
            generator=generator,
            only_largest=True,
        )
        estimate, block = _largest_of(every, linear_map)
    return checked(estimate, rtol, upper_rtol, strict), block


def _largest_of(every: NormEstimate, linear_map: LinearMap) -> tuple[NormEstimate, Tensor]:
    value, block = every.value.max(-1)
    index = block[..., None, None, None].expand(*block.shape, 1, *linear_map.in_shape)
    # Blocks that cannot be the largest, as far as their residuals tell, need not have converged.
    counts = every.value * (1 + every.residual) >= value[..., None]
    estimate = NormEstimate(
        value=value,
        residual=every.residual.gather(-1, block[..., None]).squeeze(-1),
        error=torch.where(counts, every.error, 0.0).amax(-1),
        # The norm is that of one block: this is too low only if that block's end is.
        upper=every.upper.amax(-1),
        miss=every.miss,
        converged=(every.converged | ~counts).all(-1),
        n_matvecs=every.n_matvecs,
        direction=every.direction.gather(-3, index).squeeze(-3),
    )
    return estimate, block


def check_settings(
    rtol: float,
    upper_rtol: float,
    max_steps: int,
    generator: torch.Generator | None = None,
    strict: bool = True,
) -> tuple[float, float]:
    """The tolerances, once no setting of `operator_norm` means nothing."""
    count(max_steps, "max_steps")
    as_generator(generator)
    as_bool(strict, "strict")
    return (
        number(rtol, "rtol", least=0, below=1),
        number(upper_rtol, "upper_rtol", least=0, finite=False),
    )


def _check_linear_map(linear_map: object) -> None:
    if not isinstance(linear_map, LinearMap):
        raise TypeError(
            f"linear_map: expected a LinearMap, got {describe(linear_map)}; "
            "linearize(F, mu).atoms is that of a map of measures, "
            "LinearMap.pointwise(matrices) of matrices"
        )
