"""Self-attention as a map of measures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from types import FunctionType
from typing import Any, final

import torch
from torch import Tensor

from meanfield.attention.averaging import attention_blocks
from meanfield.attention.ball_bounds import ball_bound
from meanfield.attention.kernels import Kernel, dot_product
from meanfield.attention.kernels.kernel import At, FeatureSizes, ModifiedKernel, Score
from meanfield.attention.parameters import AttentionParameters
from meanfield.attention.rows import Normalization, RowWise, exponential, sigmoid, softmax
from meanfield.attention.sigmoid_ball import sigmoid_ball_bound
from meanfield.attention.sinkhorn import Plan
from meanfield.attention.streaming import attend
from meanfield.attention.tangent import AttentionTangent
from meanfield.attention.weights import Weights
from meanfield.checks import (
    as_bool,
    as_float_tensor,
    check_dim,
    check_finite,
    check_positioned,
    check_same_kind,
    describe,
    is_traced,
    name_of,
    without_autocast,
)
from meanfield.errors import NoDerivativeError
from meanfield.habits import with_hints
from meanfield.html import html_table, span
from meanfield.linalg import LinearMap
from meanfield.linalg.vectors import beside
from meanfield.maps import BallBounds, Linearisation, Map, expanded_radii, linearize
from meanfield.maps.autodiff import check_geometry, linearize_by_autodiff
from meanfield.maps.derivative_checks import check_derivative, check_repeats, check_weights
from meanfield.measures import ParticleMeasure, check_measure
from meanfield.results.labels import copied


@final
@with_hints
@dataclass(frozen=True)
class SelfAttention(Map):
    """F(μ) = (Γ_μ)♯μ, Γ_μ(x) = Σ_h W^h (∫ e^{⟨A^h x, y⟩} V^h y dμ(y) / ∫ e^{⟨A^h x, y⟩} dμ(y)).

    [CAP24] Definitions 2.4 (plain) and 2.5, 2.6 (causal: the integrals run over the atoms whose
    position is at most that of x; ties see each other). On the uniform measure of a sequence it
    is discrete self-attention, F(m(X)) = m(f(X)). Other kernels replace e^{⟨Ax, y⟩} and other
    normalisations its integral; their derivatives are exact as well.

    Args:
        parameters: the matrices of the layer.
        causal: whether the layer is masked; its measures then need positions.
        kernel: how points become queries and keys, and these scores; one of
            `meanfield.attention.kernels` or your own.
        normalization: from scores to attention weights, see
            `meanfield.attention.normalizations`.

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
    normalization: Normalization = softmax

    def __post_init__(self) -> None:
        _check_kind(
            self.parameters,
            AttentionParameters,
            "parameters",
            "AttentionParameters, whose from_module reads a torch.nn.MultiheadAttention",
        )
        object.__setattr__(self, "causal", as_bool(self.causal, "causal"))
        _check_kind(self.kernel, Kernel, "kernel", "a kernel of meanfield.attention.kernels")
        _check_kind(
            self.normalization,
            Normalization,
            "normalization",
            "one of meanfield.attention.normalizations, whose `RowWise` takes a function of yours",
        )
        if self.kernel.reach < math.inf and not self.kernel.needs_positions:
            raise ValueError(
                f"kernel: expected needs_positions = True of {name_of(self.kernel)}, which has "
                f"a reach of {self.kernel.reach:g} in position, got False"
            )
        if self.causal and not self.normalization.takes_masks:
            raise ValueError(
                "causal Sinkhorn attention: expected a plain layer, since the only causal plan "
                "with both marginals is the identity (the first position sees itself alone, "
                "which uses up its column, and so on)"
            )

    def __init_subclass__(cls) -> None:
        raise TypeError(
            "SelfAttention cannot be subclassed: its linearisation would not be that of the "
            "subclass; write a map of measures of your own that calls it"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> SelfAttention:
        return copied(self, memo)

    def __repr__(self) -> str:
        par = self.parameters
        parts = [f"n_heads={par.n_heads}", f"dim={par.dim}", f"out_dim={par.out_dim}"]
        parts += ["causal=True"] * self.causal
        parts += [f"kernel={self.kernel}"] * (self.kernel != dot_product)
        parts += [f"normalization={self.normalization}"] * (self.normalization is not softmax)
        return f"SelfAttention({', '.join(parts)})"

    def _repr_html_(self) -> str:
        par = self.parameters
        rows = [
            ("heads", par.n_heads),
            ("dimension", par.dim),
            ("dimension of a head", par.query.shape[-2]),
            ("dimension of the values", par.out_dim),
            ("masked", self.causal),
            ("kernel", str(self.kernel)),
            ("normalisation", str(self.normalization)),
            ("‖A‖ of each head", span(torch.linalg.matrix_norm(par.A.detach(), 2))),
            ("‖V‖ of each head", span(torch.linalg.matrix_norm(par.V.detach(), 2))),
        ]
        return html_table("Self-attention", rows)

    @with_hints
    @without_autocast
    def __call__(self, mu: ParticleMeasure, /) -> ParticleMeasure:
        """F(μ): atoms move to Γ_μ(xᵢ), weights and positions stay.

        Raises:
            ValueError: another dimension than the parameters', or no positions where they count.
            TypeError: another dtype than the parameters'.
            ConvergenceError: a Sinkhorn plan that has not converged, if strict.
        """
        weights, plan = self._planned(mu)
        if plan is None:
            moved = self._attend(weights, weights.features.q, weights.positions)
        else:
            moved = self._joined(weights, plan.weights @ weights.features.v)
        return mu.replace(weights.unsort(moved))

    @without_autocast
    def field(self, mu: ParticleMeasure) -> Callable[..., Tensor]:
        """Γ_μ at any point, μ held fixed: cross-attention of these points to the context μ.

        Returns:
            A function of x ``(*batch, m, d)`` with values Γ_μ(x), ``(*batch, m, d_out)``. Where
            positions count (causal layers, kernels that look at them) it takes s as well, a
            number or ``(*batch, m)``, and its value is the second component of Γ_μ(s, x). It
            raises ValueError where Γ is undefined: at a position before all the mass.
        """
        weights = self.weights(mu)

        @without_autocast
        def gamma(x: object, s: object = None) -> Tensor:
            points = as_float_tensor(x, "x", like=mu.points)
            check_same_kind(mu.points, "the measure", points, "x")
            if points.ndim < 2 or points.shape[-1] != mu.dim:
                raise ValueError(
                    f"x: expected shape (..., m, {mu.dim}), got {tuple(points.shape)}"
                )
            if not points.shape[-2]:
                raise ValueError("x: expected at least one point, got none")
            check_finite(points, "x")
            positions = None
            if weights.positions is not None:
                positions = self._row_positions(s, points, weights)
            return self._attend(weights, weights.queries(points, positions), positions)

        return gamma

    @without_autocast
    def plan(self, mu: ParticleMeasure) -> Plan:
        """The Sinkhorn plan, its potentials, and how well the marginals are met; in μ's order."""
        weights, plan = self._planned(mu)
        if plan is None:
            raise ValueError(
                f"plan: expected the normalisation sinkhorn, got {self.normalization}"
            )
        if weights.order is None:
            return plan
        place = weights.order.argsort(-1)[..., None, :]
        rows = plan.weights.take_along_dim(place[..., None], -2)
        return replace(
            plan,
            weights=rows.take_along_dim(place[..., None, :], -1),
            potentials=plan.potentials.take_along_dim(place, -1),
        )

    def weights(self, mu: ParticleMeasure) -> Weights:
        """The attention weights between the atoms of μ, a block of rows at a time."""
        return self._planned(mu)[0]

    # --- what the layer declares, see `meanfield.Map` ---

    def linearisation(self, mu: ParticleMeasure, *, geometry: str = "euclidean") -> Linearisation:
        """The derivative of the atoms, and of the field at each atom."""
        check_geometry(geometry)
        weights, plan = self._planned(mu)
        self._refuse_undefined(mu)
        if plan is not None and not bool(plan.converged.all()):
            # The implicit derivative assumes that the potentials solve their equation.
            return linearize_by_autodiff(self, mu, geometry=geometry)
        if plan is None and self._has_slopes_of_others and not is_traced(mu.points):
            self._check_slopes(weights, mu, geometry)
        tangent = AttentionTangent(weights, geometry)
        atoms = self.normalization.linear_map(tangent)
        if plan is None:  # potentials move as well, and join tokens in another way
            atoms = replace(atoms, blocks=cache(partial(attention_blocks, tangent)))
        return Linearisation(atoms, tangent.field_linear_map())

    def linearize(self, mu: ParticleMeasure, *, geometry: str = "euclidean") -> LinearMap:
        """The derivative of the atoms of F(μ) in the atoms of μ at fixed weights.

        Args:
            mu: μ.
            geometry: "euclidean": J on displacements ε. "wasserstein": D^½ J D^−½ on √aᵢ εᵢ,
                with D = diag(aᵢ); its norm is the local constant for perturbations that do not
                split atoms ([CAP24] Lemma C.5).
        """
        return linearize(self, mu, geometry=geometry).atoms

    def asks_for_gradient(self, mu: ParticleMeasure) -> bool:
        """As its matrices say; for kernels and normalisations with numbers of their own, by F."""
        if self.kernel == dot_product and self.normalization is softmax:
            return self.parameters.requires_grad
        return super().asks_for_gradient(mu)

    def largest_logits(self, mu: ParticleMeasure) -> Tensor:
        """max |s(xᵢ, xⱼ)| over the pairs of atoms that a head sees, ``(*batch, H)``."""
        self._check(mu)
        # Under ψ = exp the scores are log ψ, without the shift of keys that the softmax allows.
        weights = Weights.of(self.parameters, self.kernel, exponential, mu, causal=self.causal)
        return torch.stack([s.amax((-2, -1)) for s in weights.score_sizes()]).amax(0)

    def ball_bounds(
        self, mu: ParticleMeasure, radii: Tensor | float, *, splitting: bool = True
    ) -> BallBounds:
        """Bounds of the derivative and of displacements near μ, by the largest of the radii."""
        own, largest = self.normalization, expanded_radii(mu, radii).amax(-1)
        divided = isinstance(own, RowWise) and own.log_psi is None and own.divides
        if own is not sigmoid and not divided:
            raise NotImplementedError(
                "ball_bounds: expected attention under the softmax, with a sink or without, or "
                f"under the sigmoid, got {own}; its bound is not proved for others"
            )
        weights = self.weights(mu)
        if own is sigmoid:
            found = sigmoid_ball_bound(weights, largest)
        else:
            found = ball_bound(weights, largest, splitting=splitting)
        return found._replace(displacement=weights.unsort(found.displacement[..., None])[..., 0])

    @property
    def dim(self) -> int:  # type: ignore[override]
        """d, of the points that come in."""
        return self.parameters.dim

    @property
    def score_matrices(self) -> Tensor:  # type: ignore[override]
        """A per head, (H, d, d), of the softmax of ⟨A x, y⟩; of other layers none, (0, d, d)."""
        A = self.parameters.A
        return A if self.score.kind == "dot product" else A[:0]

    @property
    def score(self) -> Score:
        """The kind of score under the softmax, for bounds that are proved for some kinds only."""
        if self.normalization.is_softmax:
            return self.kernel.score
        if self.kernel.score.kind == "dot product" and isinstance(self.normalization, RowWise):
            if self.normalization is sigmoid:
                return Score("sigmoid")
            if self.normalization.sink is not None and self.normalization.log_psi is None:
                return Score("sink")
        return Score("other")

    def feature_sizes(self, radius: float) -> FeatureSizes | None:
        """How large queries and keys are on a ball; None if unknown, or under no softmax."""
        if not self.normalization.is_softmax:
            return None
        return self.kernel.feature_sizes(self.parameters, radius)

    @property
    def heads(self) -> Sequence[SelfAttention]:  # type: ignore[override]
        """The layer with one head at a time; they add up to it, but for the output bias."""
        return [
            replace(
                self,
                parameters=self.parameters.head(h),
                kernel=self.kernel.head(h),
                normalization=self.normalization.head(h),
            )
            for h in range(self.parameters.n_heads)
        ]

    # --- inside ---

    def _planned(self, mu: ParticleMeasure) -> tuple[Weights, Plan | None]:
        self._check(mu)
        rows = self.normalization.rows
        weights = Weights.of(self.parameters, self.kernel, rows, mu, causal=self.causal)
        plan = self.normalization.plan(weights)
        return weights if plan is None else replace(weights, potentials=plan.potentials), plan

    def _attend(self, weights: Weights, queries: Tensor, positions: Tensor | None) -> Tensor:
        """Γ for queries ``(*batch, H, m, k)``."""
        features = weights.features
        places = weights.places(positions)
        heads = attend(
            queries,
            features.k,
            features.v,
            weights.head_logs,
            places.rows,
            places.columns,
            scoring=weights.scoring,
        )
        return self._joined(weights, heads)

    def _joined(self, weights: Weights, heads: Tensor) -> Tensor:
        """The outputs of averages of values per head, ``(*batch, H, m, d_v)``."""
        par, centre = self.parameters, weights.features.v_centre
        out = par.join(heads if centre is None else heads + centre)
        return out if par.output_bias is None else out + beside(par.output_bias, out)

    def _check(self, mu: ParticleMeasure) -> None:
        par = self.parameters
        check_measure(mu, finite=False)
        check_dim(mu, par.dim)
        check_same_kind(par.query, "the parameters", mu.points, "the measure")
        if self.causal or self.kernel.needs_positions:
            check_positioned(mu, who=self._who_looks)
        self.kernel.check(mu)

    @property
    def _who_looks(self) -> str:
        return "causal attention" if self.causal else f"the kernel {name_of(self.kernel)}"

    @property
    def _has_slopes_of_others(self) -> bool:
        """Whether a kernel or a function ψ is not from this package."""
        kernel, rows = self.kernel, self.normalization.rows
        while _is_ours(kernel) and isinstance(kernel, ModifiedKernel):
            kernel = kernel.inner
        return not _is_ours(kernel) or rows.log_psi not in (None, sigmoid.log_psi)

    def _check_slopes(self, weights: Weights, mu: ParticleMeasure, geometry: str) -> None:
        """Whether they have the derivatives of their values, on both sides."""
        if weights.origin is not None:  # with the same scores, and steps of their size
            mu = mu.replace(mu.points - weights.origin)
            weights = self.weights(mu)
        image, J = self(mu), AttentionTangent(weights).as_linear_map()
        check_repeats(self, mu, image)
        check_derivative(self, mu, image, J.matvec, J.rmatvec)
        if geometry == "wasserstein":
            check_weights(self, mu, image)

    def _refuse_undefined(self, mu: ParticleMeasure) -> None:
        at = self.kernel.undefined(At(self.parameters, mu.points, mu.positions))
        if at is None or is_traced(mu.points):
            return
        if bool((at & (mu.log_weights > -math.inf)).any()):
            raise NoDerivativeError(
                f"{self.kernel!r}: expected queries and keys off 0, where their direction jumps, "
                "got one at 0; give eps > 0, or move that atom"
            )

    def _row_positions(self, s: object, points: Tensor, weights: Weights) -> Tensor:
        if s is None:
            raise ValueError(
                f"s: expected positions of the points, which {self._who_looks} looks at, got none"
            )
        positions = as_float_tensor(s, "s", like=points)
        check_same_kind(points, "x", positions, "s")
        check_finite(positions, "s")
        try:
            positions = positions.expand(points.shape[:-1])
        except RuntimeError:
            raise ValueError(
                f"s: expected a number or one per point, shape {tuple(points.shape[:-1])}, got "
                f"shape {tuple(positions.shape)}"
            ) from None
        assert weights.positions is not None
        values = (positions, weights.positions, weights.log_weights)
        traced = any(is_traced(value) for value in values)
        # A row that is not divided by its own sum alone is 0 where it sees nothing.
        rows = weights.rows
        divided = rows.divides and rows.sink is None
        if divided and not traced and not bool(weights.seeing(positions).all()):
            far = weights.scoring.position_bias or self.kernel.reach < math.inf
            why = f"{name_of(self.kernel)} hides" if far else "they lie before"
            raise ValueError(
                "s: expected positions that see an atom, since Γ is undefined elsewhere, got "
                f"{float(positions.min())} to {float(positions.max())}: {why} all the mass"
            )
        return positions


def _is_ours(kernel: Kernel) -> bool:
    return type(kernel).__module__.startswith("meanfield.")


def _check_kind(value: object, kind: Any, name: str, what: str) -> None:
    if not isinstance(value, kind):
        hint = f"; call it: {value.__name__}(…)" if isinstance(value, FunctionType) else ""
        raise TypeError(f"{name}: expected {what}, got {describe(value)}{hint}")
