"""Lower bounds of the Wasserstein Lipschitz constant on a ball, by a search over pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meanfield.checks import as_generator, choice, count, describe, number
from meanfield.images import check_map, image_of
from meanfield.lipschitz.local import LocalLipschitz, local_lipschitz
from meanfield.lipschitz.proposals import (
    Pairs,
    direction_pairs,
    random_measures,
    random_pairs,
    splitting_pairs,
    tied_measures,
    transfer_pairs,
)
from meanfield.lipschitz.search import worst_case
from meanfield.lipschitz.secant import SecantRatio, rounding_of, secant_ratio
from meanfield.measures import MeasureMap, ParticleMeasure, check_measure
from meanfield.results import Variable
from meanfield.results.answers import Answer, labelled
from meanfield.results.labels import dataset
from meanfield.transport import solve_conditional_w2, solve_w2

if TYPE_CHECKING:
    import xarray as xr

PAIR_FAMILIES = ("random", "direction", "splitting", "transfer")

# Random measures whose weights are transferred, besides the worst case.
_TRANSFERS = 4


@dataclass(frozen=True, eq=False)
class Found:
    """The best pair of one family, and how many pairs were tried and could be measured."""

    mu: ParticleMeasure
    nu: ParticleMeasure
    ratio: SecantRatio
    tried: int


class SecantSearch(Answer, noun="secant", title="Certified lower bound of a Lipschitz constant"):
    """What a search over pairs of measures found.

    Attributes:
        value: certified: the lower end of W₂(Fμ, Fν) over the upper end of W₂(μ, ν) for the best
            pair.
        family: which family of pairs holds the best one.
        radius: of the ball that holds all atoms.
        constant: the local constant at `start`; a limit of secants, so below the Lipschitz
            constant too.
        start: the measure whose local constant the structured pairs start from.
        best: the best pair per family that had one; see `Found`.
    """

    value: Tensor = labelled("certified lower bound of the Lipschitz constant")
    family: str = labelled("family of the best pair", attribute=True)
    radius: float = labelled("radius of the ball", attribute=True)
    constant: LocalLipschitz = labelled("local constant at the start", name="local")
    start: ParticleMeasure
    best: Mapping[str, Found]

    @property
    def mu(self) -> ParticleMeasure:
        """μ of the best pair."""
        return self.best[self.family].mu

    @property
    def nu(self) -> ParticleMeasure:
        """ν of the best pair."""
        return self.best[self.family].nu

    @property
    def ratio(self) -> SecantRatio:
        """The secant ratio of the best pair, whose lower end is `value`."""
        return self.best[self.family].ratio

    def to_dataset(self) -> xr.Dataset:
        """The best ratio per family with its certified interval, along `family`."""
        along: dict[str, Any] = {"dims": ("family",)}
        variables = [
            *SecantRatio.columns("secant", words="best secant ratio", **along),
            Variable("distance", "distance of the best pair", units="length", **along),
            Variable("tried", "pairs measured", dtype="int64", **along),
            *LocalLipschitz.columns("local", words="local constant at the start"),
        ]
        rows = [
            f.ratio.values("secant")
            | {"distance": float(f.ratio.denominator.value), "tried": f.tried}
            for f in self.best.values()
        ]
        values = {name: [row[name] for row in rows] for name in rows[0]}
        family = Variable("family", "family of pairs", dtype="str", **along)
        return dataset(
            variables,
            values | self.constant.values("local"),
            coords={"family": (family, list(self.best))},
        )


def lipschitz_lower(
    F: MeasureMap,
    radius: float,
    *,
    n_atoms: int = 2,
    dim: int | None = None,
    positioned: bool | None = None,
    n_pairs: int = 64,
    families: Sequence[str] = PAIR_FAMILIES,
    start: ParticleMeasure | None = None,
    generator: torch.Generator | None = None,
) -> SecantSearch:
    """A certified lower bound of sup W₂(F(μ), F(ν)) / W₂(μ, ν) over measures on B_R.

    Every pair counts with (lower bound of the numerator) / (upper bound of the denominator), so
    that the result is below the Lipschitz constant whatever the solver did; the rounding of F
    is taken to be 8 eps of the size of its images. Families:

    - "random": random pairs, far and near.
    - "direction": shrinking steps along the worst direction of the local constant at `start`.
      They tend to ‖D^½JD^−½‖.
    - "splitting": one atom of `start` splits by shrinking steps; tends to maxᵢ ‖D_xΓ_μ(xᵢ)‖.
    - "transfer": mass goes from one atom to another, of `start` and of random measures; far
      from the linear regime.

    Causal maps are measured with the conditional distance d₂; their transfers stay within a
    position.

    Args:
        F: a map of measures that keeps weights (and positions).
        radius: R > 0.
        n_atoms: atoms of the measures; random positioned ones for transfers have twice as many.
        dim: d; by default as F declares (its ``dim``).
        positioned: whether measures have positions; by default for maps that declare themselves
            causal (their ``causal``). Not together with a `start`, whose own positions count.
        n_pairs: number of random pairs.
        families: which to try, of `PAIR_FAMILIES`.
        start: measure in B_R without batch axes; by default what `worst_case` finds in 50 steps.
        generator: of the random pairs; a fixed seed if None.

    Raises:
        ValueError: a radius that is not positive, no dimension, unknown families, a start
            outside the ball, or no pair at a positive distance.

    Source: an estimator of this package. `SecantRatio` says which quotient of ends is valid.
    """
    check_map(F)
    if isinstance(families, str) or not isinstance(families, Iterable):
        raise TypeError(
            f"families: expected a list of some of {PAIR_FAMILIES}, got {describe(families)}"
        )
    families = [choice(name, "families", PAIR_FAMILIES) for name in families]
    if not families:
        raise ValueError(f"families: expected some of {PAIR_FAMILIES}, got none")
    radius, n_pairs = number(radius, "radius", above=0), count(n_pairs, "n_pairs")
    n_atoms, generator = count(n_atoms, "n_atoms"), as_generator(generator)
    if start is None:
        start, constant = worst_case(
            F,
            radius,
            n_atoms=n_atoms,
            dim=dim,
            positioned=positioned,
            starts=4,
            steps=50,
            generator=generator,
        )
    else:
        _check_start(start, radius)
        constant = local_lipschitz(F, start)
    size = _Size(n_pairs, n_atoms, start.dim, radius, start.is_positioned)
    best = {}
    for family in families:
        found = _best(F, list(_proposals(family, F, start, constant, size, generator)))
        if found is not None:
            best[family] = found
    if not best:
        raise ValueError("expected some pair at a positive finite distance, found none")
    family = max(best, key=lambda name: float(best[name].ratio.lower))
    return SecantSearch(best[family].ratio.lower, family, radius, constant, start, best)


@dataclass(frozen=True)
class _Size:
    """The number of random pairs, and what the measures are like."""

    n_pairs: int
    n_atoms: int
    dim: int
    radius: float
    positioned: bool


def _proposals(
    family: str,
    F: MeasureMap,
    start: ParticleMeasure,
    constant: LocalLipschitz,
    size: _Size,
    generator: torch.Generator,
) -> Iterator[Pairs]:
    if family == "random":
        sizes = (size.n_pairs, size.n_atoms, size.dim, size.radius)
        yield random_pairs(*sizes, positioned=size.positioned, generator=generator)
    elif family == "direction":
        yield direction_pairs(start, constant, size.radius)
    elif family == "splitting":
        for mu, local in ((start, constant), _most_splitting(F, start, size, generator)):
            yield splitting_pairs(mu, local, size.radius)
    else:
        for mu in (start, *_random_transfers(size, generator)):
            pairs = transfer_pairs(mu)
            if pairs is not None:
                yield pairs


def _most_splitting(
    F: MeasureMap, start: ParticleMeasure, size: _Size, generator: torch.Generator
) -> tuple[ParticleMeasure, LocalLipschitz]:
    """The random measure whose splitting component is largest, and its constant."""
    measures = (max(size.n_pairs, 1), start.n_particles, size.dim, size.radius)
    points, logs = random_measures(*measures, generator)
    batch = ParticleMeasure(points, log_weights=logs, positions=start.positions)
    splitting = local_lipschitz(F, batch, rtol=1e-3, strict=False).splitting
    assert splitting is not None
    mu = batch[int(torch.nan_to_num(splitting, nan=-1.0).argmax())]
    return mu, local_lipschitz(F, mu, strict=False)


def _random_transfers(size: _Size, generator: torch.Generator) -> ParticleMeasure:
    arguments = (_TRANSFERS, size.n_atoms, size.dim, size.radius, generator)
    if size.positioned:
        return tied_measures(*arguments)
    points, logs = random_measures(*arguments)
    return ParticleMeasure(points, log_weights=logs)


def _best(F: MeasureMap, batches: Sequence[Pairs]) -> Found | None:
    """The pair of largest certified ratio among those of provably positive distance."""
    best: Found | None = None
    tried = 0
    for mu, nu in batches:
        solve = solve_conditional_w2 if mu.is_positioned else solve_w2
        # Both ends are valid however far apart: a hard pair must not end the search.
        distance = solve(mu, nu, strict=False)
        # Measures that are equal up to rounding prove nothing.
        usable = (distance.lower > 0) & torch.isfinite(distance.upper)
        if not bool(usable.any()):
            continue
        mu, nu = mu[usable], nu[usable]
        tried += int(usable.sum())
        images = image_of(F, mu), image_of(F, nu)
        apart = solve(*images, strict=False).lower - rounding_of(*images)
        lower = apart.clamp_min(0.0) / distance.upper[usable]
        order = torch.nan_to_num(lower, nan=-1.0).argsort(descending=True).tolist()
        # Alone a pair may be solved by another algorithm, that does not prove it to be apart.
        k = next((k for k in order if bool(solve(mu[k], nu[k], strict=False).lower > 0)), None)
        if k is None:
            continue
        ratio = secant_ratio(F, mu[k], nu[k], strict=False)
        if best is None or float(ratio.lower) > float(best.ratio.lower):
            best = Found(mu[k], nu[k], ratio, 0)
    return None if best is None else dataclasses.replace(best, tried=tried)


def _check_start(start: ParticleMeasure, radius: float) -> None:
    if check_measure(start, "start").batch_shape:
        raise ValueError(f"start: expected no batch axes, got {tuple(start.batch_shape)}")
    largest = float(torch.linalg.vector_norm(start.points, dim=-1).max())
    if largest > radius * (1 + 1e-12):
        raise ValueError(f"start: expected atoms in the ball of radius {radius}, got {largest}")
