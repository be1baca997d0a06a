"""Windows against double loops and a dense mask: rows skip the columns that they do not see."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, linearize
from meanfield.attention import kernels, weights
from meanfield.attention.tangent import AttentionTangent
from meanfield.measures import stack

F64 = torch.float64
N, WIDTHS = 17, (1 / 32, 5 / 16, 2.5)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of two rows, so that each sees few columns."""
    for name in ("_BLOCK_ENTRIES", "_LARGE_BLOCK_ENTRIES", "_GOOD_ROWS"):
        monkeypatch.setattr(weights, name, 2)


def cloud(n: int = N, seed: int = 0) -> ParticleMeasure:
    """Positions in no order, with ties, some exactly a width apart; three weights are 0."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(n, 3, dtype=F64, generator=generator)
    positions, masses = torch.rand(2, n, dtype=F64, generator=generator)
    positions[::4], masses[3:6] = positions[0], 0.0
    return ParticleMeasure(points, masses / masses.sum(), positions=(32 * positions).round() / 32)


class WindowByBias(kernels.Kernel):
    """A window that a user writes, as a bias of −∞."""

    needs_positions = True

    def features(self, parameters, points, positions):
        q, k, v = parameters.project(points)
        return kernels.Features(parameters.scale[:, None, None] * q, k, v)

    def position_bias(self, parameters, rows, columns):
        apart = (rows[..., None, :, None] - columns[..., None, None, :]).abs()
        return torch.zeros_like(apart).masked_fill(apart >= WIDTHS[0], -math.inf)


def layer(width: float, causal: bool) -> SelfAttention:
    parameters = AttentionParameters.random(3, n_heads=2, head_dim=2, std=1.0)
    return SelfAttention(parameters, causal=causal, kernel=kernels.window(width))


def seen(s: Tensor, t: Tensor, width: float, causal: bool) -> bool:
    return bool(abs(s - t) < width) and not (causal and bool(t > s))


def by_loops(F: SelfAttention, mu: ParticleMeasure, width: float) -> Tensor:
    """Pair by pair."""
    par, x, s = F.parameters, mu.points, mu.positions
    out = torch.zeros_like(x)
    for i in range(mu.n_particles):
        for h in range(par.n_heads):
            total, mean = 0.0, torch.zeros(2, dtype=F64)
            for j in range(mu.n_particles):
                if seen(s[i], s[j], width, F.causal):
                    score = par.scale[h] * (par.query[h] @ x[i]) @ (par.key[h] @ x[j])
                    share = float((mu.log_weights[j] + score).exp())
                    total, mean = total + share, mean + share * (par.value[h] @ x[j])
            out[i] += par.output[h] @ mean / max(total, 1e-300)
    return out


def dense(F: SelfAttention, mu: ParticleMeasure, width: float, points: Tensor) -> Tensor:
    """With the matrix of all pairs and a mask."""
    par, s = F.parameters, mu.positions
    apart = s[..., :, None] - s[..., None, :]
    hidden = (apart.abs() >= width) | (F.causal & (apart < 0))
    q, k, v = (points[..., None, :, :] @ m.mT for m in (par.query, par.key, par.value))
    logits = par.scale[:, None, None] * (q @ k.mT) + mu.log_weights[..., None, None, :]
    logits = logits.masked_fill(hidden[..., None, :, :], -math.inf)
    blind = (logits == -math.inf).all(-1, keepdim=True)
    p = logits.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    return (p @ v @ par.output.mT).sum(-3)


@pytest.mark.parametrize("causal", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize("width", WIDTHS)
def test_all_derivatives_are_those_of_the_dense_mask(width, causal, small_blocks):
    """Of a batch of two sizes, the smaller one padded."""
    F, mu = layer(width, causal), stack([cloud(), cloud(9, seed=1)])
    x, along = mu.points, torch.linspace(-1, 1, mu.points.numel(), dtype=F64).view_as(mu.points)

    def ours(points: Tensor) -> Tensor:
        return F(mu.replace(points)).points

    def theirs(points: Tensor) -> Tensor:
        return dense(F, mu, width, points)

    def derivatives(f) -> list[Tensor]:
        def back(points: Tensor) -> Tensor:
            return torch.func.vjp(f, points)[1](along)[0]

        first = torch.func.jvp(f, (x,), (along,))[1]
        return [alive * f(x), first, *torch.func.jvp(back, (x,), (along,))]

    alive = (mu.log_weights > -math.inf)[..., None] * torch.ones_like(x)
    for one, other in zip(derivatives(ours), derivatives(theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)
    J, tangent = linearize(F, mu).atoms, AttentionTangent(F.weights(mu), memory=0)
    wanted = alive * torch.func.jvp(theirs, (x,), (alive * along,))[1]
    pulled = alive * torch.func.vjp(theirs, x)[1](alive * along)[0]
    torch.testing.assert_close(J.matvec(along), wanted, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(tangent.matvec(along), wanted, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(tangent.rmatvec(along), pulled, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True], ids=["plain", "masked"])
def test_a_bias_of_minus_infinity_hides_as_a_window_does(causal):
    """Absent atoms that see no mass go to 0, and what they hide has no derivative."""
    F, mu = layer(WIDTHS[0], causal), cloud()
    G = SelfAttention(F.parameters, causal, WindowByBias())
    torch.testing.assert_close(G(mu).points, F(mu).points, rtol=1e-12, atol=1e-13)
    one, other = (linearize(each, mu).atoms.to_dense() for each in (F, G))
    torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_each_row_looks_at_few_columns_and_at_no_fewer_than_it_sees():
    n, width = 2000, 19.5 / 2000
    mu = ParticleMeasure.from_sequence(torch.randn(n, 3, dtype=F64))
    for causal, most in ((False, 3), (True, 2)):
        blocks = layer(width, causal).weights(mu).blocks()
        assert sum(b.n_rows * b.n_columns for b in blocks) <= n * (most * 20 + 64)
        for rows, columns in blocks:
            last = rows.stop if causal else min(n, rows.stop + 19)
            assert columns.start <= max(0, rows.start - 19) and columns.stop >= last


def test_a_window_at_other_points_sees_what_is_near_them(small_blocks):
    """At positions in no order."""
    F, mu = layer(0.3, False), cloud()
    x, s = torch.randn(5, 3, dtype=F64), torch.tensor([0.9, 0.1, 0.5, 0.5, 0.2], dtype=F64)
    with_them = ParticleMeasure(
        torch.cat([mu.points, x]),
        log_weights=torch.cat([mu.log_weights, torch.full((5,), -math.inf, dtype=F64)]),
        positions=torch.cat([mu.positions, s]),
    )
    torch.testing.assert_close(F.field(mu)(x, s), by_loops(F, with_them, 0.3)[-5:])
