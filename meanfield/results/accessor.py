"""The accessor ``ds.meanfield``: thin, without state; each method is also a function."""

from __future__ import annotations

import importlib
from typing import Any

import xarray as xr

from meanfield.options import choice
from meanfield.results.fits import fit_power
from meanfield.results.provenance import read_provenance
from meanfield.results.shapes import to_cube

__all__ = ["MeanfieldAccessor"]


@xr.register_dataset_accessor("meanfield")
class MeanfieldAccessor:
    """What one does with a Dataset of this library.

    Example:
        >>> ds = xr.Dataset({"y": ("case", [3.0, 6.0])}, coords={"x": ("case", [1.0, 4.0])})
        >>> round(float(ds.meanfield.fit_power("x", "y").exponent), 12)
        0.5
    """

    def __init__(self, ds: xr.Dataset) -> None:
        self._ds = ds

    @property
    def provenance(self) -> dict[str, Any]:
        """Where the numbers come from: see `results.provenance`."""
        return read_provenance(self._ds)

    def to_cube(self, **settings: Any) -> xr.Dataset:
        """One dimension per parameter: see `results.to_cube`."""
        return to_cube(self._ds, **settings)

    def fit_power(
        self, x: str, y: str, *, groups: str | None = None, **settings: Any
    ) -> xr.Dataset:
        """Fit y ≈ C xᵖ to two variables, by name: see `results.fit_power`."""
        names = [x, y] if groups is None else [x, y, groups]
        columns = xr.broadcast(*(self._ds[name] for name in names))
        labels = columns[2] if groups is not None else None
        return fit_power(columns[0], columns[1], groups=labels, **settings)

    def plot(self, figure: str, **settings: Any) -> Any:
        """The figure of this name in `meanfield.figures`, drawn from the Dataset.

        Args:
            figure: such as "exponents", with or without ``plot_`` before it.
            **settings: of the figure, ``ax=`` and ``title=`` among them.
        """
        figures = importlib.import_module("meanfield.figures")
        known = [n.removeprefix("plot_") for n in figures.__all__ if n.startswith("plot_")]
        name = choice(str(figure).removeprefix("plot_").replace("-", "_"), "figure", known)
        return getattr(figures, f"plot_{name}")(self._ds, **settings)

    def __repr__(self) -> str:
        return "ds.meanfield: plot(figure), fit_power(x, y), to_cube(), provenance"
