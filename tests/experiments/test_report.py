"""The report page: it stands alone, hides nothing, and shows hostile text as text."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import xarray as xr

from meanfield import html, report, results
from meanfield.results import Variable

HOSTILE = "</td></table><script src='http://evil.example/x.js'>\"'&amp;</script>"
VOID = {"meta", "link", "img", "input"}


class Page(HTMLParser):
    """Elements with their attributes, tables by caption, visible text; refuses bad nesting."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.rows: dict[str, list[list[str]]] = {}
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

    def table(self, caption: str) -> dict[str, dict[str, str]]:
        header, *rows = self.rows[caption]
        cells = [[cell.replace("\xa0", " ") for cell in row] for row in rows]
        return {row[0]: dict(zip(header, row, strict=True)) for row in cells}


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
    record = results.provenance(
        {"note": HOSTILE}, seed=7, dtype="torch.float64", command=f"meanfield run '{HOSTILE}'"
    )
    return results.dataset(variables, values, coords=coords, attrs={"provenance": record})


def scatter(ds, *, ax):
    """Gain <b>against</b> radius.

    Second paragraph, not in the caption.
    """
    ax.plot(ds.radius, ds.gain, "o", label="gain <i>")
    ax.set(xlabel="radius $R$", ylabel="gain", title="Gains")
    ax.legend()
    return ax


def lacking(ds, *, ax):
    """A figure of cases that are not there."""
    raise ValueError("the Dataset has no case with causal=True")


@pytest.fixture(scope="module")
def source() -> str:
    ds = a_dataset()
    fits = {f"gain {HOSTILE}": results.fit_power([1.0, 4.0, 9.0], [3.0, 6.0, 9.0], exponent=0.5)}
    return report.render(
        ds,
        title=f"Gains {HOSTILE}",
        question=f"How large is `gain`?\n\nAnd {HOSTILE}?",
        figures={"gains": scatter, "absent": lacking},
        fits=fits,
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
    for place in ("Gains ", "And ", "meanfield run '", "along the line ", "gain "):
        assert place + HOSTILE in page.text
    assert page.table("Cases in trouble")["4"]["what happened"] == f"failed: ValueError: {HOSTILE}"
    assert "Gain <b>against</b> radius." in page.text


def test_every_variable_and_coordinate_is_named_with_its_meaning_and_units(page):
    ds = a_dataset()
    rows = page.table("Variables")
    assert set(rows) == {str(name) for name in ds.data_vars}
    for name, row in rows.items():
        assert row["meaning"] == ds[name].long_name
        assert row["units"] == ds[name].attrs.get("units", "–")
    # Coordinates are in the table of xarray, with their attributes.
    for name in ds.coords:
        assert str(name) in page.text and ds[name].long_name in page.text


def test_a_variable_says_its_range_and_what_is_not_certain(page):
    rows = page.table("Variables")
    gain = rows["gain"]
    assert gain["range"] == "0.125 to 4, 1 infinite"
    assert gain["no value"] == "1 of 6"
    assert gain["not converged"] == "1 of 5"  # the failed one has no value
    assert rows["gain_converged"]["range"] == "true in 4 of 6"
    assert "(case, step)" in page.text


def test_cases_in_trouble_are_listed_with_their_parameters(page):
    rows = page.table("Cases in trouble")
    assert list(rows) == ["3", "4"]
    assert rows["3"]["what happened"] == "not converged: gain"
    assert rows["3"]["radius"] == "2" and rows["3"]["kind"] == HOSTILE


def test_a_long_list_of_troubles_is_cut_and_says_so():
    ds = xr.Dataset(
        {"message": ("case", np.array(["too large"] * 100, object))},
        coords={"n": ("case", np.arange(100))},
    )
    page = Page(report.render(ds))
    listed = len(page.table("Cases in trouble"))
    assert f"{100 - listed} more" in page.text and listed < 100


def test_a_sweep_is_summed_up_by_its_status():
    flags = {
        "flag_values": np.arange(4, dtype=np.int8),
        "flag_meanings": "pending ok not_converged failed",
    }
    ds = xr.Dataset({"status": ("case", np.array([1, 2, 1, 0], np.int8), flags)})
    page = Page(report.render(ds.assign_coords(x=("case", np.arange(4.0)))))
    assert "4 cases of 1 parameter: 1 pending, 2 ok, 1 not converged." in page.text
    assert page.table("Cases in trouble")["1"]["what happened"] == "not converged"


def test_figures_are_pictures_with_words_and_a_caption(page):
    images = [attrs for tag, attrs in page.elements if tag == "img"]
    assert len(images) == 1
    words = "Gains. Horizontal axis: radius R. Vertical axis: gain. Curves: gain <i>."
    assert images[0]["alt"] == words
    kind, data = images[0]["src"].split(";base64,")
    assert kind == "data:image/svg+xml" and b"<svg" in base64.b64decode(data)
    assert "Second paragraph" not in page.text


def test_a_figure_that_cannot_be_drawn_says_why(page):
    assert "Not drawn: the Dataset has no case with causal=True" in page.text


def test_a_figure_of_very_many_points_is_kept_as_pixels():
    def cloud(ds, *, ax):
        ax.plot(np.sin(np.arange(20_000.0) ** 2), ".")

    page = Page(report.render(a_dataset(), figures={"cloud": cloud}))
    (image,) = [attrs for tag, attrs in page.elements if tag == "img"]
    assert image["src"].startswith("data:image/png")


def test_the_same_dataset_gives_the_same_page():
    ds, figures = a_dataset(), {"gains": scatter}
    pages = {report.render(ds, figures=figures) for _ in range(2)}
    assert len(pages) == 1


def test_drawing_leaves_no_figure_open():
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    report.render(a_dataset(), figures={"gains": scatter})
    assert plt.get_fignums() == before


def test_an_estimate_has_its_evidence_below_it_whatever_the_order_in_the_file():
    ds = a_dataset()
    shuffled = ds[["profile", "gain_residual", "message", "gain_converged", "gain"]]
    names = list(Page(report.render(shuffled)).table("Variables"))
    assert names == ["gain", "gain_converged", "gain_residual", "profile", "message"]


def test_figures_of_the_library_are_named_with_their_arguments():
    figures = {
        "plain": ("plot_growth_in_n", {}),
        "masked": ("plot_growth_in_n", {"causal": True}),
    }
    page = Page(report.render(a_dataset(), figures=figures))
    assert page.text.count("Not drawn") == 2  # no such cases here
    assert "(causal = True)" in page.text


def test_a_fit_shows_its_constant_its_exponent_and_its_envelope(page):
    row = page.table("Power laws")[f"gain {HOSTILE}"]
    assert row["C"].split()[0] == "3" and row["p"] == "0.5 (given)"
    assert row["envelope"] == "3" and row["points"] == "3"


def test_the_fits_that_a_dataset_has_are_in_the_table():
    fits = {
        "fit_constant": [2.0, 3.0],
        "fit_constant_lower": [1.5, np.nan],
        "fit_constant_upper": [2.5, np.nan],
        "fit_exponent": [0.5, 0.25],
        "fit_exponent_lower": [0.4, np.nan],
        "fit_exponent_upper": [0.6, np.nan],
        "fit_n_points": [9, 8],
    }
    ds = xr.Dataset(
        {name: ("fit", values) for name, values in fits.items()},
        coords={"fit_layer": ("fit", [0, 1]), "fit_law": ("fit", ["free", "free"])},
    )
    rows = Page(report.render(ds)).table("Power laws")
    assert rows["layer 0, law free"]["p"] == "0.5 [0.4, 0.6]"
    assert rows["layer 1, law free"]["C"] == "3" and rows["layer 1, law free"]["points"] == "8"


def test_provenance_and_command_are_on_the_page(page):
    rows = {row[0]: row[1] for row in page.rows["Where the numbers come from"]}
    assert rows["seed"] == "7" and rows["dtype"] == "float64"
    assert rows["version of numpy"] == np.__version__
    assert '"seed": 7' in page.text


def test_table_headers_say_what_they_head(page):
    scopes = [attrs.get("scope") for tag, attrs in page.elements if tag == "th"]
    assert set(scopes) == {"col", "row"}
    tables = [tag for tag, _ in page.elements].count("table")
    assert len(page.rows) == tables


def test_a_dataset_without_cases_or_provenance_has_a_page():
    ds = xr.Dataset({"y": ("t", [1.0, 2.0])}, coords={"t": [0, 1]}, attrs={"title": "Flow"})
    page = Page(report.render(ds))
    assert "Flow" in page.text and "carries no provenance" in page.text
    assert page.table("Variables")["y"]["range"] == "1 to 2"


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
        report.render({"y": 1})
    with pytest.raises(ValueError, match=r"plot_growth_in_n.*got 'plot_nothing'"):
        report.render(a_dataset(), figures={"x": ("plot_nothing", {})})


def test_a_table_escapes_its_title_its_header_and_its_cells():
    text = html.table(HOSTILE, [(HOSTILE, 1.5, None, True)], header=[HOSTILE, "b", "c", "d"])
    page = Page(text)
    assert page.rows == {HOSTILE: [[HOSTILE, "b", "c", "d"], [HOSTILE, "1.5", "–", "yes"]]}


def test_a_table_refuses_rows_of_different_lengths():
    with pytest.raises(ValueError, match=r"one number of cells, got \[2, 3\]"):
        html.table("t", [(1, 2), (1, 2, 3)])


def test_a_batch_is_told_by_its_ends():
    import torch

    assert html.span(torch.tensor(3.0)) == "3"
    assert html.span(torch.tensor([[1.0, float("nan")], [4.0, 2.0]])) == "1 to 4 (4 numbers)"
    assert html.span(np.array([np.nan])) == "NaN" and html.span([]) == "none"
