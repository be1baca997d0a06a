"""The operator norm of linear maps."""

from __future__ import annotations

import torch
from torch import Tensor

from meanfield.linalg.dense import dense_norm, largest_dense
from meanfield.linalg.evidence import NormEstimate, checked
from meanfield.linalg.lanczos import lanczos_norm
from meanfield.linalg.maps import LinearMap

__all__ = ["largest_block_norm", "operator_norm"]

# Below this many rows or columns a dense factorisation costs less than a Krylov iteration.
DENSE_LIMIT = 192


def operator_norm(
    linear_map: LinearMap,
    *,
    rtol: float = 1e-4,
    max_steps: int = 300,
    method: str = "auto",
    generator: torch.Generator | None = None,
    strict: bool = True,
    upper_rtol: float | None = None,
    max_basis: int | None = None,
) -> NormEstimate:
    """‖J‖₂ = max ‖Jε‖ / ‖ε‖ (Frobenius norms) of each map in the batch.

    ``"dense"`` assembles the matrices and takes the top eigenpair of their Gram matrices, scaled
    so that entries up to the end of the number range do not overflow. ``"lanczos"`` is
    Golub–Kahan–Lanczos bidiagonalisation with full re-orthogonalisation, from a mixture of a
    random start and the map's own hints, so that one dominant direction that is almost
    orthogonal to the random start is not missed. Where the map has a coarse model
    (`LinearMap.coarse`), the hint is the model's top singular vector, and after eight steps
    Davidson corrections by the model take over if what was found lies near its space, for as long
    as they help. It stops on the *relative* error of σ that the residual of the singular triple
    and the gap below it give, see `NormEstimate.error`. That is about the singular value it has
    come to; how much larger one it may have missed, with what probability, is
    `NormEstimate.upper`.

    Gradients go through "dense" only; an iteration records nothing.

    Args:
        linear_map: J.
        rtol: largest estimated relative error that counts as converged; the residual must be at
            most four times that.
        max_steps: largest number of products with J.
        method: "dense", "lanczos", or "auto": dense for small matrices.
        generator: of the random start; a fixed seed if None.
        strict: raise when not converged; otherwise the estimate comes back flagged.
        upper_rtol: go on until `upper`, too, is at most (1 + upper_rtol) · value. Then there are
            no corrections, since they tell nothing about `upper`.
        max_basis: vectors kept on either side, at least 2: then the iteration restarts with the
            better half of them. As many as 4 GiB hold if None. Corrections need room for 72.

    Raises:
        ValueError: an unknown method, or settings that mean nothing.
        ConvergenceError: the error is above rtol, or the upper end above what `upper_rtol` asks
            for, after `max_steps` steps.
        OverflowError: the matrix has entries beyond the range of its dtype.
    """
    _check_settings(rtol, max_steps)
    if method not in ("auto", "dense", "lanczos"):
        raise ValueError(f"method: expected 'auto', 'dense' or 'lanczos', got {method!r}")
    if method == "auto":
        method = "dense" if min(linear_map.rows, linear_map.columns) <= DENSE_LIMIT else "lanczos"
    if method == "dense":
        estimate = dense_norm(linear_map, rtol)
    else:
        if max_basis is not None and max_basis < 2:
            raise ValueError(f"max_basis: expected at least 2 vectors, got {max_basis}")
        estimate = lanczos_norm(
            linear_map, rtol, max_steps, generator, upper_rtol=upper_rtol, max_basis=max_basis
        )
    return checked(estimate, rtol, upper_rtol, strict)


def largest_block_norm(
    linear_map: LinearMap,
    *,
    rtol: float = 1e-4,
    max_steps: int = 300,
    method: str = "dense",
    generator: torch.Generator | None = None,
    strict: bool = True,
    upper_rtol: float | None = None,
) -> tuple[NormEstimate, Tensor]:
    """Norm of a block-diagonal map whose blocks are the last batch axis, and the block it is in.

    Args:
        linear_map: the blocks, batch shape (*batch, n).
        rtol: as for `operator_norm`.
        max_steps: as for `operator_norm`.
        method: "dense" or "lanczos" (every block at once, until those that may be the largest
            have converged).
        generator: as for `operator_norm`.
        strict: as for `operator_norm`.
        upper_rtol: as for `operator_norm`.

    Returns:
        An estimate of batch shape (*batch,), whose direction (*batch, *in_shape) lives in the
        block of the index returned beside it, (*batch,).
    """
    _check_settings(rtol, max_steps)
    if method not in ("dense", "lanczos"):
        raise ValueError(f"method: expected 'dense' or 'lanczos', got {method!r}")
    if method == "dense":
        estimate, block = largest_dense(linear_map, rtol)
        return checked(estimate, rtol, upper_rtol, strict), block
    every = lanczos_norm(
        linear_map, rtol, max_steps, generator, upper_rtol=upper_rtol, only_largest=True
    )
    value, block = every.value.max(-1)
    index = block[..., None, None, None].expand(*block.shape, 1, *linear_map.in_shape)
    # Blocks that cannot be the largest, as far as their residuals tell, need not have converged.
    counts = every.value * (1 + every.residual) >= value[..., None]
    estimate = NormEstimate(
        value=value,
        residual=every.residual.gather(-1, block[..., None]).squeeze(-1),
        error=torch.where(counts, every.error, 0.0).amax(-1),
        # Too low only if it is so in the block that has the norm: no likelier than one miss.
        upper=every.upper.amax(-1),
        converged=(every.converged | ~counts).all(-1),
        n_matvecs=every.n_matvecs,
        direction=every.direction.gather(-3, index).squeeze(-3),
    )
    return checked(estimate, rtol, upper_rtol, strict), block


def _check_settings(rtol: float, max_steps: int) -> None:
    if not 0 <= rtol < 1:
        raise ValueError(f"rtol: expected a number from 0 to 1, got {rtol}")
    if max_steps < 1:
        raise ValueError(f"max_steps: expected at least 1, got {max_steps}")
