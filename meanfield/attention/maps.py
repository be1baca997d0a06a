"""Self-attention as a map of measures."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from meanfield.attention.interaction import Interaction
from meanfield.attention.kernels import Kernel, dot_product
from meanfield.attention.normalization import LogTransition, softmax
from meanfield.attention.parameters import AttentionParameters
from meanfield.attention.streaming import attend
from meanfield.attention.tangent import AttentionTangent
from meanfield.attention.upper import upper_bound
from meanfield.checks import as_float_tensor, check_finite, check_same_kind, is_traced
from meanfield.linalg import LinearMap
from meanfield.measures import ParticleMeasure

__all__ = ["SelfAttention"]


@dataclass(frozen=True)
class SelfAttention:
    """F(μ) = (Γ_μ)♯μ, Γ_μ(x) = Σ_h W^h (∫ e^{⟨A^h x, y⟩} V^h y dμ(y) / ∫ e^{⟨A^h x, y⟩} dμ(y)).

    [CAP24] Definitions 2.4 (plain) and 2.5, 2.6 (causal: the integrals run over the atoms whose
    position is at most that of x; ties see each other). On the uniform measure of a sequence it
    is discrete self-attention, F(m(X)) = m(f(X)).

    Args:
        parameters: the matrices of the layer.
        causal: whether the layer is masked; its measures then need positions.
        kernel: what two tokens say to each other.
        normalization: from logits to transition probabilities.

    Example:
        >>> params = AttentionParameters.from_bilinear([[0.0]], [[1.0]])
        >>> F = SelfAttention(params)
        >>> F(ParticleMeasure([[1.0], [3.0]])).points
        tensor([[2.],
                [2.]], dtype=torch.float64)
    """

    parameters: AttentionParameters
    causal: bool = False
    kernel: Kernel = dot_product
    normalization: Callable[[Tensor], LogTransition] = softmax

    def __call__(self, mu: ParticleMeasure, /) -> ParticleMeasure:
        """F(μ): atoms move to Γ_μ(xᵢ), weights and positions ride along.

        Raises:
            ValueError: another dimension than the parameters', or no positions when causal.
            TypeError: another dtype than the parameters'.
        """
        self._check(mu)
        interaction = self._interaction(mu)
        points = interaction.sort(mu.points)
        moved = self._attend(interaction, points, interaction.positions)
        return mu.replace(interaction.unsort(moved))

    def field(self, mu: ParticleMeasure) -> Callable[..., Tensor]:
        """Γ_μ at any point, μ held fixed.

        Returns:
            A function of x (*batch, m, d), and of s (*batch, m) or a number when the layer is
            causal, with values Γ_μ(x) or the second component of Γ_μ(s, x), (*batch, m, d_out).
            It raises ValueError where Γ is undefined: at a position before all the mass.
        """
        self._check(mu)
        interaction = self._interaction(mu)

        def gamma(x: object, s: object = None) -> Tensor:
            points = as_float_tensor(x, "x", like=mu.points)
            check_same_kind(mu.points, "the measure", points, "x")
            if points.ndim < 2 or points.shape[-1] != mu.dim:
                raise ValueError(
                    f"x: expected shape (..., m, {mu.dim}), got {tuple(points.shape)}"
                )
            check_finite(points, "x")
            positions = self._row_positions(s, points, interaction) if self.causal else None
            return self._attend(interaction, points, positions)

        return gamma

    def linearize(
        self,
        mu: ParticleMeasure,
        *,
        geometry: str = "euclidean",
        memory: int = 2**29,
        block_size: int | None = None,
    ) -> LinearMap:
        """The derivative of the atoms of F(μ) in the atoms of μ at fixed weights.

        Args:
            mu: μ.
            geometry: "euclidean": J on displacements ε. "wasserstein": D^½ J D^−½ on √aᵢ εᵢ,
                with D = diag(aᵢ); its norm is the local constant for perturbations that do not
                split atoms ([CAP24] Lemma C.5).
            memory: bytes that kept transition matrices may take; beyond, they are recomputed.
            block_size: rows per block of the transition matrix; from the memory of one if None.
        """
        return self.tangent(
            mu, geometry=geometry, memory=memory, block_size=block_size
        ).as_linear_map()

    def tangent(
        self,
        mu: ParticleMeasure,
        *,
        geometry: str = "euclidean",
        memory: int = 2**29,
        block_size: int | None = None,
    ) -> AttentionTangent:
        """The linearisation with all that it offers (see `linearize`)."""
        if geometry not in ("euclidean", "wasserstein"):
            raise ValueError(f"geometry: expected 'euclidean' or 'wasserstein', got {geometry!r}")
        if self.normalization is not softmax:
            raise NotImplementedError(
                "the linearisation is that of softmax; for another one, wrap the map in a "
                "function of measures, which is then differentiated automatically"
            )
        self._check(mu)
        interaction = self._interaction(mu).in_place()
        queries = self.kernel.queries(self.parameters, interaction.sort(mu.points))
        return AttentionTangent(
            self.parameters, queries, interaction, geometry, memory, block_size
        )

    def field_jacobians(self, mu: ParticleMeasure) -> Tensor:
        """D_xΓ_μ(xᵢ) at every atom, (*batch, n, d_out, d); V Covᵢ A for one unbiased head."""
        return self.tangent(mu).field_jacobians()

    def linearize_field(self, mu: ParticleMeasure) -> LinearMap:
        """D_xΓ_μ(xᵢ) as a batch (*batch, n) of linear maps; atoms of weight 0 have the map 0."""
        return self.tangent(mu).field_linear_map()

    def local_upper(self, mu: ParticleMeasure) -> Tensor:
        """An upper bound of the local Wasserstein constant at μ, see `bounds.local_upper`."""
        tangent = self.tangent(mu)
        return upper_bound(self.parameters, tangent.queries, tangent.interaction)

    def _interaction(self, mu: ParticleMeasure) -> Interaction:
        return Interaction.of(self.parameters, self.kernel, mu, self.causal)

    def _attend(
        self, interaction: Interaction, points: Tensor, positions: Tensor | None
    ) -> Tensor:
        """Γ at points (*batch, m, d), a block of rows at a time."""
        par = self.parameters
        heads = self._means(interaction, points, positions) + interaction.centre
        if par.value_bias is not None:
            heads = heads + par.value_bias[:, None, :]
        if par.output is not None:
            heads = heads @ par.output.mT
        out = heads.sum(-3)
        return out if par.output_bias is None else out + par.output_bias

    def _means(self, interaction: Interaction, points: Tensor, positions: Tensor | None) -> Tensor:
        """Σⱼ Pᵢⱼ vⱼ of each head about the centre, (*batch, H, m, v)."""
        queries, values = self.kernel.queries(self.parameters, points), interaction.values
        if self.normalization is softmax:
            return attend(
                queries,
                interaction.keys,
                values,
                interaction.log_weights[..., None, :],
                None if positions is None else positions[..., None, :],
                None if interaction.positions is None else interaction.positions[..., None, :],
            )
        parts = []
        for block in interaction.blocks(positions, points.shape[-2], None):
            logits = interaction.logits(queries, positions, block)
            log_p = self.normalization(logits).log_transition
            parts.append(log_p.exp() @ values[..., block.columns, :])
        return torch.cat(parts, -2)

    def _check(self, mu: ParticleMeasure) -> None:
        par = self.parameters
        if not isinstance(mu, ParticleMeasure):
            raise TypeError(
                f"expected a ParticleMeasure, got {type(mu).__name__}; wrap points as "
                "ParticleMeasure(points) or ParticleMeasure.from_sequence(points)"
            )
        if mu.dim != par.dim:
            raise ValueError(
                f"expected a measure on R^{par.dim} (the parameters' dimension), "
                f"got one on R^{mu.dim}"
            )
        check_same_kind(par.query, "the parameters", mu.points, "the measure")
        if self.causal and mu.positions is None:
            raise ValueError(
                "causal attention: expected a measure with positions, got one without; give "
                "positions=, or use ParticleMeasure.from_sequence for a token sequence"
            )

    def _row_positions(self, s: object, points: Tensor, interaction: Interaction) -> Tensor:
        if s is None:
            raise ValueError(
                "causal attention: expected positions s beside the points x, got none"
            )
        positions = as_float_tensor(s, "s", like=points).expand(points.shape[:-1])
        check_finite(positions, "s")
        assert interaction.positions is not None
        if not is_traced(positions) and not is_traced(interaction.positions):
            alive = interaction.log_weights > -math.inf
            first = torch.where(alive, interaction.positions, math.inf).amin(-1, keepdim=True)
            if bool((positions < first).any()):
                raise ValueError(
                    "Γ is undefined at a position before all the mass: expected s ≥ "
                    f"{float(first.max())}, got {float(positions.min())}"
                )
        return positions
