"""Sphinx: the reference, made from the docstrings.

sphinx-build -W -b html .docs .docs/_build
"""

from __future__ import annotations

import importlib.metadata
import re
from itertools import takewhile
from typing import Any

project = "meanfield"
author = "The meanfield developers"
copyright = "2026, The meanfield developers"
release = importlib.metadata.version("meanfield")

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
]
templates_path = ["_templates"]
exclude_patterns = ["_build"]

# `name` in a docstring is code, and a link where it names something.
default_role = "py:obj"
add_module_names = False
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autosummary_imported_members = True
autosummary_ignore_module_all = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"meanfield {release}"
html_show_sphinx = False
html_copy_source = False

# A bibliography may hold what no docstring cites yet.
suppress_warnings = ["ref.citation"]

_CITATION = re.compile(r"\[([A-Z]{2,}[0-9]{2})\](?!_)")
_SHAPE = re.compile(r"(?<=[( ])\*(?=\w+[,)])")  # the star of (*batch, n, d)
_LETTER = re.compile(r"^(\s*\w+: [A-Z])\.$")  # "radius: R." is no list
_LITERAL = re.compile(r"(``.*?``)")


def setup(app: Any) -> None:
    """Before napoleon (priority 500) reads them, docstrings become reStructuredText."""
    app.connect("autodoc-process-docstring", _to_rest, priority=400)
    app.connect("autodoc-process-signature", _readable)
    app.connect("autodoc-skip-member", _skip_aliases)


def _readable(
    app: Any, what: str, name: str, obj: Any, options: Any, arguments: str | None, result: str
) -> tuple[str | None, str]:
    # A default from a factory is no Python, and Sphinx then lays the whole line out as text.
    return (arguments.replace("<factory>", "...") if arguments else arguments), result


def _skip_aliases(
    app: Any, what: str, name: str, obj: Any, skip: bool, options: Any
) -> bool | None:
    # The fields of a named tuple are in its signature and its docstring.
    return True if str(getattr(obj, "__doc__", "")).startswith("Alias for field") else None


def _to_rest(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are for a terminal: absolute values, shapes, Markdown tables."""
    done: list[str] = []
    rest = list(lines)
    if what == "property":  # napoleon would take what is before the colon for its type
        rest[:1] = [line.replace(": ", " \N{EN DASH} ") for line in rest[:1]]
    while rest:
        if rest[0].lstrip().startswith("| "):
            table = list(takewhile(lambda line: line.lstrip().startswith("|"), rest))
            done += _list_table(table)
            rest = rest[len(table) :]
        else:
            done.append(_line(rest.pop(0)))
    lines[:] = done


def _line(line: str) -> str:
    if line.lstrip().startswith((">>>", "... ")):
        return line
    parts = _LITERAL.split(line)
    parts[::2] = [_prose(part) for part in parts[::2]]
    return "".join(parts)


def _prose(text: str) -> str:
    text = _LETTER.sub(r"\1\\.", text)
    text = _SHAPE.sub(r"\\*", text).replace("|", r"\|")
    return _CITATION.sub(r"[\1]_", text)


def _list_table(table: list[str]) -> list[str]:
    """A Markdown table as a list-table; its second line is the rule under the header."""
    rows = [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in table]
    out = ["", ".. list-table::", "   :header-rows: 1", ""]
    for row in (rows[0], *rows[2:]):
        out += [f"   {' ' if k else '*'} - {_prose(cell)}" for k, cell in enumerate(row)]
    return [*out, ""]
