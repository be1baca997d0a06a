"""What the theorems need of a layer: its mask, its scores, and norms of its heads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from meanfield.bounds.arguments import out
from meanfield.bounds.theorems import theorem_3_3
from meanfield.checks import as_floats, describe

if TYPE_CHECKING:
    from meanfield.attention.parameters import AttentionParameters
    from meanfield.attention.self_attention import SelfAttention
    from meanfield.maps import Map
    from meanfield.maps.map import Gain

# Relative: what upper bounds of a layer are raised by, to stay above the rounding of the norms.
_ROUNDING = 1e-9

_EXPECTED = (
    "layer: expected SelfAttention, a Chain of LayerNorm or RMSNorm and SelfAttention, or "
    "AttentionParameters of a plain layer, got "
)


@dataclass(frozen=True, eq=False)
class Layer:
    """Attention as the theorems see it; per head, with H heads.

    Attributes:
        attention: the layer, the gain of a norm before it absorbed.
        norm: the normalisation before it, with γ = 1 and β = 0; None without one.
        map: the map itself.
    """

    attention: SelfAttention
    norm: Gain | None
    map: Map

    @classmethod
    def of(cls, layer: Any) -> Layer:
        """What the theorems need of this layer.

        Args:
            layer: `meanfield.attention.SelfAttention`, a chain of a norm and such a layer, or the
                parameters of a plain one.

        Raises:
            TypeError: something else.
        """
        # Here, so that formulas of numbers do without torch.
        from meanfield.attention.parameters import AttentionParameters
        from meanfield.attention.self_attention import SelfAttention
        from meanfield.maps import Map

        if isinstance(layer, AttentionParameters):
            layer = SelfAttention(layer)
        if not isinstance(layer, Map):
            raise TypeError(_EXPECTED + describe(layer))
        *before, last = layer.stages
        gains = [each.gain for each in before]
        if not isinstance(last, SelfAttention) or len(gains) > 1 or None in gains:
            raise TypeError(_EXPECTED + " then ".join(describe(each) for each in layer.stages))
        norm = gains[0] if gains else None
        if norm is not None:
            last = replace(last, parameters=last.parameters.after(before[0]))
        return cls(last, norm, layer)

    @property
    def parameters(self) -> AttentionParameters:
        """Its matrices, the gain of a norm before it absorbed."""
        return self.attention.parameters

    @cached_property
    def _wide(self) -> AttentionParameters:
        """The parameters in double precision: products in single are off by more than is added."""
        return self.parameters.to(self.parameters.query.double().dtype)

    @cached_property
    def A(self) -> np.ndarray:
        """(H, d, d), of the scores ⟨A_h x + c_h, y⟩."""
        return as_floats(self._wide.A)

    @cached_property
    def V(self) -> np.ndarray:
        """V_h, output matrices included, (H, d_out, d)."""
        return as_floats(self._wide.V)

    @cached_property
    def norm_A(self) -> np.ndarray:
        """‖A_h‖, (H,), from k × k matrices."""
        keys = np.swapaxes(as_floats(self._key), -1, -2)
        scale = np.abs(as_floats(self.parameters.scale))
        return scale * _product_norms(keys, as_floats(self.parameters.query))

    @cached_property
    def norm_V(self) -> np.ndarray:
        """‖V_h‖, (H,)."""
        par = self.parameters
        value = as_floats(par.per_head(par.value))
        if par.output is None:
            return np.linalg.norm(value, 2, axis=(-2, -1))
        return _product_norms(as_floats(par.output), value)

    @cached_property
    def shift(self) -> np.ndarray:
        """|c_h|, (H,)."""
        return np.linalg.norm(self.pull, axis=-1)

    @cached_property
    def pull(self) -> np.ndarray:
        """c_h = scale · Kᵀ b_Q, (H, d): what a query bias adds to Ax; 0 without one."""
        return self._pulled(self.parameters.query_bias, self._key)

    @cached_property
    def key_shift(self) -> np.ndarray:
        """|scale · Qᵀ b_K|, (H,): what a key bias adds to Aᵀy; 0 without one."""
        par = self.parameters
        bias = None if par.key_bias is None else par.per_head(par.key_bias)
        return np.linalg.norm(self._pulled(bias, par.query), axis=-1)

    @cached_property
    def has_centred_values(self) -> bool:
        """Whether the values of 0 are 0: they have no bias, nor has a norm before them."""
        bias = self.parameters.value_bias
        return bias is None or not as_floats(bias).any()

    def effective_A(self, radius: Any) -> np.ndarray:
        """‖A_h‖ + |c_h|/R, shape (..., H): stands in for ‖A_h‖ where there is a query bias.

        The proofs of Theorems 3.3, 4.3 and 3.5 use ‖A‖ and ‖Ax‖ ≤ ‖A‖R on the ball only, and
        ‖Ax + c‖ ≤ (‖A‖ + |c|/R)R. This step is not in the paper; tested numerically.
        """
        R = np.asarray(radius, float)[..., None]
        if not self.shift.any():
            return np.broadcast_to(self.norm_A, (*R.shape[:-1], len(self.norm_A)))
        with np.errstate(divide="ignore"):
            return self.norm_A + self.shift / R

    def theorem_3_3(self, radius: Any, n: int) -> Any:
        """Σ_h √3 ‖V_h‖ ((‖A_h‖ + |c_h|/R)²R⁴(4n+1) + n)^½: all heads on n tokens in B_R.

        Source: [CAP24] Theorems 3.3 and 4.3 with Lemma 3.8; |c_h|/R is not in the paper.
        """
        R = np.asarray(radius, float)
        # One head at a time: radii by heads would be a matrix, which is no array of norms.
        of_heads = zip(self.effective_A(R.ravel()).T, self.norm_V, strict=True)
        each = [theorem_3_3(norm_A, norm_V, R.ravel(), n) for norm_A, norm_V in of_heads]
        return out(raised(np.sum(each, axis=0)).reshape(R.shape))

    def joined(self, each: Any) -> float:
        """A bound of the layer, from one of each head alone at V_h = I."""
        return float(raised(joined_heads(self.V, each, norms_V=self.norm_V)))

    @property
    def _key(self) -> Any:
        return self.parameters.per_head(self.parameters.key)

    def _pulled(self, bias: Any, matrix: Any) -> np.ndarray:
        """scale · Mᵀb of each head, (H, d)."""
        par = self.parameters
        if bias is None:
            return np.zeros((par.n_heads, par.dim))
        rows = as_floats(bias)[:, None, :] @ as_floats(matrix)
        return as_floats(par.scale)[:, None] * rows[:, 0]


def joined_heads(V: Any, constants: Any, *, norms_V: Any = None) -> Any:
    """min(Σ_h τ_h ‖V_h‖, ‖Σ_h τ_h V_hV_hᵀ‖^½ (Σ_h τ_h)^½): the constant of Σ_h V_h F_h.

    The second is smaller where heads write into different directions: by √H if these are
    orthogonal. It holds for constants in L^p with p ≥ 2: by Cauchy–Schwarz in h, and Minkowski's
    inequality for p/2.

    Args:
        V: what each head does to its mean, (H, d_out, d).
        constants: τ_h ≥ 0, a bound of each head alone at V_h = I, (..., H); ∞ if none is known.
        norms_V: ‖V_h‖, (H,), if they are known.

    Source: the first is [CAP24] Lemma 3.8; the second is this package's. Proved.
    """
    matrices, tau = as_floats(V), as_floats(constants)
    norms_V = np.linalg.norm(matrices, 2, axis=(-2, -1)) if norms_V is None else norms_V
    with np.errstate(invalid="ignore", over="ignore"):
        summed = np.where(norms_V > 0, norms_V * tau, 0.0).sum(-1)
    if len(matrices) == 1:
        return out(summed)
    finite = np.where(np.isfinite(tau), tau, 0.0)
    scale = np.maximum(finite.max(-1, keepdims=True), np.finfo(float).tiny)
    share = finite / scale  # so that no product overflows
    gram = np.einsum("...h,hik->...ik", share, matrices @ np.swapaxes(matrices, -1, -2))
    top = np.linalg.eigvalsh(gram)[..., -1].clip(0)
    with np.errstate(over="ignore"):
        together = np.sqrt(top * share.sum(-1)) * scale[..., 0]
    return out(np.where(np.isfinite(tau).all(-1), np.minimum(summed, together), summed))


def raised(value: Any) -> Any:
    """The bound, raised above the rounding of the norms in it."""
    return value * (1 + _ROUNDING)


def _product_norms(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """‖left @ right‖ for tall left (H, m, k) and wide right (H, k, d)."""
    first = np.linalg.qr(left, mode="r")
    second = np.linalg.qr(np.swapaxes(right, -1, -2), mode="r")
    return np.linalg.norm(first @ np.swapaxes(second, -1, -2), 2, axis=(-2, -1))
