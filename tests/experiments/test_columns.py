"""Every curve of every experiment is a declared column, and every declared column is a curve.

The Datasets have distinct random numbers in all columns, so that a curve drawn from the wrong one
is seen. One repetition, one window: means and medians are then the column itself.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import xarray as xr
from matplotlib.collections import PolyCollection

from meanfield.errors import NoCases
from meanfield.experiments import EXPERIMENTS, get
from meanfield.figures import curves
from meanfield.figures.canvas import FORMULA
from meanfield.figures.charts import Chart, Curve
from meanfield.results.cases import FAILED, answered
from meanfield.sweeps.plan import make_plan

FLAG = "_converged", "fit_holds"  # how a point is drawn, and not where
ONE = {"repetitions": 1, "n_windows": 1, "draws": 1}
DRAWN = [(name, figure) for name in EXPERIMENTS for figure in get(name).figures]


@pytest.fixture(autouse=True)
def _few_points_of_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no columns, and some are optima at each point."""
    monkeypatch.setattr(curves, "_FINE", 5)


def random_dataset(name: str, failed: slice | None = None) -> xr.Dataset:
    """The Dataset of a quick run, all of whose numbers are distinct and random.

    Failed cases hold what `sweep` gives them.
    """
    experiment = get(name)
    known = {field.name for field in dataclasses.fields(experiment.settings)}
    fewer = {key: value for key, value in ONE.items() if key in known and not failed}
    plan = make_plan(**experiment.plan(dataclasses.replace(experiment.quick, **fewer)))
    draw = np.random.default_rng(sum(map(ord, name)))
    sizes = {"case": len(plan.cases)} | {k: len(v) for k, v in plan.task.coords.items()}
    data: dict[str, Any] = {}
    for variable in plan.task.variables or ():
        dims = ("case", *variable.dims)
        shape = tuple(sizes[dim] for dim in dims)
        values = np.ones(shape, bool) if variable.dtype == "bool" else 1 + draw.random(shape)
        data[variable.name] = (dims, values, variable.attrs)
    if "n_layers" in data:
        data["n_layers"] = ("case", np.full(sizes["case"], sizes["layer"]))
    if name == "two-dirac":  # a configuration without a sequence has no secants
        data["euclidean_secant"][1][np.array(plan.columns["n_tokens"]) == 0] = np.nan
    if failed is not None:
        for variable in plan.task.variables or ():
            data[variable.name][1][failed] = variable.fill
        status = np.ones(sizes["case"], np.int8)
        status[failed] = FAILED
        words = "pending ok not_converged failed"
        data["status"] = ("case", status, {"flag_meanings": words})
    coords = {key: ("case", values) for key, values in plan.columns.items()}
    ds = xr.Dataset(data, coords | dict(plan.task.coords), plan.attrs)
    ds = experiment.finish(ds)
    for k, end in enumerate(("_lower", "", "_upper")):
        if f"fit_exponent{end}" in ds:
            ds[f"fit_exponent{end}"] = ("fit", k + draw.random(ds.sizes["fit"]))
    return ds


@pytest.fixture(scope="module")
def made() -> dict[str, xr.Dataset]:
    return {}


def dataset(made: dict[str, xr.Dataset], name: str) -> xr.Dataset:
    if name not in made:
        made[name] = random_dataset(name)
    return made[name]


def points(ax: Any) -> list[np.ndarray]:
    """(x, y) of everything drawn that is no formula: curves, markers, bars, bands, maps."""
    lines = [
        np.array([line.get_xdata(), line.get_ydata()], float)
        for line in ax.get_lines()
        if line.get_gid() != FORMULA and len(line.get_xdata()) and not is_red(line)
    ]
    bars = [
        np.array([[bar.get_x() + bar.get_width() / 2], [bar.get_height()]])
        for container in ax.containers
        for bar in getattr(container, "patches", [])
    ]
    bands = [path.vertices.T for found in ax.collections if isinstance(found, PolyCollection)
             for path in found.get_paths()]  # fmt: skip
    return [part[:, np.isfinite(part[1])] for part in (*lines, *bars, *bands)]


def is_red(line: Any) -> bool:
    return isinstance(line.get_color(), str) and line.get_color() == "red"


def crosses(ax: Any) -> set[tuple[float, float]]:
    """The points marked as not converged."""
    red = [line for line in ax.get_lines() if is_red(line)]
    return {pair for line in red for pair in pairs([line.get_xdata(), line.get_ydata()])}


def pairs(points: Any) -> set[tuple[float, float]]:
    return {(float(x), float(y)) for x, y in np.round(np.array(points, float).T, 9)}


def values(ds: xr.Dataset, column: str) -> np.ndarray:
    """The numbers of a column, or of a quotient of two."""
    over, *under = (ds[one] for one in column.split("/"))
    return np.sort((over / under[0] if under else over).values.ravel())


def is_among(y: np.ndarray, column: np.ndarray) -> bool:
    near = column[np.clip(np.searchsorted(column, y * (1 - 1e-12)), 0, len(column) - 1)]
    return bool(np.allclose(y, near, rtol=1e-11, atol=0))


@pytest.mark.parametrize(("name", "figure"), DRAWN)
def test_every_curve_is_a_declared_column_and_every_column_is_drawn(made, name, figure):
    pytest.importorskip("transformers")
    ds, draw = dataset(made, name), get(name).figures[figure]
    function = getattr(draw, "func", draw)
    columns = {c: values(ds, c) for c in function.columns if not c.endswith(FLAG)}
    ax = draw(ds, legend=False)
    parts = [part[1] for part in points(ax)]
    of = [[c for c, known in columns.items() if is_among(y, known)] for y in parts if len(y)]
    assert all(of), "a curve is no declared column"
    assert {c for found in of for c in found} == set(columns)


def flags(name: str, figure: str) -> set[str]:
    """The flags that a figure names, and those of the columns that it draws."""
    experiment = get(name)
    draw = experiment.figures[figure]
    columns = getattr(draw, "func", draw).columns
    known = {f"{c}_converged" for c in columns} & {v.name for v in experiment.variables}
    return known | {c for c in columns if c.endswith("_converged")}


def test_a_chart_asks_for_the_flags_that_its_curves_name():
    assert Chart("", "x", [Curve("y", flag="z_converged")], "").columns == ("y", "z_converged")


FLAGS = [(name, figure, flag) for name, figure in DRAWN for flag in sorted(flags(name, figure))]


@pytest.mark.parametrize(("name", "figure", "flag"), FLAGS)
def test_what_has_not_converged_is_marked_point_by_point(made, name, figure, flag):
    pytest.importorskip("transformers")
    ds, draw = dataset(made, name), get(name).figures[figure]
    assert not crosses(draw(ds, legend=False))
    ax = draw(ds.assign({flag: xr.zeros_like(ds[flag])}), legend=False)
    marked = crosses(ax)
    curves = [pairs(part) for part in points(ax)]
    whole = set().union(*(curve for curve in curves if curve <= marked))
    assert marked and marked == whole, "a curve is marked in part, or crosses stand alone"


@pytest.mark.parametrize("failed", [slice(0, None, 2), slice(1, None)], ids=str)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_failed_case_is_drawn_and_fitted_as_if_it_were_not_there(name, failed):
    pytest.importorskip("transformers")
    experiment, ds = get(name), random_dataset(name, failed)
    few = answered(ds)
    assert set(few.status.values) == {1} and few.sizes["case"] < ds.sizes["case"]
    for draw in experiment.figures.values():
        try:
            expected = draw(few.drop_vars("status"), legend=False)
        except NoCases:
            with pytest.raises(NoCases):
                draw(ds)
            continue
        drawn = draw(ds, legend=False)
        for one, other in zip(points(drawn), points(expected), strict=True):
            np.testing.assert_array_equal(one, other)
        assert drawn.get_title() == expected.get_title()
