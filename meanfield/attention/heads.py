"""All heads of a layer in one product: apart, each would read the displacement again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from meanfield.attention.parameters import AttentionParameters
from meanfield.linalg import LinearMap, operator_norm

__all__ = ["JoinedHeads"]

# Products with Σ_h W^h V^h that its top direction is worth: the norm estimate goes on from there.
_ROUGH_STEPS = 20

# Of layers that were linearised before. It is a start and nothing else, so that it does no harm
# if the entries of a layer change in the meantime.
_value_directions: WeakKeyDictionary[AttentionParameters, Tensor] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class JoinedHeads:
    """The linear maps of a layer with its heads side by side."""

    parameters: AttentionParameters

    @cached_property
    def inner(self) -> Tensor:
        """The rows of scale · Q, K and V of every head, one below the other, (Σ, d)."""
        par = self.parameters
        query = par.scale[:, None, None] * par.query
        return torch.cat([query.flatten(0, 1), par.key.flatten(0, 1), par.value.flatten(0, 1)])

    @cached_property
    def outer(self) -> Tensor | None:
        """W of every head side by side, (d_out, H·v); None for the identity."""
        output = self.parameters.output
        return None if output is None else output.movedim(0, 1).flatten(1)

    def parts(self, joined: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views (*batch, H, n, ·) of q̇, k̇, v̇ in (*batch, n, Σ)."""
        par = self.parameters
        widths = [par.n_heads * matrix.shape[-2] for matrix in (par.query, par.key, par.value)]
        q, k, v = (
            part.unflatten(-1, (par.n_heads, -1)).transpose(-2, -3)
            for part in joined.split(widths, -1)
        )
        return q, k, v

    def project(self, eps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q̇, k̇, v̇ of displacements (*batch, n, d)."""
        return self.parts(eps @ self.inner.mT)

    def split(self, y: Tensor) -> Tensor:
        """Wᵀy of each head, (*batch, n, d_out) → (*batch, H, n, v)."""
        if self.outer is None:
            return y[..., None, :, :]
        return (y @ self.outer).unflatten(-1, (self.parameters.n_heads, -1)).transpose(-2, -3)

    def join(self, heads: Tensor) -> Tensor:
        """Σ_h W^h of each head, (*batch, H, n, v) → (*batch, n, d_out)."""
        if self.outer is None:
            return heads.squeeze(-3)
        return heads.transpose(-2, -3).flatten(-2) @ self.outer.mT

    def value_direction(self) -> Tensor:
        """The top right singular vector of Σ_h W^h V^h, roughly; (d,)."""
        known = _value_directions.get(self.parameters)
        if known is None:
            known = _value_directions[self.parameters] = self._value_direction()
        return known

    def _value_direction(self) -> Tensor:
        par, outer = self.parameters, self.outer
        value = par.value.flatten(0, 1)

        def push(y: Tensor) -> Tensor:
            y = y @ value.mT
            return y if outer is None else y @ outer.mT

        def pull(z: Tensor) -> Tensor:
            return (z if outer is None else z @ outer) @ value

        shapes = (1, par.dim), (1, par.out_dim)
        layer = LinearMap(push, pull, *shapes, dtype=value.dtype, device=value.device)
        with torch.no_grad():
            return operator_norm(layer, max_steps=_ROUGH_STEPS, strict=False).direction.squeeze(0)
