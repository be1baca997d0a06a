"""The page: what `summaries` and `pictures` say, in a template that stands alone."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import xarray as xr

from meanfield.checks import describe
from meanfield.html import escape
from meanfield.report import summaries
from meanfield.report.pictures import Drawing, picture
from meanfield.results import read_provenance
from meanfield.results.atomic import check_replaceable, write_whole

__all__ = ["render", "write_report"]

_RANDOM = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
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
    """Write the report of a Dataset to a file, whole or not at all.

    Args:
        ds: a Dataset of this library; its labels make the tables.
        path: ends in .html; a file that this library has written is replaced.
        title: heading; by default the Dataset's attribute `title`, or "Results".
        question: what was asked, in paragraphs; by default the attribute `summary`. Text in
            backquotes is set as code.
        figures: by name, the name of a function of `meanfield.figures` with its settings, such
            as ``("plot_growth_in_n", {"causal": True})``, or any function of a Dataset and
            `ax`. The first line of its docstring is the caption. A figure for which the Dataset
            lacks the cases says so in its place.
        fits: power laws from `results.fit_power`, by what they describe.

    Returns:
        The path.

    Raises:
        ValueError: another suffix, or a figure that the library does not have.
        TypeError: `ds` is no Dataset.
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
    """The report as the text of an HTML page; arguments and errors as of `write_report`."""
    import jinja2
    from markupsafe import Markup

    if not isinstance(ds, xr.Dataset):
        raise TypeError(f"ds: expected an xarray.Dataset, got {describe(ds)}")
    record, asked = read_provenance(ds), question or str(ds.attrs.get("summary", ""))
    blocks = [block.strip() for block in re.split(r"\n\s*\n", asked) if block.strip()]
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("meanfield.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("page.html.j2").render(
        title=title or str(ds.attrs.get("title", "Results")),
        outcome=summaries.outcome(ds),
        question=[Markup(_CODE.sub(r"<code>\2</code>", escape(block))) for block in blocks],
        command=record.get("command"),
        pictures={name: picture(ds, one) for name, one in (figures or {}).items()},
        variables=Markup(summaries.variables(ds)),
        troubles=Markup(summaries.troubles(ds)),
        fits=Markup(summaries.fits(ds, fits or {})),
        dataset=Markup(_numbered(ds)),
        provenance=Markup(summaries.provenance(record)),
        record=json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False),
    )


def _numbered(ds: xr.Dataset) -> str:
    """The table of xarray, its random names numbered: the same Dataset gives the same page."""
    attrs = {name: value for name, value in ds.attrs.items() if name != "provenance"}
    with xr.set_options(display_style="html"):
        source = ds.drop_attrs(deep=False).assign_attrs(attrs)._repr_html_()
    numbers: dict[str, str] = {}
    return _RANDOM.sub(lambda m: numbers.setdefault(m[0], str(len(numbers))), source)
