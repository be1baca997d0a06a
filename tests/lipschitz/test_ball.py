"""Upper bounds at an input and in a ball around it, from what layers declare."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, bounds
from meanfield.attention.kernels import cosine, soft_cap
from meanfield.attention.weights import Block
from meanfield.linalg import Dense
from meanfield.lipschitz import ball_upper, local_lipschitz
from meanfield.maps import BallBounds, Map
from tests.attention import input_bounds_oracles as oracle
from tests.attention.input_bounds_oracles import case

F64 = torch.float64


@given(st.integers(0, 2**31))
@settings(max_examples=20)
def test_what_the_engine_sees_is_what_the_oracle_sees(seed):
    F, mu = case(seed)
    weights, heads = F.weights(mu), oracle.heads(F, mu)
    every = Block(slice(0, weights.n), slice(0, weights.n))
    p = weights.log_p(every).exp()
    order = slice(None) if weights.order is None else weights.order
    for found, head in zip(p, heads, strict=True):
        wanted = torch.from_numpy(head.P)[order][:, order]
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-14)
        assert not found[~weights.alive].any()


@given(st.integers(0, 2**31))
@settings(max_examples=20)
def test_small_layers_are_factored_at_an_input(seed):
    F, mu = case(seed)
    found, constant = float(F.local_upper(mu)), float(local_lipschitz(F, mu).value)
    assert constant <= found <= constant * (1 + 1e-9)
    assert float(ball_upper(F, mu, 0.0)) <= found * (1 + 1e-12)


def test_outputs_come_in_the_order_of_the_measure():
    F = SelfAttention(AttentionParameters.random(3, std=0.7), causal=True)
    X = torch.randn(5, 3, dtype=F64)
    s = torch.tensor([0.3, 1.0, 0.1, 0.7, 0.5], dtype=F64)
    given_order = F.ball_bounds(ParticleMeasure(X, positions=s), 0.1).displacement
    order = s.argsort()
    sorted_order = F.ball_bounds(ParticleMeasure(X[order], positions=s[order]), 0.1).displacement
    torch.testing.assert_close(given_order[order], sorted_order)


def test_batches_and_grouped_heads_have_a_bound_each():
    F = SelfAttention(AttentionParameters.random(4, n_heads=2, biases=True))
    mu = ParticleMeasure(torch.randn(3, 6, 4, dtype=F64))
    together = ball_upper(F, mu, 0.05)
    alone = torch.stack([ball_upper(F, one, 0.05) for one in mu])
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=0)
    par = AttentionParameters.random(4, n_heads=4, head_dim=2)
    shared = AttentionParameters(par.query, par.key[:2], par.value[:2], par.output)
    G = SelfAttention(shared)
    found, upper = local_lipschitz(G, mu).value, G.local_upper(mu)
    assert (found <= upper * (1 + 1e-9)).all()
    assert (upper <= ball_upper(G, mu, 0.1) * (1 + 1e-9)).all()
    radius = float(mu.points.norm(dim=-1).max())
    tokens = local_lipschitz(G, mu, geometry="euclidean").value
    assert float(tokens.max()) <= bounds.table(G, radius, 6).row("tokens").value


def test_other_maps_and_kernels_are_refused():
    mu = ParticleMeasure([[0.0], [1.0]])
    with pytest.raises(NotImplementedError, match="F: expected a map .* got <lambda>"):
        ball_upper(lambda nu: nu, mu, 0.1)
    bent = cosine(1.0, eps=0.1, inner=soft_cap(1.0))
    F = SelfAttention(AttentionParameters.random(1), kernel=bent)
    with pytest.raises(NotImplementedError, match="a kernel that says how far its features move"):
        ball_upper(F, mu, 0.1)
    for wrong in (math.nan, math.inf, -0.1):
        with pytest.raises(ValueError, match="epsilon: expected finite numbers ≥ 0"):
            ball_upper(SelfAttention(AttentionParameters.random(1)), mu, wrong)


class Doubling(Map):
    """A linear map: its bound does not depend on the ball, and may have any shape."""

    def __init__(self, upper):
        self.upper = upper

    def __call__(self, mu):
        return mu.replace(2 * mu.points)

    def ball_bounds(self, mu, radii, *, splitting=True):
        return BallBounds(self.upper, torch.zeros_like(self.upper), self.upper, 2 * radii)


def test_one_bound_comes_back_for_each_radius_whatever_shape_the_map_gives(monkeypatch):
    monkeypatch.setattr("meanfield.maps.map._FACTORED", 0)
    mu = ParticleMeasure([[[1.0], [-1.0]], [[2.0], [0.0]]])
    F = Doubling(torch.tensor(2.0, dtype=F64))
    assert ball_upper(F, mu, 0.1).shape == (2,)
    several = torch.tensor([[0.0], [0.1], [10.0]]).expand(3, 2)
    assert ball_upper(F, mu, several).tolist() == [[2.0, 2.0]] * 3
    assert ball_upper(F, mu[0], torch.tensor([0.0, 0.1, 10.0])).tolist() == [2.0] * 3
    with pytest.raises(ValueError, match=r"expected bounds of shape \(2,\).*got \(3,\)"):
        ball_upper(Doubling(torch.full((3,), 2.0, dtype=F64)), mu, 0.1)


@pytest.mark.parametrize("solver", [None, Dense()])
def test_an_atom_that_splits_in_the_ball_is_below_the_bound_with_a_solver_too(solver):
    """One atom at 10, of which a part of e^-18 moves apart: tokens alone have a smaller bound."""
    F = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]))
    logs = torch.tensor([-18.0, 0.0], dtype=F64).log_softmax(-1)
    apart = local_lipschitz(F, ParticleMeasure([[9.0], [11.0]], log_weights=logs)).value
    mu = ParticleMeasure([[10.0]])
    with_parts, tokens = (
        ball_upper(F, mu, 1.0, splitting=s, solver=solver) for s in (True, False)
    )
    assert float(tokens) < float(apart) <= float(with_parts)
