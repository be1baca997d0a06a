"""A store records what it holds: another function, setting or model is refused or reported."""

from __future__ import annotations

import ast
import asyncio
import functools
import os
import subprocess
import sys
import types
import warnings
from collections import deque
from threading import Lock
from typing import Any

import numpy as np
import pytest

from meanfield import results
from meanfield.results import Variable
from meanfield.sweeps import Task, sweep
from meanfield.sweeps.grid import case_keys, case_seed
from meanfield.sweeps.plan import make_plan

GRID = {"x": [1.0, 2.0, 3.0]}


def sweeping(body, more=""):
    """A script that sweeps a function into main.sweep."""
    return (
        f"from meanfield import sweep\n{body}\n"
        f"if __name__ == '__main__':\n"
        f"    ds = sweep(f, {{'x': [1.0, 2.0, 3.0]}}, store='main.sweep', {more})\n"
        f"    print(ds['y'].values.tolist())\n"
    )


def test_functions_of_two_scripts_are_not_the_same_function(script):
    first = script("a.py", sweeping("def f(x): return {'y': x}"))
    assert first.out == "[1.0, 2.0, 3.0]\n" and "found" not in first.err
    second = script("b.py", sweeping("def f(x): return {'y': 1000 * x}"))
    assert second.code == 1
    assert 'function: stored "a:f", now "b:f"' in second.err


def test_a_changed_body_is_named_and_kept_cases_stay(script):
    script("a.py", sweeping("def f(x): return {'y': x}"))
    changed = "def f(x, scale=7.0): return {'y': scale * x}"
    again = script("a.py", sweeping(changed))
    assert "a:f: what the store was begun with has changed since in f; finished" in again.err
    assert again.out == "[1.0, 2.0, 3.0]\n"
    accepted = script("a.py", sweeping(changed, "accept_changed_code=True"))
    assert accepted.code == 0 and "changed" not in accepted.err


def test_a_script_that_python_runs_itself_has_the_same_identity(script, tmp_path):
    script("a.py", sweeping("def f(x): return {'y': x}"))
    command = [sys.executable, "a.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "[1.0, 2.0, 3.0]\n"
    assert done.stderr.startswith("3 of 3 cases found\nsweep: 100%")


class Scaled:
    """An object whose method is swept."""

    def __init__(self, scale: Any) -> None:
        self.scale = scale

    def times(self, x):
        return {"y": float(self.scale) * x}


class Declared(Scaled):
    """With what tells it from others."""

    identified_by = ("scale",)


@pytest.mark.parametrize("name", [None, "named"])
def test_an_object_is_refused_in_one_sentence_unless_its_class_or_the_task_says_what_it_is(
    tmp_path, name
):
    store = tmp_path / "s"
    if name is None:
        with pytest.raises(TypeError, match=r"computes with self \(Scaled\), and a store cannot"):
            sweep(Scaled(2.0).times, GRID, store=store)
        with pytest.raises(TypeError, match=r"computes with inner: default of \(Scaled\)"):
            sweep(called, GRID, fixed={"inner": times_two()}, store=store)
    else:
        sweep(Task(Scaled(2.0).times, name=name), GRID, store=store)
        sweep(Task(Scaled(2.0).times, name=name), GRID, store=store)
    for _ in range(2):
        ds = sweep(Task(Declared(2.0).times, name=name), GRID, store=tmp_path / "d")
        assert ds["y"].values.tolist() == [2, 4, 6]
    with pytest.raises(ValueError, match="self: stored .*, now .*or accept_changed_code=True"):
        sweep(Task(Declared(3.0).times, name=name), GRID, store=tmp_path / "d")
    again = Task(Declared(3.0).times, name=name)
    kept = sweep(again, GRID, store=tmp_path / "d", accept_changed_code=True)
    assert kept["y"].values.tolist() == [2, 4, 6]


class Empty:
    """Nothing."""


class Slotted(Empty):
    """With a value beside its `__dict__`, which is empty."""

    __slots__ = ("value",)


class Held(deque):
    """Likewise."""


def called(x, inner):
    return inner(x)


def times_two():
    """What its function computes with is a default."""

    def inner(x, of=Scaled(2.0)):  # noqa: B008
        return of.times(x)

    return inner


SHELL = "def g(x):\n    return {g} * x\ndef f(x):\n    return {{'y': {f} * g(x)}}\n"


@pytest.mark.parametrize(("now", "what"), [({"f": 3}, "f"), ({"g": 3}, "g"), ({}, "")])
def test_what_has_no_source_is_compared_by_its_bytecode(tmp_path, now, what):
    def shell(**numbers):
        scope: dict[str, Any] = {"__name__": "shell"}
        exec(compile(SHELL.format(**{"f": 2, "g": 2} | numbers), "<shell>", "exec"), scope)
        return scope["f"]

    sweep(shell(), GRID, store=tmp_path / "s")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        sweep(shell(**now), GRID, store=tmp_path / "s")
    assert [f"changed since in {what};" in str(w.message) for w in said] == [True] * bool(what)
    assert make_plan(shell(), GRID, None, 0).description["source"].keys() == {"f", "g"}


def test_a_file_that_was_edited_since_it_was_imported_is_not_what_runs(tmp_path, monkeypatch):
    """The store is of the code that ran; that of the file is another, which is told."""
    file = tmp_path / "edited.py"
    module = types.ModuleType("edited")
    monkeypatch.setitem(sys.modules, "edited", module)
    module.__file__ = str(file)

    def write(factor):
        file.write_text(
            f"class A:\n    def zero(self): return 0\n    def factor(self): return {factor}\n"
            f"def g(x): return {('abs', 'int')[factor % 2]}(x)\n"
            f"def f(x):\n    'Said.'\n    return {{'y': {factor} * g(x) + A().zero()}}\n"
        )
        os.utime(file, (factor, factor))

    def load():
        exec(compile(file.read_text(), file, "exec"), vars(module))
        return module.f

    write(2)
    old = load()
    write(3)
    for _ in range(2):
        assert sweep(old, GRID, store=tmp_path / "s")["y"].values.tolist() == [2, 4, 6]
    with pytest.warns(UserWarning, match="has changed since in A, f, g;"):
        sweep(load(), GRID, store=tmp_path / "s")


def test_a_cell_of_a_notebook_may_wait_at_its_top(tmp_path, monkeypatch):
    file, module = tmp_path / "cell.py", types.ModuleType("cell")
    monkeypatch.setitem(sys.modules, "cell", module)
    module.__file__ = str(file)
    file.write_text("async def g(): return 2\nk = await g()\ndef f(x): return {'y': k * x}\n")
    code = compile(file.read_text(), file, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    asyncio.run(eval(code, vars(module)))
    assert sweep(module.f, GRID, store=tmp_path / "s")["y"].values.tolist() == [2, 4, 6]
    assert make_plan(module.f, GRID, None, 0).description["source"].keys() == {"f", "g", "k"}


def test_a_value_that_a_message_can_show_is_shown(tmp_path):
    def of(scale):
        return Task(lambda x: {"y": scale[0] * x}, name="of")

    sweep(of((2.0,)), GRID, store=tmp_path / "s")
    with pytest.raises(ValueError, match=r'closure scale: stored \["2\.0"\], now \["3\.0"\]'):
        sweep(of((3.0,)), GRID, store=tmp_path / "s")
    with pytest.raises(ValueError, match=r'stored \["2\.0"\], now \{"digest": "[0-9a-f]{16}"\}'):
        sweep(of((3.0,) * 99), GRID, store=tmp_path / "s")


def test_text_is_not_a_number():
    for text in ("1.0", "1", "nan", "-inf", "1e3", " 1", "1_0"):
        number, marked = {"x": float(text)}, {"x": text}
        assert case_seed(number) != case_seed(marked)
        assert case_keys([number]) != case_keys([marked])
    assert case_seed({"x": "word"}) != case_seed({"x": {"text": "word"}})


def test_a_plain_function_is_not_evaluated_for_a_store_that_is_complete(tmp_path):
    n_calls = 0

    def count(x):
        nonlocal n_calls
        n_calls += 1
        return {"y": x}

    for _ in range(3):
        sweep(Task(count, name="count"), GRID, store=tmp_path / "s")
    assert n_calls == 3


def test_what_a_store_does_not_take_is_said_before_the_first_case(tmp_path):
    def never(x, f):
        raise AssertionError

    with pytest.raises(TypeError, match="f: expected numbers.*got lock.*`identified_by`"):
        sweep(Task(never, name="never"), GRID, fixed={"f": Lock()}, store=tmp_path / "s")
    for unknown in (Slotted(), Held([1]), ValueError(1), Scaled(2.0).times):
        with pytest.raises(TypeError, match="f.*: expected numbers"):
            sweep(Task(never, name="never"), GRID, fixed={"f": unknown}, store=tmp_path / "s")
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(TypeError, match="f: expected data that do not hold themselves"):
        sweep(Task(never, name="never"), GRID, fixed={"f": cycle}, store=tmp_path / "s")
    listed = np.array([[1], {}], object)
    with pytest.raises(TypeError, match="f: expected an array of numbers"):
        sweep(Task(never, name="never"), GRID, fixed={"f": listed}, store=tmp_path / "s")
    for fn in (lambda x, f: never(x, f), functools.partial(never, f=1)):
        task = Task(fn, [Variable("y", "y")])
        with pytest.raises(TypeError, match="expected a named function.*give Task.*name"):
            sweep(task, GRID, fixed={"f": 1}, store=tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_links_and_detours_lead_to_the_same_store(tmp_path):
    task = Task(lambda x: {"y": x}, [Variable("y", "y")], name="f")
    (tmp_path / "link").symlink_to(tmp_path / "real" / "s")
    ds = sweep(task, GRID, store=tmp_path / "link")
    assert results.read_dataset(tmp_path / "real" / "s").identical(ds)
    (tmp_path / "a").mkdir()
    assert sweep(task, GRID, store=tmp_path / "a" / ".." / "link").identical(ds)
    results.write_dataset(ds, tmp_path / "one.nc")
    (tmp_path / "alias.nc").symlink_to(tmp_path / "one.nc")
    results.write_dataset(ds.isel(case=[0]), tmp_path / "alias.nc")
    assert (tmp_path / "alias.nc").is_symlink()
    assert results.read_dataset(tmp_path / "one.nc").sizes["case"] == 1
