"""Where values are: one way to the host, no tensor on a device of its own, few looks at values."""

from __future__ import annotations

import ast
from pathlib import Path

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
from meanfield.attention import kernels, weights
from meanfield.linalg import Lanczos
from meanfield.lipschitz import local_lipschitz
from tests.interface.test_architecture import PACKAGE, calls, modules, parsed


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


def test_random_numbers_are_drawn_where_their_generator_is():
    """Which need not be the CPU, nor the device on which torch makes tensors by default."""
    strays = [
        f"{path.name}:{call.lineno}"
        for path in modules()
        for call in calls(path, "rand", "randn", "randint")
        if path.parent.name != "experiments"  # whose generators are of the CPU
        and {"generator"} == {word.arg for word in call.keywords} & {"generator", "device"}
    ]
    assert not strays


# Each look at a value inside a loop waits for all that a device was told to do. These are right,
# or are about numbers that the host has already.
LOOPS = ast.For, ast.While, ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp
LOOKS = {
    "inverse.py": 2,  # one a step of Newton's method, of at least one product
    "krylov.py": 3,  # in one of four steps, on the host
    "functionals.py": 1,  # one a block of distances
    "derivative_checks.py": 1,  # one a light atom's probe
    "search.py": 1,  # one a step, on the host
    "sinkhorn.py": 2,  # one in several steps, of n² numbers
    "caches.py": 1,  # arguments
    "stability.py": 2,  # times, and one a layer
    "trajectories.py": 1,  # times; a function looks once an output time
    "differentiable.py": 1,  # likewise
    "comparison.py": 1,
    "measure_arguments.py": 1,  # of arguments
    "measures.py": 3,  # of arguments, and one a block of distances
}
DEVICE = (
    "linalg",
    "attention",
    "layers",
    "lipschitz",
    "dynamics",
    "measures.py",
    "measure_arguments.py",
    "maps",
)


def looks(path: Path) -> list[str]:
    """Where a loop asks for a value of a tensor: float(x), bool(x), x.item(), x.tolist()."""
    found = set()
    for loop in ast.walk(parsed(path)):
        if isinstance(loop, LOOPS):
            calls_inside = (node for node in ast.walk(loop) if isinstance(node, ast.Call))
            found |= {
                f"{path.name}:{call.lineno}:{call.col_offset}"
                for call in calls_inside
                if ast.unparse(call.func) in ("float", "bool")
                or ast.unparse(call.func).endswith((".item", ".tolist", ".nonzero"))
            }
    return sorted(found)


def test_loops_do_not_wait_for_a_device():
    wing = [p for p in modules() if p.relative_to(PACKAGE).parts[0] in DEVICE]
    found = {path.name: looks(path) for path in wing}
    assert {name: len(places) for name, places in found.items() if places} == LOOKS, found


def test_blind_rows_are_not_looked_for_on_a_device(monkeypatch):
    """On a device they are masked without a look, with the same values."""
    F = SelfAttention(AttentionParameters.random(3), causal=True, kernel=kernels.window(0.3))
    mu = ParticleMeasure.from_sequence(torch.randn(9, 3, dtype=torch.float64))
    wanted, J = F(mu).points, F.linearize(mu).to_dense()
    monkeypatch.setattr(weights, "is_host", lambda device: False)
    torch.testing.assert_close(F(mu).points, wanted, rtol=0, atol=1e-14)
    torch.testing.assert_close(F.linearize(mu).to_dense(), J, rtol=0, atol=1e-14)


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
        assert found.device.type == torch.device(device).type
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
def test_a_device_says_what_the_cpu_says(device):
    assert answers(device) == pytest.approx(answers("cpu"), rel=1e-6)
