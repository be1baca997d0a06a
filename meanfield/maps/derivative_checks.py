"""What a user's function is checked for before its derivative is believed.

It keeps weights and positions; it gives the same image twice; its automatic derivative is that of
its values, on both sides and where atoms split; and an atom that is stored in two parts changes
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meanfield.checks import name_of
from meanfield.errors import ConvergenceError, NoDerivativeError
from meanfield.images import image_of, kept_atoms
from meanfield.linalg import LinearMap
from meanfield.linalg.vectors import lengths, normal_like
from meanfield.measures import MeasureMap, ParticleMeasure

# Steps of the difference quotients, relative to the size of the points. The best of them is
# compared; a kink is seen by all but the largest.
_STEPS = {torch.float64: (1e-3, 1e-5, 1e-7, 1e-9), torch.float32: (3e-2, 3e-3, 3e-4, 3e-5)}
# Largest relative error of a derivative: as a rule, and at most, where the quotients themselves
# differ by more. A missing term shows as its own size.
_AGREES = {torch.float64: (1e-4, 1e-2), torch.float32: (1e-2, 5e-2)}
# How far one-sided quotients of an atom differ at a kink, relative to the larger.
_KINK = {torch.float64: 1e-3, torch.float32: 2e-2}
# Largest relative change of an image that should stay: rounding of sums in another order.
_SAME = {torch.float64: 1e-7, torch.float32: 1e-3}
_ROUNDINGS = 100  # of a point, at most, in its image
# Of the places next to all atoms at which it is asked whether one lies at its kink: their number,
# and the distance of each coordinate, relative to the smallest step. As steps are, it is relative
# to the size of all points: x − 0.5 does not see a rounding of x = 0. In single precision it is
# about two roundings of the largest: atoms so near to a kink are refused.
_PLACES, _NEAR = 8, {torch.float64: 0.03, torch.float32: 0.01}
# The derivative in atoms of weight a has an error of eps/√a, of at most 1e-3 above this many eps.
_LIGHT = 1e3

Product = Callable[[Tensor], Tensor]


def checked_image(F: MeasureMap, mu: ParticleMeasure) -> ParticleMeasure:
    """F(μ), a measure with the same atoms, weights and positions."""
    return kept_atoms(image_of(F, mu), mu, name_of(F))


class Quotients(NamedTuple):
    """Difference quotients of a map at some points along a direction, with one step.

    Attributes:
        step: h, relative to the size of the points.
        size: of the points, (..., 1, 1).
        ahead: (F(x + hε) − F(x))/h, (..., n, d).
        behind: (F(x) − F(x − hε))/h.
        noise: lengths of their rounding errors, (..., n), if F rounds as its values do.
    """

    step: float
    size: Tensor
    ahead: Tensor
    behind: Tensor
    noise: Tensor

    def masked(self, present: Tensor) -> Quotients:
        """Those of the atoms that have mass; 0 for others."""
        ahead, behind = (torch.where(present, x, 0.0) for x in (self.ahead, self.behind))
        noise = torch.where(present[..., 0], self.noise, 0.0)
        return self._replace(ahead=ahead, behind=behind, noise=noise)


@torch.no_grad()
def quotients(
    move: Product, points: Tensor, along: Tensor, image: Tensor, least: Tensor | float = 0.0
) -> list[Quotients]:
    """The quotients of x ↦ move(x) at points whose image is known, steps decreasing.

    Args:
        move: the map.
        points: x, (..., n, d); the steps are relative to the largest coordinate of each measure.
        along: ε; atoms that do not move, the absent ones, say nothing of the scale.
        image: move(x).
        least: what that largest coordinate counts as at least, (..., 1, 1).
    """
    size = torch.where(along != 0, points, 0.0).abs().amax((-2, -1), keepdim=True)
    size = size.clamp_min(least)
    size = torch.where(size > 0, size, 1.0)
    image, found = image.detach(), []
    rounding = 10 * torch.finfo(points.dtype).eps * lengths(image)
    for step in _STEPS[points.dtype]:
        h = step * size
        ahead, behind = move(points + h * along) - image, image - move(points - h * along)
        found.append(Quotients(step, size, ahead / h, behind / h, rounding / h[..., 0]))
    return found


def kinked(
    found: Sequence[Quotients],
    product: Tensor,
    points: Tensor,
    along: Tensor,
    derivative: Product | None = None,
) -> tuple[Tensor, Tensor]:
    """At which atoms the two sides differ, and by as much with every small step, (..., n).

    Curvature makes the difference fall with the step, and rounding makes it grow. In single
    precision the smallest step reaches kinks at which the atom is not: through 32 relu, one of
    200 atoms has one. There it has a derivative: the same near the atom on all sides, another at
    the ends of that step, and the quotient of one side.

    Args:
        found: the quotients along ε.
        product: Jε at x.
        points: x.
        along: ε.
        derivative: Jε at other points, 0 for absent atoms; None where it is not known: then each
            kink counts as one of its atom.

    Returns:
        Atoms at a kink, and atoms beside one: both quotients together say nothing of these.
    """
    last, tight = found[-3:], _AGREES[product.dtype][0]
    gaps = torch.stack([lengths(q.ahead - q.behind) for q in last])
    rates = torch.stack([torch.maximum(lengths(q.ahead), lengths(q.behind)) for q in last])
    apart = gaps > _KINK[gaps.dtype] * rates.amax(0)
    at = apart.all(0) & (gaps.amax(0) < 2 * gaps.amin(0))
    if derivative is None or not bool(apart[-1].any()):
        return at, torch.zeros_like(at)
    step, room = last[-1].step * last[-1].size, tight * rates.amax(0)

    def change(t: Tensor) -> Tensor:
        return lengths(derivative(points + t) - derivative(points - t))

    off = torch.stack([lengths(side - product) for q in last for side in (q.ahead, q.behind)])
    beside = apart[-1] & (off.amin(0) <= room) & (change(step * along) > room)
    if not bool(beside.any()):
        return at, beside
    # Along ε lies each kink that the quotients see; the other places are for equal coordinates,
    # which may stay equal by rounding.
    generator = torch.Generator().manual_seed(0)
    drawn = normal_like(points.expand(_PLACES, *points.shape), generator)
    near = along, *(drawn.sign() * (1 + drawn.abs().clamp_max(1)) / 2)
    most = torch.stack([change(_NEAR[points.dtype] * step * t) for t in near]).amax(0)
    beside = beside & (most <= room)
    return at & ~beside, beside


def compare(product: Tensor, found: Sequence[Quotients], name: str) -> None:
    """Refuse a product that is none of the quotients, of any of the measures (..., n, d)."""
    central = torch.stack([0.5 * (q.ahead + q.behind) for q in found])  # off by order h²

    def sizes(vectors: Tensor) -> Tensor:
        return lengths(vectors.detach().flatten(-2))

    # A step may leave the domain, as of a logarithm: NaN says nothing.
    noise = lengths(torch.stack([q.noise for q in found]))
    off = (sizes(central - product) - noise).clamp_min(0).nan_to_num(nan=math.inf)
    spread = sizes(central[1:] - central[:-1]).nan_to_num(nan=math.inf).amin(0)
    slopes = sizes(central).nan_to_num(nan=0.0, posinf=0.0)
    off, best = off.min(0)
    own, nearby = sizes(product), slopes.amax(0)
    scale = own.maximum(slopes.gather(0, best[None])[0])
    tight, loose = _AGREES[product.dtype]
    room = (tight * scale).maximum(spread).minimum(loose * scale)
    # A derivative that vanishes is as small as the quotients are with the smallest steps.
    room = torch.where(own <= tight * nearby, room.maximum(tight * nearby), room)
    bad = ~(off <= room)
    if bool(bad.any()):
        _check_finite(product, name)
        raise ValueError(
            f"{name}: expected a map whose derivative is that of its difference quotient, got one "
            f"that is off by {float((off / scale)[bad].max()):.1e}; keep all of it in torch "
            "operations on mu.points (no .detach(), .item(), .numpy() or float()): "
            "mu.replace(points), or pushforward(T, mu)"
        )


@torch.no_grad()
def check_repeats(F: MeasureMap, mu: ParticleMeasure, image: ParticleMeasure) -> None:
    """Refuse a map that gives another image when it is called again, or none in finite numbers."""
    present = _present(image)
    if not bool(torch.where(present, image.points, 0.0).isfinite().all()):
        raise ValueError(
            f"{name_of(F)}: expected a finite image, got one with NaN or infinite entries; "
            "scale the points, or look for an overflow inside the map"
        )
    off = _distance(F(mu).points, image.points, present, mu)
    if not off <= _SAME[mu.dtype]:
        raise ValueError(
            f"{name_of(F)}: expected the same image of the same measure, got one that is off by "
            f"{off:.1e} when called again; a module in training mode draws dropout: call .eval(), "
            "and draw noise once, outside of the map"
        )


@torch.no_grad()
def check_weights(F: MeasureMap, mu: ParticleMeasure, image: ParticleMeasure) -> None:
    """Refuse a map that changes when every second atom is stored as parts of 0.3 and 0.7."""
    parts = torch.tensor([2, 1], device=mu.device).repeat(mu.n_particles)[: mu.n_particles]
    index = torch.arange(mu.n_particles, device=mu.device).repeat_interleave(parts)
    shares = torch.tensor([0.3, 0.7, 1.0], dtype=mu.dtype, device=mu.device).log()
    shares = shares.repeat(mu.n_particles)[: len(index)]
    apart = ParticleMeasure(
        mu.points[..., index, :],
        log_weights=mu.log_weights[..., index] + shares,
        positions=None if mu.positions is None else mu.positions[..., index],
    )
    found, expected = _image_apart(F, apart, mu.n_particles), image.points[..., index, :]
    present = _present(mu)[..., index, :]
    off = _distance(found, expected, present, mu) if found.shape == expected.shape else math.inf
    if not off <= _SAME[mu.dtype]:
        raise ValueError(
            f"{name_of(F)}: expected an image that depends on the measure alone, got one that is "
            f"off by {off:.1e} when atoms are stored in two parts each; use mu.log_weights: add "
            "them to the scores of a softmax, weight means by mu.weights. For the constant of a "
            'map of sequences without weights, geometry="euclidean"'
        )


def _image_apart(F: MeasureMap, apart: ParticleMeasure, n: int) -> Tensor:
    """The points of F(μ) with more atoms than μ came with, which modules of a fixed n refuse."""
    try:
        return image_of(F, apart).points
    except ConvergenceError:
        raise
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"{name_of(F)}: expected a map that takes any number of atoms, since an atom may be "
            f"stored in two parts, got {type(error).__name__} for {apart.n_particles} in place of "
            f"{n}: {error}; of n tokens alone, or with a mask of n × n (attn_mask), take the "
            'constant with geometry="euclidean", which keeps n'
        ) from error


def _present(mu: ParticleMeasure) -> Tensor:
    return (mu.log_weights > -math.inf)[..., None]


def _distance(found: Tensor, expected: Tensor, present: Tensor, mu: ParticleMeasure) -> float:
    """The largest difference, relative to the largest entry of each measure, beyond rounding."""
    x = torch.where(_present(mu), mu.points.detach(), 0.0)
    found, expected = (torch.where(present, y.detach(), 0.0) for y in (found, expected))
    apart, size, given = (t.abs().amax((-2, -1)) for t in (found - expected, expected, x))
    # An image may be the rounding of its points alone, as that of equal atoms less their mean.
    apart = apart - (_ROUNDINGS * torch.finfo(x.dtype).eps * given).minimum(apart)
    shares = apart / torch.where(size > 0, size, 1.0)
    return float(shares.max()) if shares.numel() else 0.0


def check_derivative(
    F: MeasureMap,
    mu: ParticleMeasure,
    image: ParticleMeasure,
    forward: Product,
    backward: Product,
    *,
    parts: int = 1,
    along_at: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> None:
    """Compare one product with difference quotients, and the transposed product with it.

    With `parts` of 2 every atom of the measure is stored twice, and its halves move apart.
    `along_at` is the derivative at other points, along ε, if torch knows it, see `kinked`.
    """
    name, points, present = name_of(F), mu.points.detach(), _present(mu)
    generator = torch.Generator().manual_seed(0)
    along = torch.where(present, normal_like(points, generator), 0.0)
    product = torch.where(present, forward(along), 0.0).detach()
    found = quotients(lambda x: F(mu.replace(x)).points, points, along, image.points)
    found = [q.masked(present) for q in found]

    derivative = None
    if along_at is not None:

        def derivative(x: Tensor) -> Tensor:
            return torch.where(present, along_at(x, along), 0.0)

    at, beside = kinked(found, product, points, along, derivative)
    if bool(at.any()):
        atom = int(at.reshape(-1, at.shape[-1]).any(0).nonzero()[0]) // parts
        why = (
            "as relu and abs do at 0; move the atom a little, or ask bounds.local_upper, which a "
            "map may declare"
            if parts == 1
            else "as the largest of all atoms and the distance of two halves do where atoms "
            "split, and relu very near 0; move the atom a little, or, for the constant of n "
            'tokens, which do not split, take geometry="euclidean"'
        )
        raise NoDerivativeError(
            f"{name}: expected a map with a derivative at the measure, got one whose image of "
            f"atom {atom} changes at other rates on one side than on the other, {why}"
        )
    if bool(beside.any()):
        known = ~beside[..., None]
        compare(torch.where(known, product, 0.0), [q.masked(known) for q in found], name)
    else:
        compare(product, found, name)
    zeta = torch.where(present, normal_like(product, generator), 0.0)
    transposed = torch.where(present, backward(zeta).detach(), 0.0)
    there, back = (product * zeta).sum((-2, -1)), (transposed * along).sum((-2, -1))
    room = _AGREES[mu.dtype][0] * lengths(product.flatten(-2))
    room = room + 1e3 * lengths(found[0].noise) * found[0].step
    if not bool(((there - back).abs() <= room * lengths(zeta.flatten(-2))).all()):
        for each in (product, transposed):
            _check_finite(each, name)
        raise ValueError(
            f"{name}: its forward and reverse derivatives disagree; look for a custom "
            "autograd.Function in it"
        )


def _check_finite(product: Tensor, name: str) -> None:
    """Refuse a product that is NaN or infinite at an atom."""
    bad = ~product.isfinite().all(-1)
    if bool(bad.any()):
        atom = int(bad.reshape(-1, bad.shape[-1]).any(0).nonzero()[0])
        raise NoDerivativeError(
            f"{name}: expected a map with a finite derivative at the measure, got NaN or ∞ at "
            f"atom {atom}, as of a square root or a norm at 0, also behind torch.where or clamp, "
            "which pass NaN on from the branch that is not taken: change what goes into the root"
        )


@torch.no_grad()
def check_light_atoms(
    name: str,
    mu: ParticleMeasure,
    out: ParticleMeasure,
    J: LinearMap,
    along: Tensor | None = None,
) -> None:
    """Refuse a derivative in whose place rounding stands, multiplied by 1/√a of a light atom.

    Only a share a of an image depends on an atom of mass a, so that of what J joins light atoms
    and heavy ones √a is left: where that is below the rounding of a computed derivative, it must
    be 0, or rounding is all that there is. Asked of J and of Jᵀ along eight random directions,
    since rounding may vanish along some of them, or along one direction.

    Args:
        name: of the map.
        mu: the measure whose atoms move.
        out: the image.
        J: the derivative in the geometry "wasserstein".
        along: a direction ``(*batch, n, d)``, such as the singular vector found.
    """
    least = (_LIGHT * torch.finfo(mu.dtype).eps) ** 2
    light = _present(mu) & (mu.weights < least)[..., None]
    heavy = (out.weights >= least)[..., None]
    if not bool(light.any()):
        return
    generator = torch.Generator().manual_seed(1)
    if along is None:
        pairs = [
            (normal_like(mu.points, generator), normal_like(out.points, generator))
            for _ in range(8)
        ]
    else:
        pairs = [(along, J.matvec(along))]
    forth, back = (lengths(t.flatten(-2)) for t in (J.matvec(pairs[0][0]), J.rmatvec(pairs[0][1])))
    for moved, pulled in pairs:
        there = torch.where(heavy, J.matvec(torch.where(light, moved, 0.0)), 0.0)
        again = torch.where(light, J.rmatvec(torch.where(heavy, pulled, 0.0)), 0.0)
        for found, scale in ((there, forth), (again, back)):
            # Of a map of measures this is at most about √a, of rounding at least 1e-3.
            if not bool((lengths(found.flatten(-2)) <= 1e-6 * scale).all()):
                raise NoDerivativeError(
                    f"{name}: the derivative in atoms of weight below {least:.0e} is lost in "
                    "rounding; leave these atoms out; a subclass of Map can give its own "
                    "`linearisation`"
                )
