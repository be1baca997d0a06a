"""What a person sees of a sweep whose standard error is a file."""

from __future__ import annotations

import numpy as np

from meanfield.results import Variable
from meanfield.sweeps import Task, sweep
from meanfield.sweeps.progress import Progress


def _square(x: int) -> dict[str, float]:
    return {"square": float(x * x)}


def test_a_sweep_into_a_file_says_where_it_stands_and_what_it_found(tmp_path, capsys):
    task = Task(_square, [Variable("square", "x²")])
    sweep(task, {"x": [1, 2]}, store=tmp_path / "s", progress=False)
    assert capsys.readouterr().err == ""
    sweep(task, {"x": [1, 2]}, store=tmp_path / "s")
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "2 of 2 cases found"
    assert said[-1].startswith("sweep: 100%") and "2/2" in said[-1]


def test_a_line_comes_once_a_minute(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with Progress(10) as bar:
        for _ in range(10):
            now += 13.0
            bar.advance(np.ones(1, int))
    # After 65 and 130 seconds, and at the end.
    assert len(capsys.readouterr().err.splitlines()) == 3
