"""All heads of a layer in one product: apart, each would read the displacement again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from meanfield.attention.parameters import AttentionParameters
from meanfield.linalg.ritz import top_ritz

__all__ = ["JoinedHeads"]


# Top directions of the value maps that are kept, the space that they are sought in, and their
# residual.
_DIRECTIONS, _LIMIT, _RESIDUAL = 8, 96, 1e-3

# Of layers that were linearised before. They are starts and nothing else, so that it does no harm
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

    def value_directions(self) -> Tensor:
        """The top right singular vectors of Σ_h W^h V^h, roughly; (at most 8, d)."""
        known = _value_directions.get(self.parameters)
        if known is None:
            known = _value_directions[self.parameters] = self._seek_value_directions()
        return known

    def _seek_value_directions(self) -> Tensor:
        value, outer = self.parameters.value.detach().flatten(0, 1), self.outer
        outer = None if outer is None else outer.detach()
        # Not the seed of the iteration: its random part is to know nothing of these starts.
        generator = torch.Generator().manual_seed(1)
        count = min(_DIRECTIONS, self.parameters.dim)
        start = torch.randn(1, self.parameters.dim, count, generator=generator).to(value)

        # They are starts: where a product leaves the number range it says nothing.
        def push(y: Tensor) -> Tensor:
            z = value @ y
            return (z if outer is None else outer @ z).nan_to_num(0.0, 0.0, 0.0)

        def pull(z: Tensor) -> Tensor:
            y = value.mT @ (z if outer is None else outer.mT @ z)
            return y.nan_to_num(0.0, 0.0, 0.0)

        _, vectors = top_ritz(push, pull, start, _LIMIT, _RESIDUAL)
        return vectors[0, :count]
