"""Constants in other norms: W_p for p = 1, 2, ∞ as an interval, and ‖J‖_∞ exactly."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meanfield.checks import number, without_autocast
from meanfield.habits import with_hints
from meanfield.linalg import Dense
from meanfield.linalg.vectors import lengths, normalised
from meanfield.lipschitz.local import local_lipschitz
from meanfield.maps import linearize
from meanfield.measures import MeasureMap, ParticleMeasure, check_single
from meanfield.results.answers import Answer, labelled

_ROUNDS = 30  # of alternating maximisation; each can only raise the lower end


class OrderInterval(Answer, noun="constant", title="Local Lipschitz constant of order p"):
    """A local constant of order p lies between `lower` and `upper`, up to rounding.

    Attributes:
        lower: attained by a displacement.
        upper: from norms of blocks.
        p: 1, 2 or ∞.
    """

    lower: Tensor = labelled("lower end", beside=True)
    upper: Tensor = labelled("upper end", beside=True)
    p: float = labelled("order", attribute=True)


@with_hints
@torch.no_grad()
@without_autocast
def local_order(F: MeasureMap, mu: ParticleMeasure, *, p: float) -> OrderInterval:
    """lim sup W_p(F(ν), F(μ)) / W_p(ν, μ) as mass moves by shrinking steps, for p = 1, 2, ∞.

    Where atoms may split, displacements live on parts of atoms. With the field's derivatives Sᵢ,
    and T = J − diag(Sᵢ), the norm on L^p is

        p = ∞   maxᵢ sup_{|e|=1} Σⱼ |Tᵢⱼᵀe| + |Sᵢᵀe|            (the largest displacement),
        p = 1   maxⱼ sup_{|e|=1} Σᵢ (aᵢ/aⱼ)|Tᵢⱼe| + |Sⱼe|,
        p = 2   max(‖D^½JD^−½‖, maxᵢ‖Sᵢ‖).

    The suprema over e are bracketed: `lower` by alternating maximisation from each coordinate,
    `upper` by the norms of the blocks; on the line they agree. For few atoms: the
    matrices are stored. No gradient is recorded; `local_lipschitz` has one. Not in the papers;
    derived here, tested numerically.

    Args:
        F: a map of measures that keeps weights.
        mu: μ, without batch axes; atoms of weight 0 are absent.
        p: 1, 2 or ∞.

    Raises:
        ValueError: another p, or batch axes.
        OverflowError: weights whose ratios leave the number range.

    Example:
        >>> from meanfield.attention import AttentionParameters, SelfAttention
        >>> F = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]))
        >>> mu = ParticleMeasure([[1.0], [-1.0]], weights=[0.1, 0.9])
        >>> found = local_order(F, mu, p=1.0)
        >>> float(found.lower), float(found.upper)
        (8.58696, 8.58696)
    """
    p = number(p, "p", least=1, finite=False)
    if p not in (1, 2, math.inf):
        raise ValueError(f"p: expected 1, 2 or ∞, got {p}")
    check_single(mu)
    if p == 2:
        found = local_lipschitz(F, mu, solver=Dense())
        return OrderInterval(found.value, found.upper, p)
    alive = mu.log_weights > -math.inf
    both = linearize(F, mu, geometry="wasserstein" if p == 1 else "euclidean")
    fields = both.field.to_dense() * alive[:, None, None]
    n, out, d = fields.shape
    J = both.atoms.to_dense().reshape(n, out, n, d).transpose(1, 2)
    if p == 1:  # (aᵢ/aⱼ)J from (aᵢ/aⱼ)^½J: J alone underflows at light atoms
        half = 0.5 * torch.where(alive, mu.log_weights, 0.0)
        J = (half[:, None] - half).exp()[..., None, None] * J
    J = torch.where((alive[:, None] & alive)[..., None, None], J, 0.0)
    if not bool(J.isfinite().all()):
        raise OverflowError(
            "local_order: expected ratios of weights that float64 holds, got log-weights from "
            f"{float(mu.log_weights[alive].min()):.4g} to {float(mu.log_weights.max()):.4g}"
        )
    own = torch.arange(n, device=J.device)
    averaging = J.clone()
    averaging[own, own] -= fields
    if p == 1:  # columns
        blocks = averaging.transpose(0, 1)
    else:  # rows, transposed
        blocks, fields = averaging.mT, fields.mT
    blocks = torch.cat([blocks, fields[:, None]], 1)
    upper = torch.linalg.matrix_norm(blocks, 2).sum(1).amax()
    return OrderInterval(torch.minimum(_largest_sum(blocks), upper), upper, p)


def _largest_sum(blocks: Tensor) -> Tensor:
    """max_k sup_{|e|=1} Σ_l |B_kl e| of blocks (K, L, a, b), from below.

    Σ_l |B_l e| = max over unit vectors g_l of ⟨Σ_l B_lᵀg_l, e⟩: fix one, then the other.
    """
    e = torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device)
    e = e.expand(len(blocks), -1, -1)  # (K, starts, b)
    for _ in range(_ROUNDS):
        g = normalised(torch.einsum("klab,ksb->klsa", blocks, e))[0]
        e = normalised(torch.einsum("klab,klsa->ksb", blocks, g))[0]
    return lengths(torch.einsum("klab,ksb->klsa", blocks, e)).sum(1).amax()


class InfinityNorm(Answer, noun="infinity_norm", title="∞-norm of the Jacobian"):
    """‖J‖_∞ and where it is attained.

    Attributes:
        value: max over rows of Σ |J|: the largest change of any coordinate of any token when
            every coordinate of every token changes by at most one. Exact up to rounding.
        token: the token whose row it is.
        feature: the coordinate of that token.
        direction: signs (n, d) with (J · direction)[token, feature] = value.
    """

    value: Tensor = labelled("largest absolute row sum of the Jacobian")
    token: int = labelled("token of that row", dtype="int64")
    feature: int = labelled("coordinate of that token", dtype="int64")
    direction: Tensor = labelled(
        "change of all coordinates by one that attains it", dims=("particle", "feature")
    )


@with_hints
@torch.no_grad()
def infinity_norm(F: MeasureMap, mu: ParticleMeasure) -> InfinityNorm:
    """‖J‖_∞ = max_{i,a} Σ_{j,b} |∂F(X)_{ia}/∂x_{jb}|, the norm of [KPM21].

    For few tokens: the matrix is stored. No gradient is recorded.

    Args:
        F: a map of measures.
        mu: μ, without batch axes. Atoms of weight 0 are absent.

    Raises:
        ValueError: μ has batch axes.

    Example:
        >>> from meanfield.measures import pushforward
        >>> mu = ParticleMeasure([[1.0], [-2.0]])
        >>> infinity_norm(lambda mu: pushforward(lambda x: x**2, mu), mu).value
        tensor(4., dtype=torch.float64)
    """
    check_single(mu)
    atoms = linearize(F, mu).atoms
    J = atoms.to_dense()
    sums = J.abs().sum(-1)
    row = int(sums.argmax())
    token, feature = divmod(row, atoms.out_shape[-1])
    return InfinityNorm(sums[row], token, feature, J[row].sign().reshape(atoms.in_shape))
