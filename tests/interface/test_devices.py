"""Where values are: one way to the host, no tensor on a device of its own, few looks at values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meanfield import (
    AttentionParameters,
    ParticleMeasure,
    SelfAttention,
    checks,
    dynamics,
    lipschitz,
    transport,
)
from meanfield.linalg import Lanczos
from meanfield.lipschitz import local_lipschitz
from tests.interface.test_architecture import calls, modules


def test_tensors_become_arrays_in_one_function():
    strays = []
    for path in modules():
        found = list(calls(path, "numpy", "cpu"))
        found += [
            call
            for call in calls(path, "to")
            if any(getattr(word, "value", None) == "cpu" for word in call.args)
        ]
        strays += [f"{path.name}:{call.lineno}" for call in found]
    allowed = [place for place in strays if place.startswith("checks.py")]
    assert strays == allowed and len(allowed) == 2, "use checks.to_host"


def test_the_way_to_the_host_keeps_values_and_drops_the_derivative():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    found = checks.to_host(x)
    assert isinstance(found, np.ndarray) and found.tolist() == [1.0, 2.0]


def test_blocks_are_larger_on_devices():
    assert checks.at_once(100, torch.device("cpu")) == 100
    assert checks.at_once(100, torch.device("cuda")) == 2**27


def test_a_device_without_double_precision_is_refused(monkeypatch):
    monkeypatch.setattr(checks, "_WITHOUT_DOUBLE", {"meta"})
    with pytest.raises(TypeError, match=r"double precision.* got one on meta; use \.cpu\(\)"):
        ParticleMeasure(torch.zeros(3, 2, device="meta"))


def answers(device: str) -> dict[str, float]:
    """What every part says of one layer and one measure, both on a device."""
    generator = torch.Generator().manual_seed(0)
    parameters = AttentionParameters.random(4, n_heads=2, generator=generator)
    F = SelfAttention(parameters.to(device), causal=True)
    points = torch.randn(12, 4, generator=generator, dtype=torch.float64)
    mu = ParticleMeasure.from_sequence(points.to(device))
    J, image = F.linearize(mu), F(mu)
    constant = local_lipschitz(F, mu)
    iterated = local_lipschitz(F, mu, solver=Lanczos())
    ball = lipschitz.ball_upper(F, mu, 0.01)
    flowed = dynamics.flow(SelfAttention(parameters.to(device)), mu, [0.0, 0.5])
    distance = transport.solve_w2(mu.points, image.points)
    readout = lipschitz.Readout(torch.eye(4, dtype=torch.float64, device=device))
    for found in (image.points, J @ mu.points, constant.value, iterated.upper, distance.value):
        assert found.device.type == device
    assert constant.converged and iterated.converged and bool(distance.converged)
    return {
        "map": float(image.points.sum()),
        "product": float((J @ mu.points).norm()),
        "constant": float(constant.value),
        "iterated": float(iterated.value),
        "ball": float(ball),
        "flow": float(flowed.points[-1].sum()),
        "w2": float(distance.value),
        "radius": float(lipschitz.certified_radius(F, readout, mu)),
    }


@pytest.mark.gpu
def test_a_gpu_says_what_the_cpu_says():
    on_cpu, on_gpu = answers("cpu"), answers("cuda")
    assert on_gpu == pytest.approx(on_cpu, rel=1e-6)
