"""Flows beside a vectorised script of twenty lines, in NumPy and in torch.

    python tests/benchmarks/bench_flow.py [--quick] [--device cuda]

V = A = I, uniform weights, Runge–Kutta 4 with equal steps of 0.05, on the sphere in d = 3 and in
R^64 in float32. Each row is beside the faster of the two scripts. And flows with their defaults,
beside SciPy's RK45 of the same velocity in NumPy with the tolerance that gives an error no larger
than ours, against DOP853 at 1e-11.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from scipy.integrate import solve_ivp
from tables import beside, least, main
from torch.nn.functional import scaled_dot_product_attention as sdpa

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, dynamics

STEP = 0.05


def runge_kutta(velocity: Callable[[Any], Any], x: Any, step: float) -> Any:
    """A step of the classical method, of arrays or tensors."""
    k1 = velocity(x)
    k2 = velocity(x + step / 2 * k1)
    k3 = velocity(x + step / 2 * k2)
    k4 = velocity(x + step * k3)
    return x + step / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


def velocity_of(y: np.ndarray) -> np.ndarray:
    """Attention with A = V = I at each row of y, by all of them."""
    scores = y @ y.T
    p = np.exp(scores - scores.max(1, keepdims=True))
    return p @ y / p.sum(1, keepdims=True)


def by_numpy(x: np.ndarray, steps: int, sphere: bool) -> np.ndarray:
    def on(y: np.ndarray) -> np.ndarray:
        return y / np.linalg.norm(y, axis=1, keepdims=True) if sphere else y

    def tangent(y: np.ndarray, v: np.ndarray) -> np.ndarray:
        return v - (v * y).sum(1, keepdims=True) * y if sphere else v

    def velocity(y: np.ndarray) -> np.ndarray:
        y = on(y)
        return tangent(y, velocity_of(y))

    for _ in range(steps):
        x = on(runge_kutta(velocity, x, STEP))
    return x


def by_torch(x: torch.Tensor, steps: int, sphere: bool) -> torch.Tensor:
    """The same with the fused kernel."""

    def on(y: torch.Tensor) -> torch.Tensor:
        return y / torch.linalg.vector_norm(y, dim=-1, keepdim=True) if sphere else y

    def tangent(y: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return v - (v * y).sum(-1, keepdim=True) * y if sphere else v

    def velocity(y: torch.Tensor) -> torch.Tensor:
        y = on(y)
        z = y[None, None]
        return tangent(y, sdpa(z, z, z, scale=1.0)[0, 0])

    for _ in range(steps):
        x = on(runge_kutta(velocity, x, STEP))
    return x


def on_sphere(n: int, dim: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    x = torch.randn(n, dim, generator=torch.Generator().manual_seed(0), dtype=dtype).to(device)
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def row(n: int, dim: int, steps: int, sphere: bool, device: str) -> dict:
    dtype = torch.float64 if sphere else torch.float32
    x = on_sphere(n, dim, dtype, device)
    eye = torch.eye(dim, dtype=dtype, device=device)
    F, host = SelfAttention(AttentionParameters.from_bilinear(eye, eye)), x.cpu().numpy()

    def ours() -> object:
        times, constraint = [0.0, steps * STEP], "sphere" if sphere else None
        start = ParticleMeasure(x)
        return dynamics.flow(F, start, times, method="rk4", step=STEP, constraint=constraint)

    scripts: dict[str, Callable[[], object]] = {
        "torch and SDPA": lambda: by_torch(x, steps, sphere),
        "NumPy": lambda: by_numpy(host, steps, sphere),
    }
    times = least(scripts.values(), device=device, lasting=0.2)
    peer = min(zip(times, scripts, strict=True))[1]
    where = "sphere" if sphere else f"R^{dim}, float32"
    return beside(
        f"RK4, {where}, n = {n:,}, {steps} steps",
        ours,
        scripts[peer],
        peer=f"20 lines of {peer}",
        device=device,
    )


def beside_scipy(n: int, dim: int, time: float) -> dict:
    """A flow on the sphere, and RK45 with an error no larger."""
    x, eye = on_sphere(n, dim, torch.float64, "cpu"), torch.eye(dim, dtype=torch.float64)
    F, mu = SelfAttention(AttentionParameters.from_bilinear(eye, eye)), ParticleMeasure(x)

    def velocity(_: float, flat: np.ndarray) -> np.ndarray:
        y = flat.reshape(n, dim)
        v = velocity_of(y)
        along = (v * y).sum(1, keepdims=True) / (y * y).sum(1, keepdims=True)
        return (v - along * y).ravel()

    def by_scipy(rtol: float, method: str = "RK45") -> np.ndarray:
        start = x.numpy().ravel()
        answer = solve_ivp(velocity, (0, time), start, method, rtol=rtol, atol=1e-3 * rtol)
        return answer.y[:, -1]

    def ours() -> np.ndarray:
        return dynamics.flow(F, mu, [0.0, time], constraint="sphere").points.values[-1].ravel()

    exact = by_scipy(1e-11, "DOP853")
    error = float(abs(ours() - exact).max())
    tolerances = (10.0**-k for k in np.arange(3, 10, 0.25))
    rtol = next(r for r in tolerances if abs(by_scipy(r) - exact).max() <= error)
    return beside(
        f"defaults, sphere, n = {n:,}, d = {dim}, to t = {time:g}, error {error:.0e}",
        ours,
        lambda: by_scipy(rtol),
        peer="SciPy's RK45 of NumPy",
    )


def rows(quick: bool, device: str) -> Iterator[dict]:
    sizes = ((64, 2),) if quick else ((64, 50), (256, 20), (2048, 2))
    for n, steps in sizes:
        yield row(n, 3, steps, True, device)
    if device == "cpu":
        for n, dim in ((64, 3),) if quick else ((64, 3), (64, 16), (256, 3)):
            yield beside_scipy(n, dim, 5.0)
    if quick:
        return
    yield row(2048, 64, 2, False, device)


if __name__ == "__main__":
    main(__file__, rows)
