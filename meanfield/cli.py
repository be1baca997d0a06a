"""The command line: run an experiment, draw a finished one, say what is installed.

Exit codes: 0 done, 1 an error (one sentence on stderr), 2 wrong usage, 3 finished with failed
cases.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from meanfield.experiments import EXPERIMENTS, load

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["main"]

_logger = logging.getLogger("meanfield")
_PACKAGES = (
    *("meanfield", "torch", "numpy", "scipy", "POT", "geomloss", "xarray", "zarr", "matplotlib"),
    *("pykeops", "dask", "distributed", "transformers", "pooch", "netCDF4"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    _configure_logging(options.verbose)
    try:
        return int(options.action(options))
    except KeyboardInterrupt:
        _logger.error("interrupted; finished cases are kept, continue with --resume")
        return 1
    except (ValueError, TypeError, OSError, RuntimeError, ImportError, LookupError) as error:
        if options.verbose:
            raise
        _logger.error("%s", error)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="meanfield",
        description="Self-attention as a map of measures: Lipschitz constants and transport.",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log more, show tracebacks")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    listing = commands.add_parser("list", help="the experiments")
    listing.set_defaults(action=_list)

    run = commands.add_parser("run", help="run an experiment, save its Dataset and figures")
    run.add_argument("name", metavar="NAME", help="one of: " + ", ".join(EXPERIMENTS))
    run.add_argument("--quick", action="store_true", help="small grid, seconds instead of minutes")
    run.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a setting, for example --set 'radii=[1.0, 2.0]' (TOML values; repeatable)",
    )
    run.add_argument("--config", type=Path, metavar="FILE", help="settings from a TOML file")
    run.add_argument("--out", type=Path, default=Path("results"), metavar="DIR", help="where to")
    run.add_argument("--workers", type=int, metavar="N", help="processes (default: this one)")
    run.add_argument("--threads", type=int, default=1, metavar="N", help="torch threads (1)")
    run.add_argument("--resume", action="store_true", help="keep the finished cases of DIR")
    run.add_argument("--no-figures", action="store_true", help="only the Dataset")
    run.set_defaults(action=_run)

    plot = commands.add_parser("plot", help="draw the figures of a finished run again")
    plot.add_argument("store", type=Path, metavar="STORE", help="a .zarr folder or a .nc file")
    plot.add_argument("--out", type=Path, metavar="DIR", help="where to (default: beside STORE)")
    plot.set_defaults(action=_plot)

    info = commands.add_parser("info", help="versions, extras and devices, for a bug report")
    info.set_defaults(action=_info)
    return parser


def _configure_logging(verbose: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("meanfield: %(message)s"))
    _logger.handlers[:] = [handler]
    _logger.setLevel(logging.DEBUG if verbose else logging.INFO)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def _list(options: argparse.Namespace) -> int:
    width = max(map(len, EXPERIMENTS))
    for name, summary in EXPERIMENTS.items():
        _say(f"{name:{width}}  {summary}")
    return 0


def _run(options: argparse.Namespace) -> int:
    experiment = load(options.name)
    settings = _settings(experiment, options)
    import torch

    from meanfield import results

    # Small cases: a second thread waits more than it works, ten times slower on a busy machine.
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    ds = experiment.run(settings)
    for suffix in (".zarr", ".nc"):
        _say(f"wrote {results.write(ds, options.out / (options.name + suffix))}")
    if not options.no_figures:
        _draw(ds, options.out)
    return _summary(ds)


def _settings(experiment: ModuleType, options: argparse.Namespace) -> Any:
    """The experiment's settings: its own, then the file's, then those of --set."""
    chosen = experiment.QUICK if options.quick else experiment.Settings()
    changes: dict[str, Any] = {}
    if options.config is not None:
        changes |= tomllib.loads(options.config.read_text(encoding="utf-8"))
    for text in options.set:
        key, separator, value = text.partition("=")
        if not separator:
            raise ValueError(f"--set: expected KEY=VALUE, got {text!r}")
        changes[key.strip()] = _toml_value(value.strip())
    known = {field.name: field for field in dataclasses.fields(chosen)}
    for key, value in changes.items():
        if key not in known:
            raise ValueError(f"unknown setting {key!r}; {options.name} has: {', '.join(known)}")
        changes[key] = _fitting(key, value, getattr(chosen, key))
    return dataclasses.replace(chosen, **changes)


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # a bare word


def _fitting(key: str, value: Any, current: Any) -> Any:
    """The value in the type of the current one, or an error that says what is expected."""
    if isinstance(current, tuple):
        items = value if isinstance(value, list) else [value]
        kind = type(current[0]) if current else type(items[0])
        return tuple(_fitting(key, item, kind()) for item in items)
    if isinstance(current, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not type(current):
        raise ValueError(
            f"setting {key!r}: expected {type(current).__name__} such as {current!r}, "
            f"got {value!r}"
        )
    return value


def _draw(ds: xr.Dataset, folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from meanfield import figures

    experiment = load(ds.attrs["experiment"])
    for name, (function, arguments) in experiment.FIGURES.items():
        with figures.style():
            ax = getattr(figures, function)(ds, **arguments)
            for suffix in (".png", ".pdf"):
                path = folder / f"{ds.attrs['experiment']}-{name}{suffix}"
                ax.figure.savefig(path)
                _say(f"wrote {path}")
            plt.close(ax.figure)


def _summary(ds: xr.Dataset) -> int:
    """Say how many cases there are and how many went wrong; the exit code."""
    states = ds["status"].values
    failed, loose = int((states == 3).sum()), int((states == 2).sum())
    _say(f"{len(states)} cases, {loose} not converged, {failed} failed")
    if failed:
        first = ds["message"].values[(states == 3).argmax()]
        _logger.error("%d of %d cases failed; the first says: %s", failed, len(states), first)
    return 3 if failed else 0


def _plot(options: argparse.Namespace) -> int:
    from meanfield import results

    ds = results.read(options.store)
    if "experiment" not in ds.attrs:
        raise ValueError(f"{options.store}: not a Dataset of `meanfield run`; no experiment named")
    folder = options.out or options.store.parent
    folder.mkdir(parents=True, exist_ok=True)
    _draw(ds, folder)
    return 0


def _info(options: argparse.Namespace) -> int:
    import importlib.metadata
    import platform

    _say(f"python        {platform.python_version()} on {platform.platform()}")
    for package in _PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        _say(f"{package:13} {version}")
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    _say(f"{'devices':13} {', '.join(['cpu', *devices])}, {torch.get_num_threads()} threads")
    return 0
