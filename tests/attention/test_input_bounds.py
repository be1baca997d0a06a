"""Column bounds at an input: equal to the oracle, never below the constant."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, sampling
from meanfield.attention import input_bounds
from meanfield.attention.input_bounds import averaging_norm, field_norm, yudin_bound
from meanfield.lipschitz import local_lipschitz
from tests.attention import input_bounds_oracles as oracle

F64 = torch.float64


def case(seed: int, *, heads: int | None = None, uniform: bool = False):
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


@given(st.integers(0, 2**31))
@settings(max_examples=150)
def test_the_two_parts_bound_both_components(seed):
    F, mu = case(seed)
    seen, found = F.weights(mu), local_lipschitz(F, mu)
    upper = float(averaging_norm(seen) + field_norm(seen))
    assert float(found.value) <= upper * (1 + 1e-9)
    assert float(found.splitting) <= float(field_norm(seen)) * (1 + 1e-9) + 1e-12


@given(st.integers(0, 2**31))
def test_the_column_bound_is_that_of_the_oracle(seed):
    F, mu = case(seed)
    heads, weights = oracle.heads(F, mu), mu.weights.numpy()
    summed = sum(oracle.column_bound(head, weights) for head in heads)
    found = float(averaging_norm(F.weights(mu)))
    assert found <= summed * (1 + 1e-9)
    if len(heads) == 1:
        assert found == pytest.approx(summed, rel=1e-9)
    fields = [
        sum(np.linalg.norm(oracle.covariance(h.P[i], h.v, h.y), 2) for h in heads)
        for i in range(len(weights))
    ]
    assert float(field_norm(F.weights(mu))) == pytest.approx(max(fields), rel=1e-8)


@given(st.integers(0, 2**31))
@settings(max_examples=150)
def test_the_bound_of_yudin_et_al_holds_at_uniform_weights(seed):
    F, mu = case(seed, uniform=True)
    found = float(yudin_bound(F.weights(mu)))
    assert found == pytest.approx(oracle.yudin(F, mu), rel=1e-9)
    assert float(local_lipschitz(F, mu).value) <= found * (1 + 1e-9)


def test_without_a_query_bias_it_is_at_most_the_theorem_and_with_one_that_fails():
    seed = 331  # one masked head on the line
    F, mu = case(seed, uniform=True)
    seen = F.weights(mu)
    (head,) = oracle.heads(F, mu)
    g = [row.max() * (1 - row.max() + np.sort(np.append(row, 0))[-2]) for row in head.P]
    X, P, A = (oracle.two_norm(m) for m in (mu.points.numpy(), head.P, head.A))
    as_printed = oracle.two_norm(head.V) * (P + 2 * X**2 * A * max(g))
    constant = float(local_lipschitz(F, mu).value)
    assert F.parameters.query_bias is not None
    assert as_printed < constant <= float(yudin_bound(seen))


def test_it_says_nothing_of_other_weights():
    F = SelfAttention(AttentionParameters.random(2))
    mu = ParticleMeasure(torch.eye(2, dtype=F64), weights=[0.3, 0.7])
    assert float(yudin_bound(F.weights(mu))) == math.inf


def test_heads_that_write_into_spaces_of_their_own_are_joined():
    eye = torch.eye(8, dtype=F64).reshape(4, 2, 8)
    layer = AttentionParameters(0 * eye, eye, eye, output=eye.mT)
    F, mu = SelfAttention(layer), ParticleMeasure(torch.randn(5, 8, dtype=F64))
    # No interaction: each head takes the mean, of norm 1; added up they are 4.
    assert float(averaging_norm(F.weights(mu))) == pytest.approx(2.0, rel=1e-9)


def test_batches_blocks_and_absent_atoms_change_nothing(monkeypatch):
    F = SelfAttention(AttentionParameters.random(4, n_heads=2, biases=True), causal=True)
    X = torch.randn(3, 6, 4, dtype=F64)
    together = F.weights(ParticleMeasure.from_sequence(X))
    found = [averaging_norm(together), field_norm(together), yudin_bound(together)]
    alone = [F.weights(ParticleMeasure.from_sequence(x)) for x in X]
    monkeypatch.setattr(input_bounds, "_CHUNK_ENTRIES", 1)
    for one, bound in zip(found, (averaging_norm, field_norm), strict=False):
        torch.testing.assert_close(one, torch.stack([bound(seen) for seen in alone]))
    expected = [yudin_bound(seen) for seen in alone]
    torch.testing.assert_close(found[2], torch.stack(expected))
    absent = ParticleMeasure([[5.0], [1.0], [-1.0]], weights=[0.0, 0.5, 0.5])
    present = ParticleMeasure([[1.0], [-1.0]])
    G = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]))
    for bound in (averaging_norm, field_norm):
        assert float(bound(G.weights(absent))) == pytest.approx(
            float(bound(G.weights(present))), rel=1e-12
        )


def test_light_atoms_are_ordinary():
    F = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]))
    mu = sampling.two_diracs(radius=450**0.5, log_ratio=-900.0, direction=[1.0])
    seen, constant = F.weights(mu), float(local_lipschitz(F, mu).value)
    assert constant <= float(averaging_norm(seen) + field_norm(seen)) < 100 * constant
