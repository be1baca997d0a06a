"""The ∞-norm of a Jacobian: its largest row sum, exactly."""

from __future__ import annotations

from torch import Tensor

from meanfield.habits import with_hints
from meanfield.maps import linearize
from meanfield.measures import MeasureMap, ParticleMeasure, check_single
from meanfield.results.answers import Answer, labelled


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
def infinity_norm(F: MeasureMap, mu: ParticleMeasure) -> InfinityNorm:
    """‖J‖_∞ = max_{i,a} Σ_{j,b} |∂F(X)_{ia}/∂x_{jb}|, the norm of [KPM21].

    For few tokens: the matrix is stored.

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
