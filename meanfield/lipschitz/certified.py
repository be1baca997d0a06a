"""How far an input may move before a classifier can change its mind."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from meanfield.checks import (
    as_float_tensor,
    check_finite,
    check_same_kind,
    count,
    describe,
    without_autocast,
)
from meanfield.copies import own_copy
from meanfield.habits import with_hints
from meanfield.images import image_of
from meanfield.linalg import NormSolver
from meanfield.linalg.vectors import lengths
from meanfield.maps import Map
from meanfield.maps.intervals import Intervals
from meanfield.maps.map import as_map, constant_upper
from meanfield.measures import MeasureMap, ParticleMeasure, check_measure
from meanfield.results.answers import Answer, labelled
from meanfield.results.labels import copied

# What bounds are raised by, and how near the radius by first order one can come.
_ROUNDING = 1e-9
# Radii that are tried, and the ratio of the first to the last.
_RADII, _SPAN = 200, 1e-8


@with_hints
@final
@dataclass(frozen=True, eq=False)
class Readout:
    """Class scores of a measure: Wx̄ + b, x̄ its mean or the token that classifies.

    Args:
        weight: W, ``(classes, d)``, at least two classes.
        bias: b, ``(classes,)``; 0 if None.
        token: the number of the classifying token; the mean of all if None.

    Example:
        >>> readout = Readout([[1.0, 0.0], [0.0, 1.0]])
        >>> readout(ParticleMeasure([[1.0, 0.0], [3.0, 4.0]]))
        tensor([2., 2.], dtype=torch.float64)
    """

    weight: Any
    bias: Any = None
    token: int | None = None

    def __post_init__(self) -> None:
        weight = own_copy(as_float_tensor(self.weight, "weight"), type(self).__name__)
        if weight.ndim != 2 or len(weight) < 2 or not weight.numel():
            raise ValueError(
                "weight: expected a row for each of two classes or more, (classes, d), got "
                f"{tuple(weight.shape)}"
            )
        check_finite(weight, "weight")
        object.__setattr__(self, "weight", weight)
        if self.bias is not None:
            bias = own_copy(as_float_tensor(self.bias, "bias", like=weight), type(self).__name__)
            check_same_kind(weight, "weight", bias, "bias")
            if bias.shape != weight.shape[:1]:
                raise ValueError(f"bias: expected shape ({len(weight)},), got {tuple(bias.shape)}")
            check_finite(bias, "bias")
            object.__setattr__(self, "bias", bias)
        if self.token is not None:
            object.__setattr__(self, "token", count(self.token, "token", least=0))

    def __deepcopy__(self, memo: dict[int, Any]) -> Readout:
        return copied(self, memo)

    @without_autocast
    def __call__(self, mu: ParticleMeasure) -> Tensor:
        """The scores, ``(*batch, classes)``."""
        check_same_kind(self.weight, "weight", mu.points, "the measure")
        if mu.dim != self.weight.shape[-1]:
            raise ValueError(
                f"readout: expected a measure on R^{self.weight.shape[-1]}, got R^{mu.dim}"
            )
        scores: Tensor = self._point(mu) @ self.weight.mT
        return scores if self.bias is None else scores + self.bias

    def moved(self, displacement: Tensor, mu: ParticleMeasure) -> Tensor:
        """How far x̄ moves at most as atom i moves by this, ``(..., n)`` to ``(...)``."""
        if self.token is not None:
            return displacement[..., self.token]
        # 0 · ∞ of an absent atom is 0.
        return torch.where(mu.weights > 0, mu.weights * displacement, 0.0).sum(-1)

    def stretch(self, mu: ParticleMeasure) -> Tensor:
        """|x̄| is at most this times (Σ aᵢ|xᵢ|²)^½, ``(*batch,)``."""
        if self.token is None:
            return torch.ones_like(mu.log_weights[..., 0])
        return (-0.5 * mu.log_weights[..., self.token]).exp()

    def _point(self, mu: ParticleMeasure) -> Tensor:
        if self.token is None:
            return mu.mean()
        if self.token >= mu.n_particles:
            raise ValueError(
                f"token: expected one of {mu.n_particles}, numbered from 0, got {self.token}"
            )
        return mu.points[..., self.token, :]


class CertifiedRadius(Answer, noun="certified_radius", title="Certified radius"):
    """A radius within which no input changes the class; tensors have the batch shape of μ.

    Attributes:
        value: ε: the class is the same for all tokens x' with (Σᵢ|x'ᵢ − xᵢ|²)^½ ≤ ε. 0 where two
            classes are level.
        label: the class.
        margin: by how much its score is above the next.
        first_order: the margin over the length of its gradient, the least over the other
            classes: what the radius would be if scores were linear. No bound.
    """

    value: Tensor = labelled("certified radius, L2 of all tokens")
    label: Tensor = labelled("class", dtype="int64", name="label")
    margin: Tensor = labelled("score above that of the next class", name="margin")
    first_order: Tensor = labelled("radius of the linearised scores, no bound", beside=True)


@with_hints
@torch.inference_mode(False)  # gradients are taken wherever it is called
@torch.no_grad()
@without_autocast
def certified_radius(
    network: MeasureMap,
    readout: Readout,
    x: ParticleMeasure,
    *,
    solver: NormSolver | None = None,
) -> CertifiedRadius:
    """The largest ε that is found for which no input within ε of x changes the class, in L2.

    The margin of the class over another one, at a point within ε, is at least the margin at x
    less |r| · displacement(ε), and less ∫₀^ε of the smallest of

        |∇margin(x)| + Σ_k |∇_k margin(x)| change_k(t),     |∇margin(x)| + ρ · change(t),
        ρ · upper(t),

    with the bounds that `Map.ball_bounds` of the network gives for tokens that move by t together
    in L2, r the difference of two rows of the readout, and ρ = |r| times what weighted lengths
    differ by. ∇_k is the gradient in the output of the k-th of the maps that the network applies
    one after another, change_k what the derivative of that map can change by, times the growth
    of the maps before it. For a linear network the first two are exact, and so is ε. For a
    network with a global constant, of layers that are `meanfield.layers.Bounded` by construction,
    the third is never vacuous. For others radii come from bounds of second derivatives: `value`
    far below `first_order` says that they mean little.

    If tokens are patches of an image, cut without overlap, L2 of the tokens is that of the
    pixels. If the first map is x ↦ Wx + b, a radius in front of it is in units of x. Rounding of
    scores (about n · eps of their size) is not accounted for. No gradient is recorded: to train
    for a radius, take margins and `local_lipschitz`.

    Args:
        network: a map that declares bounds in a ball.
        readout: from its output to the scores of classes.
        x: the input, or a batch of inputs.
        solver: as for `ball_upper`.

    Raises:
        NotImplementedError: the network declares no bounds in a ball.
        TypeError: no `Readout`.

    Example:
        >>> from meanfield.layers import Pointwise
        >>> double = Pointwise(lambda x: 2 * x, lipschitz=2.0, curvature=0.0)
        >>> readout = Readout([[1.0, 0.0], [0.0, 1.0]])
        >>> found = certified_radius(double, readout, ParticleMeasure([[3.0, 1.0]]))
        >>> round(float(found), 6)  # the margin falls by 2√2 a unit
        1.414214
    """
    F = as_map(network, "network")
    if not isinstance(readout, Readout):
        raise TypeError(f"readout: expected lipschitz.Readout, got {describe(readout)}")
    mu, token = check_measure(x, "x"), readout.token
    mu = mu.to(mu.dtype, copy=True)  # what inference mode has made takes no gradient
    if token is not None and bool((mu.log_weights[..., token : token + 1] == -math.inf).any()):
        raise ValueError(
            "token: expected one that has mass in every measure, got one of weight 0, which is "
            "absent: nothing is said of how far it moves"
        )
    at = _scores(F, readout, mu)
    first = (at.margins / at.slopes.clamp_min(torch.finfo(mu.dtype).tiny)).amin(-1)
    # A network that does not move has no radius by first order: a million sizes of the input.
    far = 1e6 * (1 + torch.linalg.vector_norm(mu.points, dim=(-2, -1)))
    top = first.minimum(far) * (1 - 2 * _ROUNDING)
    shares = torch.logspace(math.log10(_SPAN), 0, _RADII, dtype=mu.dtype, device=mu.device)
    radii = top * shares.reshape(-1, *(1,) * top.ndim)
    stages = Intervals.of(F.stages, mu, solver)
    found = _within(F, readout, mu, at, stages, radii).amax(0)
    return CertifiedRadius(
        value=torch.where(at.margins.amin(-1) > 0, found, 0.0),
        label=at.label,
        margin=at.margins.amin(-1),
        first_order=first,
    )


class _Scores(NamedTuple):
    """At the input: the class, and of the other classes margins, slopes and rows of the readout.

    Attributes:
        label: ``(*batch,)``.
        margins: ``(*batch, classes − 1)``.
        slopes: lengths of the gradients of the margins, likewise.
        later: lengths in L²(μ) of their gradients in the outputs of the network's maps, likewise.
        rows: |r|, likewise.
    """

    label: Tensor
    margins: Tensor
    slopes: Tensor
    later: list[Tensor]
    rows: Tensor


def _scores(F: Map, readout: Readout, mu: ParticleMeasure) -> _Scores:
    with torch.enable_grad():
        places = [mu.points.detach().requires_grad_()]
        image = mu.replace(places[0])
        for each in F.stages:
            image = image_of(each, image, "network")
            if image.points.shape[:-1] != mu.points.shape[:-1]:
                raise ValueError(f"network: expected one image per atom of {mu!r}, got {image!r}")
            places.append(image.points)
        scores = readout(image)
        by_class = [
            torch.autograd.grad(score.sum(), places, retain_graph=True)
            for score in scores.unbind(-1)
        ]
        grads, *later = (torch.stack(of_place, -3) for of_place in zip(*by_class, strict=True))
    scores = scores.detach()
    order = scores.argsort(dim=-1, descending=True, stable=True)
    label, others = order[..., 0], order[..., 1:, None]
    logs, weight = mu.log_weights[..., None, :, None], readout.weight.detach()

    def apart(values: Tensor) -> Tensor:
        """Of the label less that of the others, ``(*batch, classes − 1, ·)``."""
        own = values.take_along_dim(label[..., None, None], -2)
        return own - values.take_along_dim(others, -2)

    def slopes(gradients: Tensor, factors: Tensor | float = 1.0) -> Tensor:
        # Absent tokens do not move.
        there = torch.where(logs > -math.inf, gradients * factors, 0.0)
        return lengths(apart(there.flatten(-2)))

    rows = apart(weight.expand(*label.shape, *weight.shape))
    return _Scores(
        label,
        apart(scores[..., None])[..., 0],
        slopes(grads),
        [slopes(each, (-0.5 * logs).exp()) for each in later],
        lengths(rows),
    )


def _within(
    F: Map,
    readout: Readout,
    mu: ParticleMeasure,
    at: _Scores,
    stages: Intervals,
    radii: Tensor,
) -> Tensor:
    """How far no input changes the class, from bounds at growing radii ``(radii, *batch)``.

    What bounds a slope in a ball does so at every point between it and the next smaller one.
    """
    # Weighted lengths of displacements are at most this times those of L2.
    widest = (0.5 * mu.log_weights.amax(-1)).exp()
    each = radii[..., None].expand(*radii.shape, mu.n_particles)
    found, parts = stages.within(each, widest * radii, splitting=False)
    with contextlib.suppress(NotImplementedError):  # bounds in a ball and none at an input
        found = found.at_most(constant_upper(F, mu))
    rho = at.rows * (widest * readout.stretch(mu))[..., None]
    by_maps = sum(g * part[..., None] for g, part in zip(at.later, parts, strict=True))
    turned = (widest[..., None] * by_maps).fmin(rho * found.change[..., None])
    steepest = (at.slopes + turned).fmin(rho * found.upper[..., None])
    steepest = (1 + _ROUNDING) * steepest.nan_to_num(nan=math.inf, posinf=math.inf)  # 0 · ∞
    steps = torch.diff(radii, dim=0, prepend=torch.zeros_like(radii[:1]))[..., None]
    lost = (steepest * steps).cumsum(0)
    left = (at.margins - torch.cat([torch.zeros_like(lost[:1]), lost[:-1]])).clamp_min(0)
    far = radii[..., None] - steps + left / steepest.clamp_min(torch.finfo(mu.dtype).tiny)
    far = torch.where(left > 0, far, 0.0)
    fall = at.rows * readout.moved(found.displacement, mu)[..., None]
    stays = at.margins > (1 + _ROUNDING) * fall
    return torch.where(stays, math.inf, far).amin(-1).minimum(radii)
