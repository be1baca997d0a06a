"""A process that has imported everything and forks children, which run sweeps and are killed.

It reads a line of JSON for each child: mode, store, address of a dask scheduler or "". The child
prints its process id when it leads a session of its own; its exit code is printed when it has
ended. A child is where a fresh process is after its imports, without the seconds that these take.

Each child writes the numbers of cases that are reported as done into the file STORE.reported. In
the mode "script" the store is a script, run as ``python PATH`` in its folder; what it prints goes
into NAME.out and NAME.err.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import threading
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import zarr.codecs  # noqa: F401
from tqdm import tqdm

from meanfield import results
from meanfield.results import store as storing
from meanfield.sweeps import sweep
from meanfield.sweeps.run import Progress
from tests.sweeps import sweep_functions as functions

N, REPETITIONS, SEED = [2, 4, 8], 40, 4
SECONDS = {"dask-worker": 0.05, "dask-scheduler": 0.05}  # a case takes, by mode; else 10 ms


def settings(mode: str, store: Path) -> dict[str, Any]:
    """What identifies the sweep of a mode."""
    fixed: dict[str, Any] = {"seconds": SECONDS.get(mode, 0.01)}
    if mode == "retry":
        return {"fn": functions.MOODY_NOISE, "seed": SEED,
                "fixed": fixed | {"cure": f"{store}.cure"}}  # fmt: skip
    return {"fn": functions.SLOW_NOISE, "seed": SEED, "fixed": fixed}


def run(mode: str, store: Path, address: str = "") -> None:
    """The sweep of a mode, as its user runs it."""
    arguments = settings(mode, store) | {"store": store, "batch_size": 4}
    grid = {"n": N, "repetition": range(REPETITIONS)}
    if mode == "extension":  # ever more cases, and files that are merged
        storing._MOST_FILES = 8
        for count in range(1, REPETITIONS + 1, 3):
            sweep(grid={"n": N, "repetition": range(count)}, **arguments)
    elif mode == "end":  # everything is done: it is merged and exported, over what is there
        storing._MOST_FILES = 1
        ds = sweep(grid=grid, **arguments)
        for suffix in (".nc", ".zarr"):
            results.write_dataset(ds, store.with_suffix(suffix))
    elif mode == "pool":
        with ProcessPoolExecutor(2) as pool:
            sweep(grid=grid, executor=pool, **arguments)
    elif address:
        from distributed import Client

        with Client(address) as client:
            sweep(grid=grid, executor=client, **arguments)
    else:
        executor = 2 if mode.startswith("worker") else None
        sweep(grid=grid, executor=executor, retry_failed=mode == "retry", **arguments)


def report_to(path: Path) -> None:
    """Write down how many cases are reported as done, whenever some are."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    advance = Progress.advance

    def reported(self: Any, n_cases: int) -> None:
        os.write(descriptor, f"{n_cases}\n".encode())
        advance(self, n_cases)

    Progress.advance = reported  # type: ignore[method-assign]


def run_script(path: Path) -> None:
    """Run a file as the main program."""
    os.chdir(path.parent)
    for descriptor, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{path.name}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.argv = [path.name]
    try:
        runpy.run_path(str(path), run_name="__main__")
    except BaseException:  # Ctrl-C too
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()


def say(number: int) -> None:
    """To the process that asked."""
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def main() -> None:
    """Load what sweeps load when they need it, then fork a child for each line."""
    with tempfile.TemporaryDirectory() as folder:
        # Nothing is exported: Zarr starts a thread, and threads do not fork.
        sweep(functions.NOISE, {"n": N, "repetition": [0]}, store=Path(folder) / "s")
    # That of tqdm is shared by all children, and one that is killed may hold it.
    tqdm.set_lock(threading.RLock())
    for line in sys.stdin:
        mode, store, address = json.loads(line)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setsid()
                say(os.getpid())
                if mode == "script":
                    run_script(Path(store))
                else:
                    report_to(Path(f"{store}.reported"))
                    run(mode, Path(store), address)
                code = 0
            finally:
                os._exit(code)
        say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


if __name__ == "__main__":
    main()
