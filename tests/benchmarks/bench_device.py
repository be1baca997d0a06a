"""A device beside the scripts one would write for it: maps, constants, pricing and flows.

    python tests/benchmarks/bench_device.py [--device cuda] [--quick]

d = 64, one head, uniform weights, standard normal atoms. The map beside the same projections and
`scaled_dot_product_attention`, and beside KeOps if it can be imported. A constant beside power
iteration, with as many products, on derivatives by `torch.func` of the same scripted layer, which
has no evidence and may not fit into memory. Pricing: one minimum over all columns for every
row (the dual step of W₂), in blocks, beside ``cdist`` in as large blocks. A flow beside a loop of
the classical Runge-Kutta method on the scripted layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch
from bench_flow import runge_kutta
from tables import beside, main
from torch import Tensor

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, dynamics
from meanfield.linalg import Lanczos
from meanfield.lipschitz import local_lipschitz
from meanfield.transport.plans.c_transform import CTransform

DIM, PRODUCTS, STEPS = 64, 10, 5


def problem(n: int, dtype: torch.dtype, device: str) -> tuple[SelfAttention, ParticleMeasure]:
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(n, DIM, generator=generator, dtype=dtype)
    parameters = AttentionParameters.random(DIM, dtype=dtype, generator=generator)
    return SelfAttention(parameters.to(device)), ParticleMeasure(points.to(device))


def script(F: SelfAttention) -> Callable[[Tensor], Tensor]:
    """The layer as one writes it: three products and the fused kernel."""
    query, key, value = (m[0] for m in (F.parameters.query, F.parameters.key, F.parameters.value))
    scale, output = float(F.parameters.scale), F.parameters.output

    def layer(x: Tensor) -> Tensor:
        q, k, v = (x @ matrix.mT for matrix in (query, key, value))
        heads = (t[None, None] for t in (q, k, v))
        mean = torch.nn.functional.scaled_dot_product_attention(*heads, scale=scale)[0, 0]
        return mean if output is None else mean @ output[0].mT

    return layer


def by_keops(F: SelfAttention) -> Callable[[Tensor], Tensor]:
    """The same by a lazy tensor of KeOps."""
    from pykeops.torch import LazyTensor

    query, key, value = (m[0] for m in (F.parameters.query, F.parameters.key, F.parameters.value))

    def layer(x: Tensor) -> Tensor:
        q = LazyTensor(float(F.parameters.scale) * (x @ query.mT)[:, None])
        scores = (q * LazyTensor((x @ key.mT)[None])).sum(-1)
        return scores.sumsoftmaxweight((x @ value.mT)[None], dim=1)

    return layer


def maps(n: int, dtype: torch.dtype, device: str) -> Iterator[dict]:
    F, mu = problem(n, dtype, device)
    layer, name = script(F), f"map, n = {n:,}, {dtype}".replace("torch.", "")
    torch.testing.assert_close(layer(mu.points), F(mu).points, rtol=1e-3, atol=1e-5)
    yield beside(
        name,
        lambda: F(mu),
        lambda: layer(mu.points),
        peer="projections and SDPA",
        device=device,
    )
    if find_spec("pykeops") and device != "cpu":
        lazy = by_keops(F)
        yield beside(
            name,
            lambda: F(mu),
            lambda: lazy(mu.points),
            peer="projections and KeOps",
            device=device,
        )


def constants(n: int, dtype: torch.dtype, device: str) -> dict:
    F, mu = problem(n, dtype, device)
    layer, solver = script(F), Lanczos(max_steps=PRODUCTS)

    def power() -> Tensor:
        v = torch.randn_like(mu.points)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            for _ in range(PRODUCTS):
                w = torch.func.jvp(layer, (mu.points,), (v / v.norm(),))[1]
                v = torch.func.vjp(layer, mu.points)[1](w)[0]
        return v.norm().sqrt()

    def ours() -> Tensor:
        found = local_lipschitz(F, mu, geometry="euclidean", solver=solver, strict=False)
        return found.value

    name = f"constant, n = {n:,}, {dtype}, {PRODUCTS} steps".replace("torch.", "")
    return beside(name, ours, power, peer="power iteration on SDPA (math)", device=device)


def pricing(n: int, d: int, device: str) -> dict:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, n, d, generator=generator, dtype=torch.float64)
    transform = CTransform(x.numpy(), y.numpy(), device=device)
    zero, at, to = torch.zeros(n, dtype=torch.float64).numpy(), x.to(device), y.to(device)
    size = max(1, (2**21 if device == "cpu" else 2**27) // n)

    def by_cdist() -> Tensor:
        return torch.cat([torch.cdist(rows, to).square().amin(-1) for rows in at.split(size)])

    return beside(
        f"pricing, n = {n:,}, d = {d}",
        lambda: transform(zero, 1),
        by_cdist,
        peer="cdist in blocks",
        device=device,
    )


def flows(n: int, dtype: torch.dtype, device: str) -> dict:
    F, mu = problem(n, dtype, device)
    layer, step = script(F), 0.1

    def by_hand() -> Tensor:
        x = mu.points
        for _ in range(STEPS):
            x = runge_kutta(layer, x, step)
        return x

    def ours() -> object:
        return dynamics.flow(F, mu, [0.0, STEPS * step], method="rk4", step=step)

    name = f"flow, n = {n:,}, {STEPS} steps, {dtype}".replace("torch.", "")
    return beside(name, ours, by_hand, peer="rk4 on projections and SDPA", device=device)


def rows(quick: bool, device: str) -> Iterator[dict]:
    sizes, many = ((1_024, 4_096), 10_000) if device == "cpu" else ((16_384, 65_536), 100_000)
    if quick:
        sizes, many = (64,), 300
    for n in sizes:
        for dtype in (torch.float32, torch.float64):
            yield from maps(n, dtype, device)
            try:
                yield constants(n, dtype, device)
            except torch.OutOfMemoryError as error:
                print(f"constant, n = {n:,}, {dtype}: {error}")
    for d in (2, 16):
        yield pricing(many, d, device)
    yield flows(many, torch.float32, device)


if __name__ == "__main__":
    main(__file__, rows)
