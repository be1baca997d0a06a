"""Batches of small local constants beside batched automatic differentiation, and single ones.

    python tests/benchmarks/bench_two_atoms.py [--quick] [--device cuda]

The peer is what an expert writes: `vmap(jacrev(...))` over the whole batch and `svdvals`, for both
components and without evidence. Float64; weights differ by factors up to e^50. Single Euclidean
constants of some hundred coordinates and more stand beside `svds` with products by hand in NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, svds
from tables import beside, main
from torch import Tensor

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention
from meanfield.lipschitz import local_lipschitz


def problem(
    cases: int, dim: int, n: int = 2, device: str = "cpu"
) -> tuple[SelfAttention, ParticleMeasure]:
    generator = torch.Generator().manual_seed(0)
    parameters = AttentionParameters.random(dim, generator=generator)
    points = torch.randn(cases, n, dim, generator=generator, dtype=torch.float64)
    logs = -50 * torch.rand(cases, n, generator=generator, dtype=torch.float64)
    mu = ParticleMeasure(points, log_weights=logs.log_softmax(-1))
    return SelfAttention(parameters.to(device)), mu.to(device)


def by_autodiff(F: SelfAttention, mu: ParticleMeasure) -> Tensor:
    """Both components of every case: a bare layer in torch, its Jacobians, their norms."""
    par = F.parameters
    A, V = par.A[0], par.V[0]

    def field(x: Tensor, points: Tensor, logs: Tensor) -> Tensor:
        return torch.softmax(x @ A.T @ points.T + logs, -1) @ points @ V.T

    def whole(points: Tensor, logs: Tensor) -> Tensor:
        return field(points, points, logs)

    J = torch.func.vmap(torch.func.jacrev(whole))(mu.points, mu.log_weights)
    root = (0.5 * mu.log_weights).exp()
    J = root[:, :, None, None, None] * J / root[:, None, None, :, None]
    n, d = mu.points.shape[-2:]
    particle = torch.linalg.svdvals(J.reshape(-1, n * d, n * d))[:, 0]
    each = torch.func.vmap(torch.func.jacrev(field), in_dims=(0, None, None))
    D = torch.func.vmap(each)(mu.points, mu.points, mu.log_weights)
    return torch.maximum(particle, torch.linalg.svdvals(D)[..., 0].amax(-1))


def by_svds(F: SelfAttention, mu: ParticleMeasure) -> float:
    """The Euclidean constant of uniform atoms: a linearisation by hand that keeps P."""
    par, x = F.parameters, mu.points.numpy()
    A, V, (n, d) = par.A[0].numpy(), par.V[0].numpy(), x.shape
    queries, keys, values = x @ A.T, x @ A, x @ V.T
    p = queries @ x.T
    p = np.exp(p - p.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    means = p @ values

    def forth(flat: np.ndarray) -> np.ndarray:
        eps = flat.reshape(n, d)
        moved = p * (eps @ A.T @ x.T + queries @ eps.T)
        out = p @ (eps @ V.T) + moved @ values - moved.sum(1, keepdims=True) * means
        return out.ravel()

    def back(flat: np.ndarray) -> np.ndarray:
        zeta = flat.reshape(n, d)
        moved = p * (zeta @ values.T - (zeta * means).sum(1, keepdims=True))
        return (p.T @ zeta @ V + moved @ keys + moved.T @ queries).ravel()

    J = LinearOperator((n * d, n * d), matvec=forth, rmatvec=back, dtype=float)
    return float(svds(J, k=1, return_singular_vectors=False, rng=0, tol=1e-4)[0])


def single(quick: bool) -> Iterator[dict]:
    """With evidence, and the value alone."""
    for n, dim in [(24, 16)] if quick else [(24, 16), (64, 16), (128, 64)]:
        F, mu = problem(1, dim, n)
        mu = ParticleMeasure(mu.points[0])
        for words, upper_rtol in (("", 0.01), (", value alone", math.inf)):
            yield beside(
                f"Euclidean constant{words}, n = {n}, d = {dim}",
                lambda F=F, mu=mu, upper_rtol=upper_rtol: local_lipschitz(
                    F, mu, geometry="euclidean", upper_rtol=upper_rtol
                ),
                lambda F=F, mu=mu: by_svds(F, mu),
                peer="svds on a kept linearisation",
            )


def rows(quick: bool, device: str) -> Iterator[dict]:
    if device == "cpu":
        yield from single(quick)
    sizes = [(20_000, 2, 2), (5_000, 2, 8), (2_000, 8, 4), (100, 16, 8), (100, 16, 16)]
    sizes += [(1, 2, 2), (1, 16, 8), (1, 32, 8)]
    for cases, n, dim in sizes[5:6] if quick else sizes:
        F, mu = problem(cases, dim, n, device)
        yield beside(
            f"{f'{cases:,} constants' if cases > 1 else 'one constant'}, n = {n}, d = {dim}",
            lambda F=F, mu=mu: local_lipschitz(F, mu),
            lambda F=F, mu=mu: by_autodiff(F, mu),
            peer="vmap(jacrev) and svdvals",
            device=device,
        )


if __name__ == "__main__":
    main(__file__, rows)
