"""The command line as a user sees it: files, messages, exit codes."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import meanfield
from meanfield import cli, results
from meanfield.errors import NoCases
from meanfield.experiments import masked_bound, two_dirac
from meanfield.results import encoding
from meanfield.sweeps import Task, batches, status, sweep

SMALL = [
    *("--quick", "--set", "radii=[1.0, 1.5]", "--set", "n_tokens=[2, 5]"),
    *("--set", "secant_tokens=[5]", "--set", "steps=[1e-1, 1e-4]", "--set", "split_radii=[2.0]"),
    *("--set", "offsets=[0.0]", "--set", "log_ratios=[-900.0]", "--set", "dims=[2]"),
]


# All of them are drawn in `test_figures.py`.
FIGURES = {name: two_dirac.EXPERIMENT.figures[name] for name in ("growth-in-n", "splitting")}
FEWER = dataclasses.replace(two_dirac.EXPERIMENT, figures=FIGURES)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two_dirac, "EXPERIMENT", FEWER)
        formats = ["--format", "pdf", "--format", "svg"]
        assert cli.main(["run", "two-dirac", *SMALL, *formats, "--out", str(folder)]) == 0
    return folder


def test_a_run_leaves_both_datasets_and_every_figure(finished):
    zarr = results.read_dataset(finished / "two-dirac.zarr")
    netcdf = results.read_dataset(finished / "two-dirac.nc")
    assert zarr.sizes == netcdf.sizes
    for name in ("value", "euclidean", "wasserstein_secant"):
        np.testing.assert_array_equal(zarr[name], netcdf[name])
    for name in FIGURES:
        for suffix in ("png", "pdf", "svg"):
            assert (finished / f"two-dirac-{name}.{suffix}").stat().st_size > 2000


def test_a_run_ends_with_lines_of_python_that_work(tmp_path, capsys):
    # The cases of two-dirac are no product grid, those of quadratic-growth are.
    small = ["--quick", "--no-figures", "--out", str(tmp_path)]
    for name, command in (("two-dirac", SMALL), ("quadratic-growth", [])):
        assert cli.main(["run", name, *command, *small]) == 0
        code, words = (
            capsys.readouterr().out.splitlines()[-1].removeprefix("in Python: ").split(" has one ")
        )
        ds = eval(code, {"meanfield": meanfield})
        assert ("case" in ds.sizes) == (words == "row per case")
    assert words == "axis per parameter"


def test_status_of_a_folder_names_the_stores_in_it(finished, caplog):
    assert cli.main(["status", str(finished)]) == 1
    assert "it holds two-dirac.sweep" in caplog.text


def test_a_run_is_what_the_settings_say(finished):
    ds = results.read_dataset(finished / "two-dirac.nc")
    assert set(ds.radius.values) == {1.0, 1.5, 2.0}
    assert set(ds.n_tokens.values) == {0, 2, 5}
    record = results.read_provenance(ds)
    assert record["versions"]["meanfield"]
    assert record["spec"]["fixed"]["s.secant_tokens"] == [5]


def test_plot_draws_a_finished_run_again(finished, tmp_path, monkeypatch):
    store = str(finished / "two-dirac.nc")
    monkeypatch.setattr(two_dirac, "EXPERIMENT", FEWER)
    assert cli.main(["plot", store, "--out", str(tmp_path)]) == 0
    drawn = {f"two-dirac-{name}.png" for name in FIGURES}
    assert {path.name for path in tmp_path.iterdir()} == drawn  # PDF on request only


def test_settings_come_from_a_toml_file_and_set_wins(tmp_path, capsys):
    config = tmp_path / "small.toml"
    config.write_text("radii = [1.0]\nn_tokens = [99]\ngamma = 2\n")
    command = ["run", "two-dirac", *SMALL[:1], "--config", str(config), "--set", "radii=[2.0]"]
    command += ["--set", "split_radii=[]", "--set", "offsets=[0.0]", "--no-figures"]
    command += ["--set", "secant_tokens=[]", "--set", "dims=[1]", "--out", str(tmp_path)]
    assert cli.main(command) == 0
    ds = results.read_dataset(tmp_path / "two-dirac.nc")
    assert set(ds.radius.values) == {2.0}
    # --quick makes small what the file has large, and leaves the rest.
    assert 99 not in ds.n_tokens.values
    assert ds.attrs["gamma"] == 2
    assert "0 failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "two-dirac", "--config", "/nonexistent.toml"], "nonexistent.toml"),
        (["grade", "/nonexistent.npy"], "nonexistent.npy: there is no such file"),
        (["plot", "/nonexistent.nc"], "nonexistent.nc"),
        (["report", "/nonexistent.nc"], "nonexistent.nc"),
        (["status", "/nonexistent.zarr"], "nonexistent.zarr"),
        (["run", "two-dirac", "--out", __file__], "--out: expected a folder, got the file"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_1(arguments, words, capsys):
    said_in_one_sentence(arguments, 1, words, capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "three-dirac"], "experiment: expected one of 'two-dirac', "),
        (["run", "two-dirc"], "did you mean 'two-dirac'?"),
        (
            ["run", "two-dirac", "--set", "radius=1"],
            "got 'radius'; did you mean 'radii'?",
        ),
        (
            ["run", "two-dirac", "--set", "radii=1,2"],
            "'radii': expected a list in brackets, such as --set 'radii=[1,2]', got '1,2'",
        ),
        (["run", "two-dirac", "--set", "radii"], "expected key=value, got 'radii'"),
        (["run", "two-dirac", "--set", "radii=[1.0, 2"], "'radii': broken TOML, [1.0, 2:"),
        (["run", "two-dirac", "--set", "gamma=1.0\nseed=7"], "'gamma': expected one value"),
        (["run", "two-dirac", "--set", "gamma=fast"], "'gamma': expected float"),
        (["run", "two-dirac", "--set", "radii=true"], "'radii': expected float"),
        (["run", "two-dirac", "--config", str(Path(cli.__file__))], "expected TOML, got: "),
        (["run", "two-dirac", "--set", "gamma=-1"], "gamma: expected a number > 0"),
        (["run", "two-dirac", "--quick", "--set", "radii=[1, 1]"], "expected different cases"),
        (["run", "through-depth", "--quick", "--set", "models=[]"], "expected at least one case"),
        (["run", "two-dirac", "--set", "masks=yes"], "'masks': expected bool"),
        (["run", "through-depth", "--set", "causal=maybe"], "expected True or False, got 'maybe'"),
        (["run", "real-text", "--quick", "--set", "dtype=half"], "expected one of 'float32', "),
        (["run", "two-dirac", "--case-timeout", "5"], "--case-timeout: expected --workers"),
    ],
)
def test_what_the_line_asks_for_and_is_not_there_is_exit_code_2(
    arguments, words, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    said_in_one_sentence(arguments, 2, words, capsys)
    assert not any(tmp_path.iterdir())


def said_in_one_sentence(arguments, code, words, capsys):
    assert cli.main(arguments) == code
    out, said = capsys.readouterr()
    assert words in said and not out
    assert "Traceback" not in said
    assert len(said.strip().splitlines()) == 1


def test_asked_for_there_is_a_traceback_and_the_same_exit_code(capsys):
    for arguments, code in ((["run", "three-dirac"], 2), (["plot", "/nonexistent.nc"], 1)):
        assert cli.main(["-v", *arguments]) == code
        assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("run", "required: NAME; one NAME of `meanfield list`"),
        ("run two-dirac sharpness", "sharpness; one NAME of"),
        ("run two-dirac --set radii 1.0 2.0", "each setting has a --set of its own"),
        ("run two-dirac --set gamma=1.0 seed=7", "seed=7; one NAME .* has a --set of its own"),
        ("run two-dirac --seed=1", "--seed=1; --set seed=1"),
        ("run --seeds 3 two-dirac", "two-dirac; --set seed=1"),
        ("run two-dirac --fast", "; --quick"),
        ("run two-dirac --verbose", "; -v stands before the command"),
        ("list -v", "; -v stands before the command"),
        ("--quick run two-dirac", "--quick; it stands behind the command"),
        ("run two-dirac -j 2", "; --workers N"),
        ("run two-dirac --n-workers 2", "did you mean '--workers'"),
        ("run two-dirac --no-plots", "; --no-figures"),
        ("run two-dirac --force", "; a run goes on"),
        ("run two-dirac --overwrite", "; a run goes on"),
        ("run two-dirac --device cuda", "; experiments run on the CPU"),
        ("run two-dirac --dtype float32", "; experiments run on the CPU"),
        ("run two-dirac --dry-run", "; --quick"),
        ("run two-dirac --print-config", "; an unknown --set is answered with all settings"),
        ("report a.nc --open", "; the last line names the file"),
        ("report a.nc --seed 1", "--seed 1$"),
    ],
)
def test_options_of_other_programs_are_answered_with_ours(line, words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(line.split())
    usage, said = capsys.readouterr().err.strip().rsplit("\n", 1)
    assert ended.value.code == 2
    assert re.search(words, said)
    command = next(word for word in line.split() if word[0] != "-")
    assert usage.startswith(f"usage: meanfield {command} ")


def test_status_and_report_speak_of_the_run(finished, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(two_dirac, "EXPERIMENT", FEWER)
    store = str(finished / "two-dirac.zarr")
    for name in ("two-dirac.zarr", "two-dirac.sweep", "two-dirac.nc"):
        assert cli.main(["status", "--check", str(finished / name)]) == 0
    assert "0 not converged, 0 failed" in capsys.readouterr().out
    assert cli.main(["report", store, "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "two_dirac_lower" in page


def test_the_cube_of_a_run_has_the_page_of_any_dataset(tmp_path, capsys):
    ds = sweep(lambda x: {"y": x}, {"x": [1]}, attrs={"experiment": "two-dirac"}, progress=False)
    path = results.write_dataset(results.to_cube(ds), tmp_path / "cube.nc")
    assert cli.main(["report", str(path)]) == 0
    assert cli.main(["plot", str(path)]) == 1
    assert "expected a Dataset with particles through time" in capsys.readouterr().err
    assert two_dirac.EXPERIMENT.finish(results.to_cube(ds)).identical(results.to_cube(ds))


def test_a_run_at_one_step_has_the_page_of_any_dataset(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(two_dirac, "EXPERIMENT", FEWER)
    ds = results.read_dataset(finished / "two-dirac.zarr")[["value", "euclidean_secant"]]
    for one in (ds.isel(step=0), ds.mean("step", keep_attrs=True)):
        path = results.write_dataset(one, tmp_path / "one.nc")
        assert cli.main(["report", str(path)]) == 0
        assert 'alt="local Wasserstein constant' in path.with_suffix(".html").read_text("utf-8")


def test_status_is_of_the_store_that_is_named(tmp_path, capsys):
    for n, name in ((1, "exp"), (2, "exp.sweep")):
        sweep(Task(lambda x: {"y": x}, name="one"), {"x": range(n)}, store=tmp_path / name)
        capsys.readouterr()
        assert cli.main(["status", str(tmp_path / "exp")]) == 0
        assert "1 of 1 cases done" in capsys.readouterr().out


def test_a_sweep_of_ones_own_has_a_report_and_figures(tmp_path, capsys):
    store = tmp_path / "own.sweep"
    sweep(Task(lambda x: {"inverse": 1 / x}, name="inverse"), {"x": [1, 0, 2]}, store=store)
    assert cli.main(["report", str(store)]) == 0
    page = (tmp_path / "own.html").read_text(encoding="utf-8")
    assert "3 cases of 1 parameter" in page and "2 ok, 1 failed" in page
    assert "1 failed: ZeroDivisionError" in page
    assert 'alt="inverse against x."' in page
    capsys.readouterr()
    assert cli.main(["plot", str(store)]) == 3
    said = capsys.readouterr()
    assert "3 cases, 0 not converged, 1 failed" in said.out and "ZeroDivisionError" in said.err
    assert (tmp_path / "own-inverse.png").stat().st_size > 2000
    sweep(Task(lambda x: {"y": x}, name="one"), {"x": [1]}, store=tmp_path / "one.sweep")
    capsys.readouterr()
    assert cli.main(["plot", str(tmp_path / "one.sweep")]) == 1
    assert "expected a Dataset with particles through time" in capsys.readouterr().err


def test_a_defect_of_a_figure_is_exit_code_1_and_a_figure_without_cases_is_none(
    finished, tmp_path, capsys, monkeypatch
):
    def lacking(ds, *, ax):
        raise NoCases("no masked cases")

    def broken(ds, *, ax):
        ax.set_title(r"$\\beta$")  # which is no formula

    store, out = str(finished / "two-dirac.nc"), str(tmp_path / "page.html")
    for figures, code, words in (
        ({"lacking": lacking}, 0, "no masked cases"),
        ({"lacking": lacking, "broken": broken}, 1, "ParseException"),
    ):
        one = dataclasses.replace(two_dirac.EXPERIMENT, figures=figures)
        monkeypatch.setattr(two_dirac, "EXPERIMENT", one)
        assert cli.main(["plot", store, "--out", str(tmp_path)]) == code
        said = capsys.readouterr()
        assert words in said.out + said.err
        assert cli.main(["report", store, "--out", out]) == code
    assert "Not drawn: no masked cases" in Path(out).read_text(encoding="utf-8")


def test_an_older_run_has_the_figures_that_it_can_have(finished, tmp_path, capsys):
    ds = results.read_dataset(finished / "two-dirac.nc")
    del ds.attrs["gamma"]
    older = results.write_dataset(ds.drop_vars("euclidean_secant"), tmp_path / "older.nc")
    assert cli.main(["plot", str(older)]) == 0
    said = capsys.readouterr().out
    assert "no figure growth-in-radius: the Dataset has no attribute 'gamma'" in said
    assert "got one without ['euclidean_secant']" in said
    assert (tmp_path / "two-dirac-splitting.png").exists()


def test_the_same_run_again_computes_nothing_and_another_is_refused(finished, capsys, monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("a finished case was computed again")

    monkeypatch.setattr(batches, "_outcomes", refuse)
    command = ["run", "two-dirac", *SMALL, "--no-figures", "--out", str(finished)]
    assert cli.main(command) == 0

    def unanswered(ds: object) -> list[str]:
        raise NoCases("the settings left out what the answer is about")

    one = dataclasses.replace(two_dirac.EXPERIMENT, answer=unanswered)
    monkeypatch.setattr(two_dirac, "EXPERIMENT", one)
    assert cli.main(command) == 0
    assert cli.main([*command, "--set", "gamma=0.5"]) == 1
    assert "gamma" in capsys.readouterr().err


def test_shards_together_are_the_run(finished, tmp_path):
    command = ["run", "two-dirac", *SMALL, "--no-figures", "--out", str(tmp_path)]
    for shard in ("0/2", "1/2"):
        assert cli.main([*command, "--shard", shard]) == 0
    assert cli.main(command) == 0
    whole, ds = (
        results.read_dataset(tmp_path / "two-dirac.nc"),
        results.read_dataset(finished / "two-dirac.nc"),
    )
    np.testing.assert_array_equal(whole.value, ds.value)
    with pytest.raises(SystemExit):
        cli.main([*command, "--shard", "2/2"])


def test_wrong_usage_is_exit_code_2(capsys):
    run = ["run", "two-dirac"]
    workers = [[*run, "--workers", text] for text in ("0", "²", "1.5", "-1", "two")]
    timeouts = [[*run, "--workers", "1", "--case-timeout", text] for text in ("0", "nan", "x")]
    shards = [[*run, "--shard", text] for text in ("²/4", "4", "1/0", "2/2", "-1/2", "/")]
    for arguments in (["fly"], ["run"], [*run, "--n", "4"], *workers, *timeouts, *shards):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        assert caught.value.code == 2
    assert "usage: meanfield" in capsys.readouterr().err
    for flag in ("--version", "-V"):
        with pytest.raises(SystemExit, match="0"):
            cli.main([flag])
        assert capsys.readouterr().out == f"{meanfield.__version__}\n"


def test_failed_cases_are_counted_and_exit_code_3(tmp_path, capsys):
    # e^{γR²} leaves the number range at R = 30: the case fails, the others are kept.
    command = ["run", "two-dirac", "--quick", "--no-figures", "--out", str(tmp_path)]
    changes = {
        "radii": "[1.0, 30.0]",
        "n_tokens": "[2]",
        "secant_tokens": "[]",
        "offsets": "[0.0]",
        "split_radii": "[]",
        "log_ratios": "[]",
    }
    for key, value in changes.items():
        command += ["--set", f"{key}={value}"]
    assert cli.main(command) == 3
    said = capsys.readouterr()
    assert "4 failed" in said.out
    assert "range of torch.float64" in said.err
    ds = results.read_dataset(tmp_path / "two-dirac.nc")
    assert sorted(set(ds.radius.values[ds.status.values == 3])) == [30.0]
    assert np.isnan(ds.value.values[ds.status.values == 3]).all()


def test_a_run_whose_cases_all_failed_says_why_and_draws_nothing(tmp_path, capsys):
    command = ["run", "two-dirac", "--quick", "--out", str(tmp_path)]
    for key in ("n_tokens=[]", "secant_tokens=[]", "offsets=[0.0]", "split_radii=[]"):
        command += ["--set", key]
    command += ["--set", "radii=[30.0]", "--set", "log_ratios=[]"]
    assert cli.main(command) == 3
    said = capsys.readouterr()
    assert "4 of 4 cases failed; the first says: OverflowError: " in said.err
    assert [file.name for file in tmp_path.iterdir()] == ["two-dirac.sweep"]
    for action in ("plot", "report"):
        assert cli.main([action, str(tmp_path / "two-dirac.sweep")]) == 1
        assert "no case has an answer, 4 failed; the first says: " in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["two-dirac.sweep"]


def test_nothing_that_somebody_else_has_made_is_replaced(finished, tmp_path, capsys):
    store = str(finished / "two-dirac.sweep")
    before = {file.name for file in finished.iterdir()}
    for name in ("page.html", "two-dirac-splitting.png", "two-dirac.nc"):
        (tmp_path / name).write_text("mine")
    assert cli.main(["report", store, "--out", str(tmp_path / "page.html")]) == 1
    assert cli.main(["run", "two-dirac", *SMALL, "--out", str(tmp_path)]) == 1
    assert not (tmp_path / "two-dirac.sweep").exists()  # said before the work, not after
    assert (tmp_path / "page.html").read_text() == "mine"
    assert {file.name for file in finished.iterdir()} == before
    assert cli.main(["status", "--check", store]) == 0


def test_status_check_is_exit_code_1_for_damaged_and_for_missing_files(finished, tmp_path, capsys):
    store = tmp_path / "two-dirac.sweep"
    shutil.copytree(finished / "two-dirac.sweep", store)
    assert cli.main(["status", "--check", str(store)]) == 0
    batch = max(store.glob("batch-*.npz"))
    whole = batch.read_bytes()
    batch.write_bytes(whole[:99] + bytes([whole[99] ^ 1]) + whole[100:])
    assert cli.main(["status", str(store)]) == 0
    assert cli.main(["status", "--check", str(store)]) == 1
    assert f"damaged: {batch.name}" in capsys.readouterr().out
    batch.unlink()
    assert cli.main(["status", "--check", str(store)]) == 1
    assert f"missing: {batch.name}" in capsys.readouterr().out


def test_threads_are_those_of_each_case(tmp_path, monkeypatch):
    before, bounds_of, seen = torch.get_num_threads(), two_dirac._bounds, set()

    def counting(*case):
        seen.add(torch.get_num_threads())
        return bounds_of(*case)

    monkeypatch.setattr(two_dirac, "_bounds", counting)
    small = ["--set", "n_tokens=[2]", "--set", "secant_tokens=[]", "--set", "split_radii=[]"]
    try:
        for n_threads in (1, 3):
            seen.clear()
            command = ["run", "two-dirac", *SMALL, *small, "--threads", str(n_threads)]
            out = str(tmp_path / str(n_threads))
            assert cli.main([*command, "--no-figures", "--out", out]) == 0
            assert seen == {n_threads}
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_during_a_case_keeps_those_before_it(tmp_path, capsys, monkeypatch, name):
    number, constant_of, n_calls = getattr(signal, name), masked_bound.local_lipschitz, 0

    def interrupted(*case, **how):
        nonlocal n_calls
        n_calls += 1
        if n_calls == 5:
            os.kill(os.getpid(), number)
        return constant_of(*case, **how)

    monkeypatch.setattr(masked_bound, "local_lipschitz", interrupted)
    command = ["run", "masked-bound", "--quick", "--set", "clouds=1"]
    assert cli.main([*command, "--no-figures", "--out", str(tmp_path)]) == 128 + number
    store = tmp_path / "masked-bound.sweep"
    n_kept = status(store).n_done
    assert n_kept >= 4
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith(f"meanfield: ended by {name}: {n_kept} of ")
    assert not list(store.glob(".*"))
    # What was cut short is drawn with a line that says so.
    assert cli.main(["plot", str(store)]) == 0
    waiting = re.search(r"0 failed, (\d+) pending", capsys.readouterr().out)
    assert waiting and int(waiting[1]) > 0


@pytest.mark.parametrize(
    ("number", "n_workers"),
    [
        pytest.param("SIGINT", 0, marks=pytest.mark.slow),
        pytest.param("SIGTERM", 0, marks=pytest.mark.slow),
        pytest.param("SIGTERM", 2, marks=pytest.mark.slow),
        pytest.param("SIGHUP", 0, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_with_a_line_that_is_true_and_a_whole_store(tmp_path, number, n_workers):
    number = getattr(signal, number)
    code = """if True:
        import sys, time
        from meanfield import cli
        sizes = [i / 1000 for i in range(1000)]
        sys.exit(cli.main(["run", "masked-bound", "--set", f"sizes={sizes}", "--out", sys.argv[1],
                           *sys.argv[2:]]))
    """
    workers = ["--workers", str(n_workers)] if n_workers else []
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), *workers], stderr=subprocess.PIPE, text=True
    )
    store, deadline = tmp_path / "masked-bound.sweep", time.monotonic() + 60
    while not list(store.glob("batch-*.npz")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    said = process.communicate(timeout=30)[1].strip().splitlines()
    assert process.returncode == 128 + number
    n_kept = status(store).n_done
    assert said[-1].startswith(f"meanfield: ended by {number.name}: {n_kept} of ")
    assert str(store) in said[-1]
    assert not list(store.glob(".*"))


def test_list_and_info_say_what_there_is(capsys):
    assert cli.main(["list"]) == 0
    assert "two-dirac" in capsys.readouterr().out
    assert cli.main(["info"]) == 0
    said = capsys.readouterr().out
    assert "torch" in said
    assert "threads" in said
    for command, key in (("list", "name"), ("info", "torch")):
        assert cli.main([command, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert key in (found[0] if command == "list" else found)


@pytest.mark.parametrize("given", [["rum", "two-dirac"], ["-v", "rum"]])
def test_a_command_that_is_none_is_answered_with_the_nearest(given, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(given)
    assert ended.value.code == 2
    assert "got 'rum'; did you mean 'run'?" in capsys.readouterr().err


def run_few(out):
    few = ["n_tokens=[2]", "secant_tokens=[]", "split_radii=[]"]
    sets = [word for setting in few for word in ("--set", setting)]
    return cli.main(["run", "two-dirac", *SMALL, *sets, "--no-figures", "--out", str(out)])


def test_a_run_that_netcdf_cannot_hold_keeps_its_zarr(tmp_path, capsys, monkeypatch):
    """A limit of 8 bytes stands for 2 GiB."""
    assert run_few(tmp_path) == 0
    monkeypatch.setattr(encoding, "_MOST_BYTES", 8)
    assert run_few(tmp_path) == 0
    said = capsys.readouterr()
    assert re.search(r"two-dirac\.nc is not written: .*: expected at most 2 GiB", said.err)
    assert (
        "ends in .zarr takes more\n" in said.err and "cases, 0 not converged, 0 failed" in said.out
    )
    assert results.read_dataset(tmp_path / "two-dirac.zarr").sizes["case"]
    assert not (tmp_path / "two-dirac.nc").exists()  # that of the earlier run


def test_a_folder_whose_name_is_not_utf_8_is_written_like_any_other(tmp_path, capsys, monkeypatch):
    folder = os.path.join(tmp_path, os.fsdecode(b"caf\xe9"))
    monkeypatch.setattr(sys, "argv", ["meanfield", "run", "--out", folder])  # in the provenance
    assert run_few(folder) == 0
    assert "caf\\udce9/two-dirac.nc\n" in capsys.readouterr().out
    ds = results.read_dataset(os.path.join(folder, "two-dirac.nc"))
    assert "caf\\udce9" in results.read_provenance(ds)["command"]


def test_nothing_but_lines_goes_into_a_pipe(tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "meanfield", "run", "two-dirac", *SMALL),
            *("--set", "n_tokens=[2]", "--set", "secant_tokens=[]", "--set", "split_radii=[]"),
            *("--no-figures", "--out", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "\r" not in done.stderr
    assert "cases, 0 not converged, 0 failed" in done.stdout


def test_a_reader_that_has_gone_ends_the_lines_and_not_the_work(monkeypatch, capsys):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert cli.main(["list"]) == 0
        pipe.write("what is left in the buffer goes nowhere")
    assert not capsys.readouterr().err


def test_without_arguments_it_says_what_to_do_next(capsys):
    assert cli.main([]) == 0
    said = capsys.readouterr().out
    for command in ("list", "run", "report", "status", "info"):
        assert f"meanfield {command}" in said
