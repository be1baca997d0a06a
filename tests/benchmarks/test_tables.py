"""The tables of the page of performance: what goes where, and that every script runs."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tables

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", tables.named())
def test_a_table_on_the_page_is_that_of_its_script_and_its_rows(name):
    rows = json.loads((HERE / f"{name}.json").read_text("utf-8"))
    script = runpy.run_path(str(HERE / f"{name}.py"))
    assert script.get("table", tables.table)(rows) in tables.PAGE.read_text("utf-8")
    assert max(row.get("relative_width", 0) for row in rows) < 1e-9


def test_a_table_is_written_between_its_comments_and_nowhere_else(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- begin bench_a -->\nold\n<!-- end bench_a -->\nafter\n")
    tables.show("somewhere/bench_a.py", "| new |", page)
    assert page.read_text() == (
        "before\n<!-- begin bench_a -->\n\n| new |\n\n<!-- end bench_a -->\nafter\n"
    )
    with pytest.raises(ValueError, match="expected one pair of comments"):
        tables.show("bench_b.py", "| new |", page)


def test_rows_of_another_processor_are_kept_and_ones_own_replaced(tmp_path):
    file = tmp_path / "rows.json"
    old = [{"case": "a", "machine": "H200, torch 2.13"}, {"case": "b", "machine": "EPYC, 1 core"}]
    file.write_text(json.dumps(old))
    new = [{"case": "c", "machine": "EPYC, 2 cores"}]
    assert tables.kept(file, new) == [old[0], *new]


def test_a_row_says_how_much_slower_the_script_is():
    def spin(seconds):
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    row = tables.beside("a", lambda: spin(0.01), lambda: spin(0.02), peer="b", lasting=0.0)
    assert row["ratio"] == pytest.approx(2, rel=0.2)
    row |= {"ours_s": 0.01, "peer_s": 0.02, "machine": tables.USUAL}
    shown = tables.table([row, row | {"machine": "H200"}])
    assert (
        shown.startswith("| case | ours |") and shown.count("| a | 10 ms | b | 20 ms | 2 |") == 2
    )
    assert shown.count("\n\nOn H200:\n\n| case |") == 1


@pytest.mark.slow
def test_every_benchmark_of_the_page_runs_at_small_sizes():
    command = [sys.executable, str(HERE / "run_all.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
