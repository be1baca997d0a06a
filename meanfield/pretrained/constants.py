"""Local constants of the layers of a model, in one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from meanfield.lipschitz import LocalLipschitz, local_lipschitz
from meanfield.maps import Map
from meanfield.maps.map import constant_upper
from meanfield.measures import ParticleMeasure
from meanfield.results.labels import Variable, array_of, dataset

if TYPE_CHECKING:
    import xarray as xr

_PARTS = ("value", "upper", "miss", "error", "residual", "converged")


class Place(NamedTuple):
    """A map and the measure that enters it."""

    map: Map
    measure: ParticleMeasure


def constants_of(
    attention: Sequence[Place],
    blocks: Sequence[Place],
    network: Place,
    *,
    geometry: str,
    rtol: float,
    attrs: Mapping[str, str | int | float],
) -> xr.Dataset:
    """The constants of the layers of a model and of the whole.

    Args:
        attention: its attention layers.
        blocks: its blocks.
        network: all of it.
        geometry: of the constants.
        rtol: of the constants.
        attrs: attributes of the Dataset.
    """
    texts = network.measure.batch_shape
    batch = ("text",) * len(texts)
    variables: list[Variable] = []
    values: dict[str, Any] = {}
    for name, words, layers in (
        ("attention", "local constant of the attention layer", attention),
        ("block", "local constant of the block", blocks),
    ):
        rows = [_measured(place, name, geometry, rtol) for place in layers]
        variables += _columns(name, words, ("layer", *batch))
        values |= {key: np.stack([row[key] for row in rows]) for key in rows[0]}
    variables += _columns("network", "local constant of the network", batch)
    values |= _measured(network, "network", geometry, rtol)
    sizes = {"layer": len(blocks), **dict(zip(batch, texts, strict=True))}
    coords = {
        name: (Variable(name, f"{name}, from 0", dims=(name,), dtype="int64"), np.arange(size))
        for name, size in sizes.items()
    }
    return dataset(variables, values, coords=coords, attrs={**attrs, "geometry": geometry})


def _columns(name: str, words: str, dims: tuple[str, ...]) -> list[Variable]:
    bound = Variable(
        f"{name}_bound", f"{words}: certain bound, NaN where none is known", dims=dims
    )
    return [*LocalLipschitz.columns(name, *_PARTS, words=words, dims=dims), bound]


def _measured(place: Place, name: str, geometry: str, rtol: float) -> dict[str, Any]:
    F, mu = place
    found = local_lipschitz(F, mu, geometry=geometry, rtol=rtol, strict=False)
    try:
        bound = array_of(constant_upper(F, mu))
    except NotImplementedError:  # not proved for its kernel
        bound = np.asarray(np.nan)
    shape = mu.batch_shape
    values = found.values(name, *_PARTS) | {f"{name}_bound": bound}
    return {key: np.broadcast_to(value, shape) for key, value in values.items()}
