"""Cross-attention: the points of one measure attend to those of another."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from meanfield.attention.self_attention import SelfAttention
from meanfield.checks import check_positioned, check_same_kind, describe
from meanfield.linalg import LinearMap
from meanfield.maps import Linearisation, Map
from meanfield.maps.autodiff import check_geometry
from meanfield.maps.derivative_checks import check_light_atoms
from meanfield.measures import ParticleMeasure, check_measure


@final
@dataclass(frozen=True, eq=False)
class CrossAttention:
    """(μ, η) ↦ Γ_μ♯η: the queries η move as the field of attention to the context μ says.

    Γ_μ is that of [CAP24] Definition 2.4, of any kernel and any normalisation that has a field.
    An encoder's output is a context, and so is a cache of keys and values. On the diagonal it is
    self-attention: Γ_μ♯μ. Batches of both measures have the same leading axes.

    Args:
        layer: the attention whose field Γ is.

    Raises:
        TypeError: no `SelfAttention`.

    Example:
        >>> from meanfield.attention import AttentionParameters
        >>> mean = SelfAttention(AttentionParameters.from_bilinear([[0.0]], [[1.0]]))
        >>> cross = CrossAttention(mean)
        >>> context = ParticleMeasure([[1.0], [3.0]])
        >>> cross(context, ParticleMeasure([[5.0]])).points
        tensor([[2.]], dtype=torch.float64)
    """

    layer: SelfAttention

    def __post_init__(self) -> None:
        if not isinstance(self.layer, SelfAttention):
            raise TypeError(f"layer: expected SelfAttention, got {describe(self.layer)}")

    def __call__(self, mu: ParticleMeasure, eta: ParticleMeasure, /) -> ParticleMeasure:
        """Γ_μ♯η, with the weights and positions of η.

        Args:
            mu: the context μ.
            eta: the queries η, with positions where the layer looks at them.

        Raises:
            ValueError: dimensions or batches that do not fit; queries before all of the context.
        """
        self._check(mu, eta)
        gamma = self.layer.field(mu)
        positions = (eta.positions,) if self._looks_at_positions else ()
        return eta.replace(gamma(eta.points, *positions))

    def at(self, mu: ParticleMeasure) -> AtContext:
        """The map η ↦ Γ_μ♯η of measures, at this context: for `Chain`, `Residual` and the rest."""
        return AtContext(self, check_measure(mu))

    def context_derivative(
        self, mu: ParticleMeasure, eta: ParticleMeasure, *, geometry: str = "wasserstein"
    ) -> LinearMap:
        """The derivative of the atoms of Γ_μ♯η in those of μ, ``(n, d) → (m, d_out)``.

        Args:
            mu: the context, n atoms.
            eta: the queries, m atoms.
            geometry: "euclidean": J on displacements. "wasserstein": E^½ J D^−½ with the weights
                D of μ and E of η.

        Raises:
            NoDerivativeError: the derivative in very light atoms is lost in rounding.
        """
        check_geometry(geometry)
        image = self(mu, eta)
        into, out_of = _present(mu), _present(eta)
        if geometry == "wasserstein":
            into, out_of = into / _roots(mu), out_of * _roots(eta)
        points = mu.points.detach()

        def move(points: Tensor) -> Tensor:
            return self(mu.replace(points), eta).points

        def along(eps: Tensor) -> Tensor:
            return torch.func.jvp(move, (points,), (eps.contiguous(),))[1]

        def push(eps: Tensor) -> Tensor:
            return out_of * along(into * eps)

        def pull(zeta: Tensor) -> Tensor:
            return into * torch.func.vjp(move, points)[1](out_of * zeta)[0]

        J = LinearMap(
            push,
            pull,
            in_shape=(mu.n_particles, mu.dim),
            out_shape=(eta.n_particles, image.dim),
            batch_shape=mu.batch_shape,
            dtype=mu.dtype,
            device=mu.device,
        )
        if geometry == "wasserstein":
            check_light_atoms("CrossAttention", mu, image, J)
        return J

    @property
    def _looks_at_positions(self) -> bool:
        return self.layer.causal or self.layer.kernel.needs_positions

    def _check(self, mu: ParticleMeasure, eta: ParticleMeasure) -> None:
        check_measure(mu)
        check_measure(eta, "eta")
        check_same_kind(mu.points, "mu", eta.points, "eta")
        if mu.batch_shape != eta.batch_shape:
            raise ValueError(
                f"eta: expected the batch shape {tuple(mu.batch_shape)} of mu, got "
                f"{tuple(eta.batch_shape)}"
            )
        if self._looks_at_positions:
            check_positioned(eta, "eta")


@final
@dataclass(frozen=True, eq=False)
class AtContext(Map):
    """η ↦ Γ_μ♯η at a fixed context μ; made by `CrossAttention.at`."""

    cross: CrossAttention
    context: ParticleMeasure
    particlewise = True

    @property
    def dim(self) -> int:  # type: ignore[override]
        """d."""
        return self.cross.layer.dim

    def __call__(self, eta: ParticleMeasure, /) -> ParticleMeasure:
        """Γ_μ♯η."""
        return self.cross(self.context, eta)

    def linearisation(self, eta: ParticleMeasure, *, geometry: str = "euclidean") -> Linearisation:
        """DΓ_μ(xᵢ) of every atom, in both parts: the weights cancel."""
        check_geometry(geometry)
        points, present, out_dim = eta.points.detach(), _present(eta), self(eta).dim

        def move(points: Tensor) -> Tensor:
            return self(eta.replace(points)).points

        def push(eps: Tensor) -> Tensor:
            return present * torch.func.jvp(move, (points,), (eps.contiguous(),))[1]

        def pull(zeta: Tensor) -> Tensor:
            return torch.func.vjp(move, points)[1](present * zeta)[0]

        atoms = LinearMap.of(points, push, pull, out_dim=out_dim)
        return Linearisation(atoms, LinearMap.of(points, push, pull, out_dim=out_dim, each=True))


def _present(mu: ParticleMeasure) -> Tensor:
    return (mu.log_weights > -math.inf)[..., None].to(mu.dtype)


def _roots(mu: ParticleMeasure) -> Tensor:
    """√aᵢ, ``(*batch, n, 1)``; 1 for absent atoms."""
    logs = torch.where(mu.log_weights > -math.inf, mu.log_weights, 0.0)
    return (0.5 * logs)[..., None].exp()
