"""Local constants of the layers of a model, in one table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from meanfield.lipschitz import LocalLipschitz, local_lipschitz
from meanfield.maps import Map
from meanfield.maps.map import constant_upper
from meanfield.measures import ParticleMeasure
from meanfield.results.labels import Variable, array_of, dataset

if TYPE_CHECKING:
    import xarray as xr

_WORDS = {
    "attention": "local constant of the attention layer",
    "block": "local constant of the block",
    "network": "local constant of the network",
}
_PARTS = ("value", "upper", "miss", "error", "residual", "converged")


class Place(NamedTuple):
    """A map and the measure that enters it."""

    map: Map
    measure: ParticleMeasure


def constants_of(
    layers: Mapping[int, Mapping[str, Place]],
    network: Place | None,
    *,
    geometry: str,
    rtol: float,
    bounds: bool,
    progress: bool,
    attrs: Mapping[str, str | int | float],
) -> xr.Dataset:
    """The constants of layers of a model and of the whole.

    Args:
        layers: "attention" and, where it is read, "block" of each layer.
        network: all of it, or None to leave it out.
        geometry: of the constants.
        rtol: of the constants.
        bounds: whether their certain bounds are computed.
        progress: whether a terminal shows how many maps are done.
        attrs: attributes of the Dataset.
    """
    from tqdm import tqdm

    first = next(iter(layers.values()))["attention"].measure
    texts = {"text": range(first.batch_shape[0])} if first.batch_shape else {}
    maps = [*(named for places in layers.values() for named in places.items())]
    maps += [] if network is None else [("network", network)]
    with tqdm(maps, unit="map", leave=False, disable=None if progress else True) as bar:
        rows = [_measured(place, name, geometry, rtol, bounds) for name, place in bar]
    variables: list[Variable] = []
    values: dict[str, Any] = {}
    for name, words in _WORDS.items():
        own = [row for (which, _), row in zip(maps, rows, strict=True) if which == name]
        if not own:
            continue
        whole = name == "network"
        variables += _columns(name, words, (*([] if whole else ["layer"]), *texts), bounds)
        values |= own[0] if whole else {key: np.stack([r[key] for r in own]) for key in own[0]}
    coords = {
        name: (Variable(name, f"{name}, from 0", dims=(name,), dtype="int64"), list(numbers))
        for name, numbers in {"layer": layers, **texts}.items()
    }
    return dataset(variables, values, coords=coords, attrs={**attrs, "geometry": geometry})


def _columns(name: str, words: str, dims: tuple[str, ...], bounds: bool) -> list[Variable]:
    bound = Variable(
        f"{name}_bound", f"{words}: certain bound, NaN where none is known", dims=dims
    )
    own = LocalLipschitz.columns(name, *_PARTS, words=words, dims=dims)
    return [*own, bound] if bounds else [*own]


def _measured(
    place: Place, name: str, geometry: str, rtol: float, bounds: bool
) -> dict[str, np.ndarray]:
    F, mu = place
    found = local_lipschitz(F, mu, geometry=geometry, rtol=rtol, strict=False)
    values = found.values(name, *_PARTS)
    if bounds:
        try:
            values[f"{name}_bound"] = array_of(constant_upper(F, mu))
        except NotImplementedError:  # not proved for its kernel
            values[f"{name}_bound"] = np.nan
    return {key: np.broadcast_to(value, mu.batch_shape) for key, value in values.items()}
