"""The inverse of contractive residual layers, with a certified error."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from meanfield.checks import as_bool, count, describe, number
from meanfield.errors import ConvergenceError
from meanfield.habits import with_hints
from meanfield.layers.chain import Chain
from meanfield.layers.composition import Residual
from meanfield.layers.contraction import Bounded, size
from meanfield.linalg import operator_norm
from meanfield.maps import linearize
from meanfield.measures import MeasureMap, ParticleMeasure, check_measure
from meanfield.results.answers import Answer, labelled

# Rounding error of one evaluation of y − x − s F(x), in units of eps times the sizes of the three.
_ROUNDINGS = 8.0
# The constant is refuted if a ratio ‖F(x) − F(x')‖/‖x − x'‖ exceeds it by this factor.
_REFUTED = 1 + 1e-6
# After so many steps without a smaller residual only rounding is left.
_PATIENCE = 8


class Inversion(Answer, noun="preimage", title="Preimage"):
    """A preimage and its evidence; tensors have the batch shape of ν.

    Attributes:
        measure: μ with G(μ) = ν, up to the error; weights and positions are those of ν.
        error: the preimage is within this of `measure` in the weighted L2 distance
            (Σ aᵢ|xᵢ − x'ᵢ|²)^½ of atoms matched, and so in W₂; infinite where nothing is proved.
        residual: ‖ν − G(μ)‖ in the norm of the layer's constant; the largest of a chain's.
        n_steps: evaluations of the layer, summed over those of a chain.
        converged: whether the error is at most rtol times the size of μ or ν.
        factor: c, the contraction factor of the certificate; the largest of a chain's.
        steepness: the largest ratio ‖F(x) − F(x')‖/‖x − x'‖ met, over the constant. Above 1 the
            constant is wrong, and nothing is proved; far below 1 it is loose.
    """

    measure: ParticleMeasure
    error: Tensor = labelled("certified error, weighted L2", beside=True)
    residual: Tensor = labelled("residual", beside=True)
    n_steps: int = labelled("evaluations", attribute=True)
    converged: Tensor = labelled("converged", dtype="bool", beside=True)
    factor: float = labelled("contraction factor", attribute=True)
    steepness: Tensor = labelled("steepness seen, over the constant", beside=True)


@with_hints
def invert(
    G: MeasureMap,
    nu: ParticleMeasure,
    *,
    rtol: float = 1e-10,
    max_steps: int = 2000,
    strict: bool = True,
    probe: bool = True,
) -> Inversion:
    """The measure μ with G(μ) = ν, for layers made by `contractive` and chains of them.

    T(x) = y − s F(x) is a contraction with factor c = s · constant, so for every x

        ‖x − x*‖ ≤ ‖y − G(x)‖ / (1 − c)        (Banach, a posteriori)

    where y = G(x*), however x was found. After k steps this is at most the a-priori bound
    c^k ‖x₁ − x₀‖/(1 − c), and much less where F is less steep than its constant. In a chain the
    error of one layer adds to the residual of the layer before it.

    The proof assumes the constant. It is tested between iterates and against the norm of the
    Jacobian at the answer; if F is steeper, the constant is refuted and the error is infinite.
    Rounding of the sum y − x − s F(x) is counted; that of F itself is taken to be 8 eps of its
    size. No gradient is recorded.

    Args:
        G: a layer of `contractive`, or a `Chain` of such layers.
        nu: ν; batch axes give a batch.
        rtol: error asked for, relative to the larger of (Σ aᵢ|xᵢ|²)^½ of μ and of ν.
        max_steps: evaluations of each layer at most.
        strict: raise when the error is not reached; otherwise return with `converged` False.
        probe: whether to look at the Jacobian at the answer too.

    Raises:
        TypeError: a map that was not made by `contractive`.
        ValueError: a contraction factor of 1 or more.
        ConvergenceError: if strict: the constant is refuted, or the error not reached.
    """
    check_measure(nu, "nu")
    rtol, max_steps = number(rtol, "rtol", above=0), count(max_steps, "max_steps")
    strict, probe = as_bool(strict, "strict"), as_bool(probe, "probe")
    stages = [_Stage.of(layer) for layer in (G.maps if isinstance(G, Chain) else (G,))]
    with torch.no_grad():
        found, answers = nu, []
        error = nu.points.new_zeros(nu.batch_shape)
        # maxᵢ |xᵢ| from (Σ aᵢ|xᵢ|²)^½: the lightest atom may carry all of it.
        logs = nu.log_weights
        steeper = (-0.5 * logs.where(logs > -math.inf, 0.0).amin(-1)).exp()
        kinds = [stage.norm for stage in stages]
        handed = [pair == ("max", "l2") for pair in pairwise(kinds)]  # from each to the one before
        for k in reversed(range(len(stages))):
            # Tolerance for this layer, so that the total stays below rtol.
            share = math.prod(1 - stage.factor for stage in stages[:k]) / len(stages)
            goal = share * rtol * size(nu.points, nu, "l2") / steeper ** sum(handed[:k])
            if k < len(handed) and handed[k]:
                error = error * steeper
            answers.append(stages[k].solve(found, error, goal, max_steps, probe))
            found, error = answers[-1].measure, answers[-1].error
        largest = torch.maximum(size(nu.points, nu, "l2"), size(found.points, found, "l2"))
    answer = Inversion(
        measure=found,
        error=error,
        residual=torch.stack([each.residual for each in answers]).amax(0),
        n_steps=sum(each.n_steps for each in answers),
        converged=error.isfinite() & (error <= rtol * largest),
        factor=max(stage.factor for stage in stages),
        steepness=torch.stack([each.steepness for each in answers]).amax(0),
    )
    if strict and not bool(answer.converged.all()):
        growth = float(steeper.max()) if any(handed) else 1.0
        raise ConvergenceError(_reason(answer, rtol, growth))
    return answer


@dataclass(frozen=True)
class _Stage:
    """One layer x + s F(x), and its certificate."""

    map: Bounded
    scale: float
    factor: float
    norm: str

    @classmethod
    def of(cls, layer: MeasureMap) -> _Stage:
        if not isinstance(layer, Residual) or not isinstance(layer.map, Bounded):
            raise TypeError(
                f"invert: expected layers made by meanfield.layers.contractive, got "
                f"{describe(layer)}; an inverse needs a Lipschitz constant to rest on"
            )
        factor = abs(layer.scale) * layer.map.constant
        if not factor < 1:
            raise ValueError(
                f"invert: expected a contraction factor below 1, got scale · constant = "
                f"{factor:.6g}; the layer need not have an inverse"
            )
        return cls(layer.map, layer.scale, factor, layer.map.norm)

    def solve(
        self, nu: ParticleMeasure, off: Tensor, goal: Tensor, max_steps: int, probe: bool
    ) -> Inversion:
        """The preimage of a measure that is itself only known up to `off`."""
        x, image, steepness = nu.points, None, torch.zeros_like(off)
        best = torch.full_like(off, math.inf)
        where, last, residual, waited, steps = x, x, best, 0, 0
        while steps < max_steps:
            steps += 1
            before, moved = image, self.map(nu.replace(x)).points
            if moved.shape != x.shape:
                raise ValueError(
                    f"G: expected a layer from R^{x.shape[-1]} to itself, got one to "
                    f"R^{moved.shape[-1]}"
                )
            if before is not None:
                ratio = self._ratio(moved - before, x - last, nu, moved)
                steepness = torch.maximum(steepness, ratio)
            gap = nu.points - x - self.scale * moved
            room = self._rounding(x, moved, nu)
            length = size(gap, nu, self.norm)
            error = (length + room + off) / (1 - self.factor)
            better = error < best
            waited = 0 if bool((better & (length > room)).any()) else waited + 1
            best, residual = torch.minimum(best, error), torch.where(better, length, residual)
            where = torch.where(better[..., None, None], x, where)
            settled = (best <= goal + off / (1 - self.factor)) | (residual <= room)
            if bool((settled | (steepness > _REFUTED)).all()) or waited >= _PATIENCE:
                break
            last, image, x = x, moved, x + gap
        mu = nu.replace(where)
        if probe:
            steepness = torch.maximum(steepness, self._steepness_at(mu))
        error = torch.where(steepness <= _REFUTED, best, math.inf)
        return Inversion(mu, error, residual, steps, error <= goal, self.factor, steepness)

    def _rounding(self, x: Tensor, moved: Tensor, nu: ParticleMeasure) -> Tensor:
        sizes = [size(part, nu, self.norm) for part in (x, nu.points, self.scale * moved)]
        return _ROUNDINGS * torch.finfo(x.dtype).eps * sum(sizes, torch.zeros_like(sizes[0]))

    def _ratio(self, moved: Tensor, step: Tensor, nu: ParticleMeasure, image: Tensor) -> Tensor:
        """A lower bound of ‖F(x) − F(x')‖ / (constant ‖x − x'‖): less what rounding may add."""
        eps = _ROUNDINGS * torch.finfo(image.dtype).eps
        noise = eps * size(image, nu, self.norm)
        rise = (size(moved, nu, self.norm) - noise).clamp_min(0)
        run = self.map.constant * size(step, nu, self.norm)
        # A step at rounding level says nothing.
        coarse = eps * self.map.constant * size(nu.points, nu, self.norm)
        return torch.where(run > 100 * coarse, rise / run, 0.0)

    def _steepness_at(self, mu: ParticleMeasure) -> Tensor:
        """‖Jv‖ / (constant ‖v‖) along the v that maximises it in the weighted L² norm."""
        J = linearize(self.map, mu, geometry="wasserstein").atoms
        top = operator_norm(J, rtol=1e-2, strict=False)
        half = (0.5 * mu.log_weights)[..., None].exp()
        positive = half > 0
        rise, run = (
            size(torch.where(positive, weighted / half, 0.0), mu, self.norm)
            for weighted in (J.matvec(top.direction), top.direction)
        )
        # A constant of 0 holds for what does not move.
        return torch.where((run > 0) & ~(rise <= 0), rise / (self.map.constant * run), 0.0)


def _reason(answer: Inversion, rtol: float, growth: float) -> str:
    steep = float(answer.steepness.max())
    if steep > _REFUTED:
        return (
            f"invert: the constant of a layer is refuted, its map is {steep:.4g} times as steep; "
            "dot-product attention has no constant on R^d: give a bound that holds, or clip its "
            "tokens to a ball, with layers.Clip"
        )
    if not growth * torch.finfo(answer.error.dtype).eps < rtol:  # beyond what any step can mend
        return (
            f"invert: a certified error of {float(answer.error.max()):.2e}, asked for was a "
            f"relative {rtol:.2e}: an error in the norm l2 counts {growth:.2e} times in the norm "
            "max of a layer before, since the lightest atom may carry all of it; give all layers "
            "of the chain one norm, or pass strict=False for the flagged answer"
        )
    return (
        f"invert: a certified error of {float(answer.error.max()):.2e} after {answer.n_steps} "
        f"evaluations, asked for was a relative {rtol:.2e} (residual "
        f"{float(answer.residual.max()):.2e}, contraction factor {answer.factor:.4g}); raise "
        "max_steps or rtol, or pass strict=False for the flagged answer"
    )
