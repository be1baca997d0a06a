"""A flow killed at random moments resumes and ends with the same bits."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import xarray as xr

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, dynamics, sampling
from meanfield.dynamics import resuming
from meanfield.results.arrays import write_arrays

KINDS = ("rk4", "dopri5", "noise", "coalesce", "functionals", "layers")
N_TIMES, PROBES = 30, 2  # by two measures it is told which flow a store holds


def arguments(kind: str, slowness: int = 1) -> dict:
    """The arguments of a flow of a tenth of a second, or of a slower one."""
    g = torch.Generator().manual_seed(3)
    B, V = torch.randn(2, 3, 3, generator=g, dtype=torch.float64)
    x = sampling.sphere(60, 3, generator=g)
    F = SelfAttention(AttentionParameters.from_bilinear(4 * torch.eye(3).double(), V))
    base = {"F": F, "mu": ParticleMeasure(x), "times": np.linspace(0, 3, N_TIMES)}
    base["constraint"] = "sphere"
    if kind == "rk4":
        return base | {"method": "rk4", "step": 4e-2 / slowness}
    if kind == "noise":
        noise = dynamics.Noise(0.1, torch.Generator().manual_seed(5))
        return base | {"method": "euler", "step": 2e-2 / slowness, "noise": noise}
    if kind == "layers":
        other = SelfAttention(AttentionParameters.from_bilinear(B, V))
        return base | {"F": [F, other, F], "method": "rk4", "step": 4e-2 / slowness}
    if kind == "functionals":
        seen = {"energy": lambda m: dynamics.log_energy(m, B), "size": dynamics.diameter}
        return base | {
            "method": "rk4",
            "step": 4e-2 / slowness,
            "observe": seen,
            "keep_points": False,
        }
    rtol = 1e-6 if slowness == 1 else 1e-10
    method = dynamics.Adaptive("dopri5", rtol, rtol / 100)
    return base | {"method": method, "coalesce": 1e-3 if kind == "coalesce" else 0.0}


SCRIPT = """
import sys
import torch
from meanfield import dynamics
from tests.dynamics.test_store import arguments

torch.set_num_threads(1)
dynamics.flow(**arguments(sys.argv[1], 20), store=sys.argv[2])
"""


def start(kind, store) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", SCRIPT, kind, str(store)], env=environment)


def records(store) -> int:
    return len(list(store.glob("time-*.npz"))) if store.exists() else 0


def same(ds: xr.Dataset, other: xr.Dataset) -> None:
    xr.testing.assert_identical(ds.drop_attrs(), other.drop_attrs())


class Stopped(Exception):
    pass


@pytest.mark.parametrize("kind", KINDS)
def test_a_flow_that_was_stopped_goes_on_and_ends_with_the_same_bits(kind, tmp_path):
    whole = dynamics.flow(**arguments(kind))
    calls = 0

    def interrupted(mu):
        nonlocal calls
        calls += 1
        if calls > PROBES + N_TIMES // 2:
            raise Stopped
        return 0.0

    settings = arguments(kind)
    seen = settings.pop("observe", {}) | {"zero": interrupted}
    with pytest.raises(Stopped):
        dynamics.flow(**settings, observe=seen, store=tmp_path / "s")
    assert records(tmp_path / "s") == N_TIMES // 2
    calls = -(10**9)
    ds = dynamics.flow(**arguments(kind) | {"observe": seen}, store=tmp_path / "s")
    assert calls == -(10**9) + PROBES + N_TIMES - N_TIMES // 2, "did finished work again"
    same(ds.drop_vars("zero"), whole)
    # A finished one is read.
    calls = -(10**9)
    same(dynamics.flow(**arguments(kind) | {"observe": seen}, store=tmp_path / "s"), ds)
    assert calls == -(10**9) + PROBES


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_flow_killed_again_and_again_ends_with_the_same_bits(kind, tmp_path):
    torch.set_num_threads(1)
    whole = dynamics.flow(**arguments(kind, 20))
    store, killed = tmp_path / "s", 0
    rng = np.random.default_rng(0)
    for _ in range(4):
        before = records(store)
        process = start(kind, store)
        deadline = time.monotonic() + 120
        while process.poll() is None and records(store) <= before:
            assert time.monotonic() < deadline, "no progress in two minutes"
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.1))
        killed += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert killed >= 1
    same(dynamics.flow(**arguments(kind, 20), store=store), whole)


def test_a_store_of_another_flow_is_refused_by_the_fields_that_differ(tmp_path):
    base = arguments("rk4") | {"times": [0.0, 0.1]}
    dynamics.flow(**base, store=tmp_path / "s")
    other = SelfAttention(AttentionParameters.from_bilinear(torch.eye(3), torch.eye(3)).to(
        torch.float64
    ))  # fmt: skip
    moved = base["mu"].replace(base["mu"].points.flip(0))
    for change, field in [
        ({"times": [0.0, 0.2]}, "times"),
        ({"step": 1e-3}, "method"),
        ({"constraint": None}, "constraint"),
        ({"F": other}, r"F\[0\]"),
        ({"mu": moved}, "start"),
        ({"observe": {"size": dynamics.diameter}}, "observe"),
        ({"keep_points": False}, "keep_points"),
    ]:
        with pytest.raises(ValueError, match=f"another flow: .*{field}"):
            dynamics.flow(**base | change, store=tmp_path / "s")


@pytest.mark.parametrize("writes", range(7))
def test_a_flow_that_dies_before_any_write_goes_on_with_the_same_bits(
    writes, tmp_path, monkeypatch
):
    """Identity, and per time a record and then the state: 7 writes."""
    base = arguments("rk4") | {"times": [0.0, 0.1, 0.2]}
    whole, left = dynamics.flow(**base), iter(range(writes))

    def until_it_dies(path, arrays):
        if next(left, None) is None:
            raise Stopped
        return write_arrays(path, arrays)

    with monkeypatch.context() as patch:
        patch.setattr(resuming, "write_arrays", until_it_dies)
        with pytest.raises(Stopped):
            dynamics.flow(**base, store=tmp_path / "s")
    same(dynamics.flow(**base, store=tmp_path / "s"), whole)


def test_a_map_that_has_changed_a_little_is_another_flow(tmp_path):
    base = arguments("rk4") | {"times": [0.0, 0.1]}
    dynamics.flow(**base, store=tmp_path / "s")
    V = base["F"].parameters.value[0]
    eye = 4 * torch.eye(3, dtype=torch.float64)
    changed = SelfAttention(AttentionParameters.from_bilinear(eye, (1 + 1e-3) * V))
    with pytest.raises(ValueError, match=r"another flow: .*F\[0\]"):
        dynamics.flow(**base | {"F": changed}, store=tmp_path / "s")


def test_what_a_killed_process_left_half_written_is_not_taken(tmp_path):
    base = arguments("rk4") | {"times": [0.0, 0.1, 0.2]}
    whole = dynamics.flow(**base, store=tmp_path / "s")
    (tmp_path / "s" / ".time-000002.npz-0123").write_bytes(b"half")
    same(dynamics.flow(**base, store=tmp_path / "s"), whole)
    (tmp_path / "s" / "time-000001.npz").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="cannot be read"):
        dynamics.flow(**base, store=tmp_path / "s")


def other_energy(mu):
    return 2 * dynamics.diameter(mu)


def test_another_observable_and_a_map_that_agrees_at_the_start_are_refused(tmp_path):
    """All particles at one point: their image does not depend on the scores."""
    start = ParticleMeasure(torch.ones(5, 3, dtype=torch.float64))
    eye = torch.eye(3, dtype=torch.float64)

    def flow(scores, observed):
        F = SelfAttention(AttentionParameters.from_bilinear(scores, eye))
        noise = dynamics.Noise(0.1, torch.Generator().manual_seed(5))
        return dynamics.flow(F, start, [0.0, 0.1], method="euler", step=0.1, noise=noise,
                             observe={"size": observed}, store=tmp_path / "s")  # fmt: skip

    first = flow(eye, dynamics.diameter)
    same(flow(eye, dynamics.diameter), first)
    with pytest.raises(ValueError, match=r"another flow: F\[0\] scattered differ"):
        flow(2 * eye, dynamics.diameter)
    with pytest.raises(ValueError, match="another flow: observe size scattered differ"):
        flow(eye, other_energy)


def damages(folder, other):
    """Each file deleted, cut, emptied, turned by a bit, or taken from elsewhere."""
    files = sorted(folder.glob("*.npz"))
    for file in files:
        data = file.read_bytes()
        yield file, None
        yield file, b""
        yield file, data[: len(data) // 2]
        for at in np.linspace(0, len(data) - 1, 5).astype(int):
            yield file, data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
        for stranger in (*files, *sorted(other.glob("*.npz"))):
            if stranger.read_bytes() != data:
                yield file, stranger.read_bytes()


def test_no_damaged_exchanged_or_foreign_file_of_a_flow_gives_a_wrong_number(tmp_path):
    base, n_refused, n_right, n_tried = arguments("rk4") | {"times": [0.0, 0.1, 0.2]}, 0, 0, 0
    whole = dynamics.flow(**base, store=tmp_path / "s")
    turned = base["mu"].replace(-base["mu"].points)
    dynamics.flow(**base | {"mu": turned}, store=tmp_path / "other")
    for file, damage in damages(tmp_path / "s", tmp_path / "other"):
        store, n_tried = tmp_path / "damaged", n_tried + 1
        shutil.copytree(tmp_path / "s", store)
        name = file.name
        (store / name).unlink() if damage is None else (store / name).write_bytes(damage)
        try:
            same(dynamics.flow(**base, store=store), whole)
        except ValueError as error:
            n_refused += name in str(error) or "another flow" in str(error)
        else:
            n_right += 1
        shutil.rmtree(store)
    assert n_refused > 50 and n_refused + n_right == n_tried
