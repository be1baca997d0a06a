"""A certified bound of all local constants in a ball around an input."""

from __future__ import annotations

import torch
from torch import Tensor

from meanfield.checks import as_bool, as_float_tensor, without_autocast
from meanfield.habits import with_hints
from meanfield.linalg import NormSolver
from meanfield.maps.intervals import Intervals
from meanfield.maps.map import as_map, ball_bounds
from meanfield.measures import MeasureMap, ParticleMeasure, check_measure


@with_hints
@torch.no_grad()
@without_autocast
def ball_upper(
    F: MeasureMap,
    mu: ParticleMeasure,
    epsilon: float | Tensor,
    *,
    splitting: bool = True,
    solver: NormSolver | None = None,
) -> Tensor:
    """Upper bound of the local constants at all measures within W_∞ distance ε of μ.

    Every bit of mass may move by ε (at its position, if there are positions), atoms may split.
    At ε = 0 it is at most `bounds.local_upper`; for small ε it is the constant at μ plus what the
    derivative can change by. Blocks and networks follow the ball from layer to layer: each layer
    has a certain bound of how far it moves any token, which is the radius for the next; the local
    constants multiply, and the end-to-end constant changes by what each derivative can. Radii
    grow quickly with depth: the bound is ∞ where it overflows, or where a normalisation may meet
    a token without spread. Not in the papers; the proof is on the page "Sharp constants" of the
    documentation. Accounts for weights that underflow, not for rounding (about n · eps). No
    gradient is recorded: as a penalty take `local_lipschitz`, at points of the ball if need be.

    It bounds ratios of W₂ wherever the straight path between two measures stays in the ball: for
    tokens that move by ε at most, if the way they are labelled is the best coupling.

    Args:
        F: a map that declares `ball_bounds`: `SelfAttention` with any kernel here, under the
            softmax, a sink or the sigmoid; what is in `meanfield.layers`, blocks and networks.
        mu: μ.
        epsilon: ε ≥ 0, in the unit of the points; a number, ``(*batch,)``, or with more axes
            before, for several at once.
        splitting: whether atoms may split. Without it only tokens move, and weights stay theirs:
            a smaller bound, for perturbed sequences.
        solver: of the constants at μ of all intervals of maps of a chain, L(L + 1)/2 for L maps,
            such as ``Lanczos()``: depth then does not multiply. The answer is as certain as all of
            them. Without one, small maps and chains are factored, and large ones have certain
            bounds, which are larger.

    Returns:
        The bound, ``(*batch,)``, with the further axes of ε before.

    Raises:
        NotImplementedError: F, or a part of it, has no such bound.
        ValueError: a negative ε.

    Example:
        >>> from meanfield.attention import AttentionParameters, SelfAttention
        >>> F = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]))
        >>> mu = ParticleMeasure([[1.0], [-1.0]], weights=[0.1, 0.9])
        >>> [round(float(bound), 3) for bound in ball_upper(F, mu, torch.tensor([0.0, 0.01, 0.1]))]
        [2.994, 3.286, 5.569]
    """
    F = as_map(F)
    check_measure(mu)
    splitting = as_bool(splitting, "splitting")
    eps = as_float_tensor(epsilon, "epsilon", like=mu.points).to(mu.points)
    if not bool((eps.isfinite() & (eps >= 0)).all()):
        raise ValueError(f"epsilon: expected finite numbers ≥ 0, got {eps.tolist()}")
    batch = mu.batch_shape
    if eps.ndim and eps.shape[-len(batch) :] != batch and batch:
        raise ValueError(
            f"epsilon: expected a number, or one per measure (shape {tuple(batch)}, or with more "
            f"axes before), got shape {tuple(eps.shape)}"
        )
    radii, _ = torch.broadcast_tensors(eps[..., None], mu.log_weights)
    if solver is None:
        found = ball_bounds(F, mu, radii, splitting=splitting)
    else:
        found, _ = Intervals.of(F.stages, mu, solver).within(radii, splitting=splitting)
    return found.upper.expand(radii.shape[:-1])
