"""The upper bound at an input: never below the constant, whichever way it is computed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, sampling
from meanfield.attention import upper, weights
from meanfield.lipschitz import local_lipschitz

F64 = torch.float64


def bound(F, mu):
    return F.local_upper(mu)


def case(seed: int, *, causal: bool = False, biases: bool = True, batch: int = 8):
    g = torch.Generator().manual_seed(seed)
    d, n, heads = (int(torch.randint(low, high, (), generator=g)) for low, high in
                   ((1, 6), (1, 8), (1, 4)))  # fmt: skip
    std = float(10 ** (2 * torch.rand((), generator=g) - 1))
    layer = AttentionParameters.random(
        d, n_heads=heads, head_dim=max(1, d // 2), std=std, biases=biases, generator=g
    )
    points = 3 * torch.randn(batch, n, d, dtype=F64, generator=g)
    logs = torch.log_softmax(5 * torch.randn(batch, n, dtype=F64, generator=g), -1)
    s = torch.rand(batch, n, dtype=F64, generator=g) if causal else None
    mu = ParticleMeasure(points, log_weights=logs, positions=s)
    return SelfAttention(layer, causal=causal), mu


@given(seed=st.integers(0, 2**32 - 1), causal=st.booleans())
@settings(max_examples=50)
def test_it_bounds_both_components_of_batches(seed, causal):
    F, mu = case(seed, causal=causal)
    constant = local_lipschitz(F, mu)
    assert (constant.value <= bound(F, mu) * (1 + 1e-9)).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_the_ways_that_save_memory_bound_too_and_are_no_tighter(seed, causal, monkeypatch):
    F, mu = case(seed, causal=causal)
    tight, constant = bound(F, mu), local_lipschitz(F, mu).value
    monkeypatch.setattr(upper, "_JACOBIAN_WORK", 0)
    by_heads = bound(F, mu)
    monkeypatch.setattr(upper, "_MOMENT_ENTRIES", 0)
    by_traces = bound(F, mu)
    for found in (by_heads, by_traces):
        assert (constant <= found * (1 + 1e-9)).all()
        assert (tight <= found * (1 + 1e-9)).all()


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_change_nothing(causal, monkeypatch):
    F, mu = case(3, causal=causal)
    whole = bound(F, mu)
    monkeypatch.setattr(upper, "_CHUNK_ENTRIES", 1)
    for name in ("_BLOCK_ENTRIES", "_LARGE_BLOCK_ENTRIES"):
        monkeypatch.setattr(weights, name, 1)
    torch.testing.assert_close(bound(F, mu), whole, rtol=1e-9, atol=0)


def test_light_and_absent_atoms_are_ordinary():
    F = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]))
    mu = sampling.two_diracs(radius=450**0.5, log_ratio=-900.0, direction=[1.0])
    found, constant = float(bound(F, mu)), float(local_lipschitz(F, mu).value)
    assert constant <= found < 100 * constant
    absent = ParticleMeasure([[5.0], [1.0], [-1.0]], weights=[0.0, 0.5, 0.5])
    present = ParticleMeasure([[1.0], [-1.0]])
    assert float(bound(F, absent)) == pytest.approx(float(bound(F, present)), rel=1e-12)


def test_heads_together_are_bounded_better_than_one_by_one():
    # Heads that write into and read from spaces of their own: the norm is that of the worst one.
    eye = torch.eye(8, dtype=F64).reshape(4, 2, 8)
    layer = AttentionParameters(0 * eye, eye, eye, output=eye.mT)
    mu = ParticleMeasure(torch.randn(5, 8, dtype=F64))
    # No interaction: each head takes the mean, of norm 1; added up they would be 4.
    assert float(bound(SelfAttention(layer), mu)) == pytest.approx(1.0, abs=1e-12)


def test_float32_stays_above_the_constant():
    layer = AttentionParameters.random(16, n_heads=4, std=0.3, dtype=torch.float32)
    mu = ParticleMeasure.from_sequence(torch.randn(6, 40, 16))
    for causal in (False, True):
        F = SelfAttention(layer, causal=causal)
        assert (local_lipschitz(F, mu, rtol=1e-3).value <= bound(F, mu) * (1 + 1e-5)).all()


def test_it_is_tighter_than_the_sum_over_heads_on_a_layer_of_many():
    layer = AttentionParameters.random(64, n_heads=8, std=0.2)
    F, mu = SelfAttention(layer), ParticleMeasure(torch.randn(30, 64, dtype=F64))
    assert float(bound(F, mu)) < 6 * float(local_lipschitz(F, mu).value)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_large_gram_matrices_are_bounded_within_two_percent(dtype):
    g = torch.Generator().manual_seed(0)
    root = torch.randn(3, 120, 150, generator=g, dtype=dtype)
    root[1, 0] *= 50  # one direction far above the rest
    root[2] = 0
    gram = root @ root.mT
    bound = upper._top(gram)
    true = torch.linalg.matrix_norm(root.double(), 2)
    assert (bound.double() >= true * (1 - 1e-6)).all()
    assert (bound.double() <= true * 1.02).all()
