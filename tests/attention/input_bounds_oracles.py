"""Bounds at an input and in a ball around it, by loops over tokens and dense matrices on R^d."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from meanfield import ParticleMeasure, SelfAttention


class Head(NamedTuple):
    """One head in the whole space: P, V = W_hV_h, A, v, y = Q̃ᵀk, u = Kᵀq."""

    P: np.ndarray
    V: np.ndarray
    A: np.ndarray
    v: np.ndarray
    y: np.ndarray
    u: np.ndarray


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


def column_bound(head: Head, weights: np.ndarray) -> float:
    """[maxⱼ Σᵢ (aᵢ/aⱼ) Pᵢⱼ λ_max(VVᵀ + |uᵢ|² Cov v)]^½."""
    n = len(weights)
    tau = [
        two_norm(head.V @ head.V.T + (u @ u) * covariance(p, head.v, head.v))
        for p, u in zip(head.P, head.u, strict=True)
    ]
    columns = [
        sum(weights[i] / weights[j] * head.P[i, j] * tau[i] for i in range(n)) for j in range(n)
    ]
    return math.sqrt(max(columns))


def yudin(F: SelfAttention, mu: ParticleMeasure) -> float:
    total = 0.0
    for head in heads(F, mu):
        g = []
        for row in head.P:
            first, second = np.sort(np.append(row, 0.0))[::-1][:2]
            g.append(first * (1 - first + second))
        X = two_norm(mu.points.numpy())
        turning = X * (two_norm(head.u) + X * two_norm(head.A))
        total += two_norm(head.V) * (two_norm(head.P) + turning * max(g))
    return total


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
            s_h = (
                min(chi * std * pulled_std, math.sqrt((change @ away**2) * (change @ pulled**2)))
                + shift * pulled_shift
                + eps * math.sqrt(1 + chi) * (norm_A * std + norm_V * pulled_std)
                + norm_A * norm_V * eps**2
            )
            s[i] += s_h
            over = [
                min(math.sqrt(max(h)) * sd, math.sqrt(most @ d**2), max(d[seen])) + size * eps
                for sd, d, size in ((std, away, norm_V), (pulled_std, pulled, norm_A))
            ]
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
