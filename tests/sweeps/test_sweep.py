"""A sweep is the function at every case: labels, seeds, failures, vectorisation."""

from __future__ import annotations

import enum
import functools
import logging
import subprocess
import sys
import threading
from random import Random

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr

from meanfield import results
from meanfield.results import Variable
from meanfield.sweeps import Task, sweep
from meanfield.sweeps.grid import case_keys, case_seed, cases_of
from meanfield.sweeps.run import Progress
from tests.sweeps import sweep_functions as functions


def test_sweep_over_a_product_grid_is_the_function_at_every_case():
    ds = sweep(functions.square, {"x": [1, 2, 3], "offset": [0, 10]})
    assert ds["y"].values.tolist() == [1.0, 11.0, 4.0, 14.0, 9.0, 19.0]
    assert ds["y"].dtype == float  # of a plain function every number
    assert float(results.to_cube(ds)["y"].sel(x=3.0, offset=10.0)) == 19.0
    assert ds["status"].values.tolist() == [1] * 6


def test_ragged_grid_leaves_absent_parameters_nan():
    ds = sweep(lambda a=0.0, b=0.0: {"y": a + b}, [{"a": 1.0}, {"b": 2.0}])
    assert ds["y"].values.tolist() == [1.0, 2.0]
    np.testing.assert_array_equal(ds["b"], [np.nan, 2.0])
    spec = results.read_provenance(ds)["spec"]
    assert spec["grid"] == {"a": [1.0, None], "b": [None, 2.0]} and spec["n_cases"] == 2


def test_every_variable_is_labelled():
    ds = sweep(functions.NOISE, {"n": [2, 4], "repetition": range(3)})
    assert all("long_name" in ds[name].attrs for name in ds.variables)
    assert ds["profile"].dims == ("case", "place") and ds["profile"].units == "m"
    assert ds["n"].long_name == "sample size"


def test_failed_case_holds_nan_and_its_message_and_the_others_go_on():
    ds = sweep(functions.PICKY, {"x": [1, 3, 5, 7]})
    np.testing.assert_array_equal(ds["y"], [2.0, np.nan, 10.0, 14.0])
    assert ds["status"].values.tolist() == [1, 3, 2, 1]
    assert ds["message"].values.tolist() == ["", "ArithmeticError: three is refused", "", ""]
    assert ds["y_converged"].values.tolist() == [True, False, False, True]


def test_one_entry_that_has_not_converged_is_a_case_that_has_not():
    flags = [Variable("y_converged", "whether it converged", dims=("place",), dtype="bool")]
    task = Task(lambda x: {"y_converged": [True, x != 1]}, flags, coords={"place": [0, 1]})
    assert sweep(task, {"x": range(3)})["status"].values.tolist() == [1, 2, 1]


@pytest.mark.parametrize("flag", [0, 1.0, np.nan, "no"])
def test_what_says_whether_it_converged_is_a_truth_value(flag):
    with pytest.raises(ValueError, match="y_converged: expected a truth value.*got"):
        sweep(lambda x: {"y": 1.0, "y_converged": flag}, {"x": [1]})
    ds = sweep(lambda x: {"y": 1.0, "y_converged": np.bool_(x > 1)}, {"x": [1, 2]})
    assert ds["status"].values.tolist() == [2, 1]


def test_vectorised_sweep_equals_the_one_case_by_case_even_where_a_case_fails():
    grid = {"x": range(1, 9)}
    xr.testing.assert_equal(sweep(functions.PICKY_BATCHED, grid), sweep(functions.PICKY, grid))


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_vectorised_function_is_given_one_type_whatever_cases_share_its_call(batch_size):
    task = Task(lambda x: {"y": 1.0 * x**20}, [Variable("y", "y")], batched=True)
    ds = sweep(task, {"x": [100, 0.5]}, batch_size=batch_size)
    assert ds["y"].values.tolist() == [1e40, 0.5**20]


def test_texts_of_an_array_that_the_function_fills_anew_are_those_of_their_case():
    words = np.array(["", "b"], object)

    def fill(x):
        words[0] = f"at {x}"
        return {"word": words}

    variables = [Variable("word", "word", dims=("place",), dtype="str")]
    ds = sweep(Task(fill, variables, coords={"place": [0, 1]}), {"x": [1, 2]})
    assert ds["word"].values.tolist() == [["at 1", "b"], ["at 2", "b"]]


def test_a_tensor_with_a_derivative_is_a_number_of_a_plain_function():
    import torch

    ds = sweep(lambda x: {"y": torch.tensor(x, requires_grad=True)}, {"x": [1.0, 2.0]})
    assert ds["y"].values.tolist() == [1.0, 2.0]


def test_what_torch_only_notes_of_a_tensor_is_in_its_numbers_and_its_content(tmp_path):
    spectrum = torch.tensor([1 + 2j, 3 - 4j]).conj()  # a view, and its imaginary part another

    def phase(x, spectrum):
        return {"y": spectrum[1].imag * x}

    task = Task(phase, name="phase")
    for given in (spectrum, spectrum.resolve_conj()):
        ds = sweep(task, {"x": [1.0, 2.0]}, fixed={"spectrum": given}, store=tmp_path / "s")
        assert ds["y"].values.tolist() == [4.0, 8.0]


def test_texts_of_an_enumeration_are_texts():
    kinds = enum.StrEnum("Kind", "a b")
    ds = sweep(lambda kind: {"twice": 2 * kind}, {"kind": list(kinds)})
    assert ds["kind"].values.tolist() == ["a", "b"] and ds["twice"].values.tolist() == ["aa", "bb"]


def test_seeds_follow_the_parameters_so_a_larger_grid_changes_no_case():
    small = sweep(functions.NOISE, {"n": [2, 4], "repetition": [0, 1]}, seed=5)
    large = sweep(functions.NOISE, {"repetition": [1, 7, 0], "n": [8, 4, 2, 3]}, seed=5)
    cubes = [results.to_cube(ds).transpose("n", "repetition", ...) for ds in (small, large)]
    overlap = cubes[1].sel(n=[2, 4], repetition=[0, 1])
    np.testing.assert_array_equal(overlap["mean"], cubes[0]["mean"])
    np.testing.assert_array_equal(overlap["profile"], cubes[0]["profile"])
    other = sweep(functions.NOISE, {"n": [2, 4], "repetition": [0, 1]}, seed=6)
    assert not np.any(other["mean"].values == small["mean"].values)


def test_seed_is_the_same_in_every_process_and_version():
    """A frozen value: changing it would silently change the results of every stored sweep."""
    assert case_seed({"radius": 2.0, "masked": True, "name": "gpt2"}, 7) == FROZEN_SEED


FROZEN_SEED = 7127850438474185710


@pytest.mark.parametrize("base", [2**53, 2**60, -(2**53) - 1, 2**62])
def test_integers_that_floats_do_not_tell_apart_are_different_cases(base):
    pair = [{"x": base}, {"x": base + 1}]
    assert len(set(case_keys(pair).tolist())) == 2
    assert case_seed(pair[0]) != case_seed(pair[1])
    assert sweep(lambda x: {"last": x % 2}, pair)["last"].values.tolist() in ([0, 1], [1, 0])


def test_generator_given_to_a_function_is_seeded_by_the_case():
    import torch

    def draw(x, generator):
        return {"u": float(torch.rand((), generator=generator, dtype=torch.float64))}

    ds = sweep(draw, {"x": [0, 1]}, seed=3)
    seeds = [case_seed({"x": x}, 3) for x in (0, 1)]
    again = [draw(0, torch.Generator().manual_seed(seed))["u"] for seed in seeds]
    assert ds["u"].values.tolist() == again


def test_what_a_case_draws_after_a_sweep_of_its_own_goes_on_where_it_was():
    def outer(x, sweeps):
        before = functions.drawn(x)
        if sweeps:
            sweep(functions.drawn, {"x": [1, 2]}, progress=False)
        after = functions.drawn(x)
        return before | {f"{name}_after": value for name, value in after.items()}

    inside, without = (
        sweep(outer, {"x": [1, 2, 3]}, fixed={"sweeps": sweeps}) for sweeps in (True, False)
    )
    xr.testing.assert_equal(inside, without)
    assert len({*inside["torch_after"].values.tolist()}) == 3


def test_sweeps_of_threads_that_overlap_leave_generators_as_the_first_found_them():
    under_way, other_under_way, ended = (threading.Event() for _ in range(3))

    def first(x):
        under_way.set()
        return {"y": float(other_under_way.wait(60))}

    def second(x):
        other_under_way.set()
        return {"y": float(ended.wait(60))}

    def states():
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()  # noqa: NPY002

    before = states()
    threads = [
        threading.Thread(target=sweep, args=(fn, {"x": [x]}), kwargs={"progress": False})
        for x, fn in enumerate((first, second))
    ]
    threads[0].start()
    assert under_way.wait(60)
    threads[1].start()
    threads[0].join()
    ended.set()
    threads[1].join()
    assert states() == before


def test_vectorised_function_is_given_the_seeds_of_its_cases():
    task = Task(
        lambda x, seeds: {"low": seeds % 2**31},
        [Variable("low", "low bits of the seed", dtype="int64")],
        batched=True,
    )
    ds = sweep(task, {"x": [1.5, 2.5]}, seed=9)
    assert ds["low"].values.tolist() == [case_seed({"x": x}, 9) % 2**31 for x in (1.5, 2.5)]


@pytest.mark.parametrize("batched", [False, True])
def test_a_seed_that_a_partial_binds_is_that_of_every_case(batched):
    task = Task(
        functools.partial(lambda x, seed=0, seeds=0: {"y": x + seed + seeds}, seed=3, seeds=4),
        [Variable("y", "sum")],
        batched=batched,
    )
    assert sweep(task, {"x": [1.0, 2.0]})["y"].values.tolist() == [8.0, 9.0]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((functions.square, {"x": [1, 1.0]}), ValueError, "different cases, got {'x': 1.0} twice"),
        ((functions.square, {"x": [np.nan]}), ValueError, "got NaN"),
        ((functions.square, {"x": np.ma.masked_less([1, 2], 2)}), ValueError, "got a masked one"),
        ((functions.square, {"x": [True, 1]}), TypeError, "truth values or texts, got a mixture"),
        ((functions.square, {"x": [2**53 + 1, 0.5]}), ValueError, "got 9007199254740993"),
        ((lambda **case: {"y": 1.0}, {"a b": [1]}), ValueError, r"identifiers .*, got \['a b'\]"),
        ((Task(lambda x, seeds: {}, name="f"), {"x": [1]}), TypeError, "take generator or seed"),
        (
            (Task(lambda x, seed: {}, [Variable("y", "y")], batched=True), {"x": [1]}),
            TypeError,
            "'seed'; beside these it may take seeds",
        ),
        ((functions.square, {"x": []}), ValueError, "at least one case"),
        ((functions.square, [{"x": 1}, {}]), ValueError, "at least one parameter"),
        *(
            ((functions.square, {"x": values}), TypeError, "expected a sequence of values")
            for values in ("abc", b"abc", {1, 2}, {1: 2}, 1, np.array(1))
        ),
        ((functions.square, {"x": np.array([1], "M8[ns]")}), TypeError, "got np.datetime64"),
        ((functions.square, {"x": [[1, 2]]}), TypeError, "put other data into `fixed`"),
        ((functions.square, {"z": [1]}), TypeError, "fn: expected a function of the parameters"),
        ((lambda x: {"x": x}, {"x": [1]}), ValueError, r"got \['x'\]"),
        ((lambda x: x, {"x": [1]}), ValueError, "mapping from name to number"),
        ((lambda x: {"y": [x]}, {"x": [1]}), ValueError, "declare variables and dimensions"),
        (
            (functions.PICKY_BATCHED, [{"x": 1}, {"y": 1}]),
            (TypeError, ValueError),
            "expected a function of|same parameters",
        ),
    ],
)
def test_a_mistake_of_the_program_is_an_error_at_once(arguments, error, text):
    with pytest.raises(error, match=text):
        sweep(*arguments)


@pytest.mark.parametrize("name", ["progress", "retry_failed", "accept_changed_code"])
def test_no_text_counts_as_a_truth_value(name, tmp_path):
    with pytest.raises(TypeError, match=f"{name}: expected True or False, got 'no'"):
        sweep(functions.square, {"x": [1]}, store=tmp_path / "s", **{name: "no"})
    assert not (tmp_path / "s").exists()


def test_a_name_in_the_grid_and_fixed_is_refused():
    with pytest.raises(ValueError, match=r"got \['offset'\] in both"):
        sweep(functions.square, {"x": [1], "offset": [1]}, fixed={"offset": 2})


@pytest.mark.parametrize(
    ("attrs", "error"),
    [({"flag": True}, TypeError), ({"d": {}}, TypeError), ({"provenance": "mine"}, ValueError)],
)
def test_attributes_that_no_format_takes_are_refused_before_the_first_case(attrs, error):
    def never(x):
        raise AssertionError

    with pytest.raises(error, match="expected text or a number|another name than provenance"):
        sweep(never, {"x": [1]}, attrs=attrs)


@pytest.mark.parametrize(
    ("variables", "coords", "grid", "text"),
    [
        (["status"], {}, {}, r"got \['status'\]"),
        (["y"], {"case": [1]}, {}, r"got \['case'\]"),
        (["y"], {}, {"message": ["a"]}, r"got \['message'\]"),
        (["y", "y"], {}, {}, r"got \['y'\]"),
        (["y"], {"x": [1]}, {"x": [1]}, r"got \['x'\]"),
        ([], {}, {}, r"expected those of a task, such as .*, got \(\)"),
    ],
)
def test_a_name_means_one_thing(variables, coords, grid, text):
    def run():
        named = [Variable(name, name) for name in variables]
        return sweep(Task(lambda **parameters: {}, named, coords=coords), grid)

    with pytest.raises(ValueError, match=text):
        run()


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ({"function": None}, TypeError, "fn: expected a function or a Task, got None"),
        ({"variables": Variable("y", "y")}, TypeError, "variables: expected a list of results.V"),
        ({"variables": ["y"]}, TypeError, r"variables: expected a list of .*, got \['y'\]"),
        ({"batched": True}, ValueError, r"of a batched task, such as \[Variable\(.*, got None"),
        ({"parameters": "x"}, TypeError, "parameters: expected a list of results.Variable, got"),
        ({"coords": [1]}, TypeError, "coords: expected values by dimension, got list"),
        ({"coords": {"p": 1}}, ValueError, "list of values along 'p', got 0 axes"),
        ({"coords": {"p": np.eye(2)}}, ValueError, "list of values along 'p', got 2 axes"),
        (
            {"variables": [Variable("y", "y", dims=("head",))]},
            ValueError,
            r"values along \['head'\]",
        ),
    ],
)
def test_a_task_says_what_it_expects(how, error, text):
    with pytest.raises(error, match=text):
        Task(**({"function": functions.square} | how))


def test_the_coordinates_of_a_task_are_its_own():
    places = np.array([1.0, 2.0])
    task = Task(lambda x: {"y": [x, x]}, [Variable("y", "y", dims=("p",))], coords={"p": places})
    places[:] = 7.0
    assert sweep(task, {"x": [0.0]})["p"].values.tolist() == [1.0, 2.0]


def test_in_a_pipe_one_line_is_printed_and_failures_are_logged_once(capfd, caplog):
    with caplog.at_level(logging.INFO, logger="meanfield"):
        sweep(functions.PICKY, {"x": range(200)})
    captured = capfd.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1 and "| 200/200 [" in captured.err
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings == [
        "1 of 200 cases failed and 1 did not converge; `status` and `message` say which"
    ]


def test_cases_that_have_not_converged_are_told_where_none_has_failed(caplog):
    with caplog.at_level(logging.WARNING):
        sweep(lambda x: {"y_converged": x > 1}, {"x": [1, 2]}, progress=False)
    assert "0 of 2 cases failed and 1 did not converge" in caplog.text


def test_cases_of_a_product_grid_run_the_last_name_fastest():
    assert cases_of({"a": [1, 2], "b": (True, False)}) == [
        {"a": 1, "b": True},
        {"a": 1, "b": False},
        {"a": 2, "b": True},
        {"a": 2, "b": False},
    ]


def test_settings_of_any_kind_may_be_fixed_without_a_store():
    ds = sweep(lambda x, f: {"y": f(x)}, {"x": [2.0]}, fixed={"f": abs})
    assert ds["y"].values.tolist() == [2.0]
    assert "built-in function abs" in results.read_provenance(ds)["spec"]["fixed"]["f"]


def trained(x, model, rng=None):
    """The loss before a step of descent, which changes the model."""
    loss = (model(torch.tensor([[float(x)]])) ** 2).sum()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
    return {"loss": float(loss.detach())}


def test_what_a_case_does_to_a_fixed_setting_no_other_case_sees():
    model = torch.nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(0.5)
    for xs in ([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]):
        ds = sweep(trained, {"x": xs}, fixed={"model": model}, progress=False)
        np.testing.assert_allclose(ds.loss, (ds.x + 0.5) ** 2, rtol=1e-6)


@pytest.mark.parametrize(
    "rng", [np.random.default_rng(0), np.random.RandomState(0), torch.Generator(), Random(0)]
)
def test_a_generator_is_no_fixed_setting(rng):
    with pytest.raises(TypeError, match=r"expected no generator, got rng=.*its own"):
        sweep(trained, {"x": [1.0]}, fixed={"model": 1, "rng": rng}, progress=False)


def test_what_is_one_setting_under_two_names_stays_one_and_what_says_what_it_is_is_not_copied():
    class Model:
        identified_by = ()

    class Listed(list):
        identified_by = ()

    model, shared, listed = Model(), [1.0], Listed()

    def same(x, m, a, b, held):
        held.append(x)
        return {"same": float(m is model and a is b), "long": float(len(held))}

    fixed = {"m": model, "a": shared, "b": shared, "held": listed}
    ds = sweep(same, {"x": [1.0, 2.0]}, fixed=fixed, progress=False)
    assert ds.same.values.tolist() == ds.long.values.tolist() == [1.0, 1.0]


def test_what_cannot_be_copied_is_whole_under_each_of_its_names():
    both = [1.0, threading.Lock()]
    ds = sweep(
        lambda x, a, b: {"long": float(len(a) + len(b))},
        {"x": [1.0]},
        fixed={"a": both, "b": both},
        progress=False,
    )
    assert ds.long.values.tolist() == [4.0]


def test_minus_zero_is_the_case_zero():
    for x in (-0.0, np.float32(-0.0)):
        ds = sweep(lambda x: {"sign": float(np.copysign(1.0, x))}, {"x": [x]}, progress=False)
        assert ds.sign.values == 1 and not np.signbit(ds.x.values)


def test_the_first_case_may_fail_like_any_other():
    ds = sweep(lambda a: {"y": 1 / a}, {"a": [0, 1, 2]})
    assert ds["status"].values.tolist() == [3, 1, 1]
    assert ds["y"].values[1:].tolist() == [1.0, 0.5]
    assert "ZeroDivisionError" in str(ds["message"].values[0])


def test_a_function_that_always_raises_says_so_itself():
    with pytest.raises(
        ValueError, match=r"every case that was tried \(2\).*ZeroDivisionError: division"
    ):
        sweep(lambda a: {"y": a / 0}, {"a": [1, 2]})


def test_arrays_with_names_for_their_axes_are_stacked_with_their_coordinates(tmp_path):
    how = {"store": tmp_path / "s", "progress": False}
    sweep(functions.heads, {"x": [1.0]}, **how)
    ds = sweep(functions.heads, {"x": [1.0, 2.0]}, **how)
    assert ds.gain.dims == ("case", "head") and ds["head"].values.tolist() == ["p", "q", "r"]
    assert ds.gain.attrs == {"long_name": "gain of a head", "units": "m"}
    np.testing.assert_array_equal(ds.gain, [[0, 1, 2], [0, 2, 4]])


def test_axes_go_by_their_names_and_what_stands_beside_them_is_kept():
    ds = sweep(functions.table, {"x": [1.0, 2.0]}, progress=False)
    np.testing.assert_array_equal(ds.u[1], 2 * ds.u[0])
    assert ds.u.dims == ("case", "t", "k") and ds["t"].values.tolist() == [0.0, 0.5]
    assert ds.word.values.tolist() == [["a", "b"]] * 2
    ds = sweep(functions.lengthening, {"x": [1.0, 2.0]}, progress=False)
    assert ds.status.values.tolist() == [1, 3]
    assert "t: expected the coordinates of the first case" in str(ds.message[1].values)


def test_a_sweep_into_a_file_says_where_it_stands_and_what_it_found(tmp_path, capsys):
    task = Task(functions.square, [Variable("y", "square")])
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
            bar.advance(1)
    # After 65 and 130 seconds, and at the end.
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_what_stands_beside_the_axis_of_an_array_is_kept():
    def two(x):
        beside = {"t": [0.0, np.nan], "word": ("t", ["a", "b"])}
        return xr.DataArray([x, 2 * x], dims="t", coords=beside, name="y")

    ds = sweep(two, {"x": [1.0, 2.0]}, progress=False)
    assert ds.status.values.tolist() == [1, 1]
    assert ds.word.values.tolist() == [["a", "b"]] * 2
    task = Task(two, [Variable("y", "y", dims=("t",))], coords={"t": [0.0, np.nan]})
    assert sweep(task, {"x": [1.0]}, progress=False).y.values.tolist() == [[1.0, 2.0]]


def test_the_place_at_which_an_array_was_taken_is_no_variable():
    table = xr.DataArray([[1.0, 2.0], [3.0, 4.0]], dims=("x", "t"), coords={"x": [5.0, 6.0]})
    ds = sweep(lambda x: table.sel(x=x), {"x": [5.0, 6.0]}, progress=False)
    assert ds.value.values.tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_axes_of_other_numbers_are_refused_in_each_case():
    def apart(x):
        return xr.DataArray([x, x], dims="t", coords={"t": [0.0, x]})

    assert sweep(apart, {"x": [1.0, 2.0]}, progress=False).status.values.tolist() == [1, 3]


def test_members_of_numeric_enumerations_are_their_numbers():
    one = enum.IntEnum("Kind", "one two")
    half = enum.Enum("Half", {"half": 0.5}, type=float)
    for member, number in ((one.one, 1), (half.half, 0.5)):
        (case,) = cases_of({"n": [member]})
        assert type(case["n"]) is type(number)
        assert case_seed(case) == case_seed({"n": number})
        assert case_keys([case]) == case_keys([{"n": number}])
    with pytest.raises(ValueError, match="twice"):
        cases_of({"n": [one.one, 1]})


def test_missing_times_are_the_same_coordinates_in_every_case():
    places = np.array(["2020", "NaT"], "M8[ns]")
    ds = sweep(
        lambda a: xr.DataArray([a, 2 * a], dims="when", coords={"when": places}, name="y"),
        {"a": [1.0, 2.0]},
    )
    assert ds.y.values.tolist() == [[1.0, 2.0], [2.0, 4.0]] and (ds.status == 1).all()


def test_a_failed_case_is_said_where_nobody_has_set_up_logging(tmp_path):
    code = """
from meanfield import sweep

def f(a):
    return {"y": 1 / a}

sweep(f, {"a": [0, 1]}, progress=False)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "1 of 2 cases failed" in done.stderr


def reciprocal(x):
    return {"y": 1 / x}


@pytest.mark.parametrize(("n", "shard"), [(4, (0, 2)), (40, (0, 3)), (40, (1, 3)), (7, None)])
def test_of_a_new_store_nothing_is_found_whatever_was_tried_first(
    n, shard, tmp_path, capsys, caplog
):
    grid, index, n_shards = {"x": list(range(n))}, *(shard or (0, 1))
    with caplog.at_level(logging.WARNING, "meanfield"):
        sweep(reciprocal, grid, store=tmp_path / "a.sweep", shard=shard, progress=True)
    assert "found" not in capsys.readouterr().err
    failed = f"1 of {len(range(index, n, n_shards))} cases failed"
    said = [record.getMessage() for record in caplog.records]
    assert any(line.startswith(failed) for line in said) == (index == 0), said


def test_failures_that_a_store_holds_count_with_the_new_ones(tmp_path, caplog):
    task = Task(lambda x: reciprocal(x % 3), [Variable("y", "1/x")], name="every third")
    for n in (3, 6, 6):
        caplog.clear()
        sweep(task, {"x": range(n)}, store=tmp_path / "s", progress=False)
        (said,) = (record.getMessage() for record in caplog.records)
        assert said.startswith(f"{n // 3} of {n} cases failed and 0 did not")


@pytest.mark.parametrize(("batched", "counts"), [(False, (4, 3, 3)), (True, (4, 4, 2))])
def test_of_a_shard_its_own_cases_are_counted(batched, counts, tmp_path, capsys):
    task = Task(functions.square, [Variable("y", "square")], batched=batched)
    for n_found in (0, 1):
        for index, n in enumerate(counts):
            sweep(task, {"x": range(10)}, store=tmp_path / "s", shard=(index, 3))
            said = capsys.readouterr().err
            assert f" {n}/{n} [" in said and (f"{n} of {n} cases found" in said) == n_found


def test_what_stands_beside_the_axes_of_arrays_in_a_dict_is_kept():
    def case(x):
        beside = {"t": [0, 1], "word": ("t", ["a", "b"]), "scalar": 3}
        return {"y": xr.DataArray([x, 2 * x], dims="t", coords=beside), "z": x}

    ds = sweep(case, {"x": [1.0, 2.0]}, progress=False)
    assert ds.word.values.tolist() == [["a", "b"]] * 2 and ds.z.values.tolist() == [1.0, 2.0]
    assert ds.t.values.tolist() == [0, 1] and "scalar" not in ds


@pytest.mark.parametrize("kind", ["datetime64[ns]", "datetime64[D]", "timedelta64[s]"])
def test_an_axis_may_be_of_dates_in_a_store_too(kind, tmp_path):
    days = np.array([20454, 20455]).astype(kind)

    def case(x, words):
        return xr.Dataset({"y": ("day", [x, 2 * x])}, {"day": days, "word": ("day", words)})

    fixed, store, task = {"words": np.array(["a", "bc"])}, tmp_path / "s", Task(case, name="days")
    first, again, more = (
        sweep(task, {"x": x}, fixed=fixed, store=store) for x in ([1.0], [1.0], [1.0, 2.0])
    )
    xr.testing.assert_identical(first, again)
    xr.testing.assert_identical(results.read_dataset(store), more)
    assert np.array_equal(more.day.values, days) and more.y.values.tolist()[1] == [2.0, 4.0]


@pytest.mark.parametrize(
    ("along", "words"),
    [
        (np.array([b"a"]), r"texts or dates along 'day', got \|S1"),
        (np.array([1j]), "texts or dates along 'day', got complex128"),
    ],
)
def test_an_axis_that_no_store_holds_is_refused_at_once(along, words):
    with pytest.raises(TypeError, match=words):
        Task(lambda x: {}, name="days", coords={"day": along})


def test_an_axis_of_a_multi_index_is_refused_at_once(tmp_path):
    pairs = pd.MultiIndex.from_tuples([(1, 2), (3, 4)])

    def case(x):
        return xr.Dataset({"y": ("p", [x, x])}, xr.Coordinates.from_pandas_multiindex(pairs, "p"))

    with pytest.raises(ValueError, match=r"along 'p', got tuples, .* ds\.reset_index"):
        sweep(Task(case, name="pairs"), {"x": [1.0]}, store=tmp_path / "s")


def test_a_dataset_is_no_grid():
    grid = xr.Dataset({"n": ("case", [1, 2])}, coords={"R": ("case", [10, 20])})
    with pytest.raises(TypeError, match=r"its table is ds\.to_dataframe\(\)\.reset_index\(\)"):
        sweep(lambda n, R: {"y": n + R}, grid)
    ds = sweep(
        lambda n, R: {"y": n + R},
        grid.to_dataframe().reset_index()[["n", "R"]].to_dict("records"),
        progress=False,
    )
    assert ds.y.values.tolist() == [11, 22]
