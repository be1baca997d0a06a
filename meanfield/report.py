"""A Dataset as one self-contained page of HTML: no script, no request, no second file.

The page has the question, the figures, what failed or did not converge, the Dataset as xarray
shows it, and its provenance. Any Dataset will do; that of a sweep fills all parts.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

import xarray as xr

from meanfield.checks import as_path
from meanfield.errors import NoCases
from meanfield.figures.plots import figures_of
from meanfield.figures.saving import render
from meanfield.habits import with_hints
from meanfield.results import read_provenance
from meanfield.results.atomic import check_replaceable, make_folder, write_whole
from meanfield.results.cases import answered, is_sweep, is_true
from meanfield.results.shapes import as_dataset, parameters_of

__all__ = ["write_report"]

_LARGEST_SVG = 400_000  # bytes; beyond it a figure is embedded as pixels
_MESSAGES = 10  # different messages of failed cases that are written out
_RANDOM = re.compile(r"((?:id|for)='[a-z]+-)([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})")
_CODE = re.compile(r"(`+)(.+?)\1", re.DOTALL)
_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="meanfield">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ max-width: 72rem; margin: 0 auto; padding: 1.5rem; font: 1rem/1.5 sans-serif; }}
p, li {{ max-width: 46rem; }}
pre {{ overflow-x: auto; }}
figure {{ margin: 0; }}
.figures {{ display: grid; gap: 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); }}
img {{ width: 100%; background: #fff; }}
.xr-wrap {{ --xr-font-color0: CanvasText; --xr-font-color2: GrayText; --xr-font-color3: GrayText;
  --xr-border-color: GrayText; --xr-disabled-color: GrayText; --xr-background-color: Canvas;
  --xr-background-color-row-even: Canvas; --xr-background-color-row-odd: Canvas; }}
/* xarray cuts names after 7 rem. */
@media (min-width: 60rem) {{
  .xr-wrap {{ max-width: none !important; }}
  .xr-sections {{ grid-template-columns: max-content auto auto 1fr 0 20px 0 20px !important; }}
}}
</style>
</head>
<body>
<main>
<h1>{title}</h1>
{body}
</main>
</body>
</html>
"""


@with_hints
def write_report(
    ds: xr.Dataset,
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    question: str | None = None,
    figures: Mapping[str, Callable[..., Any]] | None = None,
) -> Path:
    """Write the page of a Dataset to a file, completely or not at all.

    Args:
        ds: any Dataset: of an experiment, of one's own sweep, of a flow.
        path: ends in .html; a file that this library has written is replaced.
        title: heading; by default the Dataset's attribute `title`, or "Results".
        question: what was asked, in paragraphs; by default the attribute `summary`. Text in
            backquotes is set as code.
        figures: by name, functions of a Dataset and ``ax=``; the first line of the docstring is
            the caption. One that raises `NoCases` is replaced by the message. If None, paths of
            particles, and each number of the cases against the parameters.

    Returns:
        The path.

    Raises:
        ValueError: another suffix.
        TypeError: `ds` is no Dataset.
        FileExistsError: a file that this library has not written is there.
        OSError: the file cannot be written; nothing is left behind.

    Example:
        >>> from tempfile import mkdtemp
        >>> ds = xr.Dataset({"y": ("case", [3.0, 6.0])}, coords={"x": ("case", [1.0, 4.0])})
        >>> write_report(ds, Path(mkdtemp()) / "report.html", title="Two cases").name
        'report.html'
    """
    path = as_path(path)
    if path.suffix not in (".html", ".htm"):
        raise ValueError(f"path: expected a name that ends in .html, got {path.name!r}")
    as_dataset(ds)
    target = check_replaceable(path)
    record, asked = read_provenance(ds), question or str(ds.attrs.get("summary", ""))
    paragraphs = [
        _CODE.sub(r"<code>\2</code>", escape(text.strip())) for text in re.split(r"\n\s*\n", asked)
    ]
    source = json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False)
    drawings = figures_of(ds) if figures is None else figures
    drawn = "\n".join(_figure(ds, name, draw) for name, draw in drawings.items())
    troubles = "".join(f"<li>{escape(one)}</li>" for one in _troubles(ds))
    sections = {
        "What was asked": "".join(f"<p>{text}</p>" for text in paragraphs if text),
        "To make it again": _preformatted(record.get("command") or ""),
        "Failed and not converged": f'<ul class="troubles">{troubles}</ul>' if troubles else "",
        "Figures": f'<div class="figures">\n{drawn}\n</div>' if drawn else "",
        "The Dataset": _table(ds),
        "Provenance": _preformatted(source) if record else "<p>There is no provenance.</p>",
    }
    body = f"<p>{escape(_outcome(ds))}</p>\n" + "\n".join(
        f"<section><h2>{head}</h2>\n{content}</section>"
        for head, content in sections.items()
        if content
    )
    heading = escape(title or str(ds.attrs.get("title", "Results")))
    make_folder(target.parent)
    write_whole(target, _PAGE.format(title=heading, body=body).encode())
    return path


def _outcome(ds: xr.Dataset) -> str:
    """One sentence: how many cases there are and how they ended."""
    created = str(read_provenance(ds).get("created", ""))[:10]
    when = f", computed on {created}" if created else ""
    if "case" not in ds.dims:
        sizes = ", ".join(f"{size} along {name}" for name, size in ds.sizes.items())
        return f"{_counted(len(ds.data_vars), 'variable')}{f' with {sizes}' * bool(sizes)}{when}."
    n_cases, n_parameters = ds.sizes["case"], len(parameters_of(ds))
    ended = ""
    if is_sweep(ds):
        words = ds["status"].attrs["flag_meanings"].split()
        counts = [int((ds["status"].values == code).sum()) for code in range(len(words))]
        named = zip(counts, words, strict=True)
        ended = ": " + ", ".join(f"{k} {word.replace('_', ' ')}" for k, word in named if k)
    counted = f"{_counted(n_cases, 'case')} of {_counted(n_parameters, 'parameter')}"
    return f"{counted}{when}{ended}."


def _troubles(ds: xr.Dataset) -> Iterator[str]:
    """The messages of failed cases with their numbers, and what did not converge."""
    texts = ds["message"].values.ravel() if "message" in ds else ()
    # Where xarray has masked a case stands NaN, which is no message.
    messages = Counter(text for text in texts if isinstance(text, str) and text).most_common()
    yield from (f"{n} failed: {text}" for text, n in messages[:_MESSAGES])
    if len(messages) > _MESSAGES:
        yield f"… and {len(messages) - _MESSAGES} other messages"
    cases = answered(ds)
    for name in map(str, ds.data_vars):
        if f"{name}_converged" in ds:
            known = cases[name].notnull()
            n = int((known & ~is_true(cases[f"{name}_converged"])).sum())
            if n:
                yield f"{name}: {n} of {int(known.sum())} did not converge"


def _figure(ds: xr.Dataset, name: str, draw: Callable[..., Any]) -> str:
    """A figure with its caption; where the Dataset has no cases for it, the reason."""
    own = draw.func if isinstance(draw, functools.partial) else draw
    caption = (own.__doc__ or "").strip().partition("\n")[0].strip()
    try:
        picture = f'<img src="{_drawn(ds, draw)}" alt="{escape(caption or name)}">'
    except NoCases as error:
        picture = f"<p>Not drawn: {escape(str(error))}</p>"
    told = f"<b>{escape(name)}.</b> {escape(caption)}"
    return f"<figure>{picture}<figcaption>{told}</figcaption></figure>"


def _drawn(ds: xr.Dataset, draw: Callable[..., Any]) -> str:
    """The figure as a data URL."""
    (data,), kind = render(ds, draw, ["svg"]).values(), "svg+xml"
    if len(data) > _LARGEST_SVG:
        (data,), kind = render(ds, draw, ["png"]).values(), "png"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"


def _table(ds: xr.Dataset) -> str:
    """The table of xarray, its random names numbered: the same Dataset gives the same page."""
    attrs = {name: value for name, value in ds.attrs.items() if name != "provenance"}
    with xr.set_options(display_style="html"):
        source = ds.drop_attrs(deep=False).assign_attrs(attrs)._repr_html_()
    numbers: dict[str, str] = {}
    return _RANDOM.sub(lambda m: m[1] + numbers.setdefault(m[2], str(len(numbers))), source)


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"


def _preformatted(text: str) -> str:
    return f"<pre><code>{escape(text)}</code></pre>" if text else ""
