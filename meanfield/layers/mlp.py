"""The feed-forward layer of a transformer, plain or gated."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import functional

from meanfield.checks import as_float_tensor, check_finite, check_same_kind
from meanfield.layers.particlewise import blockwise, present_rows
from meanfield.linearisation import Linearisation
from meanfield.measures import ParticleMeasure
from meanfield.options import choice

__all__ = ["ACTIVATIONS", "MLP", "Activation"]

# Relative: what upper bounds are raised by, to stay above the rounding of the norms.
_ROUNDING = 1e-9


class Activation(NamedTuple):
    """A function of numbers.

    Attributes:
        function: φ, entry by entry.
        largest_slope: an upper bound of sup |φ′|, from its formula, rounded up.
    """

    function: Callable[[Tensor], Tensor]
    largest_slope: float


# Where the largest slope is attained: √2 (gelu), 2.3994 (silu), 1.4185 (the tanh form of gelu).
ACTIVATIONS: dict[str, Activation] = {
    "gelu": Activation(functional.gelu, 1.12891),
    "gelu_tanh": Activation(partial(functional.gelu, approximate="tanh"), 1.129),
    "relu": Activation(functional.relu, 1.0),
    "silu": Activation(functional.silu, 1.09985),
    "quick_gelu": Activation(lambda x: x * torch.sigmoid(1.702 * x), 1.09985),
    "tanh": Activation(torch.tanh, 1.0),
}


@final
@dataclass(frozen=True, eq=False)
class MLP:
    """x ↦ W₂ φ(W₁x + b₁) + b₂, or gated: x ↦ W₂ (φ(Gx + c) ∘ (W₁x + b₁)) + b₂.

    The derivative is W₂ diag(φ′) W₁, and W₂ (diag(φ) W₁ + diag(φ′ ∘ (W₁x + b₁)) G) with a gate.
    ReLU has slope 0 at 0, as in torch.

    Args:
        inner: W₁, (m, d).
        outer: W₂, (d_out, m).
        inner_bias: b₁, (m,), or None.
        outer_bias: b₂, (d_out,), or None.
        activation: φ, a name of `ACTIVATIONS`.
        gate: G, (m, d), or None for none.
        gate_bias: c, (m,), or None.

    Example:
        >>> layer = MLP([[1.0], [-1.0]], [[1.0, 1.0]], activation="relu")
        >>> layer(ParticleMeasure([[3.0], [-2.0]])).points
        tensor([[3.],
                [2.]], dtype=torch.float64)
    """

    inner: Any
    outer: Any
    inner_bias: Any = None
    outer_bias: Any = None
    activation: str = "gelu"
    gate: Any = None
    gate_bias: Any = None

    def __post_init__(self) -> None:
        choice(self.activation, "activation", ACTIVATIONS)
        if self.gate is None and self.gate_bias is not None:
            raise ValueError("gate_bias: expected None without a gate, got one")
        inner = as_float_tensor(self.inner, "inner")
        outer = as_float_tensor(self.outer, "outer", like=inner)
        for name, matrix in (("inner", inner), ("outer", outer)):
            if matrix.ndim != 2 or 0 in matrix.shape:
                raise ValueError(f"{name}: expected a matrix, got shape {tuple(matrix.shape)}")
        width, dim = inner.shape
        shapes = {
            "inner": (width, dim),
            "outer": (len(outer), width),
            "inner_bias": (width,),
            "outer_bias": (len(outer),),
            "gate": (width, dim),
            "gate_bias": (width,),
        }
        for name, shape in shapes.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _checked(value, name, shape, inner))

    def __call__(self, mu: ParticleMeasure, /) -> ParticleMeasure:
        """The image.

        Raises:
            ValueError: another dimension.
        """
        up, gate = self._inside(mu)
        phi = ACTIVATIONS[self.activation].function
        hidden = phi(up) if gate is None else phi(gate) * up
        return mu.replace(_affine(hidden, self.outer, self.outer_bias))

    def linearisation(self, mu: ParticleMeasure, *, geometry: str = "euclidean") -> Linearisation:
        """Block-diagonal, from the slopes at every atom."""
        by_inner, by_gate = self._factors(mu)

        def push(eps: Tensor) -> Tensor:
            hidden = by_inner * (eps @ self.inner.mT)
            if by_gate is not None:
                hidden = hidden + by_gate * (eps @ self.gate.mT)
            return hidden @ self.outer.mT

        def pull(zeta: Tensor) -> Tensor:
            hidden = zeta @ self.outer
            back = (by_inner * hidden) @ self.inner
            return back if by_gate is None else back + (by_gate * hidden) @ self.gate

        return blockwise(mu, push, pull, len(self.outer), geometry)

    def local_upper(self, mu: ParticleMeasure) -> Tensor:
        """‖W₂‖ max|φ′| ‖W₁‖ at the atoms, and with a gate the sum of its two parts, (*batch,)."""
        present = present_rows(mu)
        by_inner, by_gate = self._factors(mu)
        inside = (present * by_inner).abs().amax((-2, -1)) * _norm(self.inner)
        if by_gate is not None:
            inside = inside + (present * by_gate).abs().amax((-2, -1)) * _norm(self.gate)
        return (1 + _ROUNDING) * _norm(self.outer) * inside

    @property
    def global_upper(self) -> float:
        """‖W₂‖ sup|φ′| ‖W₁‖: no local constant is above it; ∞ with a gate, whose product grows."""
        if self.gate is not None:
            return math.inf
        slope = ACTIVATIONS[self.activation].largest_slope
        return (1 + _ROUNDING) * slope * float(_norm(self.outer) * _norm(self.inner))

    @property
    def dim(self) -> int:
        """d."""
        return self.inner.shape[-1]

    def _inside(self, mu: ParticleMeasure) -> tuple[Tensor, Tensor | None]:
        """W₁x + b₁ and Gx + c."""
        if mu.dim != self.dim:
            raise ValueError(f"expected a measure on R^{self.dim}, got one on R^{mu.dim}")
        check_same_kind(self.inner, "the matrices", mu.points, "the measure")
        up = _affine(mu.points, self.inner, self.inner_bias)
        return up, None if self.gate is None else _affine(mu.points, self.gate, self.gate_bias)

    def _factors(self, mu: ParticleMeasure) -> tuple[Tensor, Tensor | None]:
        """What W₁ε and Gε are multiplied by, (*batch, n, m) each."""
        up, gate = self._inside(mu)
        up, gate = up.detach(), None if gate is None else gate.detach()
        phi, at = ACTIVATIONS[self.activation].function, up if gate is None else gate
        value, slope, *_ = torch.func.jvp(phi, (at,), (torch.ones_like(at),))
        return (slope, None) if gate is None else (value, slope * up)


def _checked(value: Any, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
    tensor = as_float_tensor(value, name, like=like)
    check_same_kind(like, "inner", tensor, name)
    if tensor.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")
    check_finite(tensor, name)
    return tensor


def _affine(points: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    image = points @ matrix.mT
    return image if bias is None else image + bias


def _norm(matrix: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrix, 2)
