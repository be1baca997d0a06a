"""The character language model: its parts, and resuming after the process is killed."""

from __future__ import annotations

import math
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from meanfield import bounds, results
from meanfield.attention import SelfAttention
from meanfield.layers import invert
from meanfield.maps import linearize

pytest.importorskip("safetensors")
SCRIPT = Path(__file__).parents[2] / "examples" / "12_character_lm.py"


@pytest.fixture(scope="module")
def lm() -> dict:
    return runpy.run_path(str(SCRIPT), run_name="lm")


@pytest.fixture(scope="module")
def text(lm):
    return lm["Text"].of("the quick brown fox jumps over the lazy dog; " * 40)


def shape(lm, text, variant, **changes):
    sizes = {"depth": 2, "dim": 8, "heads": 2, "context": 8, "factor": 0.7} | changes
    return lm["Shape"](variant, n_symbols=text.n_symbols, **sizes)


def weights_of(lm, model, seed=0):
    return {n: t.double() for n, t in lm["initial"](model, seed).items()}


@pytest.mark.parametrize("variant", ["dot product", "L2", "tied L2", "contractive L2"])
def test_no_character_sees_a_later_one_and_every_matrix_learns(lm, text, variant):
    model = shape(lm, text, variant)
    weights = {n: t.requires_grad_() for n, t in weights_of(lm, model).items()}
    windows = text.batch(3, 8, 0, 0)
    G = lm["network"](model, weights)
    mu = lm["embedded"](weights, windows[:, :-1])
    changed = windows.clone()
    changed[:, 5] = (changed[:, 5] + 1) % text.n_symbols
    before, after = G(mu).points, G(lm["embedded"](weights, changed[:, :-1])).points
    # Up to rounding: values are measured from the mean of them all.
    np.testing.assert_allclose(before[:, :5].detach(), after[:, :5].detach(), atol=1e-14)
    assert float((before[:, 5:] - after[:, 5:]).detach().norm(dim=-1).min()) > 1e-6
    lm["loss"](model, weights, windows).backward()
    for name, tensor in weights.items():
        assert tensor.grad is not None and float(tensor.grad.abs().max()) > 0, name


@pytest.mark.parametrize("scale", [1.0, 7.0])
def test_contractive_layers_have_the_certified_factor_whatever_the_weights(lm, text, scale):
    model = shape(lm, text, "contractive L2", factor=0.6)
    weights = {n: scale * t for n, t in weights_of(lm, model).items()}
    G = lm["certified"](model, weights)
    factors = [layer.scale * layer.map.constant for layer in G.maps]
    assert max(factors) == pytest.approx(0.6, rel=1e-6)
    assert max(factors) <= 0.6 * (1 + 1e-6)
    mu = lm["embedded"](weights, text.windows(8, 2)[:, :-1])
    for layer in G.maps:
        J = linearize(layer.map, mu).atoms.to_dense()
        euclidean = (
            bounds.l2_attention_2(layer.map.map, 8)
            if isinstance(layer.map.map, SelfAttention)
            else layer.map.map.global_upper
        )
        assert float(torch.linalg.matrix_norm(J, 2).max()) <= euclidean
    found = invert(G, G(mu), rtol=1e-9)
    np.testing.assert_allclose(found.measure.points, mu.points, atol=1e-8 * scale)


def test_the_batches_are_a_function_of_seed_and_step(lm, text):
    first, again = text.batch(4, 8, 1, 3), text.batch(4, 8, 1, 3)
    np.testing.assert_array_equal(first, again)
    assert not torch.equal(first, text.batch(4, 8, 1, 4))
    assert not torch.equal(first, text.batch(4, 8, 2, 3))
    starts = {tuple(row.tolist()) for row in text.windows(8)}
    assert len(starts) == len(text.windows(8)) == min(64, (len(text.valid) - 1) // 8)


def test_the_loss_is_that_of_the_uniform_guess_where_nothing_is_known(lm, text):
    model = shape(lm, text, "tied L2")
    weights = weights_of(lm, model) | {"readout": torch.zeros(text.n_symbols, 8).double()}
    assert lm["bits"](model, weights, text) == pytest.approx(math.log2(text.n_symbols))


def test_training_in_two_parts_is_training_in_one(lm, text, tmp_path):
    model = shape(lm, text, "contractive L2", depth=1)
    how = {"seed": 3, "batch": 4, "rate": 1e-2, "every": 4}
    whole, curve = lm["train"](model, text, tmp_path / "whole.st", steps=20, **how)
    # Stopped between two checkpoints: the steps after the last are made again.
    stop = RuntimeError("stop")
    calls = {"left": 11}
    batch = type(text).batch

    def limited(self, *arguments):
        calls["left"] -= 1
        if not calls["left"]:
            raise stop
        return batch(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(text), "batch", limited)
        with pytest.raises(RuntimeError, match="stop"):
            lm["train"](model, text, tmp_path / "parts.st", steps=20, **how)
    parts, again = lm["train"](model, text, tmp_path / "parts.st", steps=20, **how)
    assert again == curve
    assert curve[-1] < curve[0]
    for name, tensor in whole.items():
        np.testing.assert_array_equal(tensor, parts[name])


COMMAND = [
    *(sys.executable, "-W", "ignore", str(SCRIPT)),
    *("--variants", "contractive L2", "tied L2", "--depths", "1", "--seeds", "1"),
    *("--dim", "8", "--heads", "2", "--context", "8", "--batch", "4"),
    *("--steps", "150", "--checkpoint-every", "10"),
]


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_by_bit_the_same(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "MEANFIELD_DATA"}

    def command(name):
        return [*COMMAND, "--out", str(tmp_path / name)]

    subprocess.run(command("whole"), env=environment, check=True, capture_output=True)
    first = tmp_path / "killed" / "checkpoints" / "contractive-L2_1_0.safetensors"
    running = subprocess.Popen(
        command("killed"),
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while not first.exists():
        assert running.poll() is None
        time.sleep(0.01)
    # At once: a little later the first model may be done, and the second without a checkpoint.
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    assert not (tmp_path / "killed" / "character_lm.nc").exists()
    done = subprocess.run(
        command("killed"), env=environment, check=True, capture_output=True, text=True
    )
    assert "goes on from step" in done.stdout
    for path in sorted((tmp_path / "whole" / "checkpoints").iterdir()):
        other = tmp_path / "killed" / "checkpoints" / path.name
        assert path.read_bytes() == other.read_bytes()
    one, two = (
        results.read_dataset(tmp_path / n / "character_lm.nc") for n in ("whole", "killed")
    )
    for name in one.data_vars:
        np.testing.assert_array_equal(one[name], two[name])
    contractive = one.isel(case=np.flatnonzero(one.variant.values == "contractive L2"))
    assert bool(contractive.inverse_converged.all())
    assert float(contractive.inverse_error.max()) <= float(contractive.inverse_certified.max())
    assert float(contractive.inverse_certified.max()) <= 1e-6
    assert (contractive.measured <= contractive.bound).all()
    other = subprocess.run(
        [*command("killed"), "--rate", "0.1"], env=environment, capture_output=True, text=True
    )
    assert other.returncode != 0 and "other settings" in other.stderr
