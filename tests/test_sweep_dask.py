"""The same sweep on a dask cluster: equal, and it survives the death of a worker."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import xarray as xr

from meanfield.sweeps import sweep
from tests import sweep_functions as functions

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
        while len(list((store / "done" / "c").glob("[0-9]*"))) < 3:
            time.sleep(0.01)
        os.kill(pids[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_after_some_batches)
    killer.start()
    run = {"seed": 2, "fixed": {"seconds": 0.05}}
    ds = sweep(functions.SLOW_NOISE, GRID, **run, store=store, executor=client, batch_size=2)
    killer.join()
    assert set(client.run(os.getpid).values()) != set(pids)
    xr.testing.assert_equal(ds, sweep(functions.SLOW_NOISE, GRID, **run))
