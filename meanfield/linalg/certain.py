"""Upper bounds of norms that hold with certainty, from blocks of rows with weights.

Let J = [Jᵢⱼ] be blocks and wᵢⱼ > 0 numbers (0 where Jᵢⱼ = 0). With cᵢ = λ_max(Σⱼ JᵢⱼJᵢⱼᵀ/wᵢⱼ),

    ‖J‖² ≤ maxⱼ Σᵢ cᵢwᵢⱼ.

For |Jᵢf| = |Σⱼ (Jᵢⱼ/√wᵢⱼ)(√wᵢⱼ fⱼ)| ≤ cᵢ^½ (Σⱼ wᵢⱼ|fⱼ|²)^½; square, and sum over i. Every w is
valid: one that is far from the best costs tightness and never truth. Not in the papers; the page
"Sharp constants" of the documentation proves it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meanfield.linalg.blocks import TokenBlocks

# Up to this size eigenvalues are computed; beyond it, a Cholesky factor shows that they are below.
_SMALL, _POWER_STEPS, _SLACK = 96, 20, 1e-3
# What underflow may hide of the square of a bound, per block.
_HIDDEN = 1e-300


def row_bound(blocks: TokenBlocks, weights: Tensor) -> Tensor:
    """The bound of ‖J‖ for weights w (n, n), raised by what rounding may have taken.

    Infinite where a weight is 0 and its block is not. In double precision.

    Raises:
        ValueError: weights of another shape, negative or NaN ones.
    """
    blocks, factor = blocks.in_range()
    n, values = blocks.n, _checked(weights, blocks.n)
    columns, proves = values.new_zeros(n), torch.ones((), dtype=torch.bool, device=values.device)
    for rows in blocks.portions(squares=True):
        w = values[rows]
        proves &= ~((w == 0) & blocks.seen(rows)).any()
        s = torch.where(w > 0, 1 / w, 0.0)
        gram, slack = blocks.gram(s, rows)
        top = top_eigenvalues(gram) + slack + _HIDDEN * n * (1 + s.amax(-1))
        columns += (top[:, None] * w).sum(0)
    found = columns.amax().sqrt() * (1 + 4 * n * torch.finfo(values.dtype).eps)
    return torch.where(proves & ~found.isnan(), found, torch.inf) / factor


def _checked(values: Tensor, n: int) -> Tensor:
    if tuple(values.shape) != (n, n):
        raise ValueError(f"weights: expected shape {(n, n)}, got {tuple(values.shape)}")
    if not bool(((values >= 0) & values.isfinite()).all()):
        raise ValueError("weights: expected finite numbers ≥ 0")
    return values.double()


def top_eigenvalues(matrices: Tensor) -> Tensor:
    """Upper bounds of λ_max of symmetric positive semi-definite matrices (g, m, m), rounding too.

    For large ones tI − G has a Cholesky factor exactly when t > λ_max, up to rounding: to try
    takes a tenth of the time of an eigenvalue. Power iteration says which t to try.
    """
    m, eps = matrices.shape[-1], torch.finfo(matrices.dtype).eps
    peak = matrices.abs().amax((-2, -1))
    scale = torch.where((peak > 0) & peak.isfinite(), peak, 1.0)[:, None, None]
    unit = matrices / scale
    known = unit.isfinite().all(-1).all(-1)
    unit = torch.where(known[:, None, None], unit, 0.0)
    # As |G_ij| ≤ √(G_ii G_jj), the trace lies between the peak, which is 1, and m.
    room = 16 * m * (m + 2) * eps
    top = torch.linalg.eigvalsh(unit)[..., -1].clamp_min(0) if m <= _SMALL else _by_cholesky(unit)
    return torch.where(known, (1 + room) * top * peak, torch.inf)


def _by_cholesky(unit: Tensor) -> Tensor:
    """t with tI − G positive definite, a little above λ_max."""
    v = unit.square().sum(-1, keepdim=True).sqrt()
    top, tiny = torch.zeros_like(v[:, 0, 0]), torch.finfo(v.dtype).tiny
    for _ in range(_POWER_STEPS):
        v = v / torch.linalg.vector_norm(v, dim=-2, keepdim=True).clamp_min(tiny)
        image = unit @ v
        top, v = torch.linalg.vector_norm(image, dim=(-2, -1)), image
    eye = torch.eye(unit.shape[-1], dtype=unit.dtype, device=unit.device)
    bound, left, slack = top.clone(), torch.arange(len(unit), device=unit.device), _SLACK
    bound = torch.where(top > 0, top * (1 + slack), tiny)
    while len(left):
        trial = bound[left, None, None] * eye - unit[left]
        left = left[torch.linalg.cholesky_ex(trial)[1] > 0]
        slack = 2 * slack
        bound[left] = bound[left] * (1 + slack)
    return bound
