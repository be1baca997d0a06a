"""Constants in training: the recipes of the page with the real loggers, and the run in data/."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

from meanfield import results

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / ".docs" / "training.md").read_text(encoding="utf-8")
RECIPES = dict(re.findall(r"^## (.*?)\n.*?```python\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL))
IDS = torch.arange(3, 8)
NAMES = {f"{part}/layer{k}" for part in ("attention", "block") for k in range(2)} | {"network"}


def ran(recipe, **names):
    transformers = pytest.importorskip("transformers")
    lines = [line for line in RECIPES[recipe].splitlines() if line.strip()]
    assert len(lines) - sum(line.startswith(("import", "from")) for line in lines) <= 12
    config = transformers.LlamaConfig(
        **{"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "pad_token_id": 0},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16},
    )
    torch.manual_seed(0)
    known = {"transformers": transformers, "model": transformers.LlamaForCausalLM(config)}
    known |= {"ids": IDS} | {
        name: value(known["model"]) if callable(value) else value for name, value in names.items()
    }
    exec(RECIPES[recipe], known)
    return known


def test_a_loop_of_ones_own():
    found = ran(
        "A loop of your own",
        batches=torch.arange(200 * 4).reshape(200, 1, 4) % 50,
        optimiser=lambda model: torch.optim.SGD(model.parameters(), lr=0.5),
        loss_of=lambda _: lambda model, ids: model(input_ids=ids, labels=ids).loss,
    )["log"]
    assert list(found) == [0, 100]
    assert NAMES <= set(found[0]) == set(found[100])
    assert found[0]["block/layer0"] != found[100]["block/layer0"]


def test_the_trainer(tmp_path):
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    rows = [{"input_ids": IDS, "labels": IDS}] * 8

    def trainer(model):
        arguments = transformers.TrainingArguments(
            **{"output_dir": str(tmp_path), "max_steps": 4, "logging_steps": 2},
            **{"report_to": "none", "use_cpu": True, "disable_tqdm": True},
        )
        return transformers.Trainer(model, arguments, train_dataset=rows)

    history = ran("The Trainer of transformers", trainer=trainer)["trainer"].state.log_history
    measured = [entry for entry in history if "block/layer0" in entry]
    assert [entry["step"] for entry in measured] == [2, 4]
    assert all(set(entry) >= NAMES for entry in measured)


def test_weights_and_biases(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    logged, log = {}, wandb.Run.log

    def recorded(run, numbers, step=None, **more):
        logged[step] = numbers
        return log(run, numbers, step=step, **more)

    monkeypatch.setattr(wandb.Run, "log", recorded)
    ran("Weights & Biases")
    assert list(logged) == [0, 1]
    assert set(logged[0]) >= NAMES
    assert list(tmp_path.rglob("*.wandb"))


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ran("TensorBoard", folder=str(tmp_path))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= NAMES
    assert [entry.step for entry in events.Scalars("block/layer1")] == [0, 1]


def test_numbers_of_a_table_are_flat_and_leave_out_what_is_none():
    ds = xr.Dataset(
        {
            "a": (("layer", "head"), [[1.0, np.nan]]),
            "b": ("layer", [True]),
            "c": ("layer", ["x"]),
            "d": 3,
        },
        {"layer": [4]},
    )
    found = results.numbers(ds)
    assert found == {"a/layer4/head0": 1.0, "b/layer4": 1.0, "d": 3.0}
    assert json.loads(json.dumps(found)) == found
    with pytest.raises(TypeError, match="Dataset"):
        results.numbers({})


def test_numbers_of_a_table_that_waits_to_be_read_are_read():
    pytest.importorskip("dask")
    ds = xr.Dataset({"a": ("x", [1.0, 2.0])})
    assert results.numbers(ds.chunk()) == results.numbers(ds) == {"a/x0": 1.0, "a/x1": 2.0}


def test_the_run_in_data_is_certain_and_the_example_draws_it(tmp_path, monkeypatch):
    path = ROOT / "data" / "training.nc"
    ds = results.read_dataset(path)
    assert path.stat().st_size < 1_000_000
    assert ds.block_converged.all() and ds.step[0] == 0 and len(ds.step) > 8
    for part in ("attention", "block"):
        assert (ds[part] <= ds[f"{part}_upper"]).all()
        assert (ds[part] <= ds[f"{part}_bound"]).all() and np.isfinite(ds[f"{part}_bound"]).all()
    # ω of F − id is at most ‖DF‖ − 1, and the network at most the product of the blocks.
    assert (ds.omega <= ds.block_upper - 1).all()
    assert (ds.moved_lower <= ds.moved).all() and (ds.moved > 0).all()
    assert float(ds.loss[-1]) < 0.7 * float(ds.loss[0])
    assert all(variable.attrs["long_name"] for variable in ds.data_vars.values())
    arguments = ["26_monitor.py", "--open", str(path), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(str(ROOT / "examples" / "26_monitor.py"), run_name="__main__")
    assert (tmp_path / "training.png").stat().st_size > 2000
