"""The reference: its example runs, and it builds from the docstrings without a warning."""

from __future__ import annotations

import doctest
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / ".docs"


def test_the_first_page_shows_what_the_library_returns():
    outcome = doctest.testfile(str(DOCS / "index.rst"), module_relative=False)
    assert outcome.attempted > 0 and outcome.failed == 0


@pytest.mark.slow
def test_the_reference_builds_without_a_warning(tmp_path):
    pytest.importorskip("sphinx")
    pytest.importorskip("furo")
    # A copy, for autosummary writes beside its source.
    source = tmp_path / "source"
    source.mkdir()
    for part in ("conf.py", "index.rst", "theory.rst", "_templates/autosummary/module.rst"):
        target = source / part
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((DOCS / part).read_bytes())
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    done = subprocess.run(
        [*command, str(source), str(tmp_path / "pages")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    transport = (tmp_path / "pages/_generated/meanfield.transport.html").read_text("utf-8")
    assert 'id="meanfield.transport.solve_w2"' in transport
