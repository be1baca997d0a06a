"""The local Lipschitz constant of a map of measures at a measure."""

from __future__ import annotations

from dataclasses import replace

import torch

from meanfield.checks import is_traced, without_autocast
from meanfield.habits import with_hints
from meanfield.linalg import NormSolver
from meanfield.linalg.evidence import RTOL, UPPER_RTOL
from meanfield.lipschitz.constant import LocalLipschitz, constant_of
from meanfield.lipschitz.differentiable import differentiable_value
from meanfield.maps import linearize
from meanfield.maps.map import as_map
from meanfield.measures import MeasureMap, ParticleMeasure, check_measure


@with_hints
@without_autocast
def local_lipschitz(
    F: MeasureMap,
    mu: ParticleMeasure,
    *,
    geometry: str = "wasserstein",
    rtol: float = RTOL,
    upper_rtol: float = UPPER_RTOL,
    solver: NormSolver | None = None,
    strict: bool = True,
) -> LocalLipschitz:
    """Local Lipschitz constant of F at μ, in W₂ or, for "euclidean", ‖Df(X)‖.

    lim sup W₂(F(ν), F(μ)) / W₂(ν, μ) as mass moves by shrinking steps.

    For "wasserstein" the constant is max(‖D^½JD^−½‖, maxᵢ ‖D_xΓ_μ(xᵢ)‖) with D = diag(aᵢ) and J
    the derivative of the atoms of F(μ) in those of μ. The first component ([CAP24] Lemma C.5)
    moves atoms as a whole. The second is not in the paper (derived here, tested numerically):
    W₂ lets an atom split, and one that splits about its place moves queries without moving what
    they see. Equivalently: the norm on the measure with every atom stored twice. For positioned
    measures atoms move at fixed position, as in the conditional distance.

    The limit is over ν → μ in W_∞: all mass moves little. A small share of the mass that moves
    *far* is a small step in W₂ as well, and its ratio can be larger. So a secant ratio from μ may
    exceed the constant at μ. It never exceeds the largest constant on the displacement
    interpolation from μ to ν, so the two have the same supremum over measures on a convex set.

    For "euclidean" it is the spectral norm of J, the constant of the discrete map at X.

    Where the points, the log-weights or parameters of F ask for a gradient, `value` has one: the
    constant of a layer is a penalty like any other. It costs one more derivative of F, along the
    worst direction, and in the backward pass the second singular value, since a double one has no
    derivative in general. The relative error of the gradient is about `residual` over the gap
    between the two. With ``strict=False``, as in a training loop, the second singular value is
    not computed: near a double one the result is a generalised gradient, and that of ‖W‖ in a
    linear layer x ↦ Wx, which does the same to all atoms. Under ``torch.no_grad()`` nothing is
    recorded.

    Args:
        F: a map of measures that keeps weights (and positions).
        mu: where; batch axes give a batch of constants. Atoms of weight 0 are absent.
        geometry: "wasserstein" or "euclidean".
        rtol: largest estimated relative error that counts as converged.
        upper_rtol: how far the upper end may be above each component, relatively, so that
            `converged` is about the constant and not about a smaller singular value; `math.inf`
            to ask for the value alone.
        solver: such as ``Dense()`` or ``Lanczos(max_steps=500)`` of `meanfield.linalg`; by
            default chosen by size. Derivatives of the field in at most 16 dimensions are always
            factored, and so is a map that moves each atom by itself, block by block.
        strict: raise when not converged; otherwise the answer comes back flagged.

    Raises:
        ConvergenceError: not converged, if strict.
        OverflowError: the linearisation leaves the number range.
        ValueError: in the backward pass, where the largest singular value is not simple, if
            strict.

    Example:
        >>> from meanfield.attention import AttentionParameters, SelfAttention
        >>> A = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
        >>> F = SelfAttention(AttentionParameters.from_bilinear(A, [[1.0]]))
        >>> mu = ParticleMeasure([[1.0], [-1.0]], weights=[0.1, 0.9])
        >>> constant = local_lipschitz(F, mu).value
        >>> round(float(constant.detach()), 4)
        2.9937
        >>> constant.backward()
        >>> A.grad
        tensor([[-3.8078]], dtype=torch.float64)
    """
    F = as_map(F)
    if is_traced(check_measure(mu).points):
        raise RuntimeError(
            "expected a measure with values, got a traced one: the norm is looked for among "
            "values, which torch.func and torch.compile hide; take the gradient by requires_grad "
            "and backward(), and a batch of measures in place of vmap"
        )
    with torch.no_grad():
        at = linearize(F, mu, geometry=geometry)
        found = constant_of(
            at,
            geometry=geometry,
            rtol=rtol,
            upper_rtol=upper_rtol,
            solver=solver,
            strict=strict,
            particlewise=F.particlewise,
        )
    return replace(found, value=differentiable_value(F, mu, at, found, rtol=rtol, strict=strict))
