"""Figures are functions of a Dataset: what they draw is what the Dataset says."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import xarray as xr

from meanfield import figures
from meanfield.experiments import two_dirac

TINY = two_dirac.Settings(
    radii=(1.0, 1.5),
    n_tokens=(2, 5),
    dims=(1,),
    offsets=(-1.0, 0.0, 1.0),
    log_ratios=(-900.0,),
    split_radii=(1.0, 4.0),
    steps=(1e-1, 1e-4),
    secant_tokens=(5,),
)


FIGURES = two_dirac.EXPERIMENT.figures


@pytest.fixture(scope="module")
def ds() -> xr.Dataset:
    return two_dirac.EXPERIMENT.run(TINY)


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    import matplotlib.pyplot as plt

    plt.close("all")


def line(ax, label: str) -> tuple[np.ndarray, np.ndarray]:
    (found,) = [one for one in ax.get_lines() if one.get_label() == label]
    return np.asarray(found.get_xdata(), float), np.asarray(found.get_ydata(), float)


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_of_the_experiment_is_drawn_without_a_warning(ds, name, tmp_path):
    with figures.style():
        ax = FIGURES[name](ds)
        ax.figure.savefig(tmp_path / "figure.png")
    assert ax.get_title()
    assert ax.get_xlabel()
    assert ax.get_ylabel()
    drawn = [y for one in ax.get_lines() for y in np.asarray(one.get_ydata(), float)]
    assert np.isfinite(drawn).all()


def test_a_figure_draws_on_the_axes_it_is_given(ds):
    import matplotlib.pyplot as plt

    ax = plt.subplots()[1]
    assert two_dirac.splitting(ds, ax=ax) is ax


def test_the_growth_in_n_is_the_euclidean_constant(ds):
    n, values = line(two_dirac.growth_in_n(ds), "R = 1.5")
    rows = ds.isel(
        case=np.flatnonzero((ds.radius == 1.5) & (ds.n_tokens > 0) & ~ds.causal)
    ).sortby("n_tokens")
    np.testing.assert_array_equal(n, rows.n_tokens)
    np.testing.assert_array_equal(values, rows.euclidean)


def test_the_best_pair_lies_between_its_bounds(ds):
    ax = two_dirac.growth_in_radius(ds)
    _, best = line(ax, "found, plain: best two Diracs")
    _, above = line(ax, "upper bound, plain: this package")
    _, below = line(ax, "lower bound, plain")
    assert (below <= best * (1 + 1e-12)).all()
    assert (best <= above).all()
    _, papers = line(ax, "upper bound, [CAP24] Thm 3.5")
    assert (above < papers).all()
    # At finitely many scales of position the masked constant stays below its limit.
    _, interleaved = line(ax, "found, masked: at every scale of position")
    _, limit = line(ax, "lower bound, masked: twice the plain")
    assert (0.7 * limit < interleaved).all() and (interleaved > best).all()
    assert (interleaved <= line(ax, "upper bound, masked: this package")[1]).all()


@pytest.mark.parametrize("causal", [False, True])
def test_a_marker_of_w2_is_not_covered_by_that_of_its_curve(ds, causal):
    lines = [o for o in two_dirac.secants(ds, causal=causal).get_lines() if len(o.get_xdata())]
    rings = [one for one in lines if one.get_linestyle() == "None"]
    assert rings and all(one.get_fillstyle() == "none" for one in rings)
    for other in lines:
        if other not in rings:
            assert other.get_marker() == "None" or other.get_markevery() == []


def test_the_only_marker_of_a_curve_of_weights_is_at_its_best_one(ds):
    ax = two_dirac.light_weight(ds)
    for one in ax.get_lines():
        if str(one.get_label()).startswith("R = "):
            assert one.get_marker() != "None"
            (place,) = one.get_markevery()
            assert one.get_ydata()[place] == one.get_ydata().max()


def test_points_that_have_not_converged_are_marked(ds):
    ds = ds.copy(deep=True)
    rows = np.flatnonzero((ds.radius == 1.5) & (ds.n_tokens == 5) & ~ds.causal)
    ds.euclidean_converged.values[rows] = False
    x, y = line(two_dirac.growth_in_n(ds), "not converged")
    assert x.tolist() == [5.0]
    assert y == ds.euclidean.values[rows]


def test_a_dataset_without_the_cases_says_so(ds):
    plain = ds.isel(case=np.flatnonzero(~ds.causal))
    with pytest.raises(ValueError, match="no case with causal=True"):
        two_dirac.growth_in_n(plain, causal=True)


def test_the_style_is_left_behind():
    import matplotlib as mpl

    before = mpl.rcParams["font.size"]
    with figures.style():
        assert mpl.rcParams["pdf.fonttype"] == 42
    assert mpl.rcParams["font.size"] == before


PUBLIC = [name for name in figures.__all__ if name.startswith("plot_")]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_figure_says_which_options_it_takes(name):
    parameters = inspect.signature(getattr(figures, name)).parameters
    assert {"ds", "ax", "legend", "title", "label", "lines"} <= set(parameters)
    assert parameters["ax"].default is None
    assert "legend: under the Axes" in getattr(figures, name).__doc__


def test_title_legend_label_and_lines_are_the_caller_s(ds):
    ax = two_dirac.splitting(ds, title="Mine", legend=False, linewidth=3, label="ours")
    assert ax.get_title() == "Mine" and ax.get_legend() is None
    assert {one.get_linewidth() for one in ax.get_lines()} == {3}
    assert all(str(one.get_label()).startswith("ours: ") for one in ax.get_lines())
    # A second Dataset on the same Axes keeps the first one's lines as they are.
    two_dirac.splitting(ds, ax=ax, label="theirs", linewidth=1, title="")
    assert {one.get_linewidth() for one in ax.get_lines()} == {1, 3}
    assert ax.get_title() == ""
    ax = two_dirac.splitting(ds, legend={"loc": "upper left", "title": "curves"})
    assert ax.get_legend().get_title().get_text() == "curves"


def test_an_unknown_option_is_named_with_the_nearest(ds):
    with pytest.raises(TypeError, match=r"splitting: expected .*got 'linewidht'.*'linewidth'"):
        two_dirac.splitting(ds, linewidht=2)
    with pytest.raises(TypeError, match=r"ds: expected an xarray.Dataset, got None"):
        two_dirac.splitting(None)


@pytest.mark.parametrize("size", [(5.2, 3.6), (3.3, 2.4), (6.75, 2.2)])
def test_a_legend_covers_neither_curves_nor_labels(ds, size):
    import matplotlib.pyplot as plt

    with figures.style():
        ax = plt.subplots(figsize=size)[1]
        two_dirac.growth_in_radius(ds, ax=ax)
        ax.figure.canvas.draw()
        legend = ax.get_legend().get_window_extent()
    assert legend.y1 <= ax.xaxis.get_tightbbox().y0 + 1
    assert legend.y1 <= ax.get_window_extent().y0


def test_curves_differ_without_their_colours(ds):
    ax = two_dirac.growth_in_n(ds)
    drawn = [one for one in ax.get_lines() if str(one.get_label()).startswith("R = ")]
    assert len({one.get_marker() for one in drawn}) == len(drawn) > 1


def test_ticks_stand_at_the_data(ds):
    ax = two_dirac.growth_in_n(ds)
    assert [float(tick) for tick in ax.get_xticks()] == [2.0, 5.0]


def test_a_dataset_without_the_columns_of_a_figure_is_refused(ds):
    with pytest.raises(ValueError, match=r"splitting: expected .*without \['splitting_secant'\]"):
        two_dirac.splitting(ds.drop_vars("splitting_secant"))


def test_only_missing_cases_are_answered_by_a_missing_figure(ds, tmp_path):
    plain = ds.isel(case=np.flatnonzero(~ds.causal))
    masked = {"masked": partial(two_dirac.growth_in_n, causal=True)}
    (said,) = figures.save_all(plain, masked, tmp_path)
    assert "no figure masked: the Dataset has no case" in str(said)

    def broken(ds: xr.Dataset, *, ax) -> None:
        ax.set_title(r"$\\beta$")  # a formula that is none

    with pytest.raises(ValueError, match="ParseException"):
        list(figures.save_all(ds, {"broken": broken}, tmp_path))
    assert not list(tmp_path.iterdir())


def test_growth_draws_a_column_with_its_bounds(ds):
    rows = ds.isel(case=np.flatnonzero((ds.n_tokens > 0) & ~ds.causal))
    ax = figures.plot_growth(rows, y="euclidean", by="radius", bounds=["general_lower"])
    n, values = line(ax, "radius = 1.5")
    one = rows.isel(case=np.flatnonzero(rows.radius == 1.5)).sortby("n_tokens")
    np.testing.assert_array_equal((n, values), (one.n_tokens, one.euclidean))
    assert ax.get_ylabel() == one.euclidean.long_name
    with pytest.raises(ValueError, match="did you mean 'euclidean'"):
        figures.plot_growth(rows, y="euclidian")


def test_paths_of_a_flow_are_drawn_without_cases(tmp_path):
    points = np.random.default_rng(0).normal(size=(5, 3, 2))
    flow = xr.Dataset({"points": (("time", "particle", "feature"), points)}, {"time": range(5)})
    x, y = line(figures.plot_particle_paths(flow), "end")
    np.testing.assert_array_equal((x, y), points[-1].T)
    assert list(figures.save_animations(flow, {"flow": figures.animate_particles}, tmp_path))
