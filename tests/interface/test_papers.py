"""The page of the papers: every name on it exists, and the settings of the papers are settings."""

from __future__ import annotations

import pkgutil
import re
import tomllib
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from meanfield import results
from meanfield.cli import main
from meanfield.experiments import EXPERIMENTS, get
from meanfield.experiments.settings import override, quick_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / ".docs" / "papers.md").read_text(encoding="utf-8")
NAMES = sorted(set(re.findall(r"\{py:obj\}`~(meanfield[\w.]*)`", PAGE)))
COMMANDS = sorted(set(re.findall(r"`meanfield run ([\w-]+)", PAGE)))
FILES = sorted((ROOT / "examples" / "papers").glob("*.toml"))
FAST = {"cap24_figure_3", "kpm21_section_5_2"}  # of the files, in seconds
SMOOTH, KIM = PAGE.split("\n## The Lipschitz Constant of Self-Attention ")
_KINDS = "Definition|Lemma|Theorem|Proposition|Corollary|Remark|Section|Figure|Table"

# Every numbered item of the papers, and the sections that are answered by themselves. Of [KPM21]
# those of the body.
ITEMS = {
    "CAP24": """
        Definition 2.1 2.2 2.3 2.4 2.5 2.6 4.1 A.1 A.2 A.7 B.1 C.4
        Lemma 3.1 3.2 3.8 4.2 A.3 A.4 A.5 A.6 A.8 B.2 B.3 C.1 C.2 C.5 C.6 C.7 D.1 E.2
        Proposition 3.4 3.6 C.8
        Theorem 3.3 3.5 3.7 4.3 4.4 4.5 C.3 E.3
        Remark E.1
        Section 2.3 C.5 C.7 E.1 E.2 E.3
        Figure 1 2 3 4 5 6
    """,
    "KPM21": """
        Definition 2.1
        Theorem 2.1 3.1 3.2
        Lemma 2.1
        Corollary 2.1
        Section 3.2 4 5.1 5.2 5.3 5.4
        Figure 1 2 3
        Table 1
    """,
}


def items_of(text):
    """The items that a page names: (kind, number), of "Lemmas 3.2, 4.2 and B.3" three."""
    number = r"(?:[A-E]\.)?\d(?:\.\d)?"
    found = re.finditer(rf"\b({_KINDS})s? ({number}(?:(?:, | and ){number})*)", text)
    return {(m[1], each) for m in found for each in re.findall(number, m[2])}


@pytest.mark.parametrize(("key", "page"), [("CAP24", SMOOTH), ("KPM21", KIM)])
def test_every_item_of_a_paper_is_answered_and_no_other_is_named(key, page):
    lines = [line.split() for line in ITEMS[key].strip().splitlines()]
    listed = {(kind, number) for kind, *numbers in lines for number in numbers}
    # What stands in the first column of a table, or in the sentence on those without a function.
    first = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")]
    without = re.findall(r"^.* have no function\.$", page, re.MULTILINE)
    assert items_of("\n".join(first + without)) == listed


@pytest.mark.parametrize("name", NAMES)
def test_every_function_on_the_page_exists(name):
    assert pkgutil.resolve_name(name) is not None


def test_every_command_and_file_on_the_page_exists():
    assert set(COMMANDS) <= set(EXPERIMENTS)
    linked = re.findall(r"<\.\./(examples/papers/\S+)>", PAGE)
    assert {ROOT / name for name in linked} == set(FILES)
    for name in re.findall(r"`(examples/\w+\.py)`", PAGE):
        assert (ROOT / name).is_file()


def test_every_experiment_that_the_list_gives_to_a_paper_is_on_the_page():
    listed = {name for name, paper in EXPERIMENTS.items() if "Fig" in paper}
    assert listed <= set(COMMANDS)


def test_the_constants_of_the_running_mean_on_the_page_are_right():
    given = re.search(r"is ([\d.]+),\s+([\d.]+), ([\d.]+) and ([\d.]+) for 2, 8, 32 and 128", PAGE)
    assert given is not None
    for n, constant in zip((2, 8, 32, 128), map(float, given.groups()), strict=True):
        running_mean = np.tri(n) / np.arange(1, n + 1)[:, None]
        assert np.linalg.norm(running_mean, 2) == pytest.approx(constant, abs=5e-4)


def experiment_of(path):
    """The experiment that the page gives the settings to."""
    row = next(line for line in PAGE.splitlines() if path.name in line)
    found = re.search(r"`meanfield run ([\w-]+)`", row)
    assert found is not None
    return get(found[1])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_settings_of_the_papers_are_kept_by_quick_where_they_are_not_made_small(path):
    experiment, given = experiment_of(path), tomllib.loads(path.read_text(encoding="utf-8"))
    whole = override(experiment.settings, given)
    small = quick_of(whole)
    unmarked = [f.name for f in fields(whole) if "quick" not in f.metadata]
    assert all(getattr(small, name) == getattr(whole, name) for name in unmarked)
    assert small != whole


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=() if path.stem in FAST else pytest.mark.slow)
        for path in FILES
    ],
)
def test_every_settings_file_runs_quickly_without_weights_or_a_text(path, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.delenv("MEANFIELD_DATA", raising=False)
    name = experiment_of(path).name
    command = ["run", name, "--config", str(path), "--quick", "--out", str(tmp_path)]
    assert main(command) == 0
    assert (results.read_dataset(tmp_path / f"{name}.zarr").status == 1).all()
    assert list(tmp_path.glob("*.png"))
