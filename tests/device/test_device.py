"""Every public function with its tensors on a device: the CPU's answer, on that device.

`pytest -m gpu --device NAME` says where; without a GPU the device is pretended.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

from meanfield import (
    AttentionParameters,
    ParticleMeasure,
    SelfAttention,
    corpora,
    dynamics,
    linalg,
    lipschitz,
    merge,
    sampling,
    sweeps,
    transport,
)
from meanfield.linalg import LinearMap
from meanfield.maps import Linearisation
from tests.interface import calls, right_calls

pytestmark = pytest.mark.gpu

TENSORS = {
    *("x", "y", "a", "s", "A", "V", "F", "J", "mu", "nu", "seq", "later", "light", "params"),
    *("gamma", "masked_gamma", "cross", "tied"),
}
LINES = [
    line
    for line in right_calls.LINES
    if TENSORS & {node.id for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Name)}
]


def numpy_on(device: str) -> SimpleNamespace:
    """The few functions of NumPy that `right_calls` uses, on a device."""

    def array(value: Any) -> torch.Tensor:
        return torch.tensor(value, dtype=torch.float64, device=device)

    return SimpleNamespace(array=array, ones=lambda shape: array(np.ones(shape)), log=torch.log)


def parts(answer: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors, arrays and numbers of an answer; a singular vector has no sign of its own."""
    if isinstance(answer, torch.Tensor):
        yield path, answer.abs() if path.endswith("direction") else answer
    elif isinstance(answer, (LinearMap, Linearisation)):
        yield path, (answer.atoms if isinstance(answer, Linearisation) else answer).to_dense()
    elif isinstance(answer, ParticleMeasure):
        yield from (
            (f"{path}.{name}", getattr(answer, name)) for name in ("points", "log_weights")
        )
    elif isinstance(answer, xr.Dataset):
        yield from ((f"{path}.{name}", column.values) for name, column in answer.items())
    elif is_dataclass(answer):
        for one in fields(answer):
            if one.name != "seconds":
                yield from parts(getattr(answer, one.name), f"{path}.{one.name}")
    elif isinstance(answer, (list, tuple)):
        for k, one in enumerate(answer):
            yield from parts(one, f"{path}[{k}]")
    else:
        yield path, answer


@pytest.mark.parametrize("line", LINES)
def test_a_call_gives_what_it_gives_on_the_cpu(line, device, tmp_path):
    here = dict(parts(calls.value_of(line, tmp=tmp_path)))
    known = {"np": numpy_on(device), "tensor": lambda x: x, "tmp": tmp_path}
    if line.startswith(("layers.LayerNorm", "layers.RMSNorm")):
        line = line.replace("[1.0, 2.0]", "np.array([1.0, 2.0])")
    there = dict(parts(calls.value_of(line, device=device, **known)))
    assert there.keys() == here.keys()
    unequal = {path for path in here if not calls.alike(there[path], here[path])}
    assert not unequal
    tensors = {path: one.device for path, one in there.items() if isinstance(one, torch.Tensor)}
    strays = {path: where for path, where in tensors.items() if where.type != device}
    assert not strays


def test_a_generator_of_the_device_may_be_given(device):
    def seeded():
        return torch.Generator(device=device).manual_seed(0)

    parameters = AttentionParameters.random(2, generator=seeded())
    points = sampling.ball(3, 2, generator=seeded())
    assert {parameters.query.device.type, points.device.type} == {device}
    F = SelfAttention(parameters)
    _, worst = lipschitz.worst_case(F, 1.0, starts=2, steps=2, generator=seeded())
    assert worst.value.device.type == device
    lipschitz.compare_lemma_3_2(F, points, steps=[0.1], generator=seeded())


def test_what_is_on_the_cpu_stays_there_whatever_the_default_device(device):
    F = SelfAttention(AttentionParameters.random(2, generator=0))
    mu, nu = (ParticleMeasure(sampling.ball(6, 2, generator=seed)) for seed in (0, 1))
    ids = torch.arange(9)

    def answers():
        coupling = transport.solve_w2(mu, nu).coupling
        constant = lipschitz.local_lipschitz(F, mu, solver=linalg.Lanczos())
        certain = lipschitz.local_lipschitz(F, mu, solver=linalg.Certified(), strict=False)
        return [
            *(coupling.dense(), coupling.cost(), coupling.sample(3, generator=0)),
            *(constant, certain.value, certain.upper, lipschitz.local_order(F, mu, p=1)),
            *(merge(mu, 0.5), dynamics.cluster_count(mu, 0.5)),
            dynamics.flow(F, mu, [0.0, 1.0], coalesce=0.5),
            *lipschitz.worst_case(F, 1.0, starts=2, steps=2, generator=0),
            corpora.windows(ids, 3, count=2),
        ]

    here = dict(parts(answers()))
    with torch.device(device):
        there = dict(parts(answers()))
    assert there.keys() == here.keys()
    assert not {path for path in here if not calls.alike(there[path], here[path])}
    assert {one.device.type for one in there.values() if isinstance(one, torch.Tensor)} == {"cpu"}


def test_what_the_case_of_a_sweep_draws_on_the_device_is_its_own(device):
    def draws(n):
        return {"y": float(torch.rand((), device=device))}

    together = sweeps.sweep(draws, {"n": [1, 2]}, progress=False).y.values
    torch.manual_seed(0)
    undisturbed = [float(torch.rand((), device=device)) for _ in range(2)]
    torch.manual_seed(0)
    first = float(torch.rand((), device=device))
    alone = sweeps.sweep(draws, {"n": [2]}, progress=False).y.values
    assert alone == together[1] != together[0]
    assert [first, float(torch.rand((), device=device))] == undisturbed
