"""A certified bound of every local constant in a ball round an input."""

from __future__ import annotations

import torch
from torch import Tensor

from meanfield.capabilities import HasBallUpper, HasLocalUpper
from meanfield.checks import as_float_tensor
from meanfield.lipschitz.local import local_lipschitz
from meanfield.measures import MeasureMap, ParticleMeasure, check_measure
from meanfield.options import shown

__all__ = ["ball_upper"]

# Up to this many coordinates of all atoms the constant at μ is factored, and so certain.
_FACTORED = 1024


def ball_upper(F: MeasureMap, mu: ParticleMeasure, epsilon: float | Tensor) -> Tensor:
    """No local constant at a measure within W_∞ distance ε of μ exceeds it.

    Every bit of mass may move by ε (at its position, if there are positions), atoms may split.
    At ε = 0 it is at most `bounds.local_upper`; for small ε, and few atoms, it is the constant at
    μ plus what the derivative can change by. Not in the papers; the proof is on the page "Sharp
    constants" of the documentation. Rounding, some n · eps, is not accounted for.

    Args:
        F: a map that declares `ball_upper`, such as dot-product `SelfAttention`.
        mu: μ.
        epsilon: ε ≥ 0, in the unit of the points; a number, or (*batch,).

    Returns:
        The bound, (*batch,).

    Raises:
        TypeError: a map without such a bound.
        ValueError: a negative ε.

    Example:
        >>> from meanfield.attention import AttentionParameters, SelfAttention
        >>> F = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]))
        >>> mu = ParticleMeasure([[1.0], [-1.0]], weights=[0.1, 0.9])
        >>> [round(float(ball_upper(F, mu, epsilon)), 3) for epsilon in (0.0, 0.01, 0.1)]
        [2.994, 3.286, 5.569]
    """
    if not isinstance(F, HasBallUpper) or isinstance(F, type):
        raise TypeError(
            "expected a map that declares ball_upper(mu, epsilon), such as dot-product "
            f"SelfAttention, got {shown(F)}"
        )
    check_measure(mu)
    epsilon = as_float_tensor(epsilon, "epsilon", like=mu.points)
    if epsilon.shape not in ((), mu.batch_shape):
        raise ValueError(
            f"epsilon: expected a number or one per measure, shape {tuple(mu.batch_shape)}, got "
            f"shape {tuple(epsilon.shape)}"
        )
    if not bool((epsilon.isfinite() & (epsilon >= 0)).all()):
        raise ValueError(f"epsilon: expected finite numbers ≥ 0, got {epsilon.tolist()}")
    constant = F.local_upper(mu) if isinstance(F, HasLocalUpper) else None
    if mu.n_particles * mu.dim <= _FACTORED:
        found = local_lipschitz(F, mu, method="dense", strict=False)
        if found.n_matvecs == 0:
            certain = found.upper_999
            constant = certain if constant is None else torch.minimum(constant, certain)
    return F.ball_upper(mu, epsilon, constant=constant)
