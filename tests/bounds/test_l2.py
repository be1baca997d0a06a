"""The constants of L2 attention: reference values, and no norm of thousands of Jacobians above."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from meanfield import bounds
from meanfield.attention import AttentionParameters, SelfAttention, kernels
from meanfield.layers import Chain, LayerNorm
from meanfield.maps import linearize
from meanfield.measures import ParticleMeasure
from tests import oracles


def paper_matrices(heads: int, k: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    d = heads * k
    shapes = ((heads, d, k), (heads, d, k), (heads * k, d))
    return [torch.randn(*s, generator=generator, dtype=torch.float64) for s in shapes]


def jacobians(parameters: AttentionParameters, mu: ParticleMeasure, **how) -> torch.Tensor:
    F = SelfAttention(parameters, kernel=kernels.l2, causal=how.pop("causal", False))
    return linearize(F, mu, **how).atoms.to_dense()


def max_norm_lower(J: torch.Tensor, n: int) -> float:
    """A lower bound of the norm of J in maxᵢ|xᵢ|: the fixed point of duality, from 5 starts."""
    blocks = J.reshape(len(J), n, -1, n, J.shape[-1] // n)
    best = 0.0
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(len(J), n, blocks.shape[-1], generator=generator, dtype=J.dtype)
        for _ in range(10):
            x = x / x.norm(dim=-1, keepdim=True)
            y = torch.einsum("biajc,bjc->bia", blocks, x)
            best = max(best, float(y.norm(dim=-1).max()))
            row = y.norm(dim=-1).argmax(-1)
            every = torch.arange(len(J))
            x = torch.einsum("ba,bajc->bjc", y[every, row], blocks[every, row])
    return best


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize(("heads", "k"), [(1, 1), (2, 1), (2, 2)])
def test_no_jacobian_exceeds_the_bounds(n, heads, k, causal):
    parameters = AttentionParameters.tied_l2(
        *oracles.outputs_by_inputs(*paper_matrices(heads, k, n))
    )
    generator = torch.Generator().manual_seed(n)
    sizes = 10.0 ** torch.linspace(-1.5, 1.0, 200, dtype=torch.float64)
    X = torch.randn(200, n, heads * k, generator=generator, dtype=torch.float64)
    J = jacobians(
        parameters, ParticleMeasure.from_sequence(sizes[:, None, None] * X), causal=causal
    )
    assert float(J.abs().sum(-1).max()) <= bounds.l2_attention_inf(parameters, n)
    spectral = torch.linalg.matrix_norm(J, 2).max()
    assert float(spectral) <= bounds.l2_attention_2(parameters, n)
    assert max_norm_lower(J, n) <= bounds.l2_attention_max(parameters, n)


@pytest.mark.parametrize("lightest", [0.2, 1e-3, 1e-6])
def test_weighted_atoms_obey_the_bound_at_one_over_the_lightest_weight(lightest):
    generator = torch.Generator().manual_seed(3)
    parameters = AttentionParameters.tied_l2(*oracles.outputs_by_inputs(*paper_matrices(1, 2, 5)))
    weights = torch.tensor([lightest, *[(1 - lightest) / 3] * 3], dtype=torch.float64)
    X = torch.randn(400, 4, 2, generator=generator, dtype=torch.float64)
    X = X * 10.0 ** torch.linspace(-1, 1, 400, dtype=torch.float64)[:, None, None]
    mu = ParticleMeasure(X, weights)
    n = 1 / float(weights.min())
    weighted = torch.linalg.matrix_norm(jacobians(parameters, mu, geometry="wasserstein"), 2)
    assert float(weighted.max()) <= bounds.l2_attention_2(parameters, n)
    J = jacobians(parameters, mu)
    assert float(J.abs().sum(-1).max()) <= bounds.l2_attention_inf(parameters, n)
    assert max_norm_lower(J, 4) <= bounds.l2_attention_max(parameters, n)


@pytest.mark.parametrize("seed", range(5))
def test_the_bounds_are_below_the_forms_of_the_paper(seed):
    matrices = paper_matrices(2, 2, seed)
    parameters = AttentionParameters.tied_l2(*oracles.outputs_by_inputs(*matrices))
    arrays = [m.numpy() for m in matrices]
    room = 1 + 1e-9
    assert bounds.l2_attention_inf(parameters, 7) <= oracles.l2_bound_inf(7, *arrays) * room
    assert bounds.l2_attention_2(parameters, 7) <= oracles.l2_bound_2(7, *arrays) * room
    assert bounds.l2_attention_max(parameters, 7) < bounds.l2_attention_2(parameters, 7)


def test_one_head_of_dimension_one_has_the_reference_values():
    one = AttentionParameters.tied_l2([[1.0]], [[1.0]])
    found = [bounds.l2_attention_inf(one, n) for n in (2, 5, 10, 20, 50)]
    np.testing.assert_allclose(found, [2.11, 3.87, 5.40, 7.09, 9.54], atol=0.006)
    assert bounds.l2_attention_max(one, 10) == pytest.approx(bounds.l2_attention_inf(one, 10))
    c = bounds.l2_spread(10)
    assert bounds.l2_attention_2(one, 10) == pytest.approx(math.sqrt(10) * (1 + 2 * c) + 2 * c)


def test_the_paper_s_layer_is_the_oracle_s():
    W, V, output = paper_matrices(2, 2, 4)
    F = SelfAttention(
        AttentionParameters.tied_l2(*oracles.outputs_by_inputs(W, V, output)), kernel=kernels.l2
    )
    X = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(5, 4).cos()
    expected = oracles.l2_attention(X.numpy(), W.numpy(), V.numpy(), output.numpy())
    np.testing.assert_allclose(F(ParticleMeasure(X)).points, expected, rtol=1e-11)


def test_heads_that_follow_different_tokens_add_up_in_the_norm_of_the_furthest():
    # x ↦ x₁ + x₂, a head each: √2 in the Euclidean norm; 2 where x₁ and x₂ are of two tokens.
    queries = [[[1.0, 0.0]], [[0.0, 1.0]]]
    parameters = AttentionParameters(queries, queries, queries, [[[1.0]], [[1.0]]])
    assert bounds.l2_attention_2(parameters, 1) == pytest.approx(math.sqrt(2))
    assert bounds.l2_attention_max(parameters, 1) == pytest.approx(2.0)


def test_a_layer_without_a_constant_is_refused():
    eye = np.eye(2)
    untied = AttentionParameters(eye, 2 * eye, eye)
    with pytest.raises(ValueError, match="tied queries and keys"):
        bounds.l2_attention_2(untied, 2)
    repelled = AttentionParameters(eye, eye, eye, scale=-1.0)  # a token sees itself least
    with pytest.raises(ValueError, match="a scale ≥ 0"):
        bounds.l2_attention_2(repelled, 2)
    table = bounds.table(SelfAttention(repelled, kernel=kernels.l2), 3.0, n=3)
    for row in ("L2", "L2, n tokens"):
        assert table.row(row).value is None and "negative" in table.row(row).reason
    biased = AttentionParameters(eye, eye, eye, query_bias=[1.0, 0.0])
    with pytest.raises(ValueError, match="tied queries and keys"):
        bounds.l2_attention_inf(biased, 2)
    blind = AttentionParameters(eye[:1], eye[:1], eye)
    with pytest.raises(ValueError, match="a function of its queries"):
        bounds.l2_attention_max(blind, 2)
    # It has none indeed: along what the queries do not see, the Jacobian grows without end.
    sizes = [
        float(jacobians(blind, ParticleMeasure([[0.0, 0.0], [1.0, s]])).abs().sum(-1).max())
        for s in (1.0, 1e3, 1e6)
    ]
    assert sizes[2] > 900 * sizes[1] > 9e4 * sizes[0]
    good = AttentionParameters.tied_l2([[1.0]], [[1.0]])
    with pytest.raises(ValueError, match="n: expected a number ≥ 1"):
        bounds.l2_attention_inf(good, 0)
    with pytest.raises(ValueError, match=r"output: expected shape \(1, d_out, 1\)"):
        AttentionParameters.tied_l2([[1.0]], [[1.0]], [[1.0, 1.0]])


def test_the_bias_that_queries_and_keys_share_changes_nothing():
    W, V, output = paper_matrices(1, 2, 2)
    plain = AttentionParameters.tied_l2(*oracles.outputs_by_inputs(W, V, output))
    bias = [[1.0, -2.0]]
    biased = AttentionParameters(
        plain.query, plain.key, plain.value, plain.output, query_bias=bias, key_bias=bias
    )
    assert bounds.l2_attention_2(biased, 5) == bounds.l2_attention_2(plain, 5)


def test_values_are_a_function_of_queries_up_to_the_rounding_of_the_layer():
    W, V = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.float64):
        par = AttentionParameters.tied_l2(W.to(dtype), V.to(dtype))
        assert math.isfinite(bounds.l2_attention_2(par, 10))
    one = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    par = AttentionParameters(one, one, torch.tensor([[1.0, 9e-10]], dtype=torch.float64), scale=1)
    with pytest.raises(ValueError, match="a function of its queries"):
        bounds.l2_attention_2(par, 2)


@pytest.mark.parametrize("dim", [2, 3, 16])
def test_directions_that_only_rounding_sees_count_for_nothing(dim):
    """Behind LayerNorm a square Q loses one direction, up to the rounding of its dtype."""
    Q, V = torch.randn(2, dim, dim, generator=torch.Generator().manual_seed(dim)) / dim**0.5
    weight = 1 + 0.3 * torch.randn(dim, generator=torch.Generator().manual_seed(1))
    rows = [
        bounds.table(
            Chain(
                [
                    LayerNorm(weight.to(dtype)),
                    SelfAttention(
                        AttentionParameters.tied_l2(Q.to(dtype), V.to(dtype)), kernel=kernels.l2
                    ),
                ]
            ),
            5.0,
            10,
        )
        for dtype in (torch.float32, torch.float64)
    ]
    for name in ("L2, n tokens", "L2, Thm 3.2"):
        single, double = (float(table.row(name)) for table in rows)
        assert single == pytest.approx(double, rel=1e-4)


@pytest.mark.parametrize("smallest", [1e-3, 1e-6, 1e-9])
def test_queries_of_a_large_condition_number_keep_the_digits_of_their_values(smallest):
    k, d, g = 4, 8, torch.Generator().manual_seed(1)
    left, right, V = (torch.randn(*s, generator=g).double() for s in ((k, k), (d, k), (3, d)))
    sizes = torch.logspace(0, math.log10(smallest), k, dtype=torch.float64)
    Q = torch.linalg.qr(left)[0] * sizes @ torch.linalg.qr(right)[0].mT
    par, c = AttentionParameters.tied_l2(Q, V), bounds.l2_spread(5)
    exact = np.linalg.norm(V @ Q.mT, 2) / math.sqrt(k)
    factor = math.sqrt(5) * (1 + 2 * c) + 2 * c
    assert bounds.l2_attention_2(par, 5) == pytest.approx(factor * exact, rel=1e-6)
    stated = math.sqrt(5 / k) * (4 * c + 1) * np.linalg.norm(V, 2)
    assert bounds.l2_theorem_3_2(par, 5, value=V) == pytest.approx(stated, rel=1e-9)
    assert bounds.l2_theorem_3_2(par, 5) <= stated * (1 + 1e-3)


def test_the_theorem_that_asks_for_the_scale_of_the_paper_says_so():
    eye = torch.eye(2)
    par = AttentionParameters.tied_l2(eye, eye)
    other = AttentionParameters(par.query, par.key, par.value, scale=0.5)
    table = bounds.table(SelfAttention(other, kernel=kernels.l2), 3.0, 5)
    assert table.row("L2, n tokens").applicable
    assert "1/√k" in table.row("L2, Thm 3.2").reason
    near = AttentionParameters(par.query, par.key, par.value, scale=2**-0.5 * (1 + 1e-6))
    for wrong in (other, near):
        with pytest.raises(ValueError, match="scale: expected 1/√2"):
            bounds.l2_theorem_3_2(wrong, 5)
    small = AttentionParameters.tied_l2(eye, 1e-9 * eye)
    with pytest.raises(ValueError, match="another function of queries"):
        bounds.l2_theorem_3_2(small, 5, value=2e-9 * eye)


def test_bounds_are_the_smallest_of_the_products_of_norms_that_their_proofs_give():
    """Written head by head, of heads of all shapes and sizes, so that each product is smallest."""
    norm, chosen = np.linalg.norm, set()
    for seed in range(60):
        rng = np.random.default_rng(seed)
        H, k, v, more, d_out = rng.integers(1, 5, 5)
        n, d = 7, k + more
        Q, B, W = (
            rng.normal(size=(H, *shape)) * 10.0 ** rng.uniform(-1, 1, (H, 1, 1))
            for shape in ((k, d), (v, k), (d_out, v))
        )
        if seed % 3 == 0:  # heads that write into places of their own
            W = np.stack([np.kron(np.eye(1, H, h).T, W[h]) for h in range(H)])
        if seed % 4 == 0:  # rows of equal sums, of which the values see one
            Q, B = 1 + 0.2 * rng.normal(size=Q.shape), B * (np.arange(k) == 0)
        par = AttentionParameters(Q, Q, B @ Q, W)
        B = B @ Q @ np.linalg.pinv(Q)
        left, c = [W[h] @ B[h] for h in range(H)], bounds.l2_spread(n)

        rows = []
        for row in range(len(left[0])):
            by_head = 0.0
            for h in range(H):
                w, sums = left[h][row], abs(Q[h]).sum(1)
                reach = min(norm(sums), math.sqrt(d) * norm(Q[h], 2))
                forms = (
                    (1 + 4 * math.sqrt(k) * c) * abs(w).sum() * max(sums),
                    (1 + 4 * c) * norm(w) * reach,
                )
                chosen.add("sums" if forms[0] < forms[1] else float(norm(sums) == reach))
                by_head += min(forms)
            rows.append(by_head)
        assert bounds.l2_attention_inf(par, n) == pytest.approx(max(rows), rel=1e-9)

        sizes = [norm(q, 2) for q in Q]
        together = norm(np.hstack(left), 2)
        others = [
            sum(norm(one, 2) * size for one, size in zip(left, sizes, strict=True)),
            norm(np.hstack(list(W)), 2)
            * math.hypot(*(norm(b, 2) * size for b, size in zip(B, sizes, strict=True))),
        ]
        stacked = [together * norm(np.vstack(list(Q)), 2), *others]
        apart = [together * math.hypot(*sizes), *others]
        chosen |= {("2", np.argmin(stacked)), ("max", np.argmin(apart))} if H > 1 else set()
        factor = math.sqrt(n) * (1 + 2 * c) + 2 * c
        assert bounds.l2_attention_2(par, n) == pytest.approx(factor * min(stacked), rel=1e-9)
        found = bounds.l2_attention_max(par, n)
        assert found == pytest.approx((1 + 4 * c) * min(apart), rel=1e-9)
    assert len(chosen) == 9, chosen
