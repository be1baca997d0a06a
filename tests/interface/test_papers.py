"""The page of the papers: every name on it exists, and the settings of the papers are settings."""

from __future__ import annotations

import pkgutil
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from meanfield.cli import _settings
from meanfield.experiments import EXPERIMENTS, get

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / ".docs" / "papers.md").read_text(encoding="utf-8")
NAMES = sorted(set(re.findall(r"\{py:obj\}`~(meanfield[\w.]*)`", PAGE)))
COMMANDS = sorted(set(re.findall(r"`meanfield run ([\w-]+)", PAGE)))
FILES = sorted((ROOT / "examples" / "papers").glob("*.toml"))


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
    listed = {name for name, one in EXPERIMENTS.items() if "Fig" in one.paper}
    assert listed <= set(COMMANDS)


def test_the_constants_of_the_running_mean_on_the_page_are_right():
    given = re.search(r"its constant is ([\d.]+), ([\d.]+), ([\d.]+) and\s+([\d.]+)", PAGE)
    assert given is not None
    for n, constant in zip((2, 8, 32, 128), map(float, given.groups()), strict=True):
        running_mean = np.tri(n) / np.arange(1, n + 1)[:, None]
        assert np.linalg.norm(running_mean, 2) == pytest.approx(constant, abs=5e-4)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_settings_of_the_papers_are_settings_of_their_experiment(path):
    row = next(line for line in PAGE.splitlines() if path.name in line)
    experiment = re.search(r"`meanfield run ([\w-]+)`", row)
    assert experiment is not None
    known = vars(get(experiment.group(1)).settings)
    given = tomllib.loads(path.read_text(encoding="utf-8"))
    assert set(given) <= set(known)
    # Beside --quick too, whose few layers are of random models alone.
    options = SimpleNamespace(quick=True, config=path, set=["seed=3"])
    quick = _settings(get(experiment.group(1)), options)
    if "depth" in known:
        assert quick.depth == 0 or quick.model.startswith("random:")
        assert quick.depth == 0 or quick.depth > given.get("layer", 0)
