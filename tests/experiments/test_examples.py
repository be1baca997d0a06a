"""Every numbered script runs from the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("[0-9]*.py"))


def test_every_example_has_a_number_of_its_own():
    numbers = [int(path.name[:2]) for path in EXAMPLES]
    assert numbers == sorted(set(numbers))


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES[:5], ids=lambda path: path.stem)
def test_the_examples_run_quickly_and_draw(path, tmp_path):
    command = [sys.executable, str(path), "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert list(tmp_path.glob("*.png"))
