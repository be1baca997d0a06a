"""Flows in closed form: ordinary differential equations and constants.

Figures and tests compare simulations with them. They are solved to about 1e-10.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meanfield.checks import choice, to_host
from meanfield.dynamics.clocks import checked_times
from meanfield.dynamics.placements import PLACEMENTS


class Equiangular(NamedTuple):
    """Of n unit vectors with equal angles: their common cosine ρ and norm r, each (T,)."""

    cosine: np.ndarray
    radius: np.ndarray


def equiangular(
    beta: float,
    n: int,
    times: Any,
    *,
    cosine: float = 0.0,
    placement: str = "post",
) -> Equiangular:
    """The flow of n equiangular tokens with V = I, A = βI, which stay equiangular.

    With p = e^β/(e^β + (n−1)e^{βρ}) the attention a token pays to itself and θ its direction,
    Γ = pθᵢ + (1−p)/(n−1) Σ_{j≠i} θⱼ. On the sphere (Post-LN)
    ρ̇ = 2e^{βρ}(1−ρ)((n−1)ρ+1)/(e^β + (n−1)e^{βρ}). Pre-LN divides it by r, with ṙ = ⟨θ, Γ⟩;
    Peri-LN divides both by |Γ|; nGPT divides the first by |Γ|.

    Args:
        beta: β ≥ 0.
        n: number of tokens, at least 2, in dimension n or more.
        times: increasing; at the first the cosine is as given and the radius 1.
        cosine: ρ at the first time, −1/(n−1) ≤ ρ ≤ 1.
        placement: "post", "pre", "peri" or "ngpt".

    Source: Rigollet (arXiv 2512.01868); placements after Karagodin et al. (arXiv 2510.22026).
    """
    choice(placement, "placement", PLACEMENTS)
    if n < 2 or not -1 / (n - 1) <= cosine <= 1:
        raise ValueError(f"n, cosine: expected n ≥ 2 and ρ in [−1/(n−1), 1], got {n}, {cosine}")

    def derivative(_t: float, y: np.ndarray) -> list[float]:
        rho, r = y
        # Divided by e^β, which overflows at β = 710.
        other = math.exp(beta * (rho - 1))
        own = 1 / (1 + (n - 1) * other)
        turn = 2 * (1 - rho) * ((n - 1) * rho + 1)
        q = other * own
        turn = turn * q
        outward = own + (n - 1) * q * rho
        length = math.sqrt(
            own**2 + 2 * own * q * (n - 1) * rho + q**2 * (n - 1) * (1 + (n - 2) * rho)
        )
        speed = 1 / length if placement in ("peri", "ngpt") else 1.0
        free = placement in ("pre", "peri")
        return [turn * speed / (r if free else 1.0), outward * speed if free else 0.0]

    found = _solved(derivative, np.array([cosine, 1.0]), times)
    return Equiangular(found[:, 0], found[:, 1])


def mode_rate(k: Any, beta: float) -> Any:
    """k² I_k(β)/(β I₀(β)): growth rate of cos kφ on the uniform measure of the circle.

    V = I, A = βI, softmax. *Ours*; the factor k² I_k(β) is known.
    """
    from scipy.special import ive

    return np.asarray(k) ** 2 * ive(k, beta) / (beta * ive(0, beta))


def first_mode(beta: float) -> int:
    """The k of the largest `mode_rate`: how many clusters the first metastable stage has."""
    k = np.arange(1, 10 + int(4 * math.sqrt(max(beta, 1.0))))
    return int(k[np.argmax(mode_rate(k, beta))])


def gaussian_moments(
    A: Tensor,
    V: Tensor,
    mean: Tensor,
    covariance: Tensor,
    times: Any,
    *,
    key: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mean (T, d) and covariance (T, d, d) of the flow of N(m, Σ), which stays Gaussian.

    Softmax attention: Γ(x) = V(m + ΣAx), so ṁ = V(m + ΣAm), Σ̇ = VΣAΣ + (VΣAΣ)ᵀ. With `key` K,
    L2 attention with weights e^{⟨Ax,y⟩ − ½|Ky|²}: μ tilted by e^{−½|Ky|²} is N(Cm′, C) with
    C = (Σ⁻¹ + KᵀK)⁻¹ and m′ = Σ⁻¹m, so Γ(x) = VC(m′ + Ax).

    Args:
        A: scores ⟨Ax, y⟩, (d, d). For weights e^{−s|Qx−Ky|²} it is 2s KᵀQ, and `key` is √(2s) K.
        V: values, (d, d).
        mean: m at the first time, (d,).
        covariance: Σ at the first time, (d, d), positive definite if `key` is given.
        times: increasing.
        key: K of the tilt, (k, d).

    Source: softmax, [SABP22]; the L2 equation derived here.
    """
    bilinear, value = to_host(A.double()), to_host(V.double())
    gram = None if key is None else to_host((key.mT @ key).double())
    d = len(mean)

    def derivative(_t: float, y: np.ndarray) -> np.ndarray:
        m, sigma = y[:d], y[d:].reshape(d, d)
        # C = Σ(I + GΣ)⁻¹ and C Σ⁻¹ m = (I + ΣG)⁻¹ m need no inverse of Σ.
        tilt = np.eye(d) if gram is None else np.linalg.inv(np.eye(d) + gram @ sigma)
        slope = value @ sigma @ tilt @ bilinear
        drift = slope @ sigma
        return np.concatenate([value @ tilt.T @ m + slope @ m, (drift + drift.T).ravel()])

    start = np.concatenate([to_host(mean.double()), to_host(covariance.double()).ravel()])
    found = torch.as_tensor(_solved(derivative, start, times))
    return found[:, :d], found[:, d:].reshape(-1, d, d)


def _solved(derivative: Callable[[float, np.ndarray], Any], start: Any, times: Any) -> np.ndarray:
    from scipy.integrate import solve_ivp

    clock = checked_times(times)
    if len(clock) == 1:
        return np.asarray(start)[None]
    found = solve_ivp(
        derivative, clock[[0, -1]], start, method="DOP853", t_eval=clock, rtol=1e-11, atol=1e-13
    )
    if not found.success:
        raise OverflowError(
            f"the equation has no solution up to t = {clock[-1]:g}: {found.message}"
        )
    return found.y.T
