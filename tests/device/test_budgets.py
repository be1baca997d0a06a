"""What functions ask of a device, counted: operations (about one kernel each), looks and copies.

Numbers of operations depend neither on the processor nor, but for blocks of rows, on the sizes. A
budget is what was counted and room for a few: a look inside a loop or a second pass exceeds it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from meanfield import (
    AttentionParameters,
    ParticleMeasure,
    SelfAttention,
    dynamics,
    local_lipschitz,
    transport,
)
from meanfield.attention import normalizations
from meanfield.errors import MissingExtraError
from meanfield.linalg import Certified, Lanczos
from meanfield.transport import entropic
from tests.device import pretended

pytestmark = pytest.mark.gpu

# Most operations, looks and copies to the device.
BUDGETS = {
    "measure": (26, 4, 0),
    "map": (21, 0, 0),
    "masked map": (35, 1, 0),
    "linearisation": (11, 1, 0),
    "product": (16, 0, 0),
    "transposed product": (20, 0, 0),
    "constant": (1400, 9, 4),
    "2,000 constants of two atoms": (240, 19, 0),
    "certain constant": (2900, 23, 10),
    "ten steps of a flow": (950, 8, 0),
    "adaptive flow": (520, 12, 0),
    "stability": (6000, 230, 0),
    "Sinkhorn attention": (120, 6, 0),
    "2,000 distances of two atoms": (20, 8, 5),
    "distance": (20, 8, 5),
    "Sinkhorn divergence": (4200, 3, 0),
    "Sinkhorn divergence of 24 conditions": (3600, 9, 6),
}


@functools.cache
def calls() -> dict[str, Callable[[], Any]]:
    generator = torch.Generator().manual_seed(0)

    def points(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype).to(pretended.NAME)

    def layer(d: int, causal: bool = False, **settings: Any) -> SelfAttention:
        kept = {"normalization": settings.pop("normalization", normalizations.softmax)}
        drawn = AttentionParameters.random(d, generator=generator, **settings)
        return SelfAttention(drawn.to(pretended.NAME), causal, **kept)

    x = points(512, 64, dtype=torch.float32)
    mu, twelve, two = ParticleMeasure.from_sequence(x), points(12, 4), points(2000, 2, 2)
    wide = {"n_heads": 4, "dtype": torch.float32}
    F, masked, G, H = layer(64, **wide), layer(64, True, **wide), layer(2), layer(4, n_heads=2)
    J, small = F.linearize(mu), ParticleMeasure(points(8, 2))
    twelve, two = ParticleMeasure(twelve), ParticleMeasure(two)
    balanced = layer(4, std=0.3, normalization=normalizations.sinkhorn())
    times, sequence = [0.0, 0.05, 0.1], ParticleMeasure.from_sequence(points(24, 2))
    return {
        "measure": lambda: ParticleMeasure.from_sequence(x),
        "map": lambda: F(mu),
        "masked map": lambda: masked(mu),
        "linearisation": lambda: F.linearize(mu),
        "product": lambda: J @ x,
        "transposed product": lambda: J.T @ x,
        "constant": lambda: local_lipschitz(F, mu, geometry="euclidean", solver=Lanczos()),
        "2,000 constants of two atoms": lambda: local_lipschitz(G, two),
        "certain constant": lambda: local_lipschitz(H, twelve, solver=Certified(), strict=False),
        "ten steps of a flow": lambda: dynamics.flow(F, mu, times, method="rk4", step=0.01),
        "adaptive flow": lambda: dynamics.flow(F, mu, [0.0, 0.1]),
        "stability": lambda: dynamics.stability(G, small, [0.0, 0.5, 1.0]),
        "Sinkhorn attention": lambda: balanced(twelve),
        "2,000 distances of two atoms": lambda: transport.w2(two, two),
        "distance": lambda: transport.solve_w2(x[:256], x[256:]),
        "Sinkhorn divergence": lambda: transport.sinkhorn_divergence(x, x * 1.1, blur=0.5),
        "Sinkhorn divergence of 24 conditions": lambda: transport.conditional_sinkhorn_divergence(
            sequence, sequence.replace(sequence.points.flip(0))
        ),
    }


@pytest.fixture(autouse=True)
def _counting(device: str) -> None:
    if device != pretended.NAME:
        pytest.skip("only a pretended device counts")


@pytest.mark.parametrize("name", BUDGETS)
def test_a_call_asks_no_more_than_its_budget(name):
    call = calls()[name]
    call()
    with pretended.counted() as asked:
        call()
    assert asked.operations <= BUDGETS[name][0], dict(asked)
    assert asked.looks <= BUDGETS[name][1], dict(asked)
    assert asked.sent <= BUDGETS[name][2], dict(asked)


def test_every_call_has_a_budget():
    assert calls().keys() == BUDGETS.keys()


def test_points_of_a_divergence_cost_no_operations_until_a_quarter_of_the_memory_is_full(
    monkeypatch,
):
    counts = []
    for n in (900, 1500):
        x = torch.linspace(0, 1, n, dtype=torch.float32)[:, None].to(pretended.NAME)
        with pretended.counted() as asked:
            transport.sinkhorn_divergence(x, 1 - x / 2, blur=2.0, scaling=0.5)
        counts.append(asked.operations)
    assert counts[0] == counts[1] <= 330
    room = 4 * 28 * 1500**2 * 4
    module = torch.get_device_module(pretended.NAME)
    monkeypatch.setattr(entropic.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(module, "mem_get_info", lambda _: (room // 100, room - 1))
    with pytest.raises(MissingExtraError, match=r"1,500 points.*0\.252 GB.*pykeops"):
        transport.sinkhorn_divergence(x, x)


# ------------------------------------------------------------------ the device itself


def test_a_tensor_of_the_cpu_does_not_mix():
    F = calls()["map"].__closure__[0].cell_contents
    with pytest.raises(ValueError, match="expected the device of the parameters, pretended:0"):
        F(ParticleMeasure(torch.zeros(2, 64)))
    x = torch.ones(3, device=pretended.NAME)
    with pytest.raises(RuntimeError, match="device"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match="device"):
        torch.cat([x, torch.ones(3)])
    torch.testing.assert_close((x + torch.tensor(1.0)).cpu(), torch.full((3,), 2.0))
    assert x[torch.tensor([0, 2])].shape == (2,)  # indices may be anywhere, as on a GPU
    with pytest.raises(TypeError, match="pretended:0"):
        x.numpy()


def test_a_look_in_a_loop_is_counted():
    x = torch.ones(5, device=pretended.NAME)
    with pretended.counted() as asked:
        for one in x:
            float(one + 1)
        x.cpu()
    assert (asked.operations, asked.looks, asked.sent) == (5, 6, 0)


def test_what_is_written_through_a_view_is_in_the_whole():
    host = torch.arange(12.0).reshape(3, 4)
    there = host.to(pretended.NAME)
    for x in (host, there):
        x.T[1].mul_(2.0)
        x[1:, ::2] = -x[1:, ::2]
        x.diagonal().add_(1.0)
        torch.add(x[0], 1.0, out=x[2])
        torch.cumsum(x[:, 3], 0, out=x[:, 0])
    torch.testing.assert_close(there.cpu(), host, rtol=0, atol=0)
    assert there.T.stride() == host.T.stride()


def test_complex_numbers_random_numbers_and_derivatives_work_there():
    z = torch.tensor([1 + 2j, 3 - 1j], device=pretended.NAME)
    assert (z.real - z.imag).tolist() == [-1.0, 4.0]
    drawn = torch.randn(1000, device=pretended.NAME)
    assert 0.8 < float(drawn.std()) < 1.2
    x = torch.linspace(0, 1, 5, device=pretended.NAME).requires_grad_()
    (slope,) = torch.autograd.grad((x**3).sum(), x)
    torch.testing.assert_close(slope.cpu(), 3 * torch.linspace(0, 1, 5) ** 2)
