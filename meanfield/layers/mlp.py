"""The feed-forward layer of a transformer, plain or gated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import functional

from meanfield.checks import (
    as_float_tensor,
    check_dim,
    check_finite,
    check_same_kind,
    choice,
    is_traced,
    without_autocast,
)
from meanfield.copies import own_copy
from meanfield.errors import NoDerivativeError
from meanfield.habits import with_hints
from meanfield.layers.particlewise import Particlewise, Product, above_rounding, present_rows
from meanfield.linalg.vectors import lengths, slopes_of, units
from meanfield.maps import BallBounds, expanded_radii
from meanfield.maps.map import scaled_radii
from meanfield.measures import ParticleMeasure
from meanfield.results.labels import copied


class Activation(NamedTuple):
    """A function of numbers; bounds of its derivatives are from their formulas, rounded outwards.

    Attributes:
        function: φ, entry by entry.
        lowest_slope: a lower bound of φ′.
        highest_slope: an upper bound of φ′, and of |φ′|.
        curvature: an upper bound of |φ″|; ∞ for a slope that is constant but for a jump at 0.
    """

    function: Callable[[Tensor], Tensor]
    lowest_slope: float
    highest_slope: float
    curvature: float

    def slope_change(self, at: Tensor, slope: Tensor, radii: Tensor) -> Tensor:
        """An upper bound of |φ′(x) − φ′(at)| for |x − at| ≤ radii."""
        if math.isinf(self.curvature):
            # At exactly 0 both slopes count, also at radius 0.
            bent = torch.where(at.abs() > radii, 0.0, math.inf)
        else:
            bent = self.curvature * radii
        return bent.minimum((self.highest_slope - slope).maximum(slope - self.lowest_slope))

    def steepest(self, at: Tensor, slope: Tensor, radii: Tensor) -> Tensor:
        """An upper bound of |φ′(x)| for |x − at| ≤ radii."""
        near = slope.abs() + self.slope_change(at, slope, radii)
        return near.clamp_max(self.highest_slope)


# Slopes are extreme at ±√2 (gelu), ±2.3994 (silu), ±1.4185 (the tanh form of gelu); |φ″| is
# largest at 0, except for tanh.
ACTIVATIONS: dict[str, Activation] = {
    "gelu": Activation(functional.gelu, -0.12891, 1.12891, 0.79789),
    "gelu_tanh": Activation(partial(functional.gelu, approximate="tanh"), -0.129, 1.129, 0.79789),
    "relu": Activation(functional.relu, 0.0, 1.0, math.inf),
    "silu": Activation(functional.silu, -0.09985, 1.09985, 0.5),
    "quick_gelu": Activation(lambda x: x * torch.sigmoid(1.702 * x), -0.09985, 1.09985, 0.851),
    "tanh": Activation(torch.tanh, 0.0, 1.0, 0.76981),
}


@with_hints
@final
@dataclass(frozen=True, eq=False)
class MLP(Particlewise):
    """x ↦ W₂ φ(W₁x + b₁) + b₂, or gated: x ↦ W₂ (φ(Gx + c) ∘ (W₁x + b₁)) + b₂.

    The derivative is W₂ diag(φ′) W₁, and W₂ (diag(φ) W₁ + diag(φ′ ∘ (W₁x + b₁)) G) with a gate.
    ReLU at exactly 0 has no derivative: there `linearisation` refuses, and the bounds hold.

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

    broadcasts = True

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

    def __deepcopy__(self, memo: dict[int, Any]) -> MLP:
        return copied(self, memo)

    def __repr__(self) -> str:
        width, dim = self.inner.shape
        parts = [f"dim={dim}", f"width={width}", f"out_dim={len(self.outer)}"]
        parts += [f"activation={self.activation!r}", *["gated"] * (self.gate is not None)]
        return f"MLP({', '.join(parts)})"

    @without_autocast
    def __call__(self, mu: ParticleMeasure, /) -> ParticleMeasure:
        """The image.

        Raises:
            ValueError: another dimension.
        """
        up, gate = self._inside(mu)
        phi = ACTIVATIONS[self.activation].function
        hidden = phi(up) if gate is None else phi(gate) * up
        return mu.replace(_affine(hidden, self.outer, self.outer_bias))

    def products(self, mu: ParticleMeasure) -> tuple[Product, Product]:
        """The derivative and its transpose, from the slopes at every atom.

        Raises:
            NoDerivativeError: ReLU at exactly 0.
        """
        self._refuse_kinks(mu)
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

        return push, pull

    def local_upper(self, mu: ParticleMeasure) -> Tensor:
        """‖W₂D^½‖ ‖D^½W₁‖, D = max |φ′| over the atoms; a gate adds such a term; ``(*batch,)``.

        Where ReLU meets exactly 0 both slopes count.
        """
        still = torch.zeros_like(mu.log_weights)
        return self._norm_from(self._largest_factors(mu, self._factor_changes(mu, still)))

    def ball_bounds(
        self, mu: ParticleMeasure, radii: Tensor | float, *, splitting: bool = True
    ) -> BallBounds:
        """From: coordinate k of W₁x moves by r |w_k| at most, and φ′ there by sup |φ″| times that.

        A factor f of W₁ that changes by at most |f| ≤ D, entry by entry, changes the derivative
        by W₂ diag(f) W₁, and ‖W₂ diag(f) W₁‖ ≤ ‖W₂D^½‖ ‖D^½W₁‖. With a gate the factors are
        φ(g) and φ′(g)u, and |φ′(g′)u′ − φ′(g)u| ≤ |φ′(g′) − φ′(g)||u| + |φ′(g′)||u′ − u|.
        """
        each, present = expanded_radii(mu, radii), present_rows(mu)
        changes = self._factor_changes(mu, each)
        most = self._largest_factors(mu, changes)
        change = self._norm_from([None if c is None else present * c for c in changes])
        near = BallBounds.of(self.local_upper(mu), change, self._norm_from(most), each)
        return near._replace(displacement=scaled_radii(near.upper[..., None], each))

    def _largest_factors(
        self, mu: ParticleMeasure, changes: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Upper bounds of |`_factors`| that change by this much; 0 for absent atoms."""
        cap = ACTIVATIONS[self.activation].highest_slope if self.gate is None else math.inf
        return [
            None if f is None or c is None else present_rows(mu) * (f.abs() + c).clamp_max(cap)
            for f, c in zip(self._factors(mu), changes, strict=True)
        ]

    def _refuse_kinks(self, mu: ParticleMeasure) -> None:
        up, gate = self._inside(mu)
        if not math.isinf(ACTIVATIONS[self.activation].curvature) or is_traced(up):
            return
        at, matrix = (up, self.inner) if gate is None else (gate, self.gate)
        # Units that no input reaches, or that reach no output, have nothing to differentiate.
        used = matrix.abs().amax(-1) * self.outer.abs().amax(0)
        jump = used if gate is None else used * up.abs()
        if bool(((at == 0) & (jump > 0) & (present_rows(mu) > 0)).any()):
            raise NoDerivativeError(
                f"MLP: expected no unit at exactly 0, where {self.activation} has no derivative, "
                "got one; move that atom a little, or take local_upper or ball_upper, which hold "
                "there"
            )

    def _factor_changes(self, mu: ParticleMeasure, radii: Tensor) -> tuple[Tensor, Tensor | None]:
        """Upper bounds of the change of `_factors` as atoms move by radii ``(*batch, n)``."""
        act = ACTIVATIONS[self.activation]
        up, gate = self._inside(mu)
        at, matrix = (up, self.inner) if gate is None else (gate, self.gate)
        slope = slopes_of(act.function, at)[1]
        moved = scaled_radii(lengths(matrix), radii[..., None])
        bent = act.slope_change(at, slope, moved)
        if gate is None:
            return bent, None
        steepest = act.steepest(at, slope, moved)
        up_moved = scaled_radii(lengths(self.inner), radii[..., None])
        return scaled_radii(steepest, moved), bent * up.abs() + scaled_radii(steepest, up_moved)

    def _norm_from(self, factors: Sequence[Tensor | None]) -> Tensor:
        """A bound of ‖W₂ diag(f) W₁‖ + ‖W₂ diag(g) G‖ for |f|, |g| ≤ factors at every atom."""
        total = self.outer.new_zeros(())
        for factor, matrix in zip(factors, (self.inner, self.gate), strict=True):
            if factor is not None:
                root = factor.amax(-2).sqrt()[..., None, :]
                known = torch.where(root < math.inf, root, 0.0)
                norms = _norm(self.outer * known) * _norm(matrix.mT * known)
                total = total + torch.where((root < math.inf).all((-2, -1)), norms, math.inf)
        return total

    @property
    def global_upper(self) -> float:
        """‖W₂‖ sup|φ′| ‖W₁‖ bounds all local constants; ∞ with a gate, whose product grows."""
        if self.gate is not None:
            return math.inf
        slope = ACTIVATIONS[self.activation].highest_slope
        return slope * float((_norm(self.outer) * _norm(self.inner)).detach())

    @property
    def dim(self) -> int:  # type: ignore[override]
        """d."""
        return self.inner.shape[-1]

    @property
    def out_dim(self) -> int:  # type: ignore[override]
        """d_out."""
        return len(self.outer)

    def _inside(self, mu: ParticleMeasure) -> tuple[Tensor, Tensor | None]:
        """W₁x + b₁ and Gx + c."""
        check_dim(mu, self.dim)
        check_same_kind(self.inner, "the matrices", mu.points, "the measure")
        up = _affine(mu.points, self.inner, self.inner_bias)
        return up, None if self.gate is None else _affine(mu.points, self.gate, self.gate_bias)

    def _factors(self, mu: ParticleMeasure) -> tuple[Tensor, Tensor | None]:
        """What W₁ε and Gε are multiplied by, ``(*batch, n, m)`` each."""
        up, gate = self._inside(mu)
        up, gate = up.detach(), None if gate is None else gate.detach()
        phi, at = ACTIVATIONS[self.activation].function, up if gate is None else gate
        value, slope = slopes_of(phi, at)
        return (slope, None) if gate is None else (value, slope * up)


def _checked(value: Any, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
    tensor = own_copy(as_float_tensor(value, name, like=like), "MLP")
    check_same_kind(like, "inner", tensor, name)
    if tensor.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")
    check_finite(tensor, name)
    return tensor


def _affine(points: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    image = points @ matrix.mT
    return image if bias is None else image + bias


@without_autocast
def _norm(matrix: Tensor) -> Tensor:
    """‖W‖₂ at most, from the smaller Gram matrix: a tenth of the time of an SVD."""
    wide = matrix if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT
    unit = units(wide.flatten(-2))
    wide = wide / unit[..., None]
    found = torch.linalg.eigvalsh(wide @ wide.mT)[..., -1].clamp_min(0).sqrt()
    return above_rounding(unit[..., 0] * found, wide.shape[-1])
