"""Figures are functions of a Dataset: what they draw is what the Dataset says."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import re
import shutil

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import xarray as xr
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from meanfield import (
    AttentionParameters,
    ParticleMeasure,
    SelfAttention,
    dynamics,
    figures,
    sweep,
)
from meanfield.errors import NoCases
from meanfield.experiments import (
    clustering,
    get,
    inversion,
    kernel_growth,
    l2_tightness,
    mean_field_limit,
    quadratic_growth,
    sharpness,
    two_dirac,
)
from meanfield.figures.charts import Chart, Curve, Law
from meanfield.figures.curves import curve, formula, law, mark_unconverged
from meanfield.figures.legends import place_legend
from meanfield.figures.plots import exponents, figures_of, secants
from meanfield.figures.selection import best, by_level, levels, model_and_text, select
from meanfield.results import Variable, to_cube
from meanfield.sweeps import Task
from tests.experiments.test_columns import random_dataset

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
    assert FIGURES["splitting"](ds, ax=ax) is ax


def test_the_growth_in_n_is_the_euclidean_constant(ds):
    n, values = line(FIGURES["growth-in-n"](ds), "R = 1.5")
    rows = ds.isel(
        case=np.flatnonzero((ds.radius == 1.5) & (ds.n_tokens > 0) & ~ds.causal)
    ).sortby("n_tokens")
    np.testing.assert_array_equal(n, rows.n_tokens)
    np.testing.assert_array_equal(values, rows.euclidean)


def test_the_best_pair_lies_between_its_bounds(ds):
    ax, masked = FIGURES["growth-in-radius"](ds), FIGURES["growth-in-radius-masked"](ds)
    ends = [0, -1]  # of a formula; the Dataset has two radii
    best, papers = line(ax, "found")[1], line(ax, "[CAP24]")[1][ends]
    above, below = (line(ax, label)[1][ends] for label in ("at most", "at least"))
    assert (below <= best * (1 + 1e-12)).all()
    assert (best <= above).all()
    assert (above < papers).all()
    # At finitely many scales of position the masked constant stays below its limit.
    interleaved, limit = (
        line(masked, "many scales")[1],
        line(masked, "limit, at least")[1][ends],
    )
    assert (0.7 * limit < interleaved).all() and (interleaved > best).all()
    assert (interleaved <= line(masked, "at most")[1][ends]).all()


def alone(name):
    """The box of a name, without the line to its curve."""
    return Text.get_window_extent(name)


@pytest.mark.parametrize("size", [(4.6, 3.4), (3.3, 2.0)])
def test_curves_are_named_at_their_ends_and_no_name_covers_another(ds, size):
    import matplotlib.pyplot as plt

    with figures.style():
        ax = FIGURES["growth-in-n"](ds, ax=plt.subplots(figsize=size)[1])
        ax.figure.canvas.draw()
        named = {text.get_text(): text for text in ax.texts}
        curves = [o for o in ax.get_lines() if len(o.get_xdata()) and o.get_label()[0] != "_"]
        assert named.keys() == {one.get_label() for one in curves} >= {"R = 1", "R = 1.5"}
        assert all(named[one.get_label()].get_color() is one.get_color() for one in curves)
        boxes = sorted(map(alone, ax.texts), key=lambda box: box.y0)
        for one in curves:  # each name is joined to the last point of its curve
            x, y = (np.asarray(part, float) for part in one.get_data())
            x, y = x[np.isfinite(x + y)], y[np.isfinite(x + y)]
            end = ax.transData.transform((x.max(), y[x.argmax()]))
            joined = ax.transAxes.transform(named[one.get_label()].xy)
            assert np.allclose(joined, end, atol=1)
            assert named[one.get_label()].arrow_patch.get_edgecolor()[:3] == to_rgb(
                one.get_color()
            )
    assert all(low.y1 <= high.y0 + 1 for low, high in itertools.pairwise(boxes))
    keys = [text.get_text() for text in ax.get_legend().get_texts()]
    assert keys == ["two weighted atoms", "lower bound, Prop. 3.4"]


@pytest.mark.parametrize("causal", [False, True])
def test_a_marker_of_w2_is_not_covered_by_that_of_its_curve(ds, causal):
    chart = secants(causal, lambda ds: select(ds, causal=causal, n_tokens=5, radius=1.5))
    lines = [one for one in chart(ds).get_lines() if len(one.get_xdata())]
    rings = [one for one in lines if one.get_linestyle() == "None"]
    assert rings and all(one.get_fillstyle() == "none" for one in rings)
    for other in lines:
        if other not in rings:
            assert other.get_marker() == "None" or other.get_markevery() == []


def test_points_that_have_not_converged_are_marked(ds):
    ds = ds.copy(deep=True)
    rows = np.flatnonzero((ds.radius == 1.5) & (ds.n_tokens == 5) & ~ds.causal)
    ds.euclidean_converged.values[rows] = False
    x, y = line(FIGURES["growth-in-n"](ds), "not converged")
    assert x.tolist() == [5.0]
    assert y == ds.euclidean.values[rows]


def test_a_dataset_without_the_cases_says_so(ds):
    plain = ds.isel(case=np.flatnonzero(~ds.causal))
    with pytest.raises(ValueError, match=r"no case with crowd=-1\.0, causal=True"):
        FIGURES["growth-in-radius-masked"](plain)


def test_the_constant_at_many_scales_has_its_evidence(ds):
    known = ds.interleaved.notnull().values
    assert known.any() and ds.interleaved_converged.values.all()
    assert (ds.interleaved <= ds.interleaved_upper).values[known].all()
    assert (ds.interleaved_residual < 1e-6).values[known].all()


def test_the_style_is_left_behind():
    import matplotlib as mpl

    before = mpl.rcParams["font.size"]
    with figures.style():
        assert mpl.rcParams["pdf.fonttype"] == 42
    assert mpl.rcParams["font.size"] == before
    with pytest.raises(ValueError, match="expected one of 'house', 'paper', got 'papper'"):
        figures.style("papper").__enter__()


def test_on_paper_a_figure_is_one_column_of_svg_without_a_title(ds, tmp_path):
    with figures.style("paper"):
        ax = FIGURES["splitting"](ds)
        ax.figure.savefig(tmp_path / "figure")
    drawn = (tmp_path / "figure.svg").read_text(encoding="utf-8")
    assert "Heavy atom" not in drawn
    assert "local constant, Wasserstein" in drawn  # letters, not outlines
    assert float(re.search(r'width="([\d.]+)pt"', drawn)[1]) < 3.5 * 72


PUBLIC = [name for name in figures.__all__ if name.startswith("plot_")]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_figure_says_which_options_it_takes(name):
    parameters = inspect.signature(getattr(figures, name)).parameters
    assert {"ds", "ax", "legend", "title"} <= set(parameters)
    assert parameters["ax"].default is None


def test_title_and_legend_are_the_caller_s(ds):
    ax = FIGURES["splitting"](ds, title="Mine", legend=False)
    assert ax.get_title() == "Mine" and ax.get_legend() is None
    FIGURES["splitting"](ds, ax=ax, title="")
    assert ax.get_title() == ""
    with pytest.raises(ValueError, match="legend: expected 'ends', got 'best'"):
        FIGURES["splitting"](ds, legend="best")


def test_an_unknown_option_is_named_with_the_nearest(ds):
    with pytest.raises(TypeError, match=r"against radius: .*got legnd=; did you mean 'legend'"):
        FIGURES["splitting"](ds, legnd=False)
    with pytest.raises(TypeError, match=r"ds: expected an xarray.Dataset, got None"):
        FIGURES["splitting"](None)


@pytest.mark.parametrize("size", [(5.2, 3.6), (3.3, 2.4), (6.75, 2.2)])
def test_a_legend_covers_neither_curves_nor_labels(ds, size):
    import matplotlib.pyplot as plt

    with figures.style():
        ax = plt.subplots(figsize=size)[1]
        FIGURES["growth-in-radius"](ds, ax=ax, legend=True)
        ax.figure.canvas.draw()
        legend = ax.get_legend().get_window_extent()
    assert legend.y1 <= ax.xaxis.get_tightbbox().y0 + 1
    assert legend.y1 <= ax.get_window_extent().y0


def test_curves_differ_without_their_colours(ds):
    ax = FIGURES["growth-in-n"](ds)
    drawn = [one for one in ax.get_lines() if str(one.get_label()).startswith("R = ")]
    assert len({one.get_marker() for one in drawn}) == len(drawn) > 1


def test_ticks_stand_at_the_data(ds):
    ax = FIGURES["growth-in-n"](ds)
    assert [float(tick) for tick in ax.get_xticks()] == [2.0, 5.0]


def test_a_dataset_without_the_columns_of_a_figure_is_refused(ds):
    with pytest.raises(
        ValueError, match=r"against radius: expected .*without \['splitting_secant'\]"
    ):
        FIGURES["splitting"](ds.drop_vars("splitting_secant"))


def test_only_missing_cases_are_answered_by_a_missing_figure(ds, tmp_path):
    plain = ds.isel(case=np.flatnonzero(~ds.causal))
    masked = {"masked": FIGURES["growth-in-radius-masked"]}
    both = masked | {"plain": FIGURES["growth-in-radius"]}
    said, made = figures.save_all(plain, both, tmp_path)
    assert "no figure masked: the Dataset has no case" in str(said)
    new = tmp_path / "a" / "b"  # whoever does not look at the answer
    figures.save_all(plain, both, new, stem="again", formats="png")
    assert made.read_bytes() == (new / "again-plain.png").read_bytes()
    shutil.rmtree(new.parent)
    made.unlink()

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


def test_a_new_figure_holds_its_legend(ds):
    """Saved as it is, without a style and without ``bbox_inches="tight"``."""
    ax = figures.plot_growth(ds, x="radius", y="euclidean", by="n_tokens")
    ax.figure.draw_without_rendering()
    box, whole = ax.get_legend().get_window_extent(), ax.figure.bbox
    assert box.width > 0 and whole.y0 <= box.y0 and box.y1 <= whole.y1
    assert whole.x0 <= box.x0 and box.x1 <= whole.x1


@pytest.mark.parametrize("kind", [1.5, True, "word"])
def test_cases_that_lack_a_parameter_have_a_curve_of_their_own(kind):
    """Of a ragged grid; NaN, which equals nothing, marks what a case has not got."""
    grid = [{"a": 4, "c": kind}, {"a": 1}, {"a": 2, "c": kind}, {"a": 3}]
    ds = sweep(lambda a, c=None: {"y": a * 10.0 + (c is None)}, grid, progress=False)
    for ax in (figures.plot_growth(ds, x="a", y="y", by="c"), figures_of(ds)["y"](ds)):
        np.testing.assert_array_equal(line(ax, "no c"), [[1, 3], [11, 31]])
        labels = ax.get_legend_handles_labels()[1]
        (other,) = (label for label in labels if label.startswith("c = "))
        np.testing.assert_array_equal(line(ax, other), [[2, 4], [20, 40]])
    twice = sweep(
        lambda a, c=None, e=0: {"y": a * 10.0 + e},
        [{"a": a, "e": e} for a in (1, 2) for e in (0, 1)] + [{"a": 1, "e": 0, "c": kind}],
        progress=False,
    )
    ax = figures.plot_growth(twice, x="a", y="y", by="c")
    assert {each.get_linestyle() for each in ax.get_lines()} == {"None"}


def test_no_entry_of_a_legend_is_without_its_line():
    @figures.figure("y")
    def draw(ds, *, ax):
        """A line, a key to it, a key to none, and a line without a point."""
        ax.plot(ds.x, ds.y, "s--", label="values")
        ax.plot(ds.x, np.nan * ds.y, "-", label="nowhere")
        for look in ("k--", "ks", "k:", "kx", "kx--"):
            ax.plot([], [], look, label=f"key {look}")
        return ax

    ds = xr.Dataset({"y": ("x", [1.0, 2.0])}, {"x": [1.0, 2.0]})
    assert draw(ds).get_legend_handles_labels()[1] == ["values", "key k--", "key ks"]


@pytest.mark.parametrize("dim", [1, 2, 3, 5])
def test_a_flow_is_drawn_as_it_comes(dim):
    eye = np.eye(dim)
    F = SelfAttention(AttentionParameters.from_bilinear(eye, eye))
    start = np.random.default_rng(0).normal(size=(3, dim))
    flow = dynamics.flow(F, ParticleMeasure(start), [0.0, 0.5])
    ax = figures.plot_particle_paths(flow)
    if dim == 1:
        drawn = [one.get_ydata() for one in ax.get_lines()]
        np.testing.assert_array_equal(drawn, flow.points.values[..., 0].T)
    else:
        np.testing.assert_array_equal(line(ax, "end"), flow.points.values[-1, :, :2].T)
    words = {3: ", seen along $x_3$", 5: ", two of 5 coordinates"}.get(dim, "")
    assert ax.get_title() == f"Paths of the particles{words}"
    # A coordinate that is 0 throughout hides nothing.
    kept = flow.pad(feature=(0, 1), constant_values=0.0)
    assert figures.plot_particle_paths(kept).get_title() == f"Paths of the particles{words}"
    turned = figures.plot_particle_paths(flow.transpose("particle", "feature", "time"))
    for one, other in zip(ax.get_lines(), turned.get_lines(), strict=True):
        np.testing.assert_array_equal(one.get_xydata(), other.get_xydata())
    # So are several flows in a sweep of one's own, along cases.
    both = xr.concat([flow, flow], "case").assign_coords(beta=("case", [1.0, 2.0]))
    assert list(figures_of(both)) == ["paths"]
    for name, draw in figures_of(both).items():
        assert draw(both).get_title().endswith("\nthe first of 2 cases"), name


def test_points_that_are_no_paths_have_no_figure():
    for dims in (("particle", "feature"), ("case", "particle", "feature"), ("time", "particle"),
                 ("beta", "time", "particle", "feature")):  # fmt: skip
        ds = xr.Dataset({"points": (dims, np.ones([2] * len(dims)))})
        assert figures_of(ds) == {}
        with pytest.raises(
            ValueError, match=r"ds: expected points \(time, particle, feature\), got"
        ):
            figures.plot_particle_paths(ds)


def test_any_sweep_has_figures_of_its_numbers_against_its_parameters():
    ds = sweep(
        lambda radius, shift, word: {"y": radius + shift, "y_upper": 9.0, "z": 10.0**radius},
        {"radius": [1.0, 2.0, 3.0], "shift": [0.0, 1.0], "word": ["a"]},
        progress=False,
    )
    drawings = figures_of(ds)
    assert list(drawings) == ["y", "z"]
    ax = drawings["y"](ds)
    np.testing.assert_array_equal(line(ax, "shift = 1"), [[1, 2, 3], [2, 3, 4]])
    assert (ax.get_xscale(), ax.get_yscale()) == ("linear", "linear")
    assert "y upper" in " ".join(ax.get_legend_handles_labels()[1]).replace("_", " ")
    assert drawings["z"](ds).get_yscale() == "log"
    # A third parameter leaves several points at one x, and no curve through them.
    three = ds.assign_coords(word=("case", list("ab") * 3)).assign_coords(
        shift=("case", [0.0, 0.5, 1.0, 1.5, 2.0, 2.5])
    )
    assert figures_of(three)["y"].x == "shift"
    ax = figures.plot_growth(ds, x="radius", y="y")
    assert ax.get_lines()[0].get_linestyle() == "None"
    assert figures_of(ds.isel(case=[0])) == {}


def test_evidence_takes_no_figure_from_an_answer():
    names = [f"y{k}" for k in range(5)]
    ends = ("", "_residual", "_error", "_lower", "_upper")
    ds = sweep(
        lambda x: {name + end: x for name in names for end in ends},
        {"x": [1.0, 2.0]},
        progress=False,
    )
    assert list(figures_of(ds)) == names


def test_an_answer_that_is_called_like_evidence_or_counts_has_a_figure():
    def answers(x):
        return {"test_error": x, "n_clusters": int(x)}

    variables = [Variable("test_error", "error"), Variable("n_clusters", "n", dtype="int64")]
    ds = sweep(Task(answers, variables), {"x": [1.0, 2.0]}, progress=False)
    assert list(figures_of(ds)) == ["test_error", "n_clusters"]


def test_values_that_six_digits_do_not_tell_apart_have_all():
    for values in ([1.0000001, 1.0000002], [0.1, 0.2]):
        rows = xr.Dataset({"y": ("case", [1.0, 2.0])}, {"x": ("case", [1.0, 2.0])})
        ax = figures.plot_growth(rows.assign_coords(k=("case", values)), x="x", y="y", by="k")
        assert ax.get_legend_handles_labels()[1] == [f"k = {value}" for value in values]


def test_one_name_may_stand_for_a_list_of_one(ds):
    layers = {"layer": [0, 1]}, {"model": "m", "length": 3}
    names = ("attention", "attention_upper", "attention_converged")
    rows = xr.Dataset({name: ("layer", [1.0, 2.0]) for name in names}, *layers)
    shown = figures.plot_constants(rows, parts="attention").get_legend_handles_labels()[1]
    assert shown == figures.plot_constants(rows).get_legend_handles_labels()[1]
    with pytest.raises(ValueError, match=r"parts: expected some of \['attention'\], got none"):
        figures.plot_constants(rows, parts=[])
    ax = figures.plot_growth(ds, x="radius", y="value", bounds="theorem_3_5")
    assert ds.theorem_3_5.long_name in ax.get_legend_handles_labels()[1]


def test_two_settings_of_an_experiment_never_have_one_label(ds):
    near = {1.0: 1.0000001, 1.5: 1.0000002}
    rows = ds.assign_coords(radius=("case", [near.get(R, R) for R in ds.radius.values]))
    rows["radius"].attrs = ds.radius.attrs
    for name in ("growth-in-n", "light-weight"):
        labels = FIGURES[name](rows, legend=True).get_legend_handles_labels()[1]
        assert {"R = 1.0000001", "R = 1.0000002"} <= {*labels}
    assert "R = 1.0000002" in FIGURES["lemma-3-2"](rows).get_title()
    step = rows.assign_coords(step=("step", [0.1, 3e-5]))
    assert "(step 3e-05)" in str(FIGURES["splitting"](step).get_legend_handles_labels()[1])
    (first, *_) = two_dirac.answer(rows.assign_coords(radius=1 * rows.radius.clip(max=1.0000002)))
    assert first.startswith("plain, R = 1.0000002:")
    ax = figures.plot_growth(rows, x="radius", y="value")
    ax.figure.canvas.draw()
    ticks = [one.get_text() for one in ax.get_xticklabels()]
    assert len({*ticks}) == len(ticks) == len(np.unique(rows.radius))
    flows = xr.Dataset(
        {
            "n_clusters": (("case", "step"), np.ones((2, 3))),
            "time": (("case", "step"), [[0, 1, 2]] * 2),
        },
        {"space": ("case", ["sphere"] * 2), "beta": ("case", [1.0000001, 1.0000002])},
    )
    labels = clustering.count(flows).get_legend_handles_labels()[1]
    assert labels == [r"$\beta$ = 1.0000001", r"$\beta$ = 1.0000002"]
    gap = (("case", "time"), np.ones((2, 2)))
    many = xr.Dataset(
        {"w2": gap, "mean_error": gap},
        {
            "time": [1.0000001, 1.0000002],
            "n_particles": ("case", [8, 16]),
            "dim": ("case", [3, 3]),
        },
    )
    labels = mean_field_limit.slopes(many).get_legend_handles_labels()[1]
    assert [label[-13:] for label in labels[::2]] == ["t = 1.0000001", "t = 1.0000002"]


def test_a_bound_of_which_a_logarithmic_axis_has_no_point_is_not_in_the_legend():
    ds = xr.Dataset({"y": ("case", [1.0, 30.0])}, {"x": ("case", [1.0, 2.0])})
    ds = ds.assign(lower=0 * ds.y, upper=2 * ds.y)
    for rows, drawn in ((ds, ["y", "upper"]), (ds.isel(case=[0]), ["y", "lower", "upper"])):
        ax = figures.plot_growth(rows, x="x", y="y", bounds=["lower", "upper"])
        assert ax.get_legend_handles_labels()[1] == drawn


def test_a_cube_of_which_a_case_failed_is_refused_as_any_cube():
    ds = sweep(lambda x: {"y": 1 / x}, {"x": [0, 1]}, progress=False)
    for other in (to_cube(ds), ds.isel(case=0)):
        with pytest.raises(ValueError, match="draw what the sweep returned, and not its cube"):
            figures.plot_growth(other, x="x", y="y")


def test_what_is_no_number_is_not_drawn_against_one():
    words = {"x": ("case", [1.0, 2.0]), "word": ("case", ["a", "b"])}
    ds = xr.Dataset({"y": ("case", [1.0, 2.0])}, words)
    for asked in ({"x": "word", "y": "y"}, {"x": "x", "y": "word"}):
        with pytest.raises(ValueError, match="ds: expected numbers to draw, got word"):
            figures.plot_growth(ds, **asked)


def test_axes_have_the_units_of_what_is_drawn():
    gain = ("case", [1.0, 2.0], {"long_name": "gain", "units": "$/m"})
    ds = xr.Dataset({"y": gain}, {"x": ("case", [1.0, 2.0], {"units": "1"})})
    ax = figures.plot_growth(ds, x="x", y="y")
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("x", r"gain [\$/m]")


def test_logarithmic_axes_have_one_kind_of_number():
    rows = xr.Dataset({"y": ("case", [1.0, 30.0])}, {"n": ("case", [1.0, 5000.0])})
    ax = figures.plot_growth(rows, x="n", y="y")
    ax.figure.canvas.draw()
    ticks = [t.get_text() for a in (ax.xaxis, ax.yaxis) for t in a.get_ticklabels()]
    assert not any("10^" in text for text in ticks)


def test_cases_come_by_the_values_that_parameters_have_together():
    ds = xr.Dataset(
        {"y": ("case", [5.0, 6.0, 7.0, 8.0])},
        {
            "kernel": ("case", ["soft", "hard", "soft", "hard"]),
            "dim": ("case", [3, 2, 2, 2]),
            "causal": ("case", [True, True, True, True]),
        },
    )
    assert levels(ds, "kernel") == ["soft", "hard"]  # words as they come, numbers in order
    assert levels(ds, "dim") == [2, 3]
    cases = by_level(ds, "dim", "kernel")
    found = {(dim, kernel): rows.y.values.tolist() for _, dim, kernel, rows in cases}
    assert found == {(2, "soft"): [7.0], (2, "hard"): [6.0, 8.0], (3, "soft"): [5.0]}
    assert list(found) == [(2, "soft"), (2, "hard"), (3, "soft")]


def test_the_best_case_of_each_level_is_among_those_that_have_a_value():
    y = [np.nan, 2.0, 3.0, np.nan, np.nan]
    ds = xr.Dataset({"y": ("case", y)}, {"x": ("case", [1, 1, 1, 2, 2])})
    found = best(ds, "y", over="x")
    assert (found.x.values.tolist(), found.y.values.tolist()) == ([1], [3.0])
    with pytest.raises(NoCases, match="a value of y"):
        best(ds.isel(case=[0, 3]), "y", over="x")


def test_a_median_is_drawn_with_its_range_and_has_converged_where_all_of_it_has():
    flags = [[True, True, False], [True, True, True]]
    ds = xr.Dataset({"y": (("x", "seed"), [[1.0, 5.0, 2.0], [3.0, 1.0, 4.0]]),
                     "y_converged": (("x", "seed"), flags)}, {"x": [10.0, 20.0]})  # fmt: skip
    ax = Figure().subplots()
    curve(ax, ds, "x", "y", along="seed", label="median")
    np.testing.assert_array_equal(line(ax, "median"), [[10, 20], [2, 3]])
    np.testing.assert_array_equal(line(ax, "not converged"), [[10], [2]])
    (band,) = ax.collections
    assert set(map(tuple, band.get_paths()[0].vertices)) == {(10, 1), (10, 5), (20, 1), (20, 4)}


def test_a_column_of_more_dimensions_is_drawn_as_points_above_each_x():
    ds = xr.Dataset({"y": (("seed", "x"), [[1.0, 3.0], [5.0, 7.0]])}, {"x": [10.0, 20.0]})
    ax = Figure().subplots()
    curve(ax, ds, "x", "y/y", "o")
    curve(ax, ds, "x", "y", "o", label="points")
    np.testing.assert_array_equal(line(ax, "points"), [[10, 10, 20, 20], [1, 5, 3, 7]])


def test_the_interval_of_a_law_is_that_of_its_exponent():
    names = ("constant", "exponent", "exponent_lower", "exponent_upper")
    numbers = dict(zip(names, (2.0, 0.5, 0.45, 0.56), strict=True))
    fits = {f"fit_{name}": ("fit", [value]) for name, value in numbers.items()}
    more = {f"fit_constant_{end}": ("fit", [9.0]) for end in ("lower", "upper")}
    more |= {f"fit_exponent_{half}": ("fit", [p]) for half, p in (("small", 0.1), ("large", 0.8))}
    one, bent = (more | fits | {"fit_holds": ("fit", [holds])} for holds in (True, False))
    assert law(xr.Dataset(one)) == "$2\\,n^{0.50}$ [0.45, 0.56]"
    assert law(xr.Dataset(bent)) == "$n^{0.10}$ to $n^{0.80}$"


def test_the_largest_constant_of_a_kernel_is_the_largest(monkeypatch):
    A, V = -2 * np.eye(2), np.eye(2)
    layers = [SelfAttention(AttentionParameters.from_bilinear(B, V)) for B in (0 * A, A, 0 * A)]
    monkeypatch.setattr(kernel_growth, "_layers", lambda kernel: layers)
    quick = dataclasses.replace(kernel_growth.EXPERIMENT.quick, starts=1, steps=1)
    g = torch.Generator().manual_seed(0)
    assert kernel_growth.largest_constant(quick, "L2", 1.0, 2, g)["constant"] > 1.5


def test_a_curve_is_drawn_in_the_order_of_its_axis():
    ds = xr.Dataset({"y": ("case", [3.0, 1.0, 2.0])}, {"x": ("case", [30.0, 10.0, 20.0])})
    ax = Figure().subplots()
    curve(ax, ds, "x", "y")
    np.testing.assert_array_equal(ax.get_lines()[0].get_xydata().T, [[10, 20, 30], [1, 2, 3]])


def test_what_is_no_curve_is_named_below():
    ax = Figure().subplots()
    ax.plot([0.0, 1.0], [0.0, 1.0], label="curve")
    ax.errorbar([0.0, 1.0], [1.0, 2.0], 0.1, fmt="o", label="interval")
    mark_unconverged(ax, [0.5], [0.5], [False])
    place_legend(ax, "ends")
    assert [text.get_text() for text in ax.texts] == ["curve"]
    below = {text.get_text() for text in ax.get_legend().get_texts()}
    assert below == {"interval", "not converged"}


def test_names_at_the_ends_of_curves_stand_apart_and_below_the_title():
    fig = Figure()
    ax = fig.subplots()
    for k, end in enumerate((1.0, 0.999, 0.998, 0.997, 0.5, 0.1)):
        ax.plot([0.0, 1.0], [0.0, end], label=f"name {k}")
    ax.set_title("a title that is as wide as the whole of the Axes, and a little more than that")
    place_legend(ax, "ends")
    fig.draw_without_rendering()
    boxes = [alone(text) for text in ax.texts]
    ends = sorted((box.y0, box.y1) for box in boxes)
    assert len(ends) == 6
    assert all(low[1] <= high[0] for low, high in itertools.pairwise(ends))
    assert ends[-1][1] <= ax.title.get_window_extent().y0
    assert ends[0][1] < ax.transData.transform((0, 0.2))[1]  # the lone one stays at its curve


def test_of_a_flag_that_is_nan_nothing_is_known():
    flags = ("case", np.array([np.nan, 1.0]))
    ds = xr.Dataset({"y": ("case", [1.0, 2.0]), "y_converged": flags}, {"x": ("case", [1.0, 2.0])})
    lines = figures.plot_growth(ds, x="x", y="y").get_lines()
    (crossed,) = [line for line in lines if "converged" in line.get_label()]
    assert crossed.get_xydata().tolist() == [[1.0, 1.0]]


def test_curves_may_go_by_dates():
    days = np.array(["2020-01-01", "2020-01-02"] * 2, "datetime64[ns]")
    values = ("case", [1.0, 2.0, 3.0, 4.0])
    ds = xr.Dataset({"y": values}, {"x": ("case", [1.0, 1.0, 2.0, 2.0]), "day": ("case", days)})
    ax = figures.plot_growth(ds, x="x", y="y", by="day")
    assert [line.get_ydata().tolist() for line in ax.get_lines()] == [[1, 3], [2, 4]]
    assert "2020-01-02" in ax.get_legend_handles_labels()[1][1]
    ax = figures.plot_growth(ds.assign_coords(day=ds.day - ds.day[0]), x="x", y="y", by="day")
    assert [line.get_ydata().tolist() for line in ax.get_lines()] == [[1, 3], [2, 4]]


def test_a_formula_on_a_logarithmic_axis_begins_where_x_is_positive():
    ax = plt.subplots()[1]
    ax.set_xscale("log")
    formula(ax, lambda x: x, [0.0, 1.0, 4.0])
    formula(ax, lambda x: x, [0.0])
    (line,) = ax.get_lines()
    assert (line.get_xdata().min(), line.get_xdata().max()) == (1.0, pytest.approx(4.0))


def test_a_figure_that_has_no_cases_now_leaves_none_of_an_earlier_run(tmp_path):
    ds = xr.Dataset({"y": ("case", [1.0, 2.0])}, {"x": ("case", [1.0, 2.0])})
    drawing = {"growth": functools.partial(figures.plot_growth, x="x", y="y")}
    (path,) = figures.save_all(ds, drawing, tmp_path)
    assert path.is_file()

    def none(ds, ax=None):
        raise NoCases("none")

    assert figures.save_all(ds, {"growth": none}, tmp_path) == ["no figure growth: none"]
    assert not path.exists()
    path.write_bytes(b"mine")
    drawings = {"growth": none, "other": drawing["growth"]}
    assert figures.save_all(ds, drawings, tmp_path)[1].is_file()
    assert path.read_bytes() == b"mine"


def test_a_dollar_of_the_data_is_a_dollar_and_one_of_a_formula_is_not(tmp_path):
    kinds = ["$\\bad$", "a$b$c_2", "5 $"]
    task = Task(
        lambda n, kind: {"y": n * len(kind)}, [Variable("y", "gain in $ of $\\worse$")], name="own"
    )
    ds = sweep(task, {"n": [1.0, 2.0], "kind": kinds}, progress=False)
    ds["n"].attrs["long_name"] = "number of tokens $n$"
    ax = figures_of(ds)["y"](ds)
    ax.figure.savefig(tmp_path / "figure.svg")
    shown = [text.get_text() for text in ax.get_legend().get_texts()]
    assert shown == [f"kind = {kind}".replace("$", r"\$") for kind in kinds]
    assert ax.get_ylabel() == r"gain in \$ of \$\worse\$"
    assert ax.get_xlabel() == "number of tokens $n$"
    rows = ds.assign_attrs(model="a$b", text="$\\c$")
    assert model_and_text(rows) == r"model a\$b, text \$\c\$"
    chart = Chart("", "n", [Curve("y", "{kind}")], "t", by="kind")
    assert chart(ds).get_legend_handles_labels()[1][0] == r"\$\bad\$"


def test_with_one_value_on_the_axis_bounds_are_dashes(ds):
    rows = ds.isel(case=np.flatnonzero(ds.radius == 1.0))
    one = xr.Dataset({"y": ("case", [1.0])}, {"x": ("case", [2.0])})
    own = one.assign(y_upper=2 * one.y)
    for ax in (
        FIGURES["growth-in-radius"](rows),
        FIGURES["growth-in-radius-masked"](rows),
        figures.plot_growth(own, x="x", y="y", bounds=["y_upper"]),
    ):
        for drawn in (one for one in ax.get_lines() if len(one.get_xdata())):
            assert drawn.get_marker() not in ("None", "", None), drawn.get_label()
            assert drawn.get_markersize() > 0 and drawn.get_markevery() != []
    for drawn in FIGURES["growth-in-radius"](ds).get_lines():  # of two values they are lines
        assert drawn.get_marker() != "_"


@pytest.mark.parametrize(("log", "bottom"), [("", 0.0), ("y", 0.01)])
def test_data_stay_below_the_upper_edge_where_the_axis_begins_far_below(log, bottom):
    ds = xr.Dataset({"y": ("case", [13.8, 13.9])}, {"x": ("case", [1.0, 2.0])})
    ax = Chart("", "x", [Curve("y")], "t", log=log, ylim=(bottom, None))(ds)
    low, data, high = ax.transData.transform([[1, bottom], [1, 13.9], [1, ax.get_ylim()[1]]])[:, 1]
    assert ax.get_ylim()[0] == bottom
    assert 0.03 < (high - data) / (high - low) < 0.08


def test_what_is_found_for_a_kernel_has_no_line_that_would_cross_its_bound():
    radii = np.array([0.5, 2.0])
    bound = [float(kernel_growth._KERNELS["dot product"][1](R)) for R in radii]
    ds = xr.Dataset(
        {"constant": ("case", bound), "constant_converged": ("case", [True, True])},
        {"kernel": ("case", ["dot product"] * 2), "radius": ("case", radii)},
    )
    ax = kernel_growth.GROWTH(ds)
    (found,) = [one for one in ax.get_lines() if one.get_label() == "dot product, found"]
    assert found.get_linestyle() == "None" and found.get_marker() == "o"


def test_a_limit_of_more_and_more_scales_is_not_called_a_lower_bound(ds):
    ax = FIGURES["growth-in-radius-masked"](ds)
    assert "at least" not in {str(one.get_label()) for one in ax.get_lines()}
    masked, plain = (sharpness.EXPERIMENT.figures[name] for name in ("gap-masked", "gap"))
    assert "limit" in masked.__doc__ and "masked" in masked.__doc__
    assert "lower bound" in plain.__doc__ and "plain" in plain.__doc__


def test_a_lower_bound_is_named_by_its_formula_and_no_marker_hides_another():
    ds = quadratic_growth.EXPERIMENT.run(quadratic_growth.EXPERIMENT.quick, progress=False)
    lines = quadratic_growth.GROWTH(ds).get_lines()
    (lower,) = [str(one.get_label()) for one in lines if "lower" in str(one.get_label())]
    assert all(part in lower for part in ("2R^2", "Vu", "A^Tu", r"-\|V\|/3"))
    assert "− ‖V‖/3" in str(quadratic_growth.GROWTH.__doc__)
    points = [one for one in lines if str(one.get_label()).startswith("local constant")]
    assert len(points) == 2 and {one.get_fillstyle() for one in points} == {"none"}


def of_fits(exponents, lower, holds):
    """Fits of constants that grow as these powers of n, one in each layer."""
    n, p = np.array([2.0, 4.0, 8.0]), np.array(exponents)
    fits = {"constant": np.ones(len(p)), "exponent": p, "holds": holds}
    fits |= {"exponent_lower": lower, "exponent_upper": 2 * p - lower}
    fits |= {"exponent_small": p, "exponent_large": p}
    labels = {"law": ["free"] * len(p), "quantity": ["y"] * len(p), "layer": np.arange(len(p))}
    return xr.Dataset(
        {
            "y": (("case", "layer"), n[:, None] ** p),
            **{f"fit_{name}": ("fit", values) for name, values in fits.items()},
        },
        {
            "n_tokens": ("case", n),
            "layer": np.arange(len(p)),
            **{f"fit_{name}": ("fit", values) for name, values in labels.items()},
        },
    )


def test_where_no_law_holds_its_words_name_the_points():
    ds = of_fits([0.1, 0.4], np.array([0.0, 0.3]), [False, True])
    for own, first in (("", "layer 0: "), ("y {layer}", "y 0, layer 0: ")):
        curves = [Curve("y", own, "o"), Law("y", "layer {layer}: ")]
        ax = Chart("", "n_tokens", curves, "t", by="layer", log="xy")(ds)
        handles, labels = ax.get_legend_handles_labels()
        named = dict(zip(labels, handles, strict=True))
        label = first + "$n^{0.10}$ to $n^{0.10}$"
        assert named[label].get_marker() == "o" and len(named[label].get_xdata()) == 3
        assert named["layer 1: $1\\,n^{0.40}$ [0.30, 0.50]"].get_linestyle() == "-"


@pytest.mark.parametrize("n_known", [0, 1])
def test_intervals_are_named_where_there_are_some(n_known):
    ds = of_fits([0.1, 0.4], np.array([np.nan, [np.nan, 0.3][n_known]]), [True, True])
    ax = exponents({"y": "y"})(ds)
    assert ("95 % interval" in ax.get_ylabel()) == (n_known > 0)
    assert ("no intervals of fewer than 3 windows" in ax.get_title()) == (n_known == 0)


@pytest.mark.parametrize("x", [[0, 1e-3, 1, 1000], [-2, -1, 0, 1, 100], [1, 1.2, 1.4, 9]])
def test_no_name_of_a_tick_covers_another(x):
    ds = xr.Dataset({"y": ("case", np.arange(len(x)) * 1.0)}, {"x": ("case", np.array(x) * 1.0)})
    with figures.style():
        ax = figures.plot_growth(ds, x="x", y="y")
        ax.figure.draw_without_rendering()
        named = [text for text in ax.get_xticklabels() if text.get_text()]
        boxes = [text.get_window_extent() for text in named]
    assert len(boxes) > 1
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


@pytest.mark.parametrize("along", ["x", "y", "xy"])
@pytest.mark.parametrize("values", [[1e-300, 1.0, 1e300], [1e-320, 1.0, 2.0], [1.0, 2.0, 1e308]])
def test_values_of_any_size_are_inside_the_axes(along, values, tmp_path):
    columns = {"x": [1.0, 2.0, 3.0], "y": [1.0, 2.0, 3.0]} | dict.fromkeys(along, values)
    ds = xr.Dataset({"y": ("case", columns["y"])}, {"x": ("case", columns["x"])})
    ax = figures.plot_growth(ds, x="x", y="y")
    ax.figure.savefig(tmp_path / "figure.png")
    inside = ax.transAxes.inverted().transform(
        ax.transData.transform(ax.get_lines()[0].get_xydata())
    )
    assert (inside >= -1e-9).all() and (inside <= 1 + 1e-9).all()


def test_names_of_axes_and_legends_say_what_is_drawn():
    l2 = random_dataset("l2-tightness")
    groups = [
        one
        for one in l2_tightness.TIGHTNESS(l2, legend=False).get_lines()
        if "equal groups" in str(one.get_label())
    ]
    assert min(groups[0].get_xdata()) >= 3  # of two tokens there are no two groups
    ax = inversion.ERRORS(random_dataset("inversion"))
    assert {label.partition(",")[0] for label in ax.get_legend_handles_labels()[1]} == {
        "L2",
        "dot product",
        "$c^k$",
    }
    ax = get("through-depth").figures["models"](random_dataset("through-depth"))
    assert ax.get_xlabel() == "blocks passed / number of blocks"
    assert max(ax.get_lines()[0].get_xdata()) == 1.0
