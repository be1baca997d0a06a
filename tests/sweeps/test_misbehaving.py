"""Bad return values, errors and Ctrl-C: a failure is recorded, the other cases are kept."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time

import numpy as np
import pytest
import torch

from meanfield import results
from meanfield.results import Variable
from meanfield.sweeps import Task, status, sweep

STRAYS = [
    ("int64", 1.7, "does not hold 1.7"),
    ("int64", np.nan, "does not hold nan"),
    ("int64", 2**70, "expected int64, got object"),
    ("int64", np.uint64(2**63), "does not hold"),
    ("float32", 1e300, "does not hold 1e+300"),
    ("float64", 2**53 + 1, "does not hold 9007199254740993; declare"),
    ("float64", 1 + 2j, "expected float64, got complex128"),
    ("float64", np.ma.masked, "got masked ones"),
    ("float64", "1.5", "expected float64, got <U3"),
    ("float64", None, "expected float64, got object"),
    ("float64", True, "expected float64, got bool"),
    ("float64", [1.0, 2.0], r"expected shape (), got (2,)"),
    ("bool", 1, "expected bool, got int64"),
    ("str", "\ud800", "text in UTF-8"),
    ("str", "a\0", "text in UTF-8"),
    ("str", 3, "expected texts, got int"),
]


@pytest.mark.parametrize(("dtype", "value", "message"), STRAYS)
def test_a_value_that_does_not_fit_without_a_loss_is_a_failure(tmp_path, dtype, value, message):
    good = {"int64": 2**60 + 1, "str": "é漢 \x1b", "bool": True}.get(dtype, 0.5)
    task = Task(lambda x: {"v": value if x == 1 else good}, [Variable("v", "v", dtype=dtype)],
                name="stray")  # fmt: skip
    ds = sweep(task, {"x": range(3)}, store=tmp_path / "s")
    assert ds["status"].values.tolist() == [1, 3, 1]
    assert message in str(ds["message"].values[1])
    assert ds["v"].values[[0, 2]].tolist() == [good, good]
    assert results.read_dataset(tmp_path / "s").identical(ds)


def test_nan_is_a_value():
    def sometimes(x):
        return {"y": np.nan if x == 1 else x, "v": [0.0, np.nan if x in (1, 2) else 1.0]}

    variables = [Variable("y", "y"), Variable("v", "two numbers", dims=("place",))]
    ds = sweep(Task(sometimes, variables, coords={"place": [0, 1]}), {"x": range(5)})
    assert ds["status"].values.tolist() == [1] * 5


@pytest.mark.parametrize("returned", [None, "hello", 2.0, {}, {"z": 1.0}, {"y": 1.0, "z": 2.0}])
def test_another_thing_than_the_declared_names_is_a_failure(returned):
    task = Task(lambda x: returned if x == 1 else {"y": 2.0}, [Variable("y", "y")])
    ds = sweep(task, {"x": range(3)})
    assert ds["status"].values.tolist() == [1, 3, 1]
    assert "expected a mapping with exactly ['y']" in str(ds["message"].values[1])


def test_a_setting_that_a_case_changes_is_as_given_for_the_next():
    def grow(x, items, table, array, tensor):
        items.append(x)
        for changed in (table["sum"], array, tensor):
            changed += x
        sums = {"table": table["sum"].sum(), "array": array.sum(), "tensor": tensor.sum()}
        return {"n": float(len(items)), **sums}

    given = {"items": [0], "table": {"sum": np.zeros(2)}}
    given |= {"array": np.zeros(2), "tensor": torch.zeros(2)}
    ds = sweep(grow, {"x": [1, 2, 3]}, fixed=given)
    assert ds["n"].values.tolist() == [2.0, 2.0, 2.0]
    for name in ("table", "array", "tensor"):
        assert ds[name].values.tolist() == [2.0, 4.0, 6.0]
    assert given["items"] == [0] and not given["tensor"].any()


SCRIPT = """
from tests.sweeps import sweep_functions as f
from meanfield.sweeps import sweep

if __name__ == "__main__":
    sweep(f.GROWING, {{"i": range(240)}}, fixed={{"seconds": {}}}, store="s", executor={}, {})
"""


class Growing:
    """A script that sweeps `GROWING`, as its user at a terminal sees it."""

    def __init__(self, start, folder, seconds, executor=None, more=""):
        self.folder, path = folder, folder / "run.py"
        path.write_text(SCRIPT.format(seconds, executor, more))
        self.child = start("script", path)
        self.wait_for(lambda: list((folder / "s").glob("grid-*")))

    def wait_for(self, reached):
        while not reached():
            assert self.child.alive()
            time.sleep(0.02)

    def n_kept(self):
        done = (self.folder / "s" / "sweep.json").exists()
        return status(self.folder / "s").n_done if done else 0

    def send(self, number):
        os.killpg(self.child.pid, number)

    def said_after_ctrl_c(self):
        self.send(signal.SIGINT)
        assert self.child.wait(60) == 1
        said = (self.folder / "run.py.err").read_text()
        assert "\nKeyboardInterrupt" in said
        return said


@pytest.fixture
def growing(start, tmp_path):
    return functools.partial(Growing, start, tmp_path)


@pytest.mark.parametrize(
    ("seconds", "case", "share"),
    [(3, 0.05, 0.6), pytest.param(18, 0.15, 0.7, marks=pytest.mark.slow)],
)
def test_batches_end_by_time_though_the_first_cases_are_the_cheapest(
    growing, seconds, case, share
):
    """A kill loses at most a quarter of the time that the sweep has run, and the case at work."""
    run = growing(case)
    time.sleep(seconds)
    run.child.kill()
    assert run.n_kept() >= 40 + share * (seconds / case) - 10


@pytest.mark.parametrize("executor", [pytest.param(None, marks=pytest.mark.slow), 2])
def test_ctrl_c_keeps_what_is_done(growing, executor):
    run = growing(0.5, executor)
    run.wait_for(lambda: list((run.folder / "s").glob("batch-*")))
    said = run.said_after_ctrl_c()
    assert run.n_kept() >= 4
    assert f"{run.n_kept()} of 240 cases are kept in {run.folder / 's'}" in said


def test_ctrl_c_while_workers_are_starting_ends_too(growing):
    run = growing(0.5, 2)
    time.sleep(0.05)
    assert "of 240 cases are kept in" in run.said_after_ctrl_c()


@pytest.mark.slow
def test_a_script_without_main_guard_is_imported_once_and_told(script):
    done = script(
        "run.py",
        "from meanfield import sweep\nprint('imported')\n"
        "def f(x):\n    return {'y': 2.0 * x}\n"
        "sweep(f, {'x': [1.0]}, executor=1)\n",
    )
    assert done.code == 1 and done.out == 2 * "imported\n"
    assert "inside `if __name__ == '__main__':`" in done.err.splitlines()[-1]


def test_the_fork_server_is_started_where_ctrl_c_is_blocked(script):
    done = script(
        "run.py",
        "import signal\nfrom multiprocessing import forkserver\n"
        "from meanfield.sweeps import workers\n"
        "workers._block_ctrl_c()\nforkserver.ensure_running()\n"
        "print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))\n",
    )
    assert done.out == "True\n"


def test_ctrl_c_ends_a_case_in_process_at_once(growing):
    run = growing(600.0)
    run.wait_for((run.folder / "reached").exists)
    assert "40 of 240 cases are kept" in run.said_after_ctrl_c()  # all that were finished


@pytest.mark.slow
def test_another_ctrl_c_ends_the_cases_of_workers_at_once(growing):
    run = growing(600.0, 2)
    time.sleep(8)
    run.send(signal.SIGINT)
    time.sleep(0.5)
    assert run.child.alive()
    assert "of 240 cases are kept" in run.said_after_ctrl_c()


class Finalised:
    """Ctrl-C comes in its destructor, where Python drops what is raised."""

    def __del__(self):
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_in_a_destructor_ends_the_sweep_all_the_same(tmp_path, monkeypatch):
    def f(x):
        if x == 2:
            Finalised()
        return {"y": float(x)}

    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    task = Task(f, [Variable("y", "y")], name="f")
    with pytest.raises(KeyboardInterrupt) as ended:
        sweep(task, {"x": range(2000)}, store=tmp_path / "s")
    assert ended.value.__notes__[0].startswith("3 of 2000 cases are kept")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_long_text_fails_in_its_case_because_all_would_be_as_wide(tmp_path):
    task = Task(lambda x: {"text": "x" * x}, [Variable("text", "text", dtype="str")], name="t")
    ds = sweep(task, {"x": [1, 2**16, 2**16 + 1]}, store=tmp_path / "s")
    assert ds["status"].values.tolist() == [1, 1, 3]
    assert "a text of at most 65536 characters, got 65537" in str(ds["message"].values[2])


@pytest.mark.slow
def test_a_sweep_that_was_stopped_for_a_while_has_no_case_that_took_too_long(growing):
    run = growing(2.0, 2, "case_timeout=3.0")
    run.wait_for(lambda: run.n_kept() >= 40)
    run.send(signal.SIGSTOP)
    time.sleep(6.0)
    run.send(signal.SIGCONT)
    run.wait_for(lambda: run.n_kept() >= 42)
    run.child.kill()
    assert status(run.folder / "s").n_failed == 0
