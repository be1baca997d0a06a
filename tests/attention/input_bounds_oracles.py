"""Bounds at an input and in a ball around it, by loops over tokens and dense matrices on R^d."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention

F64 = torch.float64


class Head(NamedTuple):
    """One head in the whole space: P, V = W_hV_h, A, v, y = Q̃ᵀk, u = Kᵀq."""

    P: np.ndarray
    V: np.ndarray
    A: np.ndarray
    v: np.ndarray
    y: np.ndarray
    u: np.ndarray


def case(
    seed: int, *, heads: int | None = None, uniform: bool = False
) -> tuple[SelfAttention, ParticleMeasure]:
    """A layer, plain or masked, and a weighted measure; two to nine tokens."""
    g = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=g))

    d, n, H = draw(1, 4), draw(2, 9), heads or draw(1, 3)
    std = float(0.3 + 1.4 * torch.rand((), generator=g)) * d**-0.5
    layer = AttentionParameters.random(
        d, n_heads=H, head_dim=draw(1, d), std=std, biases=bool(draw(0, 1)), generator=g
    )
    points = 2 * torch.randn(n, d, dtype=F64, generator=g)
    spread = 0 if uniform else draw(0, 3)
    logs = (spread * torch.randn(n, dtype=F64, generator=g)).log_softmax(-1)
    causal = bool(draw(0, 1))
    positions = torch.randint(1, n + 1, (n,), generator=g).to(F64) / n if causal else None
    F = SelfAttention(layer, causal=causal)
    return F, ParticleMeasure(points, log_weights=logs, positions=positions)


def heads(F: SelfAttention, mu: ParticleMeasure) -> list[Head]:
    """The heads of dot-product attention, from their matrices, in the order of μ."""
    par, x = F.parameters, mu.points
    found = []
    for h in range(par.n_heads):
        one = par.head(h)
        query, key = one.scale[0] * one.query[0], one.per_head(one.key)[0]
        q = x @ query.mT
        if one.query_bias is not None:
            q = q + one.scale[0] * one.query_bias[0]
        logits = q @ ((x - x.mean(-2, keepdim=True)) @ key.mT).mT + mu.log_weights
        if F.causal:
            sees = mu.positions[None, :] <= mu.positions[:, None]
            logits = torch.where(sees, logits, -math.inf)
        P, V, A = logits.softmax(-1).numpy(), par.V[h].numpy(), (key.mT @ query).numpy()
        found.append(Head(P, V, A, x.numpy() @ V.T, x.numpy() @ A, (q @ key).numpy()))
    return found


def two_norm(matrix: np.ndarray) -> float:
    return float(np.linalg.norm(matrix, 2))


def covariance(p: np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return ((one - p @ one) * p[:, None]).T @ (other - p @ other)


def ball_bounds(
    found: list[Head], weights: np.ndarray, eps: float, constant: float, *, splitting: bool
) -> tuple[float, float, np.ndarray]:
    """The bound by change, the bound by columns, and the displacements."""
    n = len(weights)
    N, s, turning, moves = np.zeros((n, n)), np.zeros(n), np.zeros(n), np.zeros(n)
    columns = 0.0
    for P, V, A, v, y, u in found:
        norm_V, norm_A = two_norm(V), two_norm(A)
        densest, tau = np.zeros((n, n)), np.zeros(n)
        for i in range(n):
            p, seen = P[i], P[i] > 0
            m, ybar, length = p @ v, p @ y, np.linalg.norm(u[i])
            away, pulled = (np.linalg.norm(z, axis=1) for z in (v - m, y - ybar))
            h, low = np.ones(n), np.ones(n)
            for j in np.flatnonzero(seen):
                theta = 2 * eps * length + 2 * norm_A * eps**2 + eps * pulled[j]
                others = [k for k in range(n) if splitting or k != j]
                own = 0.0 if splitting else p[j]
                least = sum(p[k] * math.exp(-eps * pulled[k]) for k in others)
                largest = sum(p[k] * math.exp(eps * pulled[k]) for k in others)
                h[j] = max(1.0, 1 / (own + math.exp(-theta) * least))
                low[j] = min(1.0, 1 / (own + math.exp(theta) * largest))
            most = np.minimum(p * h, 1)
            change = np.maximum(np.minimum(p * (h - 1), 1 - p), p * (1 - low)) * seen
            # Relative to its mass, a light part of an atom may have more than all the attention.
            densest[i] = p * h if splitting else most
            shifted = np.maximum(p * (h - 1), p * (1 - low)) * seen if splitting else change
            chi = max(max(h - 1), max(1 - low))
            std, pulled_std = (math.sqrt(two_norm(covariance(p, z, z))) for z in (v, y))
            shift = min(change @ away, chi * std)
            pulled_shift = min(change @ pulled, chi * pulled_std)
            for j in range(n):
                block = two_norm(V + np.outer(v[j] - m, u[i]))
                moved = (2 * norm_V * eps + shift) * (length + norm_A * eps)
                N[i, j] += math.sqrt(weights[i] / weights[j]) * (
                    shifted[j] * block + densest[i, j] * (moved + away[j] * norm_A * eps)
                )
            grown = [
                min(math.sqrt(max(h)) * sd, math.sqrt(most @ d**2), max(d[seen]))
                for sd, d in ((std, away), (pulled_std, pulled))
            ]
            s_h = (
                min(chi * std * pulled_std, math.sqrt((change @ away**2) * (change @ pulled**2)))
                + shift * pulled_shift
                + eps * (norm_A * grown[0] + norm_V * grown[1])
                + norm_A * norm_V * eps**2
            )
            s[i] += s_h
            over = [sd + size * eps for sd, size in zip(grown, (norm_V, norm_A), strict=True)]
            tau[i] = norm_V**2 + (length + norm_A * eps) ** 2 * over[0] ** 2
            each = min(over[0] * over[1], two_norm(covariance(p, v, y)) + s_h)
            turning[i] += each
            moves[i] += min(eps * (math.sqrt(tau[i]) + each), max(away[seen]) + norm_V * eps)
        columns += math.sqrt(
            max(
                sum(weights[i] / weights[j] * densest[i, j] * tau[i] for i in range(n))
                for j in range(n)
            )
        )
    # The norm itself: what the library bounds by rounds of power iteration from above.
    return constant + two_norm(N) + max(s), columns + max(turning), moves
