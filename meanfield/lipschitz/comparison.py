"""Euclidean constants of the discrete map beside Wasserstein ones, as in [CAP24] Lemma 3.2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import xarray as xr
from torch import Tensor

from meanfield.checks import (
    as_bool,
    as_float_tensor,
    as_floats,
    as_generator,
    check_finite,
    number,
)
from meanfield.habits import with_hints
from meanfield.linalg.vectors import normal_like
from meanfield.lipschitz.constant import LocalLipschitz
from meanfield.lipschitz.local import local_lipschitz
from meanfield.lipschitz.secant import SecantRatio, euclidean_secant_ratio, secant_ratio
from meanfield.maps.map import as_map
from meanfield.measures import MeasureMap, ParticleMeasure, split, stack
from meanfield.results import Variable
from meanfield.results.labels import dataset

_ALONG = ("perturbation", "step")

# Of the Dataset of `compare_lemma_3_2`.
_PERTURBATION = Variable("perturbation", "direction", dims=("perturbation",), dtype="str")
_STEP = Variable("step", "displacement over radius, in root mean square", dims=("step",))
VARIABLES = (
    Variable(
        "euclidean_secant",
        "discrete secant ratio, Euclidean",
        dims=_ALONG,
        symbol=r"\|f(X)-f(Y)\|/\|X-Y\|",
    ),
    *SecantRatio.columns(
        "wasserstein_secant", words="secant ratio of the map of measures", dims=_ALONG
    ),
    *LocalLipschitz.columns("euclidean", words="Euclidean constant of the discrete map at X"),
    *LocalLipschitz.columns("wasserstein", words="local Wasserstein constant at the measure of X"),
    Variable("particle", "local Wasserstein constant, atoms moved as a whole"),
    Variable("splitting", "local Wasserstein constant, one atom split"),
)


class Secants(NamedTuple):
    """Secant ratios of the discrete map and of the map of measures, of the shape of the steps."""

    euclidean: Tensor
    wasserstein: SecantRatio


def secants_along(
    F: MeasureMap, mu: ParticleMeasure, direction: Tensor, lengths: Sequence[float]
) -> Secants:
    """Both secant ratios between μ and the measures with atoms xᵢ + length · √n εᵢ.

    For a uniform μ and a unit direction ε the atoms move by a length in root mean square: that
    is the W₂ distance as soon as the identity coupling is optimal, and always the conditional
    distance when there is one atom per position.

    Args:
        F: a map of measures.
        mu: a uniform measure.
        direction: ε, shape (n, d), of Frobenius norm 1.
        lengths: root-mean-square displacements.
    """
    return _secants(F, mu, mu.n_particles**0.5 * direction, lengths)


def split_secants(
    F: MeasureMap,
    mu: ParticleMeasure,
    atom: int | Tensor,
    direction: Tensor,
    lengths: Sequence[float],
) -> Secants:
    """Both secant ratios from μ to μ with an atom split into halves at xᵢ ± length · u.

    The discrete ratio is that of twice as many tokens; no displacement of n tokens splits an atom.

    Args:
        F: a map of measures.
        mu: a measure without batch axes.
        atom: i, such as the `splitting_atom` of its local Wasserstein constant.
        direction: the unit vector u, such as its `splitting_direction`, shape (d,).
        lengths: displacements of the halves.
    """
    halves = split(mu)
    first = 2 * int(atom)
    apart = torch.zeros_like(halves.points)
    apart[first], apart[first + 1] = direction, -direction
    return _secants(F, halves, apart, lengths)


def _secants(
    F: MeasureMap, mu: ParticleMeasure, direction: Tensor, lengths: Sequence[float]
) -> Secants:
    """All lengths as one batch of measures."""
    batch = stack([mu] * len(lengths))
    steps = torch.as_tensor(lengths, dtype=mu.dtype, device=mu.device)

    def f(points: Tensor) -> Tensor:
        return F(batch.replace(points)).points

    moved = mu.points + steps[..., None, None] * direction
    return Secants(
        euclidean=euclidean_secant_ratio(f, batch.points, moved),
        wasserstein=secant_ratio(F, batch, batch.replace(moved)),
    )


@with_hints
def compare_lemma_3_2(
    F: MeasureMap,
    X: Tensor,
    *,
    steps: Sequence[float] = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6),
    conditional: bool | None = None,
    generator: torch.Generator | int = 0,
) -> xr.Dataset:
    """Secants of the discrete map and of the map of measures at X, as the step shrinks.

    [CAP24] Lemma 3.2 (4.2 for masked attention): on uniform measures of n atoms the Wasserstein
    (conditional) and the Euclidean constant are equal, since for steps below half the smallest
    separation the identity coupling is optimal. Among measures of more atoms they are not: along
    "splitting" the worst atom is split in two, which no displacement of n tokens does. The local
    Wasserstein constant is the larger of both, `particle` (the Euclidean one) and `splitting`.

    Args:
        F: a map of measures.
        X: token sequence, shape (n, d).
        steps: root-mean-square displacements over the radius max ‖xᵢ‖; along "splitting"
            displacements of the two halves.
        conditional: whether distances are conditional (tokens at positions i/n); by default
            as F says (its ``causal``), and W₂ on R^d otherwise. Say True for other maps that look
            at positions, as the rotary kernel does.
        generator: of the random direction, or its seed.

    Returns:
        A Dataset along `perturbation` ("top": the worst direction of the discrete map, "random",
        "splitting") and `step`, with both secant ratios and the certified interval of the
        Wasserstein one, and the local constants with their residuals.
    """
    X = as_float_tensor(X, "X")
    if X.ndim != 2:
        raise ValueError(f"X: expected one sequence (n, d), got {tuple(X.shape)}")
    check_finite(X, "X")
    positioned = as_map(F).causal if conditional is None else as_bool(conditional, "conditional")
    sequence = ParticleMeasure.from_sequence(X)
    mu = sequence if positioned else ParticleMeasure(X)
    generator = as_generator(generator)
    euclidean = local_lipschitz(F, mu, geometry="euclidean")
    wasserstein = local_lipschitz(F, mu)
    random = normal_like(X, generator)
    top = oriented(euclidean.direction)
    directions = {"top": top, "random": random / torch.linalg.vector_norm(random)}
    radius = float(torch.linalg.vector_norm(X, dim=-1).max()) or 1.0
    steps = [number(step, "steps", above=0) for step in as_floats(steps, "steps").flat]
    lengths = [step * radius for step in steps]
    rows = {name: secants_along(F, mu, way, lengths) for name, way in directions.items()}
    atom, apart = wasserstein.splitting_atom, wasserstein.splitting_direction
    assert atom is not None and apart is not None
    rows["splitting"] = split_secants(F, mu, atom, apart, lengths)
    ratios = [row.wasserstein.values("wasserstein_secant") for row in rows.values()]
    values = {
        "euclidean_secant": [row.euclidean.tolist() for row in rows.values()],
        **{name: [ratio[name] for ratio in ratios] for name in ratios[0]},
        **euclidean.values("euclidean"),
        **wasserstein.values("wasserstein"),
        "particle": wasserstein.particle,
        "splitting": wasserstein.splitting,
    }
    coords = {"perturbation": (_PERTURBATION, list(rows)), "step": (_STEP, steps)}
    return dataset(VARIABLES, values, coords=coords)


def oriented(direction: Tensor) -> Tensor:
    """v or −v, shape ``(n, d)``, whose largest entry is positive.

    A singular vector has no sign of its own, and secants of long steps along v and −v differ. Of
    entries that are equal up to rounding it is the first.
    """
    entries = direction.flatten()
    sizes = entries.abs()
    first = int((sizes > (1 - 1e-6) * sizes.amax()).nonzero()[0])
    return direction * entries[first].sign()
