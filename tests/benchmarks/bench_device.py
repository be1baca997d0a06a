"""A device beside the scripts one would write for it.

    python tests/benchmarks/bench_device.py [--device cuda] [--quick]

Standard normal atoms and uniform weights; d = 64 and one head where nothing else is said. The map
beside the same projections and `scaled_dot_product_attention`, and beside KeOps if it can be
imported. A constant, with its linearisation, beside power iteration alone: as many products, on a
derivative of the scripted layer that `torch.func` has traced and keeps, untimed; it has no
evidence and may not fit into memory. A batch of small constants beside Jacobians by `torch.func`
and their singular values. One large flow, and many small ones in a batch, beside a loop of the
classical Runge-Kutta method on the scripted layer; start and end of both are brought to the host.
Pricing: one minimum over all columns for every row (the dual step of W₂), in blocks, beside
``cdist`` in as large blocks. The Sinkhorn divergence beside FlashSinkhorn if it can be imported.
First calls, with the start of libraries and kernels, are not timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch
from bench_flow import runge_kutta
from bench_maps import by_sdpa
from tables import beside, main
from torch import Tensor

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, dynamics
from meanfield.linalg import Lanczos
from meanfield.lipschitz import local_lipschitz
from meanfield.transport import sinkhorn_divergence
from meanfield.transport.plans.c_transform import CTransform

DIM, PRODUCTS, STEPS = 64, 10, 5


def problem(*shape: int, dtype: torch.dtype, device: str) -> tuple[SelfAttention, ParticleMeasure]:
    """A layer, and points (..., n, d)."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(shape, generator=generator, dtype=dtype)
    parameters = AttentionParameters.random(shape[-1], dtype=dtype, generator=generator)
    return SelfAttention(parameters.to(device)), ParticleMeasure(points.to(device))


def script(F: SelfAttention) -> Callable[[Tensor], Tensor]:
    return functools.partial(by_sdpa, F.parameters)


def by_keops(F: SelfAttention) -> Callable[[Tensor], Tensor]:
    """The same by a lazy tensor of KeOps."""
    from pykeops.torch import LazyTensor

    query, key, value = (m[0] for m in (F.parameters.query, F.parameters.key, F.parameters.value))
    output = F.parameters.output

    def layer(x: Tensor) -> Tensor:
        q = LazyTensor(float(F.parameters.scale) * (x @ query.mT)[:, None])
        scores = (q * LazyTensor((x @ key.mT)[None])).sum(-1)
        mean = scores.sumsoftmaxweight(LazyTensor((x @ value.mT)[None]), dim=1)
        return mean if output is None else mean @ output[0].mT

    return layer


def maps(n: int, dtype: torch.dtype, device: str) -> Iterator[dict]:
    F, mu = problem(n, DIM, dtype=dtype, device=device)
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
    F, mu = problem(n, DIM, dtype=dtype, device=device)
    layer, solver = script(F), Lanczos(max_steps=PRODUCTS)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        _, push = torch.func.linearize(layer, mu.points)
        _, pull = torch.func.vjp(layer, mu.points)

    def power() -> Tensor:
        v = torch.randn_like(mu.points)
        for _ in range(PRODUCTS):
            (v,) = pull(push(v / v.norm()))
        return v.norm().sqrt()

    def ours() -> Tensor:
        found = local_lipschitz(F, mu, geometry="euclidean", solver=solver, strict=False)
        return found.value

    name = f"constant, n = {n:,}, {dtype}, {PRODUCTS} steps".replace("torch.", "")
    return beside(name, ours, power, peer="power iteration, kept linearisation", device=device)


def small_constants(batch: int, device: str) -> dict:
    F, mu = problem(batch, 8, 4, dtype=torch.float64, device=device)
    layer = script(F)

    def by_jacobians() -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            jacobians = torch.func.vmap(torch.func.jacrev(layer))(mu.points)
        return torch.linalg.matrix_norm(jacobians.reshape(batch, 32, 32), 2)

    def ours() -> Tensor:
        return local_lipschitz(F, mu, geometry="euclidean").value

    torch.testing.assert_close(ours(), by_jacobians(), rtol=1e-4, atol=0)
    name = f"{batch:,} constants, n = 8, d = 4, float64"
    return beside(name, ours, by_jacobians, peer="jacrev, vmap and SVD", device=device)


def divergences(n: int, device: str) -> Iterator[dict]:
    """Nothing where FlashSinkhorn is missing: GeomLoss beside GeomLoss says nothing."""
    if not find_spec("flash_sinkhorn") or device == "cpu":
        return
    from flash_sinkhorn import SamplesLoss

    x, y = torch.randn(2, n, DIM, generator=torch.Generator().manual_seed(0)).to(device)
    loss = SamplesLoss(loss="sinkhorn", blur=1.0, scaling=0.9, debias=True)
    yield beside(
        f"Sinkhorn divergence, n = {n:,}, float32",
        lambda: sinkhorn_divergence(x, y, blur=1.0, scaling=0.9),
        lambda: loss(x, y),
        peer="FlashSinkhorn",
        device=device,
    )


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


def flows(*shape: int, device: str) -> dict:
    F, mu = problem(*shape, dtype=torch.float32, device=device)
    layer, step = script(F), 0.1

    def by_hand() -> Tensor:  # on the host, as in a Dataset
        x = mu.points
        for _ in range(STEPS):
            x = runge_kutta(layer, x, step)
        return torch.stack([mu.points.cpu(), x.cpu()])

    def ours() -> object:
        return dynamics.flow(F, mu, [0.0, STEPS * step], method="rk4", step=step)

    many = "flow" if len(shape) == 2 else f"{shape[0]:,} flows"
    name = f"{many}, n = {shape[-2]:,}, {STEPS} steps, float32"
    return beside(name, ours, by_hand, peer="rk4 on projections and SDPA", device=device)


def rows(quick: bool, device: str) -> Iterator[dict]:
    sizes, many = ((1_024, 4_096), 10_000) if device == "cpu" else ((16_384, 65_536), 100_000)
    batches = (1_000,) if device == "cpu" else (1_000, 10_000)
    if quick:
        sizes, many, batches = (64,), 300, (20,)
    for n in sizes:
        for dtype in (torch.float32, torch.float64):
            yield from maps(n, dtype, device)
            yield from fitting(functools.partial(constants, n, dtype, device))
    for batch in batches:
        yield from fitting(functools.partial(small_constants, batch, device))
        yield flows(batch, 16, DIM, device=device)
    for d in (2, 16):
        yield pricing(many, d, device)
    yield from divergences(min(many, 8_192), device)
    yield flows(many, DIM, device=device)


def fitting(row: Callable[[], dict]) -> Iterator[dict]:
    """The row, or why there is none: the script may not fit into memory."""
    try:
        yield row()
    except torch.OutOfMemoryError as error:
        print(f"{row}: {error}")


if __name__ == "__main__":
    main(__file__, rows)
