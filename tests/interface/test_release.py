"""What a release says of itself: the Python it needs, its version, its extras."""

from __future__ import annotations

import ast
import itertools
import re
import runpy
import tomllib
from pathlib import Path

import meanfield

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCES = sorted((ROOT / "meanfield").rglob("*.py"))


def test_every_file_is_read_by_the_oldest_python_that_is_promised():
    oldest = tuple(map(int, PROJECT["requires-python"].removeprefix(">=").split(".")))
    assert oldest == (3, 11)
    for path in SOURCES:
        ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=oldest)


def test_the_citation_names_the_version():
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: ([\d.]+)", cited, re.MULTILINE) == [PROJECT["version"]]
    assert meanfield.__version__ == PROJECT["version"]


def test_the_citation_file_has_the_references_of_the_bibliography():
    citation = runpy.run_path(str(ROOT / ".docs" / "citation.py"))
    entries = citation["entries"]()
    bib = (ROOT / ".docs" / "references.bib").read_text(encoding="utf-8")
    assert len(entries) == bib.count("\n@") + bib.startswith("@") > 10
    assert all({"title", "author", "year"} <= one.keys() for one in entries)
    assert "{" not in "".join(one["title"] + one["author"] for one in entries)
    own = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert citation["written"]() == own, "python .docs/citation.py writes it anew"
    # Every key that the docstrings and the pages cite is there.
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / ".docs").glob("*.md")]
    texts = "".join([*pages, *(path.read_text(encoding="utf-8") for path in SOURCES)])
    cited = set(re.findall(r"\[([A-Z]{2,}[0-9]{2})\]", texts))
    cited |= set(re.findall(r"\{cite:p\}`(\w+)`", texts))
    assert cited <= {one["key"] for one in entries}
    assert not re.search(r"\[[A-Z][a-z]+ [0-9]{4}\]", texts)


def test_every_extra_that_is_named_exists():
    extras = PROJECT["optional-dependencies"]
    texts, named = [path.read_text(encoding="utf-8") for path in SOURCES], set()
    for packages, extra in re.findall(r'MissingExtraError\("([^"]+)", "(\w+)"', "".join(texts)):
        held = [re.split("[<>=]", requirement)[0] for requirement in extras[extra]]
        assert packages.split() == held
        named.add(extra)
    for line in itertools.chain.from_iterable(extras.values()):
        for names in re.findall(r"^meanfield-attention\[([\w,]+)\]", line):
            named |= set(names.split(","))
    assert {"models", "corpora"} <= named <= set(extras)


def test_nothing_tells_anybody_to_install_meanfield_from_an_index():
    """The name is a stranger's there; `pip install .` and ".[extra]" are this repository."""
    folders = [ROOT / folder for folder in ("meanfield", ".docs", "examples")]
    files = [f for folder in folders for f in folder.rglob("*") if f.suffix in (".py", ".md")]
    foreign = re.compile(r"pip3? install\b[^\n`&#]*[ \"']meanfield(?![\w-])|meanfield\[\w")
    for file in [*files, *ROOT.glob("*.md")]:
        # Texts of several lines in one, as Python reads them.
        text = re.sub(r"[\"']\s*\n\s*f?[\"']", "", file.read_text(encoding="utf-8"))
        assert not (found := foreign.search(text)), f"{file}: {found[0]}"
