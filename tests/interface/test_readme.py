"""The README's examples run, and CI runs its two commands."""

from __future__ import annotations

import doctest
import re
import subprocess
from pathlib import Path

from meanfield import bounds

ROOT = Path(__file__).parents[2]


def test_the_examples_of_the_readme_give_what_they_show():
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    found = doctest.testfile(str(ROOT / "README.md"), module_relative=False, optionflags=flags)
    assert found.attempted > 20
    assert found.failed == 0


def test_the_first_page_stays_short_and_rounds_its_bound_up():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    (bound,) = re.findall(r"proved here ([\d,.]+);", text)
    exact = bounds.mean_field(1.0, 1.0, 3.0)
    assert exact <= float(bound.replace(",", "")) < exact + 1e-4


def test_the_two_commands_are_there_for_ci_to_take():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = dict(re.findall(r"<!-- command: (\w+) -->\n```\n(.+)\n```\n", text))
    assert set(commands) == {"main", "tests"}
    assert "meanfield run two-dirac" in commands["main"]
    assert "ruff check . && ruff format --check . && mypy && pytest" in commands["tests"]
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    reader = script[script.index("readme_command() {") : script.index("\n}\n") + 3]
    for name, command in commands.items():
        shell = ["bash", "-c", f"{reader}\nreadme_command {name}"]
        taken = subprocess.run(shell, cwd=ROOT, capture_output=True, text=True, check=True)
        assert taken.stdout.strip() == command
