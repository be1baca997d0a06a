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

_WORDS = {
    "attention": "local constant of the attention layer",
    "block": "local constant of the block",
    "network": "local constant of the network",
}
_PARTS = ("value", "upper", "miss", "error", "residual", "converged")


class Place(NamedTuple):
    """A map, what enters it, and which part of the model it is: a key of the table above."""

    part: str
    map: Map
    measure: ParticleMeasure


def constants_of(
    places: Sequence[Place],
    layers: Sequence[int],
    *,
    rtol: float,
    bounds: bool,
    progress: bool,
    attrs: Mapping[str, str | int | float],
) -> xr.Dataset:
    """The constants of layers of a model and of the whole.

    Args:
        places: "attention" and "block" of each layer, as far as they are read, and "network".
        layers: their numbers.
        rtol: of the constants.
        bounds: whether their certain bounds are computed.
        progress: whether a terminal shows how many maps are done.
        attrs: attributes of the Dataset.
    """
    from tqdm import tqdm

    batch = places[0].measure.batch_shape
    texts = {"text": range(batch[0])} if batch else {}
    with tqdm(places, unit="map", leave=False, disable=None if progress else True) as bar:
        rows = [_measured(place, rtol, bounds) for place in bar]
    variables: list[Variable] = []
    values: dict[str, Any] = {}
    for name, words in _WORDS.items():
        own = [row for place, row in zip(places, rows, strict=True) if place.part == name]
        if not own:
            continue
        whole = name == "network"
        dims = (*([] if whole else ["layer"]), *texts)
        variables += LocalLipschitz.columns(name, *_PARTS, words=words, dims=dims)
        if bounds:
            meaning = f"{words}: certain bound, NaN where none is known"
            variables.append(Variable(f"{name}_bound", meaning, dims=dims))
        values |= own[0] if whole else {key: np.stack([r[key] for r in own]) for key in own[0]}
    coords = {
        name: (Variable(name, f"{name}, from 0", dims=(name,), dtype="int64"), list(numbers))
        for name, numbers in {"layer": layers, **texts}.items()
    }
    return dataset(variables, values, coords=coords, attrs=attrs)


def _measured(place: Place, rtol: float, bounds: bool) -> dict[str, np.ndarray]:
    name, F, mu = place
    found = local_lipschitz(F, mu, rtol=rtol, strict=False)
    values = found.values(name, *_PARTS)
    if bounds:
        try:
            values[f"{name}_bound"] = array_of(constant_upper(F, mu))
        except NotImplementedError:  # not proved for its kernel
            values[f"{name}_bound"] = np.nan
    return {key: np.broadcast_to(value, mu.batch_shape) for key, value in values.items()}
