"""What comes back beside a norm: the evidence for it, and the one place that judges it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from meanfield.checks import describe, number
from meanfield.errors import ConvergenceError
from meanfield.linalg.certain import row_bound
from meanfield.linalg.linear_map import LinearMap
from meanfield.linalg.vectors import (
    are_in_range,
    finite,
    lengths,
    lengths_in_range,
    normalised,
)
from meanfield.results.answers import Answer, labelled

# The defaults of every call that asks for a norm: see `certify`.
RTOL, UPPER_RTOL = 1e-4, 0.01
# Times rtol that a residual may be where the gap says that the error is small enough.
TRUST = 4.0
# Rounding of a factorisation, of a map's products, and of an upper end that equals the value, in
# units of eps: constants of attention in single precision were off by 180 at most (2e-5) with
# scores up to some hundreds, and by 4,500 with scores of some 900.
ROUNDINGS = 1e3
# Likewise of a vector divided by its length.
_UNIT_ROUNDINGS = 4.0


@dataclass(frozen=True, eq=False)
class Candidate:
    """What a norm solver hands to `certify`: a vector, and what it knows of the rest.

    Attributes:
        direction: unit vectors v, ``(*batch, n, d)``, with ‖Jv‖ near ‖J‖₂.
        upper: ‖J‖₂ is at most this, ``(*batch,)``; infinite if the solver cannot say.
        miss: the probability, over a random start, that ‖J‖₂ exceeds `upper`; 0 where the solver
            has seen the whole of J.
        gap: 1 − (σ₂/σ₁)², as far as the solver sees the second singular value, ``(*batch,)``;
            None if it does not.
        n_matvecs: products with J, as many with Jᵀ; 0 if they were not counted.
        weights: w ≥ 0 of the blocks of the rows, (n, n) for each map of the flattened batch:
            `certify` computes the upper ends that they prove, with certainty.
    """

    direction: Tensor
    upper: Tensor
    miss: float
    gap: Tensor | None = None
    n_matvecs: int = 0
    weights: Sequence[Tensor] = ()


class NormEstimate(Answer, noun="norm", title="Operator norm"):
    """An estimate of ‖J‖₂ and its evidence; every tensor has the map's batch shape.

    Attributes:
        value: σ = ‖J v‖ for the unit vector v = `direction`: a lower bound of the norm up to
            rounding, whatever the solver did.
        residual: ‖Jᵀu − σv‖/σ with u = Jv/σ (relative), from two products made for this check:
            a singular value of J lies within residual · value of `value`.
        error: an estimate of the relative distance to that singular value: the residual r, or
            r²/(2·gap) (Kato–Temple) if that is less, with the relative gap to the second
            singular value as the solver sees it. Where matrices stand in the place of the map
            and are not its own, how far they are from it, and so is the residual.
        upper: ‖J‖₂ is at most this. After a factorisation that is certain up to rounding.
            After an iteration it holds with probability 1 − `miss` over the random start, for
            each map of the batch and whatever J is. A residual is about the nearest singular
            value only; this bounds a larger one that the iteration may have missed.
        miss: the probability, over the random start, that ‖J‖₂ exceeds `upper`; 0 if factored.
        converged: whether the value is within rtol of the norm, as far as can be told: the error
            is at most rtol, the residual at most four times that, and `upper` at most
            (1 + upper_rtol) · value. Both are arguments of the call, and no solver's to choose.
        n_matvecs: products with J, as many with Jᵀ; 0 if they were not counted.
        direction: v, shape ``(*batch, n, d)``.
    """

    value: Tensor = labelled("operator norm")
    residual: Tensor = labelled("relative residual", beside=True)
    error: Tensor = labelled("relative error, by residual and gap")
    upper: Tensor = labelled("upper end", beside=True)
    miss: float = labelled("probability that the norm is above its upper end", attribute=True)
    converged: Tensor = labelled("whether it has converged", dtype="bool", beside=True)
    n_matvecs: int = labelled("products with the map", attribute=True)
    direction: Tensor = labelled("unit vector that attains it", dims=("particle", "feature"))


def certify(
    linear_map: LinearMap,
    candidate: Candidate,
    *,
    rtol: float = RTOL,
    upper_rtol: float = UPPER_RTOL,
) -> NormEstimate:
    """The norms for which a solver's vectors are evidence, whatever the solver claims.

    σ = ‖Jv‖ and the residual ‖Jᵀu − σv‖/σ come from two products made here. The upper end is the
    solver's, and is dropped where the value found refutes it. It has converged if

        error ≤ rtol,   residual ≤ 4 rtol   and   upper ≤ (1 + upper_rtol) σ.

    Where ``miss`` is 0, rtol is at least the rounding of a factorisation.

    Args:
        linear_map: J.
        candidate: of each map of the batch.
        rtol: largest estimated relative error that counts as converged.
        upper_rtol: how far the upper end may be above the value, relatively; `math.inf` for a
            value alone.

    Raises:
        TypeError: no candidate, numbers in place of tensors, or in another dtype than the map's;
            a tolerance that is no number.
        ValueError: vectors that have not length 1, another shape, a miss that is no probability.
        OverflowError: a product leaves the number range.

    Example:
        >>> J = LinearMap.diagonal(torch.tensor([[2.0], [1.0]]))
        >>> v = torch.tensor([[1.0], [0.0]])
        >>> certify(J, Candidate(v, upper=torch.tensor(2.0), miss=0.0))
        NormEstimate(value=2, residual=0, error=0, upper=2, miss=0, converged=True, n_matvecs=0)
        >>> second = v.flip(0)
        >>> certify(J, Candidate(second, upper=torch.tensor(2.0), miss=0.0)).converged
        tensor(False)
    """
    if not isinstance(candidate, Candidate):
        raise TypeError(f"candidate: expected a Candidate, got {describe(candidate)}")
    rtol = number(rtol, "rtol", least=0, below=1)
    upper_rtol = number(upper_rtol, "upper_rtol", least=0, finite=False)
    return _judged(_measured(linear_map, candidate), rtol, upper_rtol)


def certify_largest(
    linear_map: LinearMap, candidate: Candidate, *, rtol: float, upper_rtol: float
) -> tuple[NormEstimate, Tensor]:
    """`certify` for a block-diagonal map, the blocks along the last batch axis; and the block.

    Blocks that cannot be the largest, as far as their residuals tell, need not have converged.
    The upper end is the largest of all: it fails only if the maximal block's own bound fails.
    """
    every = _measured(linear_map, candidate)
    value, block = every.value.max(-1)
    counts = may_be_largest(every.value, every.residual)
    largest = replace(
        every,
        value=value,
        residual=torch.where(counts, every.residual, 0.0).amax(-1),
        error=torch.where(counts, every.error, 0.0).amax(-1),
        upper=every.upper.amax(-1),
        converged=every.converged.all(-1),
        direction=every.direction.take_along_dim(block[..., None, None, None], -3).squeeze(-3),
    )
    return _judged(largest, rtol, upper_rtol), block


def _measured(linear_map: LinearMap, candidate: Candidate) -> NormEstimate:
    """The estimate; it has converged, so far, unless it refutes its upper end."""
    v, shape = _unit_vectors(linear_map, candidate), linear_map.batch_shape
    upper = _per_map(candidate.upper, shape, "upper")
    if candidate.weights:
        upper = upper.minimum(proved(linear_map, candidate.weights))
    if not 0 <= candidate.miss <= 1:
        raise ValueError(f"miss: expected a probability, got {candidate.miss}")
    value, found, residual = _value_and_residual(linear_map, v, upper)
    error = residual
    if candidate.gap is not None:
        error = relative_error(residual, _per_map(candidate.gap, shape, "gap"))
    # Not `upper < found` negated: NaN is no upper end.
    holds = upper >= found * (1 - ROUNDINGS * torch.finfo(v.dtype).eps)
    return NormEstimate(
        value=value,
        residual=residual,
        error=error,
        upper=torch.where(holds, torch.maximum(upper, found), math.inf),
        miss=candidate.miss,
        converged=holds,
        n_matvecs=candidate.n_matvecs + 1 if candidate.n_matvecs else 0,
        direction=v,
    )


@torch.no_grad()
def proved(linear_map: LinearMap, weights: Sequence[Tensor]) -> Tensor:
    """The upper ends that weights of rows prove, ``(*batch,)``; ∞ for maps without blocks."""
    count = math.prod(linear_map.batch_shape)
    if len(weights) != count:
        raise ValueError(f"weights: expected those of {count} maps, got {len(weights)}")
    bounds = torch.full((count,), math.inf, dtype=torch.float64, device=linear_map.device)
    for index, each in enumerate(weights):
        blocks = None if linear_map.blocks is None else linear_map.blocks(index)
        if blocks is not None:
            bounds[index] = row_bound(blocks, each)
    up = 1 + 2 * torch.finfo(linear_map.dtype).eps
    return up * bounds.to(linear_map.dtype).reshape(linear_map.batch_shape)


def _value_and_residual(
    linear_map: LinearMap, v: Tensor, upper: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """‖Jv‖ with its gradient and without, and ‖Jᵀu − ‖Jv‖v‖ / ‖Jv‖ with u = Jv / ‖Jv‖."""
    scale, measure = None, lengths_in_range
    forth = linear_map.matvec(v).flatten(-2)
    length = lengths_in_range(forth)
    if not are_in_range(length):
        # Rescaled by a power of two, which is exact, so that no square leaves the number range.
        scale, measure = _power_towards_one(upper), lengths
        forth = finite(linear_map.matvec(scale[..., None, None] * v).flatten(-2))
        forth, length = normalised(forth)
    value = length if scale is None else length / scale
    with torch.no_grad():
        # The image of 0 is exact.
        whole = length if scale is None else torch.where(length > 0, length, 1.0)
        u = forth / whole[..., None] if scale is None else scale[..., None] * forth
        back = linear_map.rmatvec(u.reshape(*length.shape, *linear_map.out_shape))
        defect = torch.addcmul(finite(back), length[..., None, None], v, value=-1)
        return value, value.detach(), measure(defect.flatten(-2)) / whole


def _per_map(values: Tensor, shape: torch.Size, name: str) -> Tensor:
    if not isinstance(values, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {describe(values)}")
    try:
        return values.detach().expand(shape)
    except RuntimeError as error:
        raise ValueError(
            f"{name}: expected one number per map, shape {tuple(shape)}, got {tuple(values.shape)}"
        ) from error


def _unit_vectors(linear_map: LinearMap, candidate: Candidate) -> Tensor:
    """The directions ``(*batch, n, d)``, refused unless they have length 1."""
    wanted, v = (*linear_map.batch_shape, *linear_map.in_shape), candidate.direction.detach()
    if tuple(v.shape) != wanted:
        raise ValueError(f"direction: expected shape {wanted}, got {tuple(v.shape)}")
    if v.dtype != linear_map.dtype:
        raise TypeError(f"direction: expected {linear_map.dtype}, got {v.dtype}")
    length, eps = lengths_in_range(v.flatten(-2)), torch.finfo(v.dtype).eps
    ends = torch.stack(length.aminmax()).tolist() if length.numel() else [1.0]
    farthest = max(ends, key=lambda end: abs(end - 1))
    if not abs(farthest - 1) <= eps**0.5:
        raise ValueError(
            f"direction: expected unit vectors, got one of length {farthest:g}; "
            "divide by torch.linalg.vector_norm"
        )
    if abs(farthest - 1) <= _UNIT_ROUNDINGS * eps:
        return v
    return v / length[..., None, None]


def _power_towards_one(upper: Tensor) -> Tensor:
    """A power of two near 1/upper where it is known and far from the middle of the number range.

    Elsewhere 1.
    """
    kind = torch.finfo(upper.dtype)
    most = -math.floor(math.log2(kind.tiny)) - 1
    exponent = -torch.frexp(upper).exponent.clamp(-most, most)
    known = (upper > 0) & upper.isfinite()
    return torch.where(known, torch.ldexp(torch.ones_like(upper), exponent), 1.0)


def _judged(found: NormEstimate, rtol: float, upper_rtol: float) -> NormEstimate:
    if found.miss == 0:
        rtol = max(rtol, ROUNDINGS * torch.finfo(found.value.dtype).eps)
    good = found.converged & met(found.error, found.residual, rtol)
    if upper_rtol < math.inf:
        good = good & (found.upper / (1 + upper_rtol) <= found.value)
    return replace(found, converged=good)


def met(error: Tensor, residual: Tensor, rtol: float) -> Tensor:
    """Whether error ≤ rtol and residual ≤ 4 rtol.

    Two singular values that the iteration still sees as one are closer than r²/error.
    """
    near = error <= rtol
    return near if error is residual else near & (residual <= TRUST * rtol)


def may_be_largest(value: Tensor, residual: Tensor) -> Tensor:
    """Which of the blocks along the last axis, as far as their residuals tell."""
    return value * (1 + residual) >= value.amax(-1, keepdim=True)


def relative_error(residual: Tensor, gap: Tensor) -> Tensor:
    """The smaller of the residual r and r²/(2·gap), gap = 1 − σ₂²/σ₁² (Kato–Temple)."""
    temple = 0.5 * residual.square() / gap.clamp_min(torch.finfo(gap.dtype).tiny)
    return torch.where(gap > 0, torch.minimum(residual, temple), residual)


@torch.no_grad()
def of_the_map(
    found: NormEstimate,
    linear_map: LinearMap,
    matrices: LinearMap,
    rtol: float,
    strict: bool,
    beside: Tensor | None = None,
) -> NormEstimate:
    """The estimate, flagged and without an upper end where the matrices are not those of the map.

    Refused there if `strict`.

    Its evidence is products with matrices. One product of the map along a random vector, none of
    whose entries is small, is compared with theirs: whatever is wrong in a matrix shows there.

    Args:
        found: the norms; of maps with more batch axes than it, the largest along those.
        linear_map: J.
        matrices: what was multiplied in its place.
        rtol: what is wrong by less, relative to the norm, does no harm.
        strict: refuse other matrices.
        beside: norms of which only the larger of each and its norm here counts, to which rtol is
            relative then.

    Raises:
        ConvergenceError: they are others, and `strict`.
    """
    value = found.value.detach()
    room = max(rtol, ROUNDINGS * linear_map.columns**0.5 * torch.finfo(value.dtype).eps)
    most = room * (value if beside is None else value.maximum(beside))
    x = _probe(linear_map.in_shape, value.dtype, value.device)
    x = x.expand(*linear_map.batch_shape, *linear_map.in_shape)

    def difference(x: Tensor) -> Tensor:
        return (linear_map.matvec(x) - matrices.matvec(x)).flatten(-2)

    # Lengths: of many entries each may be off by little, and the norm by much more. As shares of
    # what they may be, no square of one that counts leaves the number range; 0 / 0 is seen below.
    off = difference(x)
    shares = off / most.reshape(*most.shape, *(1 for _ in off.shape[most.ndim :]))
    if bool((torch.linalg.vector_norm(shares, dim=-1) <= 1).all()):
        return found
    # Again in the middle of the number range, in case a product left it or the norm is 0.
    scale = _power_towards_one(value)
    off = lengths(difference(scale.reshape(*scale.shape, *(1 for _ in x.shape[scale.ndim :])) * x))
    off = off[..., None].flatten(value.ndim).amax(-1)
    off = torch.where(off == 0, 0.0, off / (scale * value)).nan_to_num(math.inf, math.inf)
    agree = (off <= room) | (off * value <= most)
    if strict and not bool(agree.all()):
        raise ConvergenceError(
            "norm of a linear map: its matrices (to_dense) and its products (matvec) disagree by "
            f"{float(off.max()):.2e} of the norm, above {room:.2e}; correct either, "
            "take solver=Lanczos(), which needs products alone, or pass strict=False for the "
            "flagged estimate"
        )
    off = torch.where(agree, 0.0, off)
    return replace(
        found,
        residual=torch.maximum(found.residual, off),
        error=torch.maximum(found.error, off),
        upper=torch.where(agree, found.upper, math.inf),
        converged=found.converged & agree,
    )


@lru_cache(maxsize=64)
def _probe(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random entries of size ¼ to 1 and either sign."""
    generator = torch.Generator().manual_seed(2)
    draw = (
        2 * torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device)
        - 1
    )
    return (draw.sign() * (0.25 + 0.75 * draw.abs())).to(dtype=dtype, device=device)


def checked(estimate: NormEstimate, rtol: float, upper_rtol: float, strict: bool) -> NormEstimate:
    """The estimate, refused when it has not converged and `strict`."""
    if not strict or bool(estimate.converged.all()):
        return estimate
    if bool(met(estimate.error, estimate.residual, rtol).all()):
        room = estimate.upper / estimate.value.clamp_min(torch.finfo(estimate.value.dtype).tiny)
        what = f"upper/value - 1 = {float(room.max()) - 1:.2e}"
        asked = f"upper_rtol = {upper_rtol:.2e}"
    else:
        what = f"relative error {float(estimate.error.max()):.2e}"
        what += f" (residual {float(estimate.residual.max()):.2e})"
        asked = f"rtol = {rtol:.2e} ({TRUST:g} rtol)"
    raise ConvergenceError(
        f"norm of a linear map: {what} is above {asked} after {estimate.n_matvecs} products; give "
        "solver=Lanczos(max_steps=…) more of them, raise the tolerance (upper_rtol=1.0 for "
        "Certified(), math.inf for no upper end), or pass strict=False for the flagged estimate"
    )
