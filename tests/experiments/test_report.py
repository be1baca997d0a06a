"""The report page: self-contained, failures included, and markup in text is escaped."""

from __future__ import annotations

import base64
import functools
import json
import math
import re
import tempfile
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from meanfield import html, report
from meanfield.errors import NoCases
from meanfield.results import Variable, to_cube
from meanfield.results.cases import answered
from meanfield.results.labels import dataset
from meanfield.results.provenance import provenance
from meanfield.sweeps import Task, sweep

HOSTILE = "</td></table><script src='http://evil.example/x.js'>\"'&amp;</script>"
VOID = {"meta", "link", "img", "input"}


class Page(HTMLParser):
    """Elements with their attributes, tables by caption, visible text; refuses bad nesting."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.rows: dict[str, list[list[str]]] = {}
        self.listed: list[str] = []  # items of the list of what failed
        self.text = ""
        self.caption = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "caption":
            self.caption = ""
        if tag == "tr":
            self.rows.setdefault(self.caption, []).append([])
        if tag in ("th", "td"):
            self.rows[self.caption][-1].append("")
        if tag == "ul":
            self.is_troubles = dict(attrs).get("class") == "troubles"
        if tag == "li" and self.is_troubles:
            self.listed.append("")

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "style":
            return
        self.text += data
        if self.open and self.open[-1] == "caption":
            self.caption += data
        if self.open and self.open[-1] in ("th", "td"):
            self.rows[self.caption][-1][-1] += data
        if self.open and self.open[-1] == "li" and self.is_troubles:
            self.listed[-1] += data


def a_dataset() -> xr.Dataset:
    """Six cases: one failed, one not converged, one infinite."""
    case = ("case",)
    variables = [
        Variable("gain", "Lipschitz constant", "m/s", dims=case, symbol="L"),
        Variable("gain_residual", "its relative residual", dims=case),
        Variable("gain_converged", "whether it converged", dims=case, dtype="bool"),
        Variable("profile", f"along the line {HOSTILE}", dims=("case", "step")),
        Variable("message", "why it failed", dims=case, dtype="str"),
    ]
    values = {
        "gain": [1.0, 2.5, np.inf, 4.0, np.nan, 0.125],
        "gain_residual": [1e-9] * 6,
        "gain_converged": [True, True, True, False, False, True],
        "profile": np.arange(12.0).reshape(6, 2),
        "message": ["", "", "", "", f"ValueError: {HOSTILE}", ""],
    }
    coords = {
        "radius": (Variable("radius", "radius R", dims=case), np.linspace(0.5, 3.0, 6)),
        "kind": (Variable("kind", "kind", dims=case, dtype="str"), ["a", HOSTILE] * 3),
        "step": (Variable("step", "step", dims=("step",)), [0.1, 0.2]),
    }
    record = json.loads(provenance({"note": HOSTILE}, seed=7, dtype="torch.float64"))
    attrs = {"provenance": json.dumps(record | {"command": f"meanfield run '{HOSTILE}'"})}
    return dataset(variables, values, coords=coords, attrs=attrs)


def scatter(ds, *, ax):
    """Gain <b>against</b> radius.

    Second paragraph, not in the caption.
    """
    ax.plot(ds.radius, ds.gain, "o", label="gain <i>")
    ax.set(xlabel="radius $R$", ylabel="gain", title="Gains")
    ax.legend()
    return ax


def lacking(ds, *, ax, causal=True):
    """A figure of cases that are not there."""
    raise NoCases(f"the Dataset has no case with causal={causal}")


def rendered(ds, **how) -> str:
    """The text of the page."""
    with tempfile.TemporaryDirectory() as folder:
        path = report.write_report(ds, Path(folder) / "page.html", **how)
        return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def source() -> str:
    return rendered(
        a_dataset(),
        title=f"Gains {HOSTILE}",
        question=f"How large is `gain`?\n\nAnd {HOSTILE}?",
        figures={"gains": scatter, "absent": lacking},
    )


@pytest.fixture(scope="module")
def page(source) -> Page:
    return Page(source)


def test_the_page_is_well_formed_and_has_one_heading(page):
    tags = [tag for tag, _ in page.elements]
    assert tags.count("h1") == tags.count("main") == tags.count("title") == 1
    assert dict(page.elements)["html"] == {"lang": "en"}


def test_the_page_asks_for_nothing_and_runs_nothing(page):
    loaded = {"src", "href", "srcset", "data", "action", "poster", "background"}
    for tag, attrs in page.elements:
        assert tag not in {"script", "iframe", "object", "embed", "form", "base"}
        assert not any(name.startswith("on") for name in attrs)
        for name in loaded & set(attrs):
            assert str(attrs[name]).startswith("data:"), (tag, name)


def test_style_loads_nothing(source):
    style = re.search(r"<style>(.*?)</style>", source, re.DOTALL).group(1)
    assert "url(" not in style and "@import" not in style


def test_the_browser_is_told_to_load_nothing_and_to_use_the_reader_s_colours(page, source):
    policy = [a["content"] for t, a in page.elements if "Content-Security-Policy" in a.values()]
    assert policy == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]
    style = re.search(r"<style>(.*?)</style>", source, re.DOTALL).group(1)
    assert "color-scheme: light dark" in style
    # xarray's own table goes by variables; one left out would stay light.
    names = re.findall(r"(--xr-[\w-]+):", source[source.index("The Dataset") :])
    assert names and set(names) <= set(re.findall(r"(--xr-[\w-]+):", style))


def test_hostile_text_is_shown_as_it_is(page):
    for place in ("Gains ", "And ", "meanfield run '", "along the line ", "failed: ValueError: "):
        assert place + HOSTILE in page.text
    assert "Gain <b>against</b> radius." in page.text


def test_every_variable_and_coordinate_is_named_with_its_meaning_and_units(page):
    ds = a_dataset()
    for name in ds.variables:
        assert str(name) in page.text and ds[name].long_name in page.text
    assert "m/s" in page.text and "(case, step)" in page.text


def test_what_failed_or_did_not_converge_is_counted(page):
    assert page.listed == [f"1 failed: ValueError: {HOSTILE}", "gain: 1 of 5 did not converge"]


def test_a_long_list_of_messages_is_cut_and_says_so():
    messages = np.array([f"too large: {i}" for i in range(99)] + ["too large: 0"], object)
    page = Page(rendered(xr.Dataset({"message": ("case", messages)})))
    assert page.listed[0] == "2 failed: too large: 0"
    assert page.listed[-1] == f"… and {99 - len(page.listed) + 1} other messages"


def test_a_sweep_of_ones_own_is_summed_up_by_its_status():
    def root(x):
        return {"root": math.sqrt(x), "root_converged": x != 4}

    variables = [Variable("root", "√x"), Variable("root_converged", "whether", dtype="bool")]
    page = Page(rendered(sweep(Task(root, variables), {"x": [-1.0, 1.0, 4.0]}, progress=False)))
    assert "3 cases of 1 parameter, computed on 2" in page.text
    assert ": 1 ok, 1 not converged, 1 failed." in page.text
    assert page.listed == [
        "1 failed: ValueError: math domain error",
        "root: 1 of 2 did not converge",
    ]


def test_figures_are_pictures_with_a_caption(page):
    images = [attrs for tag, attrs in page.elements if tag == "img"]
    assert len(images) == 1
    assert images[0]["alt"] == "Gain <b>against</b> radius."
    kind, data = images[0]["src"].split(";base64,")
    assert kind == "data:image/svg+xml" and b"<svg" in base64.b64decode(data)
    assert "Second paragraph" not in page.text


def test_a_figure_without_cases_says_why_and_a_defect_of_a_figure_is_an_error(page):
    assert "Not drawn: the Dataset has no case with causal=True" in page.text
    for defect in (ValueError("broken label"), AttributeError("gian"), KeyError("gian")):

        def broken(ds, *, ax, defect=defect):
            raise defect

        with pytest.raises(type(defect)):
            rendered(a_dataset(), figures={"broken": broken})


def test_a_figure_with_settings_has_the_caption_of_its_function():
    figures = {"plain": functools.partial(lacking, causal=False)}
    page = Page(rendered(a_dataset(), figures=figures))
    assert "A figure of cases that are not there." in page.text
    assert "no case with causal=False" in page.text


def test_a_figure_of_very_many_points_is_kept_as_pixels():
    def cloud(ds, *, ax):
        ax.plot(np.sin(np.arange(20_000.0) ** 2), ".")

    page = Page(rendered(a_dataset(), figures={"cloud": cloud}))
    (image,) = [attrs for tag, attrs in page.elements if tag == "img"]
    assert image["src"].startswith("data:image/png")


def test_the_same_dataset_gives_the_same_page():
    ds, figures = a_dataset(), {"gains": scatter}
    pages = {rendered(ds, figures=figures) for _ in range(2)}
    assert len(pages) == 1


def test_what_looks_like_a_random_name_is_shown_as_it_is():
    text = "id='data-123e4567-e89b-12d3-a456-426614174000'"
    assert text in Page(rendered(xr.Dataset(attrs={"run": text}))).text


def test_a_cube_has_a_page_with_its_failures():
    def root(x, y):
        return {"root": math.sqrt(x) * y}

    ds = to_cube(sweep(root, {"x": [-1.0, 4.0], "y": [1.0, 2.0]}, progress=False))
    page = Page(rendered(ds))
    assert page.listed == ["2 failed: ValueError: math domain error"]


def test_drawing_leaves_no_figure_open():
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    rendered(a_dataset(), figures={"gains": scatter})
    assert plt.get_fignums() == before


def test_provenance_and_command_are_on_the_page(page):
    assert '"seed": 7' in page.text and '"dtype": "float64"' in page.text
    assert f'"numpy": "{np.__version__}"' in page.text


def test_a_dataset_without_cases_or_provenance_has_a_page():
    ds = xr.Dataset({"y": ("t", [1.0, 2.0])}, coords={"t": [0, 1]}, attrs={"title": "Flow"})
    page = Page(rendered(ds))
    assert "Flow" in page.text and "There is no provenance" in page.text
    assert "1 variable with 2 along t." in page.text


def test_the_file_is_written_whole_and_replaces_the_old_one(tmp_path):
    path = tmp_path / "new" / "report.html"
    for title in ("Ä first", "Ω second"):
        assert report.write_report(a_dataset(), path, title=title) == path
        assert title in path.read_text(encoding="utf-8")
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]


def test_nothing_is_left_where_the_file_cannot_be_written(tmp_path):
    (tmp_path / "report.html").mkdir()
    with pytest.raises(FileExistsError, match="was not written by this library"):
        report.write_report(a_dataset(), tmp_path / "report.html")
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_what_cannot_be_reported_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"ends in \.html, got 'report\.pdf'"):
        report.write_report(a_dataset(), tmp_path / "report.pdf")
    with pytest.raises(TypeError, match=r"xarray\.Dataset, got dict"):
        report.write_report({"y": 1}, tmp_path / "report.html")


def test_a_table_escapes_its_title_its_header_and_its_cells():
    text = html.html_table(HOSTILE, [(HOSTILE, 1.5, None, True)], header=[HOSTILE, "b", "c", "d"])
    page = Page(text)
    assert page.rows == {HOSTILE: [[HOSTILE, "b", "c", "d"], [HOSTILE, "1.5", "–", "yes"]]}


def test_a_batch_is_told_by_its_ends():
    import torch

    assert html.span(torch.tensor(3.0)) == "3"
    assert html.span(torch.tensor([[1.0, float("nan")], [4.0, 2.0]])) == "1 to 4 (4 numbers)"
    assert html.span(np.array([np.nan])) == "NaN" and html.span([]) == "none"


def test_cases_that_failed_or_wait_are_not_told_as_unconverged(tmp_path):
    def whole(x):
        if x == 2:
            raise ValueError("bad")
        return {"k": int(x), "k_converged": x != 3}

    task = Task(
        whole, [Variable("k", "k", dtype="int64"), Variable("k_converged", "c", dtype="bool")]
    )
    ds = sweep(task, {"x": [1, 2, 3, 4]}, progress=False)
    page = report.write_report(ds, tmp_path / "r.html").read_text()
    assert re.findall("<li>([^<]*)</li>", page) == [
        "1 failed: ValueError: bad",
        "k: 1 of 3 did not converge",
    ]


def test_a_status_that_has_holes_or_is_of_another_kind_is_no_error(tmp_path):
    ds = sweep(lambda x: {"y": x}, {"x": [1.0, 2.0, 3.0]}, progress=False)
    page = report.write_report(ds.where(ds.x < 3), tmp_path / "r.html").read_text()
    assert "2 ok" in page and " failed: " not in page
    flags = {"flag_masks": np.array([1, 4], np.int8), "flag_meanings": "good cloudy"}
    other = xr.Dataset(
        {"y": ("case", [1.0, 2.0]), "status": ("case", np.array([1, 4], np.int8), flags)},
        {"x": ("case", [1.0, 2.0])},
    )
    report.write_report(other, tmp_path / "other.html")
    assert answered(other) is other
    unknown = other.drop_vars("status").assign(y_converged=("case", [np.nan, 1.0]))
    page = report.write_report(unknown, tmp_path / "flag.html").read_text()
    assert "y: 1 of 2 did not converge" in page
