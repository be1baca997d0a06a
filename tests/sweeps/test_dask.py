"""The same sweep on a dask cluster: equal, also if a case kills its worker; see `test_kill`."""

from __future__ import annotations

import pytest
import xarray as xr

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


def test_a_case_that_kills_its_worker_fails_alone(tmp_path, client):
    run = {"fixed": {"how": "SIGKILL"}, "store": tmp_path / "s", "executor": client}
    ds = sweep(functions.POISON, {"x": range(12)}, **run)
    assert ds["status"].values.tolist() == [3 if x == 3 else 1 for x in range(12)]
