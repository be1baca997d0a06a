"""The same sweep on a dask cluster: equal, and it survives the death of a worker."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import xarray as xr

from meanfield import results
from meanfield.sweeps import sweep
from tests.sweeps import sweep_functions as functions

distributed = pytest.importorskip("distributed")

GRID = {"n": [2, 4, 8], "repetition": range(20)}


# distributed's own deprecations and unclosed sockets are not ours to answer for.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def client(tmp_path):
    with (
        distributed.LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=True,
            dashboard_address=None,
            local_directory=str(tmp_path),
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@pytest.mark.parametrize("stored", [False, True])
def test_sweep_on_a_cluster_equals_the_one_in_process(tmp_path, client, stored):
    store = tmp_path / "s.zarr" if stored else None
    ds = sweep(functions.NOISE, GRID, seed=2, store=store, executor=client, batch_size=7)
    xr.testing.assert_equal(ds, sweep(functions.NOISE, GRID, seed=2))


def test_sweep_ends_in_one_run_though_a_worker_is_killed(tmp_path, client):
    store = tmp_path / "s.zarr"
    pids = list(client.run(os.getpid).values())

    def kill_after_some_batches():
        while len(list(store.glob("batch-*.npz"))) < 3:
            time.sleep(0.01)
        os.kill(pids[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_after_some_batches)
    killer.start()
    run = {"seed": 2, "fixed": {"seconds": 0.05}}
    ds = sweep(functions.SLOW_NOISE, GRID, **run, store=store, executor=client, batch_size=2)
    killer.join()
    assert set(client.run(os.getpid).values()) != set(pids)
    xr.testing.assert_equal(ds, sweep(functions.SLOW_NOISE, GRID, **run))


def test_a_case_that_kills_its_worker_fails_alone(tmp_path, client):
    run = {"fixed": {"how": "SIGKILL"}, "store": tmp_path / "s", "executor": client}
    ds = sweep(functions.POISON, {"x": range(12)}, **run)
    assert ds["status"].values.tolist() == [3 if x == 3 else 1 for x in range(12)]


def test_the_death_of_the_scheduler_is_named_and_finished_batches_are_kept(tmp_path):
    code = "from distributed.cli.dask_scheduler import main; main()"
    port = str(free_port())
    command = [sys.executable, "-c", code, "--port", port, "--no-dashboard", "--host", "127.0.0.1"]
    scheduler = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    worker = subprocess.Popen(
        [sys.executable, "-m", "distributed.cli.dask_worker", f"127.0.0.1:{port}", "--nthreads",
         "1", "--no-dashboard", "--death-timeout", "20"], stderr=subprocess.DEVNULL,
    )  # fmt: skip
    store = tmp_path / "s.zarr"
    try:
        with distributed.Client(f"127.0.0.1:{port}", timeout=60) as client:
            client.wait_for_workers(1)

            def kill_after_some_batches():
                while len(list(store.glob("batch-*.npz"))) < 2:
                    time.sleep(0.01)
                scheduler.kill()

            threading.Thread(target=kill_after_some_batches).start()
            run = {"seed": 2, "fixed": {"seconds": 0.05}, "store": store}
            with pytest.raises(RuntimeError, match="the scheduler, died"):
                sweep(functions.SLOW_NOISE, GRID, **run, executor=client, batch_size=2)
    finally:
        worker.kill()
        scheduler.kill()
    assert int((results.read_dataset(store)["status"] == 1).sum()) >= 4


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
