"""A store records what it holds: another function, setting or model is refused or reported."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from meanfield import results
from meanfield.results import Variable
from meanfield.sweeps import Task, sweep
from meanfield.sweeps.grid import case_keys, case_seed
from meanfield.sweeps.identity import identity_of

GRID = {"x": [1.0, 2.0, 3.0]}


class Done(NamedTuple):
    """How a script has ended and what it has printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def script(start, tmp_path):
    """Write and run a script that sweeps a function `f` into main.sweep."""

    def script(name, body, **sweep_arguments):
        path = tmp_path / name
        arguments = ", ".join(f"{name}={value!r}" for name, value in sweep_arguments.items())
        path.write_text(
            f"from meanfield import sweep\n\n{textwrap.dedent(body)}\n"
            f"if __name__ == '__main__':\n"
            f"    ds = sweep(f, {{'x': [1.0, 2.0, 3.0]}}, store='main.sweep', {arguments})\n"
            f"    print(ds['y'].values.tolist())\n"
        )
        code = start("script", path).wait()
        return Done(code, *(Path(f"{path}.{kind}").read_text() for kind in ("out", "err")))

    return script


def test_functions_of_two_scripts_are_not_the_same_function(script):
    first = script("a.py", "def f(x):\n    return {'y': x}\n")
    assert first.out == "[1.0, 2.0, 3.0]\n"
    second = script("b.py", "def f(x):\n    return {'y': 1000 * x}\n")
    assert second.code == 1
    assert 'function: stored "a:f", now "b:f"' in second.err


def test_a_changed_body_is_named_and_kept_cases_stay(script):
    script("a.py", "def f(x):\n    return {'y': x}\n")
    commented = "def f(x):\n    # in words\n    return {'y': x}\n"
    assert "source" not in script("a.py", commented).err
    changed = "def f(x, scale=7.0):\n    return {'y': scale * x}\n"
    again = script("a.py", changed)
    assert "a:f: the source, or a list or dict that it reads, is not what" in again.err
    assert again.out == "[1.0, 2.0, 3.0]\n"
    accepted = script("a.py", changed, accept_changed_code=True)
    assert accepted.code == 0 and "source" not in accepted.err


def test_a_script_that_python_runs_itself_has_the_same_identity(script, tmp_path):
    script("a.py", "def f(x):\n    return {'y': x}\n")
    command = [sys.executable, "a.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "[1.0, 2.0, 3.0]\n"
    assert done.stderr.startswith("3 of 3 cases found\nsweep: 100%")
    assert len(done.stderr.splitlines()) == 2


class Scaled:
    """An object whose method is swept."""

    name = "scaled"

    def __init__(self, scale: Any) -> None:
        self.scale = scale

    def times(self, x):
        return {"y": float(self.scale) * x}

    def __call__(self, x):
        return self.times(x)

    @classmethod
    def of_class(cls, x):
        return {"y": x, "name": cls.name}


class Rescaled(Scaled):
    """With another class variable."""

    name = "rescaled"


def scaled_by(scale):
    def times(x):
        return {"y": scale * x}

    return times


def with_default(scale):
    def times(x, scale=scale):
        return {"y": scale * x}

    return times


SCALE: Any = 2.0


def by_global(x):
    return {"y": float(SCALE) * x}


def by_helper(x):
    return {"y": (lambda: by_global(x)["y"])()}


def named(function):
    return Task(function, name="named")


def net(seed):
    torch.manual_seed(seed)
    return torch.nn.Linear(1, 1)


def module_of(seed):
    module = net(seed)
    return lambda x: {"y": float(module(torch.tensor([x]))[0])}


@pytest.mark.parametrize(
    ("one", "other", "field"),
    [
        (Scaled(2.0).times, Scaled(3.0).times, "self"),
        (Scaled(np.ones(2)).times, Scaled(np.zeros(2)).times, "self"),
        (Scaled(net(0)).times, Scaled(net(1)).times, "self"),
        (Scaled.of_class, Rescaled.of_class, "function"),
        (named(Scaled(2.0)), named(Scaled(3.0)), "self"),
        (named(scaled_by(2.0)), named(scaled_by(3.0)), "closure scale"),
        (named(scaled_by(2.0)), named(scaled_by("2.0")), "closure scale"),
        (named(scaled_by(np.arange(9.0))), named(scaled_by(np.ones(9))), "closure scale"),
        (named(with_default(2.0)), named(with_default(3.0)), "default scale"),
        (named(module_of(0)), named(module_of(1)), "closure module"),
        (named(functools.partial(pow, 2)), named(functools.partial(pow, 3)), "argument 0"),
    ],
)
def test_what_a_function_carries_is_part_of_what_it_is(tmp_path, one, other, field):
    def description(task):
        task = task if isinstance(task, Task) else Task(task)
        return task.identity

    first, again, second = (description(task) for task in (one, one, other))
    assert first == again
    differs = {n for n in first.carried if first.carried[n] != second.carried[n]}
    assert differs == ({field} if field != "function" else {"class"})
    assert (first.name != second.name) == (field == "function")


def test_the_numbers_of_another_object_do_not_come_back(tmp_path):
    assert sweep(Scaled(2.0).times, GRID, store=tmp_path / "s")["y"].values.tolist() == [2, 4, 6]
    assert sweep(Scaled(2.0).times, GRID, store=tmp_path / "s")["y"].values.tolist() == [2, 4, 6]
    with pytest.raises(ValueError, match="self: stored .*, now "):
        sweep(Scaled(3.0).times, GRID, store=tmp_path / "s")
    kept = sweep(Scaled(3.0).times, GRID, store=tmp_path / "s", accept_changed_code=True)
    assert kept["y"].values.tolist() == [2, 4, 6]


@pytest.mark.parametrize("function", [by_global, by_helper])
def test_a_global_that_has_changed_is_refused_also_in_a_helper(tmp_path, monkeypatch, function):
    sweep(function, GRID, store=tmp_path / "s")
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    with pytest.raises(ValueError, match=r'global SCALE: stored "2\.0", now "3\.0"'):
        sweep(function, GRID, store=tmp_path / "s")
    monkeypatch.setitem(globals(), "SCALE", threading.Lock())
    with pytest.raises(TypeError, match=r"global SCALE \(lock\), and a store cannot tell"):
        sweep(function, GRID, store=tmp_path / "new")


def test_a_container_that_has_changed_is_a_warning_because_it_may_be_a_cache(tmp_path):
    kept: dict[str, float] = {}
    task = named(lambda x: {"y": kept.setdefault("y", x)})
    sweep(task, GRID, store=tmp_path / "s")
    with pytest.warns(UserWarning, match="a list or dict that it reads, is not what"):
        sweep(task, GRID, store=tmp_path / "s")


def test_what_has_no_source_warns(tmp_path):
    scope: dict[str, Any] = {"__name__": "shell"}
    exec(compile("def f(x):\n    return {'y': x}\n", "<shell>", "exec"), scope)
    typed = Task(scope["f"], name="f")
    for _ in range(2):
        with pytest.warns(UserWarning, match="source cannot be read"):
            sweep(typed, GRID, store=tmp_path / "s")
    assert identity_of(len).code == ""
    assert identity_of(functools.lru_cache(by_global)).carried == {"global SCALE": "2.0"}


def test_text_is_not_a_number(tmp_path):
    def f(x, mode=0):
        return {"y": f"{type(x).__name__} {type(mode).__name__}"}

    store, task = tmp_path / "s", named(f)
    sweep(task, {"x": [1.0]}, fixed={"mode": 1.0}, store=store)
    with pytest.raises(ValueError, match=r"fixed\.mode: stored"):
        sweep(task, {"x": [1.0]}, fixed={"mode": "1.0"}, store=store)
    with pytest.raises(ValueError, match="parameter 'x': the store holds numbers, got texts"):
        sweep(task, {"x": ["1.0"]}, fixed={"mode": 1.0}, store=store)
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

    with pytest.raises(TypeError, match="f: expected numbers"):
        sweep(Task(never, name="never"), GRID, fixed={"f": abs}, store=tmp_path / "s")
    with pytest.raises(TypeError, match="expected a named function"):
        sweep(lambda x: {"y": 1 / 0}, GRID, store=tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_links_and_detours_lead_to_the_same_store(tmp_path):
    task = Task(lambda x: {"y": x}, [Variable("y", "y")], name="f")
    (tmp_path / "link").symlink_to(tmp_path / "real" / "s")
    ds = sweep(task, GRID, store=tmp_path / "link")
    assert results.read_dataset(tmp_path / "real" / "s").identical(ds)
    (tmp_path / "a").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sweep(task, GRID, store=tmp_path / "a" / ".." / "link").identical(ds)
    results.write_dataset(ds, tmp_path / "one.nc")
    (tmp_path / "alias.nc").symlink_to(tmp_path / "one.nc")
    results.write_dataset(ds.isel(case=[0]), tmp_path / "alias.nc")
    assert (tmp_path / "alias.nc").is_symlink()
    assert results.read_dataset(tmp_path / "one.nc").sizes["case"] == 1
