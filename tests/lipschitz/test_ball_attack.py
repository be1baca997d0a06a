"""Bounds in a ball against a separate oracle: derivatives written out, in logarithms.

With light atoms, entries of D^½JD^−½ can be large although their attention weights underflow. Such
ratios of weights also magnify the rounding of automatic differentiation. So bounds are compared
neither with the library's own linearisation nor with autodiff here.
"""

from __future__ import annotations

import math

import pytest
import torch

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention
from meanfield.lipschitz import ball_upper, local_lipschitz

F64 = torch.float64


def derivative(F, logs, positions, x):
    """D^½JD^−½ of a layer with output matrices at x ``(*batch, n, d)``: V(T + S), head by head."""
    par, total = F.parameters, 0.0
    half = 0.5 * (logs[..., :, None] - logs[..., None, :])
    for h in range(par.n_heads):
        value = par.output[h] @ par.value[h]
        bias = 0.0 if par.query_bias is None else par.query_bias[h]
        u = par.scale[h] * (x @ par.query[h].mT + bias) @ par.key[h]
        scores = logs[..., None, :] + u @ x.mT
        if F.causal:
            later = positions[..., None, :] > positions[..., :, None]
            scores = torch.where(later, -math.inf, scores)
        log_p = scores.log_softmax(-1)
        # xⱼ − mᵢ as a mean of differences, which do not cancel.
        away = torch.einsum(
            "...ik,...jkd->...ijd", log_p.exp(), x[..., :, None, :] - x[..., None, :, :]
        )
        lever = value + (away @ value.mT)[..., :, None] * u[..., :, None, None, :]
        blocks = (log_p + half).exp()[..., None, None] * lever
        covariance = torch.einsum("...ij,...ije,...ijf->...ief", log_p.exp(), away, away)
        field = value @ covariance @ (par.scale[h] * par.key[h].mT @ par.query[h])
        own = torch.eye(x.shape[-2], dtype=x.dtype)[..., None, None] * field[..., :, None, :, :]
        total = total + (blocks + own).transpose(-3, -2).flatten(-2).flatten(-3, -2)
    return total


def norm(matrix):
    return torch.linalg.matrix_norm(matrix, 2)


def parted(mu, shares):
    """Atoms in parts of log-shares ``(n, parts)``: points, log-weights and positions."""
    parts = shares.shape[-1]
    logs = (mu.log_weights[:, None] + shares.log_softmax(-1)).flatten()
    at = mu.positions.repeat_interleave(parts)
    return mu.points.repeat_interleave(parts, 0), logs, at


def attack(F, mu, eps, shares, generator, *, restarts=16, steps=8):
    """The largest constant, change of the derivative and displacements that ascent finds."""
    x, logs, at = parted(mu, shares)
    start, image = derivative(F, logs, at, x), F(mu).points.repeat_interleave(shares.shape[-1], 0)
    found = []
    for still in (0.0, start):
        step = torch.randn(restarts, *x.shape, generator=generator, dtype=F64)
        step, best = eps * step / step.norm(dim=-1, keepdim=True), torch.zeros((), dtype=F64)
        far = torch.zeros(len(x), dtype=F64)
        for k in range(steps):
            step = step.detach().requires_grad_(True)
            value = norm(derivative(F, logs, at, x + step) - still)
            best = torch.maximum(best, value.detach().amax())
            moved = ParticleMeasure(
                (x + step).detach(), log_weights=logs.expand(restarts, -1), positions=at
            )
            far = torch.maximum(far, (F(moved).points - image).norm(dim=-1).amax(0))
            (slope,) = torch.autograd.grad(value.clamp_min(1e-300).log().sum(), step)
            step = step + eps * 0.9**k * slope / slope.norm(dim=-1, keepdim=True).clamp_min(1e-300)
            step = step * (eps / step.norm(dim=-1, keepdim=True).clamp_min(eps))
        found.append(float(best))
    return (*found, far.unflatten(0, shares.shape).amax(-1))


def assert_unrefuted(F, mu, eps, shares, generator):
    splitting = shares.shape[-1] > 1
    near = F.ball_bounds(mu, eps, splitting=splitting)
    constant, change, far = attack(F, mu, eps, shares, generator)
    assert constant <= float(ball_upper(F, mu, eps, splitting=splitting)) * (1 + 1e-7)
    assert change <= float(near.change) * (1 + 1e-6) + 1e-9
    assert (far <= near.displacement * (1 + 1e-6)).all()


@pytest.mark.parametrize(
    "seed", [s if s < 4 else pytest.param(s, marks=pytest.mark.slow) for s in range(200)]
)
def test_parts_of_any_mass_exceed_no_bound(seed):
    g = torch.Generator().manual_seed(seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (), generator=g))]

    d, n, parts = pick(1, 2), pick(1, 2, 3), pick(1, 2, 2, 3)
    heads, std, biases = pick(1, 2), pick(0.3, 0.7, 1.5), pick(True, False)
    par = AttentionParameters.random(
        d, n_heads=heads, head_dim=2, std=std, biases=biases, generator=g
    )
    logs = (pick(0.0, 1.0, 50.0) * torch.randn(n, generator=g, dtype=F64)).log_softmax(-1)
    mu = ParticleMeasure(
        pick(0.3, 1.0, 3.0, 6.0) * torch.randn(n, d, generator=g, dtype=F64),
        log_weights=logs,
        positions=torch.randint(2, (n,), generator=g).to(F64),
    )
    shares = torch.randn(n, parts, generator=g, dtype=F64)
    shares[:, 0] -= pick(0.0, 5.0, 50.0, 300.0)
    eps = pick(1e-3, 0.03, 0.3, 1.0, 3.0)
    assert_unrefuted(SelfAttention(par, causal=pick(True, False)), mu, eps, shares, g)


@pytest.mark.parametrize("splitting", [True, False])
@pytest.mark.parametrize(
    ("dtype", "points", "log_weight"),
    [
        (torch.float64, (20.0, 60.0), -1600.0),
        (torch.float64, (20.0, 55.0), -1400.0),
        (torch.float32, (10.0, 21.0), -220.0),
    ],
)
def test_attention_below_the_number_range_counts_where_an_atom_is_as_light(
    dtype, points, log_weight, splitting
):
    # Attention of e^-800 to an atom of weight e^-1600: the entry of D^½JD^−½ is 1 + 40 · 20.
    one = torch.ones(1, 1, dtype=dtype)
    F = SelfAttention(AttentionParameters(one, one, one, one[None], scale=1.0))
    x, logs = torch.tensor(points, dtype=dtype)[:, None], torch.tensor([0.0, log_weight])
    mu = ParticleMeasure(x, log_weights=logs.to(dtype))
    wide = SelfAttention(AttentionParameters(*(3 * [one.double()]), one[None].double(), scale=1.0))
    expected = float(norm(derivative(wide, logs.double(), None, x.double())))
    assert expected > 100
    assert float(local_lipschitz(F, mu).value) == pytest.approx(expected, rel=1e-5)
    assert expected <= float(F.local_upper(mu)) * (1 + 1e-5)
    for eps in (0.0, 1e-3, 1e-2, 0.1):
        near = F.ball_bounds(mu, eps, splitting=splitting)
        upper = float(ball_upper(F, mu, eps, splitting=splitting))
        at = derivative(wide, logs.double(), None, x.double())
        for signs in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
            moved = x.double() + eps * torch.tensor(signs, dtype=F64)[:, None]
            there = derivative(wide, logs.double(), None, moved)
            assert float(norm(there)) <= upper * (1 + 1e-5)
            assert float(norm(there - at)) <= float(near.change) * (1 + 1e-3) + 1e-9


def test_a_light_part_has_all_the_attention_it_moves_to():
    one = torch.ones(1, 1, dtype=F64)
    F = SelfAttention(AttentionParameters(-one, one, one, one[None], scale=1.0))
    mu = ParticleMeasure([[10.0]], positions=[0.0])
    g = torch.Generator().manual_seed(0)
    shares = torch.tensor([[0.0, -24.0]], dtype=F64)
    assert attack(F, mu, 1.0, shares, g)[0] > 1e5
    assert_unrefuted(F, mu, 1.0, shares, g)


def test_a_bound_that_leaves_the_number_range_is_no_reason_against_the_others():
    # The columns of attention over weights reach e^1600; the constant is 1601.
    eye = torch.eye(2, dtype=F64)
    par = AttentionParameters(eye[:, None], eye[:, None], eye[:, None], eye[..., None], scale=1.0)
    mu = ParticleMeasure([[20.0, 1.0], [100.0, 2.0]], log_weights=[0.0, -3200.0])
    upper, constant = SelfAttention(par).local_upper(mu), local_lipschitz(SelfAttention(par), mu)
    assert float(upper) >= float(constant.value) * (1 - 1e-9)
