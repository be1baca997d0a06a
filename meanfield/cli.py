"""The command line: run an experiment, draw a finished one, say what is installed."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import meanfield
from meanfield.checks import count, number, suggestion
from meanfield.errors import NoCases
from meanfield.experiments import EXPERIMENTS, get, question_of
from meanfield.habits import sentence_of

if TYPE_CHECKING:
    import xarray as xr

    from meanfield.experiments.experiment import Experiment

_logger = logging.getLogger("meanfield")
_OTHERS = "matplotlib", "pykeops", "dask", "distributed", "transformers", "pooch"


_FIRST_STEPS = """\
meanfield: self-attention as a map of measures, its Lipschitz constants and optimal transport

  meanfield list                                what there is to run
  meanfield run two-dirac --quick --out first   a first experiment: seconds
  meanfield report first/two-dirac.nc           its figures and numbers on one page
  meanfield status first/two-dirac.sweep        how far a run is, and what failed
  meanfield grade gaussian-1000-2.npy           a transport plan of any solver, to an interval
  meanfield info                                versions and devices, for a bug report

In Python: import meanfield; meanfield.transport.w2(x, y). All options: meanfield --help"""
_EXIT_CODES = """\
exit codes: 0 done, 1 an error (one sentence on stderr), 2 wrong usage: options, NAME or
settings that cannot be, and nothing was begun, 3 finished with failed cases, 129 ended by
SIGHUP, 130 by Ctrl-C, 143 by SIGTERM"""
_RUN = "the .sweep, .zarr or .nc of a run"
_OUT = "folder for the store, the Dataset and the figures (default: results)"
_ANSWER = ".npy or .npz named by its problem, or a folder of such (see transport.grade)"
_ANY = "the store of a sweep, or the .zarr or .nc of a Dataset"
_SET = "--set 'radii=[1.0, 2.0]'"
_NAME = "one NAME of `meanfield list`; each setting has a --set of its own: "
# Options of other programs, the option that a command has to have, and what is written here.
_WRITTEN = (
    ("NAME", "--set", _NAME + _SET),
    ("--seed --seeds", "--set", "--set seed=1"),
    ("--fast --small --test", "--quick", "--quick"),
    ("-j --jobs --n-jobs --processes", "--workers", "--workers N"),
    ("--no-plots --no-plot", "--no-figures", "--no-figures"),
    ("--force --overwrite --resume --restart", "--out", "a run goes on; another has an --out"),
    ("--device --gpu --cuda --dtype", "--set", "experiments run on the CPU, in float64"),
    ("--dry-run", "--quick", "--quick, a run of seconds"),
    ("--print-config --show-config", "--set", "an unknown --set is answered with all settings"),
    ("--open --show", "--out", "the last line names the file to open"),
    ("-v --verbose --debug", "", "-v stands before the command: meanfield -v COMMAND"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser, commands = _parser()
    given = sys.argv[1:] if arguments is None else list(arguments)
    if not given:
        _say(_FIRST_STEPS)
        return 0
    command = next((word for word in given if not word.startswith("-")), "list")
    if command not in commands:
        listed = ", ".join(commands)
        parser.error(f"expected one of {listed}, got {command!r}{suggestion(command, commands)}")
    options, unknown = parser.parse_known_args(given)
    if unknown:
        commands[command].error(f"unrecognized arguments: {' '.join(unknown)}")
    with _logging_to_stderr(options.verbose), _ending_by_signal():
        return _act(options)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors say what is written here."""

    def error(self, message: str) -> NoReturn:
        """End with exit code 2, the usage, and the message."""
        kind, _, words = message.partition(": ")
        known, hint = self._option_string_actions, ""
        if kind in ("unrecognized arguments", "the following arguments are required"):
            word = words.split()[0].partition("=")[0] if words.startswith("-") else "NAME"
            near = "; it stands behind the command" if word in known else suggestion(word, known)
            hint = sentence_of(_WRITTEN, word, set(known)) or near
        super().error(message + hint)


class _UsageError(Exception):
    """The line asks for an experiment, or for settings, that cannot be."""


@contextlib.contextmanager
def _asked() -> Iterator[None]:
    """What is refused here is what the line asks for."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise _UsageError(str(error)) from error


class _Ended(KeyboardInterrupt):
    """A signal to end the process: time limit of a cluster (SIGTERM), closed terminal (SIGHUP)."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def _ending_by_signal() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP as Ctrl-C: what is finished is stored, and a line says so."""
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    if threading.current_thread() is not threading.main_thread():
        numbers = []

    def end(number: int, frame: Any) -> None:
        raise _Ended(number)

    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _act(options: argparse.Namespace) -> int:
    try:
        return int(options.action(options))
    except KeyboardInterrupt as error:
        number = error.number if isinstance(error, _Ended) else signal.SIGINT
        said = ["ended by " + signal.Signals(number).name, *getattr(error, "__notes__", [])]
        _logger.error("%s", ": ".join(said))
        return 128 + number
    except _UsageError as error:
        _logger.error("%s", error, exc_info=options.verbose)
        return 2
    except (ValueError, TypeError, OSError, RuntimeError, ImportError, LookupError) as error:
        _logger.error("%s", error, exc_info=options.verbose)
        return 1


def _parser() -> tuple[_Parser, Mapping[str, _Parser]]:
    """The parser, and those of its commands."""
    parser = _Parser(
        prog="meanfield",
        allow_abbrev=False,  # --n would be --no-figures
        description="Self-attention as a map of measures: Lipschitz constants and transport.",
        epilog=_EXIT_CODES,
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log more, show tracebacks")
    parser.add_argument("-V", "--version", action="version", version=meanfield.__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, action: Any, words: str, store: str = "") -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=words, allow_abbrev=False)
        added.set_defaults(action=action)
        if store:
            added.add_argument("store", type=Path, metavar="RUN", help=store)
        return added

    listing = command("list", _list, "the experiments")
    _add_run(command("run", _run, "run an experiment, save its Dataset and figures"))
    state = command("status", _status, "how far a run is, and what failed", _RUN)
    state.add_argument(
        "--check", action="store_true", help="exit code 1 if a file of it is damaged or missing"
    )
    plot = command("plot", _plot, "draw the figures of a finished run again", _RUN)
    plot.add_argument("--out", type=Path, metavar="DIR", help="folder (default: beside it)")
    _add_format(plot)
    report = command("report", _report, "one HTML page of a run or of any Dataset", _ANY)
    report.add_argument("--out", type=Path, metavar="FILE", help="default: RUN with .html")
    grade = command("grade", _grade, "how good other solvers' plans and potentials are")
    grade.add_argument("path", type=Path, metavar="FILE", help=_ANSWER)
    info = command("info", _info, "versions, extras and devices, for a bug report")
    for one in (listing, info):
        one.add_argument("--json", action="store_true", help="for scripts")
    return parser, commands.choices


def _add_run(run: argparse.ArgumentParser) -> None:
    run.add_argument("name", metavar="NAME", help="one of: " + ", ".join(EXPERIMENTS))
    run.add_argument(
        "--quick",
        action="store_true",
        help="small grid and random weights, seconds; those of --config too",
    )
    run.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a setting, for example " + _SET + " (a TOML value; repeatable; "
        "an unknown KEY is answered with those there are)",
    )
    run.add_argument("--config", type=Path, metavar="FILE", help="settings from a TOML file")
    run.add_argument("--out", type=Path, default=Path("results"), metavar="DIR", help=_OUT)
    run.add_argument("--workers", type=_whole, metavar="N", help="processes (default: this one)")
    run.add_argument(
        "--threads", type=_whole, default=1, metavar="N", help="torch threads (default: 1)"
    )
    run.add_argument(
        "--shard", type=_shard, metavar="I/K", help="only every K-th case, for array jobs"
    )
    run.add_argument("--retry-failed", action="store_true", help="run failed cases again")
    run.add_argument(
        "--case-timeout",
        type=_seconds,
        metavar="S",
        help="seconds a case may take, with --workers",
    )
    run.add_argument("--no-figures", action="store_true", help="only the Dataset")
    _add_format(run)


def _add_format(command: argparse.ArgumentParser) -> None:
    words = "each figure as PDF or SVG as well as PNG (repeatable)"
    command.add_argument(
        "--format", action="append", default=["png"], choices=("png", "pdf", "svg"), help=words
    )


def _whole(text: str, least: int = 1) -> int:
    try:
        return count(int(text), "value", least=least)
    except ValueError:
        expected = f"a whole number ≥ {least}"
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}") from None


def _seconds(text: str) -> float:
    try:
        return number(float(text), "value", above=0, finite=False)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number > 0, got {text!r}") from None


def _shard(text: str) -> tuple[int, int]:
    index, _, parts = text.partition("/")
    with contextlib.suppress(argparse.ArgumentTypeError):
        if _whole(index, 0) < _whole(parts):
            return int(index), int(parts)
    raise argparse.ArgumentTypeError(f"expected I/K with 0 ≤ I < K such as 0/4, got {text!r}")


@contextlib.contextmanager
def _logging_to_stderr(verbose: bool) -> Iterator[None]:
    """Log to stderr while a command runs; afterwards restore the caller's logging."""
    handler, level = logging.StreamHandler(sys.stderr), _logger.level
    handler.setFormatter(logging.Formatter("meanfield: %(message)s"))
    _logger.addHandler(handler)
    _logger.setLevel(logging.DEBUG if verbose else logging.INFO)
    show = warnings.showwarning

    def log(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if category is UserWarning:  # the library's own; others are for developers
            _logger.warning("%s", message)
        else:
            show(message, category, *where, **more)

    warnings.showwarning = log
    try:
        yield
    finally:
        warnings.showwarning = show
        _logger.removeHandler(handler)
        _logger.setLevel(level)


def _say(text: str) -> None:
    """Print a line at once. A reader that has gone (`| head`) ends the lines, not the work."""
    encoding = sys.stdout.encoding or "utf-8"  # names of files may be in another one
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _list(options: argparse.Namespace) -> int:
    rows = [
        {"name": name, "question": question_of(name), "paper": paper}
        for name, paper in EXPERIMENTS.items()
    ]
    if options.json:
        _say(json.dumps(rows, indent=1, ensure_ascii=False))
        return 0
    widths = {key: max(len(row[key]) for row in rows) for key in ("name", "question")}
    for row in rows:
        _say("  ".join(f"{text:{widths.get(key, 0)}}" for key, text in row.items()).rstrip())
    return 0


def _run(options: argparse.Namespace) -> int:
    with _asked():
        experiment = get(options.name)
        settings = _settings(experiment, options)
        if options.case_timeout is not None and options.workers is None:
            raise ValueError(
                "--case-timeout: expected --workers N too, processes that can be ended"
            )
    if options.out.exists() and not options.out.is_dir():
        raise ValueError(f"--out: expected a folder, got the file {options.out}")
    store = options.out / f"{options.name}.sweep"
    import torch

    from meanfield.results.atomic import check_replaceable
    from meanfield.results.cases import answered
    from meanfield.sweeps import sweep
    from meanfield.sweeps.grid import cases_of

    for suffix in (".zarr", ".nc"):  # refuse it before hours of work, not after
        check_replaceable(store.with_suffix(suffix))
    # Cases are small: more threads wait for one another, ten times slower on a busy machine.
    torch.set_num_threads(options.threads)
    with _asked():
        plan = experiment.plan(settings)
        cases_of(plan["grid"])  # refuses none, and the same one twice
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--out: expected a folder that can be made, got {options.out}: {error.strerror}"
        ) from None
    ds = sweep(
        **plan,
        store=store,
        executor=options.workers,
        shard=options.shard,
        case_timeout=options.case_timeout,
        retry_failed=options.retry_failed,
    )
    _say(f"wrote {store}")
    known = answered(ds)
    if options.shard or not known.sizes["case"]:
        return _summary(ds)
    ds = experiment.finish(ds)
    _write(ds, store)
    if not options.no_figures:
        begun = time.monotonic()
        _draw(ds, options.name, options.out, stem=options.name, formats=options.format)
        _say(f"figures took {time.monotonic() - begun:.0f} s")
    code = _summary(ds)
    with contextlib.suppress(NoCases):  # settings may leave out what the answer is about
        for line in experiment.answer(known):
            _say(line)
    _say(f"next: meanfield report {store.with_suffix('.zarr')}")
    _say(f"in Python: {_in_python(ds, store.with_suffix('.zarr'))}")
    return code


def _in_python(ds: xr.Dataset, path: Path) -> str:
    """How to read the Dataset of a run, with one axis per parameter if its cases are a grid."""
    from meanfield.results import to_cube

    read = f"meanfield.results.read_dataset({str(path)!r})"
    try:
        to_cube(ds)
    except ValueError:
        return f"{read} has one row per case"
    return f"meanfield.results.to_cube({read}) has one axis per parameter"


def _write(ds: xr.Dataset, store: Path) -> None:
    """The Dataset of a run in both formats, beside its store."""
    from meanfield.results import write_dataset

    _say(f"wrote {write_dataset(ds, store.with_suffix('.zarr'))}")
    try:
        _say(f"wrote {write_dataset(ds, store.with_suffix('.nc'))}")
    except ValueError as error:  # it is whole in the other file
        _logger.warning("%s is not written: %s", store.with_suffix(".nc"), error)
        store.with_suffix(".nc").unlink(missing_ok=True)  # it would be of an earlier run


def _settings(experiment: Experiment, options: argparse.Namespace) -> Any:
    """The settings of a run: the defaults, then the file's, made small by --quick, then --set."""
    from meanfield.experiments.settings import override, quick_of, read_toml

    given = read_toml(options.config) if options.config else {}
    chosen = override(experiment.settings, given)
    return override(quick_of(chosen) if options.quick else chosen, {}, options.set)


def _draw(
    ds: xr.Dataset, name: str | None, folder: Path, *, stem: str, formats: Sequence[str]
) -> None:
    """The figures of an experiment, or those of any Dataset."""
    from meanfield.figures import save_all
    from meanfield.figures.plots import figures_of

    drawings = figures_of(ds) if name is None else get(name).figures
    if not drawings:
        raise ValueError(
            "expected a Dataset with particles through time, or with cases of several values of "
            f"a number, got the variables {list(ds.variables)}"
        )
    for made in save_all(ds, drawings, folder, stem=stem, formats=formats):
        _say(f"wrote {made}" if isinstance(made, Path) else made)


def _summary(ds: xr.Dataset) -> int:
    """Print how many cases there are and how many failed; returns the exit code."""
    from meanfield.results.cases import first_message

    status = ds["status"].values
    pending, _, not_converged, failed = (int((status == code).sum()) for code in range(4))
    waiting = f", {pending} pending" if pending else ""
    _say(f"{len(status)} cases, {not_converged} not converged, {failed} failed{waiting}")
    if failed:
        _logger.error("%d of %d cases failed%s", failed, len(status), first_message(ds))
    return 3 if failed else 0


def _status(options: argparse.Namespace) -> int:
    from meanfield.results.store import is_store
    from meanfield.sweeps import status

    store = options.store
    if not is_store(store) and (beside := store.with_suffix(".sweep")).exists():
        store = beside  # of the run whose file was given
    found = status(store)
    _say(str(found))
    if options.check and (found.damaged or found.missing):
        return 1
    return 3 if found.n_failed else 0


def _plot(options: argparse.Namespace) -> int:
    from meanfield.results.cases import is_sweep

    ds, name = _finished(options.store)
    folder = options.out or options.store.parent
    folder.mkdir(parents=True, exist_ok=True)
    _draw(ds, name, folder, stem=name or options.store.stem, formats=options.format)
    return _summary(ds) if is_sweep(ds) else 0


def _report(options: argparse.Namespace) -> int:
    from meanfield.report import write_report

    ds, name = _finished(options.store)
    about: dict[str, Any] = {}
    if name is not None:
        experiment = get(name)
        title, _, question = experiment.question.partition("\n")
        about = {"title": title, "question": question, "figures": experiment.figures}
    path = options.out or options.store.with_suffix(".html")
    _say(f"wrote {write_report(ds, path, **about)}")
    return 0


def _finished(path: Path) -> tuple[xr.Dataset, str | None]:
    """A Dataset, and the name of the experiment that made it, if it still has its dimensions."""
    from meanfield import results
    from meanfield.results.cases import answered, first_message

    ds = results.read_dataset(path)
    name = ds.attrs.get("experiment")
    if name not in EXPERIMENTS or "case" not in ds.sizes:
        return ds, None
    if not all({*v.dims} <= {*ds[v.name].dims} for v in get(name).variables if v.name in ds):
        return ds, None  # of one layer, say, or a mean over windows
    if not answered(ds).sizes["case"]:
        n_failed = int((ds["message"] != "").sum())
        raise ValueError(f"{path}: no case has an answer, {n_failed} failed{first_message(ds)}")
    return get(name).finish(ds), name


def _grade(options: argparse.Namespace) -> int:
    from meanfield.results.labels import outward
    from meanfield.transport import grade
    from meanfield.transport.submissions import SUFFIXES

    files = [options.path]
    if options.path.is_dir():
        files = sorted(file for file in options.path.iterdir() if file.suffix in SUFFIXES)
        if not files:
            raise ValueError(f"{options.path}: expected files {' or '.join(SUFFIXES)}, got none")
    width = max(32, *(len(file.name) for file in files))
    head = f"{'file':{width}} {'lower':>16} {'upper':>16} {'plan off':>9} {'pot. off':>9}  blame\n"
    failed = []
    for file in files:
        try:
            found = grade(file)
        except (ValueError, OSError) as error:
            _logger.error("%s", error)
            failed.append(file)
            continue
        low, high = (outward(found.lower, 10, up=False), outward(found.upper, 10, up=True))
        ends = f"{low:16.10g} {high:16.10g}"
        errors = f"{found.plan_error:9.1e} {found.potentials_error:9.1e}"
        _say(f"{head}{found.file:{width}} {ends} {errors}  {found.blame}")
        head = ""
    return 0 if not failed else 3 if options.path.is_dir() else 1


def _info(options: argparse.Namespace) -> int:
    import importlib.metadata
    import platform

    from meanfield.results.provenance import PACKAGES

    found = {"python": f"{platform.python_version()} on {platform.platform()}"}
    found["meanfield"] = meanfield.__version__
    for package in (*PACKAGES, *_OTHERS):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found["devices"] = f"{', '.join(['cpu', *devices])}, {torch.get_num_threads()} threads"
    lines = (f"{name:13} {text}" for name, text in found.items())
    _say(json.dumps(found, indent=1) if options.json else "\n".join(lines))
    return 0
