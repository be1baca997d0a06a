"""Simulations against what is known: collapse times, growth of modes, masks, Gaussians."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from scipy.special import iv

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, dynamics, sampling
from meanfield.attention.normalizations import exponential, softmax
from tests import oracles

PRECISE = dynamics.Adaptive("dop853", rtol=1e-11, atol=1e-13)


def eye(d: int) -> torch.Tensor:
    return torch.eye(d, dtype=torch.float64)


def simple(d: int, beta: float, value: float = 1.0, **settings) -> SelfAttention:
    parameters = AttentionParameters.from_bilinear(beta * eye(d), value * eye(d))
    return SelfAttention(parameters, **settings)


def cosine(points) -> float:
    u = np.asarray(points)[:2]
    return float(u[0] @ u[1] / np.linalg.norm(u[0]) / np.linalg.norm(u[1]))


# --- equiangular tokens ---


@pytest.mark.parametrize(
    ("beta", "normalised", "time"),
    [(1.0, True, 5.270284), (8.0, True, 73.44568), (1.0, False, 2.897049)],
)
def test_orthonormal_tokens_collapse_at_the_published_time(beta, normalised, time):
    n = 32
    F = simple(n, beta, normalization=softmax if normalised else exponential)
    ds = dynamics.flow(
        F, ParticleMeasure(eye(n)), [0.0, time], method=PRECISE, constraint="sphere"
    )
    # The time has 7 digits and 1 − ρ falls at a rate of 2 (2e^β): 1e-3 · 2e · 5e-7 at most.
    assert cosine(ds.points[-1]) == pytest.approx(0.999, abs=1e-8)


@pytest.mark.parametrize(
    ("gamma", "limit"), [(1.0, 1.0), (2.0, 4 * 0.5 / (1 + 3 * 0.5)), (4.0, 0.5)]
)
def test_one_layer_has_a_phase_transition_at_two_log_n(gamma, limit):
    n, rho = 400, 0.5
    gram = rho + (1 - rho) * eye(n)
    mu = ParticleMeasure(torch.linalg.cholesky(gram))
    image = simple(n, gamma * math.log(n))(mu).points[:2]
    # With γ ≠ 2 the share of the smaller side is n^{−|γ/2 − 1|}.
    assert cosine(image) == pytest.approx(limit, abs=3 / math.sqrt(n))


# --- modes of the circle ---


def circle(n: int, k: int, size: float) -> ParticleMeasure:
    """The uniform measure of the circle with density 1 + size·cos kφ, in n weighted atoms."""
    phi = 2 * math.pi * torch.arange(n, dtype=torch.float64) / n
    weights = (1 + size * torch.cos(k * phi)) / n
    return ParticleMeasure(torch.stack([phi.cos(), phi.sin()], -1), weights)


@pytest.mark.parametrize(("beta", "k"), [(1.0, 1), (4.0, 2), (4.0, 3), (30.0, 5)])
def test_modes_of_the_circle_grow_at_the_rate_of_bessel_functions(beta, k):
    n, size, h = 256, 1e-6, 1e-3
    mu = circle(n, k, size)
    ds = dynamics.flow(simple(2, beta), mu, [0.0, h], method="rk4", step=h, constraint="sphere")

    def mode(points) -> float:
        angle = np.arctan2(points[:, 1], points[:, 0])
        return 2 * float(mu.weights.numpy() @ np.cos(k * angle))

    found = math.log(mode(ds.points.values[-1]) / mode(ds.points.values[0])) / h
    expected = k**2 * iv(k, beta) / (beta * iv(0, beta))
    assert found == pytest.approx(expected, rel=1e-4)


# --- causal ---


@pytest.mark.parametrize("seed", [0, 1])
def test_masked_tokens_on_the_sphere_all_go_to_the_first_which_never_moves(seed):
    g = torch.Generator().manual_seed(seed)
    d, n = 3, 8
    A = torch.randn(d, d, generator=g, dtype=torch.float64)
    F = SelfAttention(AttentionParameters.from_bilinear(A, eye(d)), causal=True)
    mu = ParticleMeasure.from_sequence(sampling.sphere(n, d, generator=g))
    ds = dynamics.flow(
        F, mu, [0.0, *np.geomspace(1.0, 400.0, 6)], method="dopri5", constraint="sphere"
    )
    np.testing.assert_allclose(ds.points[:, 0], mu.points[:1].expand(7, -1), atol=1e-13)
    np.testing.assert_allclose(ds.points[-1], mu.points[:1].expand(n, -1), atol=0.05)


def test_at_large_beta_only_the_closest_pair_moves():
    phi = torch.tensor([0.0, 0.5, 1.3, 3.0], dtype=torch.float64)
    mu = ParticleMeasure(torch.stack([phi.cos(), phi.sin()], -1))
    velocity = dynamics.flow(
        simple(2, 200.0), mu, [0, 1e-3], method="rk4", step=1e-3, constraint="sphere"
    ).points
    speed = np.linalg.norm(velocity[1] - velocity[0], axis=-1)
    assert speed[:2].min() > 1e6 * speed[2:].max()
    assert speed[0] == pytest.approx(speed[1], rel=1e-9)


# --- Gaussians ---


def quadrature(mean, covariance, nodes: int = 26) -> ParticleMeasure:
    """N(m, Σ) as weighted atoms: Gauss–Hermite nodes, exact where e^{⟨Ax,y⟩} is a polynomial."""
    z, w = np.polynomial.hermite_e.hermegauss(nodes)
    keep = w / w.sum() > 1e-40
    z, log_w = torch.as_tensor(z[keep]), torch.as_tensor(np.log(w[keep] / w.sum()))
    grid = torch.cartesian_prod(z, z)
    logs = (log_w[:, None] + log_w).reshape(-1)
    root = torch.linalg.cholesky(covariance)
    return ParticleMeasure(mean + grid @ root.mT, log_weights=logs - logs.logsumexp(0))


GAUSSIAN = (
    torch.tensor([[0.4, 0.3], [-0.2, 0.1]], dtype=torch.float64),  # A
    torch.tensor([[0.6, -0.5], [0.3, -0.8]], dtype=torch.float64),  # V
    torch.tensor([0.3, -0.1], dtype=torch.float64),  # m
    torch.tensor([[0.8, 0.2], [0.2, 0.5]], dtype=torch.float64),  # Σ
)


def test_a_gaussian_stays_one_and_follows_its_covariance_equation():
    A, V, m, sigma = GAUSSIAN
    times = [0.0, 0.5, 1.0]
    F = SelfAttention(AttentionParameters.from_bilinear(A, V))
    ds = dynamics.flow(F, quadrature(m, sigma), times, method=dynamics.Adaptive("dop853", 1e-9))
    layer = {"query": A.numpy()[None], "key": np.eye(2)[None], "value": V.numpy()[None]}

    def rates(_, y):
        found = oracles.gaussian_rates(y[:2], y[2:].reshape(2, 2), layer | {"scale": 1.0})
        return np.concatenate([one.ravel() for one in found])

    start = np.concatenate([m.numpy(), sigma.numpy().ravel()])
    expected = solve_ivp(rates, (0, 1), start, t_eval=times, rtol=1e-11, atol=1e-13).y.T
    for x, y in zip(ds.points.values, expected, strict=True):
        weights = quadrature(m, sigma).weights.numpy()
        np.testing.assert_allclose(weights @ x, y[:2], rtol=1e-7, atol=1e-8)
        found = np.cov(x.T, aweights=weights, bias=True)
        np.testing.assert_allclose(found.ravel(), y[2:], rtol=1e-7, atol=1e-8)
