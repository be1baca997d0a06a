"""Windows: rows skip the columns that they do not see. Double loops are in `test_kernels`."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, linearize
from meanfield.attention import kernels, streaming, weights
from meanfield.attention.kernels.kernel import ModifiedKernel
from meanfield.attention.tangent import AttentionTangent
from meanfield.measures import stack
from tests.attention.kernel_oracles import Case, field

F64 = torch.float64
N, WIDTHS = 17, (1 / 32, 5 / 16, 2.5)


def in_small_blocks(monkeypatch) -> None:
    """Of two rows, so that each sees few columns; streamed, as between many atoms."""
    monkeypatch.setattr(streaming, "_FEW_ENTRIES", 0)
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

    def features(self, parameters, points, positions):
        q, k, v = parameters.project(points)
        return kernels.Features(parameters.scale[:, None, None] * q, k, v)

    def position_bias(self, parameters, rows, columns):
        apart = (rows[..., None, :, None] - columns[..., None, None, :]).abs()
        return torch.zeros_like(apart).masked_fill(apart >= WIDTHS[0], -math.inf)


class WindowByReach(kernels.Kernel):
    """A window that a user writes, as a reach."""

    reach = WIDTHS[0]
    features = WindowByBias.features


class WindowOfAnother(ModifiedKernel):
    """The same on top of a kernel that does not look at positions."""

    inner = kernels.dot_product
    position_bias = WindowByBias.position_bias


def layer(width: float, causal: bool) -> SelfAttention:
    parameters = AttentionParameters.random(3, n_heads=2, head_dim=2, std=1.0)
    return SelfAttention(parameters, causal=causal, kernel=kernels.window(width))


@pytest.mark.parametrize("causal", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize("width", WIDTHS)
def test_blocks_of_few_rows_and_columns_change_no_derivative(width, causal, monkeypatch):
    """Of a batch of two sizes, the smaller one padded."""
    F, mu = layer(width, causal), stack([cloud(), cloud(9, seed=1)])
    x, along = mu.points, torch.linspace(-1, 1, mu.points.numel(), dtype=F64).view_as(mu.points)

    def image(points: Tensor) -> Tensor:
        return F(mu.replace(points)).points

    def back(points: Tensor) -> Tensor:
        return torch.func.vjp(image, points)[1](along)[0]

    def derivatives(memory: int) -> list[Tensor]:
        first = torch.func.jvp(image, (x,), (along,))[1]
        J = AttentionTangent(F.weights(mu), memory=memory)
        products = [J.matvec(along), J.rmatvec(along)]
        return [image(x), first, *torch.func.jvp(back, (x,), (along,)), *products]

    whole = derivatives(2**30)
    in_small_blocks(monkeypatch)
    for one, other in zip(derivatives(0), whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


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


def test_a_window_at_other_points_sees_what_is_near_them(monkeypatch):
    """At positions in no order."""
    F, mu = layer(0.3, False), cloud()
    x, s = torch.randn(5, 3, dtype=F64), torch.tensor([0.9, 0.1, 0.5, 0.5, 0.2], dtype=F64)
    arrays = (t.numpy() for t in (mu.points, mu.log_weights, mu.positions))
    kernel = ("window", 0.3, ("dot",))
    case = Case(*arrays, F.parameters._given(), kernel, ("softmax",), False)
    wanted = np.stack([field(case, *at) for at in zip(x.numpy(), s.numpy(), strict=True)])
    in_small_blocks(monkeypatch)
    torch.testing.assert_close(F.field(mu)(x, s), torch.from_numpy(wanted))


@pytest.mark.parametrize("kind", [WindowByBias, WindowByReach, WindowOfAnother])
def test_a_bias_or_a_reach_of_your_own_looks_at_positions(kind):
    F, mu = layer(WIDTHS[0], causal=False), cloud()
    mine = SelfAttention(F.parameters, kernel=kind())
    order = mu.positions.argsort()
    stored = ParticleMeasure(
        mu.points[order], log_weights=mu.log_weights[order], positions=mu.positions[order]
    )
    torch.testing.assert_close(mine(mu).points, F(mu).points)
    torch.testing.assert_close(mine(stored).points, F(mu).points[order])
    with pytest.raises(ValueError, match="positions, which the kernel Window"):
        mine(ParticleMeasure(mu.points))


@pytest.mark.parametrize("inherited", [False, True])
def test_a_bias_without_positions_is_refused(inherited):
    parent = WindowByBias if inherited else kernels.Kernel
    own = {} if inherited else {"position_bias": WindowByBias.position_bias}
    with pytest.raises(TypeError, match="Late: expected needs_positions = True, or none"):
        type("Late", (parent,), {"needs_positions": False, **own})
    assert type("Late", (parent,), own)().needs_positions


def test_a_reach_that_comes_late_asks_for_positions():
    class Late(kernels.Kernel):
        features = WindowByBias.features

        def __init__(self):
            self.reach = 0.3

    parameters = AttentionParameters.random(3)
    with pytest.raises(ValueError, match="expected needs_positions = True of Late, which has"):
        SelfAttention(parameters, kernel=Late())
