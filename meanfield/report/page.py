"""The page: what `tables` and `pictures` say, in HTML that stands alone."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xarray as xr

from meanfield import html
from meanfield.html import escape
from meanfield.report import tables
from meanfield.report.pictures import Drawing, picture
from meanfield.results import read_provenance
from meanfield.results.atomic import check_replaceable, write_whole

__all__ = ["render", "write_report"]

_TROUBLES = 30  # cases in trouble that are written out
_CODE = re.compile(r"(`+)(.+?)\1", re.DOTALL)


def write_report(
    ds: xr.Dataset,
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    question: str | None = None,
    figures: Mapping[str, Drawing] | None = None,
    fits: Mapping[str, xr.Dataset] | None = None,
) -> Path:
    """Write the report of a Dataset (see `render`) to a file, whole or not at all.

    Args:
        ds: a Dataset of this library; its labels make the tables.
        path: ends in .html; a file that this library has written is replaced.
        title: heading of the page.
        question: what was asked.
        figures: what to draw.
        fits: power laws from `results.fit_power`, by what they describe.

    Returns:
        The path.

    Raises:
        ValueError: another suffix, or a figure that the library does not have.
        FileExistsError: a file that this library has not written is there.
        OSError: the file cannot be written; nothing is left behind.

    Example:
        >>> from tempfile import mkdtemp
        >>> ds = xr.Dataset({"y": ("case", [3.0, 6.0])}, coords={"x": ("case", [1.0, 4.0])})
        >>> write_report(ds, Path(mkdtemp()) / "report.html", title="Two cases").name
        'report.html'
    """
    path = Path(path)
    if path.suffix not in (".html", ".htm"):
        raise ValueError(f"path: expected a name that ends in .html, got {path.name!r}")
    page = render(ds, title=title, question=question, figures=figures, fits=fits)
    target = check_replaceable(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, page.encode())
    return path


def render(
    ds: xr.Dataset,
    *,
    title: str | None = None,
    question: str | None = None,
    figures: Mapping[str, Drawing] | None = None,
    fits: Mapping[str, xr.Dataset] | None = None,
) -> str:
    """The report of a Dataset as the text of an HTML page.

    Args:
        ds: a Dataset of this library.
        title: heading; by default the Dataset's attribute `title`, or "Results".
        question: what was asked, in paragraphs; by default the attribute `summary`. Text in
            backquotes is set as code.
        figures: by name, a `Figure` (a function of `meanfield.figures` and its arguments) or
            any function of a Dataset and `ax`. The first line of its docstring is the caption.
            A figure for which the Dataset lacks the cases says so in its place.
        fits: Datasets of `results.fit_power`, by what they describe.

    Raises:
        ValueError: a figure that the library does not have.
        TypeError: if `ds` is no Dataset.
    """
    if not isinstance(ds, xr.Dataset):
        raise TypeError(f"ds: expected an xarray.Dataset, got {type(ds).__name__}")
    title = title or str(ds.attrs.get("title", "Results"))
    question = question or str(ds.attrs.get("summary", ""))
    record = read_provenance(ds)
    sections = [
        ("What was asked", _paragraphs(question)),
        ("To make it again", _command(record)),
        ("Figures", _figures(ds, figures or {})),
        ("Parameters", _table(tables.parameters(ds))),
        ("Variables", _table(tables.variables(ds))),
        ("Cases in trouble", _troubles(ds)),
        ("Power laws", _fits(fits or {})),
        ("Provenance", _provenance(record)),
    ]
    body = "\n".join(
        f"<section><h2>{heading}</h2>\n{content}</section>"
        for heading, content in sections
        if content
    )
    lead = f'<p class="lead">{escape(tables.outcome(ds))}</p>'
    return _PAGE.format(title=escape(title), style=_STYLE, lead=lead, body=body)


def _paragraphs(text: str) -> str:
    blocks = [escape(block.strip()) for block in re.split(r"\n\s*\n", text.strip()) if block]
    return "".join("<p>" + _CODE.sub(r"<code>\2</code>", block) + "</p>\n" for block in blocks)


def _command(record: Mapping[str, Any]) -> str:
    command = record.get("command")
    return f"<pre><code>{escape(command)}</code></pre>\n" if command else ""


def _figures(ds: xr.Dataset, figures: Mapping[str, Drawing]) -> str:
    parts = []
    for name, figure in figures.items():
        source, words, caption, missing = picture(ds, figure)
        image = f'<img src="{source}" alt="{escape(words)}">'
        shown = (
            f'<p class="none">Not drawn: {escape(missing)}</p>'
            if missing
            else _box(f"Figure {name}", image)
        )
        caption = f"<figcaption><b>{escape(name)}.</b> {escape(caption)}</figcaption>"
        parts.append(f"<figure>{shown}{caption}</figure>\n")
    return "".join(parts)


def _troubles(ds: xr.Dataset) -> str:
    found = tables.troubles(ds)
    more = len(found.rows) - _TROUBLES
    text = f"<p>… and {more} more; the Dataset has all of them.</p>\n" if more > 0 else ""
    return _table(found._replace(rows=found.rows[:_TROUBLES])) + text


def _fits(fits: Mapping[str, xr.Dataset]) -> str:
    note = (
        "<p>In brackets the jackknife interval. A fit is a mean and bounds nothing; the envelope "
        "is the smallest C for which C xᵖ is above all points.</p>\n"
    )
    return _table(tables.fits(fits)) + (note if fits else "")


def _provenance(record: Mapping[str, Any]) -> str:
    if not record:
        return "<p>This Dataset carries no provenance.</p>\n"
    whole = escape(json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False))
    return _table(tables.provenance(record)) + (
        "<details><summary>All of it, as JSON</summary>"
        f"<pre><code>{whole}</code></pre></details>\n"
    )


def _table(table: tables.Table) -> str:
    """A table in a box; "" without rows."""
    if not table.rows:
        return ""
    return _box(table.title, html.table(table.title, table.rows, header=table.header)) + "\n"


def _box(label: str, content: str) -> str:
    """What is too wide for a narrow window scrolls by itself, with the keyboard too."""
    opening = f'<div class="box" role="region" tabindex="0" aria-label="{escape(label)}">'
    return f"{opening}{content}</div>"


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="meanfield">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" \
content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<header><h1>{title}</h1>
{lead}</header>
{body}
</main>
</body>
</html>
"""


_STYLE = """
:root { --ink: #1c2127; --soft: #57606a; --paper: #fff; --line: #d5dae0; --tint: #f3f5f8;
  --mark: #7a3e9d; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --soft: #a2abb6; --paper: #14171b;
  --line: #363d46; --tint: #1e2329; --mark: #cfa5ea; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 1.5rem 1.25rem 4rem; }
h1 { font-size: 1.8rem; line-height: 1.2; margin: 0.5rem 0; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 0.75rem; }
p { max-width: 46rem; margin: 0.6rem 0; }
.lead, .none, figcaption, summary { color: var(--soft); }
figure { margin: 0; }
section:has(> figure) { display: grid; gap: 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); }
section:has(> figure) > h2 { grid-column: 1 / -1; margin-bottom: 0; }
img { display: block; width: 100%; height: auto; background: #fff; padding: 0.6rem;
  border: 1px solid var(--line); border-radius: 6px; }
.none { padding: 1rem; border: 1px dashed var(--line); border-radius: 6px; margin: 0; }
figcaption { font-size: 0.9rem; margin-top: 0.4rem; }
figcaption b { color: var(--ink); }
code, pre, tbody th { font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: 0.86rem; }
pre { background: var(--tint); padding: 0.75rem 1rem; border-radius: 6px; overflow-x: auto; }
.box { position: relative; overflow-x: auto; }
.box:focus-visible { outline: 2px solid var(--mark); outline-offset: 2px; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
caption { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
th, td { text-align: left; vertical-align: top; padding: 0.35rem 1.1rem 0.35rem 0;
  border-bottom: 1px solid var(--line); }
thead th { color: var(--soft); font-weight: 600; white-space: nowrap; }
tbody th { font-weight: 500; }
td { max-width: 40rem; }
td:only-of-type { overflow-wrap: anywhere; }
@media (max-width: 40rem) { img { width: 30rem; max-width: none; } }
details { margin-top: 1rem; }
summary { cursor: pointer; }
@media print { body { font-size: 10pt; } figure { break-inside: avoid; }
  .box { overflow: visible; } }
"""
