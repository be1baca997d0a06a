"""Sphinx: pages in Markdown, tutorials and examples run at build, reference from docstrings.

sphinx-build -W --keep-going -b html .docs .docs/_build
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import runpy
import shutil
import tempfile
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from docutils import nodes
from docutils.utils.math import MathError
from pybtex.plugin import register_plugin
from pybtex.style.formatting.unsrt import Style
from pybtex.style.labels import BaseLabelStyle
from sphinx.util import logging
from sphinx_gallery.scrapers import figure_rst, matplotlib_scraper

import meanfield

ROOT = Path(__file__).resolve().parent.parent

_FORMULAS = runpy.run_path(str(ROOT / ".docs" / "formulas.py"))
_MATHML = runpy.run_path(str(ROOT / ".docs" / "mathml.py"))
_LISTING = runpy.run_path(str(ROOT / ".docs" / "listing.py"))
_HOUSE = runpy.run_path(str(ROOT / ".docs" / "house.py"))
# A page and a drawing that are no files of the repository.
(ROOT / ".docs" / "reference" / "experiments.md").write_text(_LISTING["page"](), encoding="utf-8")
(ROOT / ".docs" / "_static" / "house.svg").write_text(_HOUSE["drawing"](), encoding="utf-8")

project = "meanfield"
author = "The meanfield developers"
copyright = "2026, The meanfield developers"
release = meanfield.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_gallery.gen_gallery",
    "sphinxcontrib.bibtex",
]
templates_path = ["_templates"]
exclude_patterns = ["_build", "tutorials", "Thumbs.db"]
# The settings of the gallery hold a function, which Sphinx says it cannot keep between builds.
suppress_warnings = ["config.cache"]

# `name` in a docstring is code, and a link where it names something.
default_role = "py:obj"
add_module_names = False
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autosummary_imported_members = True
autosummary_ignore_module_all = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
# A doctest in Markdown ends with a blank line, which is none of the code.
highlight_options = {"python": {"stripnl": True}, "pycon": {"stripnl": True}}

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
bibtex_bibfiles = ["references.bib"]
bibtex_default_style = "keys"

html_theme = "furo"
html_title = f"meanfield {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_math_renderer = "mathml"

# A build without running anything: sphinx-build -D plot_gallery=0 ...
_TEMPORARY = tempfile.TemporaryDirectory(prefix="meanfield-docs-")  # gone when the build ends
_OUT = Path(_TEMPORARY.name)


def _arguments(gallery: dict[str, Any], script: dict[str, Any]) -> list[str]:
    """Of the script that is run: examples in their quick form, tutorials as they are."""
    path = Path(script["src_file"])
    script["example_globals"]["__file__"] = str(path)  # which a script has, and a page has not
    quick = ["--quick", "--out", str(_OUT / path.stem)]
    return quick if "examples" in path.parts[-2] else []


def _tight(gallery: dict[str, Any], script: str) -> None:
    """Figures are saved after the style in which they were drawn has ended."""
    matplotlib.rcParams.update({"savefig.bbox": "tight", "axes.formatter.min_exponent": 4})


# By heading of the page of figures, the pictures below it.
_FULL = {
    head.partition(" --")[0]: re.findall(r"^!\[(.*)\]\((.*)\)$", body, re.MULTILINE)
    for head, body in re.findall(
        r"^## `(.*)`\n((?:(?!^## ).*\n)*)", (ROOT / ".docs/figures.md").read_text(), re.MULTILINE
    )
}


def _full_figures(block: Any, script: dict[str, Any], gallery: dict[str, Any]) -> str:
    """Instead of the figures of a quick run those of the full one, where they have been drawn.

    Only those below the example's own command: others have the settings of an experiment.
    """
    full = _FULL.get(f"python examples/{Path(script['src_file']).name}", ())
    if not full or not plt.get_fignums():
        return matplotlib_scraper(block, script, gallery)
    plt.close("all")
    made, shown = [], script.setdefault("full figures", set())
    for words, name in full:
        if name not in shown:
            shown.add(name)
            copy = shutil.copyfile(ROOT / ".docs" / name, next(script["image_path_iterator"]))
            made.append(figure_rst([copy], gallery["src_dir"], words))
    return "\n".join(made)


sphinx_gallery_conf = {
    "examples_dirs": ["tutorials", str(ROOT / "examples")],
    "gallery_dirs": ["_generated/tutorials", "_generated/gallery"],
    "filename_pattern": r"\.py$",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "reset_argv": _arguments,
    "reset_modules": ("matplotlib", _tight),
    "remove_config_comments": True,
    "download_all_examples": False,
    "show_signature": False,
    "write_computation_times": False,
    "doc_module": ("meanfield",),
    "inspect_global_variables": False,
    "image_srcset": ["2x"],
    "image_scrapers": (_full_figures,),
}
os.environ.setdefault("MPLBACKEND", "Agg")


class _Keys(BaseLabelStyle):
    """[CAP24] is called so everywhere: in docstrings, here and in the README."""

    def format_labels(self, entries: Any) -> Any:
        return (entry.key for entry in entries)


class _KeyStyle(Style):
    default_label_style = _Keys


register_plugin("pybtex.style.formatting", "keys", _KeyStyle)

_CITATION = re.compile(r"\[([A-Z]{2,}[0-9]{2})\]")
_UNIT = re.compile(r"(?<=\d) (?=(?:µs|ms|s|min|h|kB|MB|GB|KiB|MiB|GiB|%|times)\b|%)")
_LITERAL = re.compile(r"(``.*?``|:cite:p:`.*?`|:math:`.*?`)", re.DOTALL)


def setup(app: Any) -> None:
    """Docstrings as they are read in a terminal; formulas as MathML, which needs no script."""
    app.connect("autodoc-process-docstring", _plain_marks, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", _readable)
    app.connect("autodoc-skip-member", _skip_aliases)
    app.connect("doctree-read", _try_formulas)
    app.connect("doctree-read", _readable_tables)
    app.connect("source-read", _cited_in_scripts)
    app.connect("missing-reference", _named_at_the_top)
    app.add_html_math_renderer("mathml", (_inline_math, None), (_display_math, None))


def _plain_marks(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """In a docstring |x| is an absolute value and [CAP24] a citation; settings have meanings."""
    if what == "class" and dataclasses.is_dataclass(obj):
        known = {one.name: one.metadata.get("meaning") for one in dataclasses.fields(obj)}
        meanings = [f"    {name}: {meaning}." for name, meaning in known.items() if meaning]
        lines += ["", "Attributes:", *meanings, ""] if meanings else []
    if what == "data" and isinstance(obj, dict | tuple):
        lines[:] = [", ".join(f"``{name}``" for name in obj) + "."]
    made: list[str] = []
    for is_code, block in itertools.groupby(_FORMULAS["displayed"](lines), _Code()):
        text = "\n".join(block)
        if not is_code:
            cited = _CITATION.sub(r":cite:p:`\1`", text)
            parts = _LITERAL.split(_FORMULAS["with_mathematics"](cited, _can_be_written))
            parts[::2] = [part.replace("|", r"\|").replace("\0", "|") for part in parts[::2]]
            text = "".join(parts)
        made += text.split("\n")
    lines[:] = made


class _Code:
    """Whether a line is of a doctest or a table, which end with an empty line."""

    inside = False

    def __call__(self, line: str) -> bool:
        self.inside = line.lstrip().startswith((">>>", "===")) or (
            self.inside and bool(line.strip())
        )
        return self.inside


def _cited_in_scripts(app: Any, docname: str, content: list[str]) -> None:
    """[CAP24] in the text of a tutorial or an example is a link; its code is indented."""
    if docname.startswith(("_generated/tutorials/", "_generated/gallery/")):
        lines = content[0].split("\n")
        cited = [x if x[:1].isspace() else _CITATION.sub(r":cite:p:`\1`", x) for x in lines]
        content[0] = "\n".join(cited)


def _named_at_the_top(app: Any, env: Any, node: Any, text: Any) -> Any:
    """`meanfield.w2` leads to where it is described, on the page of its package."""
    above, _, name = str(node.get("reftarget", "")).rpartition(".")
    found = getattr(meanfield, name, None) if above == "meanfield" else None
    packages = str(getattr(found, "__module__", "")).split(".")[:2]
    if len(packages) < 2 or node.get("refdomain") != "py":
        return None
    domain = env.get_domain("py")
    target = ".".join([*packages, name])
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", target, node, text)


def _readable_tables(app: Any, doctree: nodes.document) -> None:
    """Tables of words can be read on a phone, and numbers stay on the line of their unit."""
    for table in doctree.findall(nodes.table):
        entries = [*table.findall(nodes.entry)]
        n_numbers = sum(entry.astext()[:1] in "0123456789−→" for entry in entries)
        if 4 * n_numbers < len(entries):
            table["classes"].append("words")
            _name_columns(table)
        for entry in entries:
            for text in [*entry.findall(nodes.Text)]:
                text.parent.replace(text, nodes.Text(_UNIT.sub("\N{NO-BREAK SPACE}", text)))


def _name_columns(table: nodes.table) -> None:
    """The title of its column in each cell, which is shown where rows are taken apart."""
    for head, body in zip(table.findall(nodes.thead), table.findall(nodes.tbody), strict=False):
        titles = [entry.astext() for entry in head[0]]
        for row in body if len(titles) > 2 else ():
            for title, entry in zip(titles[1:], row[1:], strict=False):
                for first in entry[:1] if entry.astext() else ():
                    first.insert(0, nodes.inline("", f"{title}: ", classes=["column"]))


def _can_be_written(code: str) -> bool:
    try:
        _MATHML["displayed"](code)
    except MathError:
        return False
    return True


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


def _try_formulas(app: Any, doctree: nodes.document) -> None:
    """A formula that cannot be written is a warning where it is read, whatever is built."""
    for node in doctree.findall(lambda node: isinstance(node, nodes.math | nodes.math_block)):
        try:
            _MATHML["displayed" if isinstance(node, nodes.math_block) else "inline"](node.astext())
        except MathError as error:
            logging.getLogger(__name__).warning("%s", error, location=node)


def _inline_math(writer: Any, node: nodes.math) -> None:
    writer.body.append(_MATHML["inline"](node.astext()))
    raise nodes.SkipNode


def _display_math(writer: Any, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="formula">{_MATHML["displayed"](node.astext())}</div>\n')
    raise nodes.SkipNode
