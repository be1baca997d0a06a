"""The table of theorems: which apply, their bounds, and that no measured constant disagrees."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meanfield import bounds, sampling
from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.attention.kernels import (
    alibi,
    cosine,
    dot_product,
    l2,
    qk_norm,
    rotary,
    soft_cap,
    window,
)
from meanfield.attention.normalizations import sigmoid, sink
from meanfield.bounds.layer import Layer
from meanfield.bounds.rates import mean_field_by_rate
from meanfield.bounds.scores import sigmoid_mean_field
from meanfield.layers import Chain, LayerNorm
from meanfield.lipschitz import local_lipschitz
from meanfield.measures import ParticleMeasure
from tests import oracles, strategies
from tests.bounds import bounds_oracles
from tests.bounds.bounds_oracles import kernel_norm

F64 = torch.float64


def random_layer(seed: int, d: int, kind: str, size: float) -> tuple[dict, AttentionParameters]:
    fields = strategies.layer(np.random.default_rng(seed), d, kind, size)
    return fields, AttentionParameters(**fields)


@given(st.integers(0, 10**6), st.integers(1, 4), st.sampled_from(strategies.LAYERS))
def test_the_norms_of_a_layer_are_those_of_its_dense_matrices(seed, d, kind):
    fields, par = random_layer(seed, d, kind, 1.0)
    found = Layer.of(par)
    dense = oracles.bilinear(fields)
    for k, (A, c, M) in enumerate(dense):
        assert found.norm_A[k] == pytest.approx(np.linalg.norm(A, 2), rel=1e-10)
        assert found.shift[k] == pytest.approx(np.linalg.norm(c), rel=1e-10, abs=1e-300)
        assert found.norm_V[k] == pytest.approx(np.linalg.norm(M, 2), rel=1e-10)
    arrays = Layer.of(AttentionParameters.from_bilinear(par.A, par.V))
    np.testing.assert_allclose(arrays.norm_A, found.norm_A, rtol=1e-10)
    np.testing.assert_allclose(arrays.norm_V, found.norm_V, rtol=1e-10)
    expected = sum(
        oracles.general_bound(
            np.linalg.norm(A, 2) + np.linalg.norm(c) / 1.7, np.linalg.norm(M, 2), 1.7, 9
        )
        for A, c, M in dense
    )
    assert found.theorem_3_3(1.7, 9) == pytest.approx(expected, rel=1e-8)


@given(
    seed=st.integers(0, 10**6),
    d=st.integers(1, 3),
    n=st.integers(1, 6),
    kind=st.sampled_from(strategies.LAYERS),
    radius=st.sampled_from([0.05, 0.5, 1.0, 2.0]),
    causal=st.booleans(),
)
@settings(max_examples=15)
def test_no_constant_of_a_batch_exceeds_any_upper_bound(seed, d, n, kind, radius, causal):
    # 30 layers × 50 measures × 2 geometries: 3,000 constants, heads and biases included.
    _, par = random_layer(seed, d, kind, 1.0)
    generator = torch.Generator().manual_seed(seed)
    F = SelfAttention(par, causal=causal)
    shape = {"radius": radius, "batch_shape": (25,), "generator": generator}
    points = torch.cat([sampling.ball(n, d, **shape), sampling.sphere(n, d, **shape)])
    spread = 2 * radius**2 * torch.rand(50, 1, generator=generator, dtype=F64) + 1
    logs = (spread * torch.randn(50, n, generator=generator, dtype=F64)).log_softmax(-1)
    mu = ParticleMeasure(points, log_weights=logs, positions=np.arange(1, n + 1) / n)
    table = bounds.table(F, radius, n)
    measured = local_lipschitz(F, mu).value
    name = "masked mean field" if causal else "mean field"
    assert float(measured.max()) <= table.row(name).value
    assert bool((measured <= bounds.local_upper(F, mu) * (1 + 1e-9) + 1e-300).all())
    tokens = local_lipschitz(F, ParticleMeasure.from_sequence(points), geometry="euclidean")
    row = table.row("masked tokens" if causal else "tokens")
    assert float(tokens.value.max()) <= row.value <= table.row("Thm 3.3, 4.3").value


@pytest.mark.parametrize("causal", [False, True])
@given(seed=st.integers(0, 10**6), d=st.integers(1, 3), radius=st.sampled_from([0.4, 1.0, 2.0]))
@settings(max_examples=12)
def test_lower_bounds_are_reached_by_their_witnesses(seed, d, radius, causal):
    generator = torch.Generator().manual_seed(seed)
    A, V = torch.randn(2, d, d, dtype=F64, generator=generator)
    F = SelfAttention(AttentionParameters.from_bilinear(A, V), causal=causal)
    n = 2 + seed % 20
    table = bounds.table(F, radius, n)
    lower = [row for row in table.applicable if row.side == "lower"]
    reached_tokens, reached_atoms = 0.0, 0.0
    for branch in ("negative", "positive"):
        values, vectors = torch.linalg.eig(A)
        for value, u in zip(values, vectors.T, strict=True):
            if value.imag or (value.real < 0) != (branch == "negative"):
                continue
            negative = branch == "negative"
            heavy_at, gamma = (-1.0, -value.real) if negative else (0.5, value.real / 8)
            points = radius * heavy_at * u.real.expand(n, -1).clone()
            points[0] = radius * u.real
            tokens = ParticleMeasure.from_sequence(points)
            found = local_lipschitz(F, tokens, geometry="euclidean").value
            reached_tokens = max(reached_tokens, float(found))
            ratio = bounds.two_dirac_best_log_ratio(float(gamma), radius)
            atoms = sampling.two_diracs(
                radius, ratio, u.real, heavy_at=heavy_at, positioned=causal
            )
            reached_atoms = max(reached_atoms, float(local_lipschitz(F, atoms).value))
    for row in lower:
        if row.name in ("two Diracs, masked", "far token"):  # a limit, and a witness of its own
            continue
        reached = reached_atoms if row.name == "two Diracs" else reached_tokens
        assert row.value <= reached * (1 + 1e-12)


def test_a_negative_scale_is_that_of_keys_turned_round():
    par = AttentionParameters.random(3, n_heads=2, head_dim=2, biases=True, generator=0)
    matrices = {"value": par.value, "output": par.output, "query_bias": par.query_bias}
    negative = AttentionParameters(par.query, par.key, **matrices, scale=-par.scale)
    turned = AttentionParameters(par.query, -par.key, **matrices, scale=par.scale)
    found, expected = (bounds.table(one, 1.0, 5) for one in (negative, turned))
    assert [row.name for row in found.applicable] == [row.name for row in expected.applicable]
    for row in expected.applicable:
        assert found.row(row.name).value == pytest.approx(row.value, rel=1e-9)


def test_the_limit_bounds_the_constant_at_large_scales():
    generator = torch.Generator().manual_seed(0)
    par = AttentionParameters.random(3, n_heads=2, head_dim=3, biases=True, generator=generator)
    X = torch.randn(20, 6, 3, dtype=F64, generator=generator)
    for causal in (False, True):
        F = SelfAttention(par, causal=causal)
        mu = ParticleMeasure.from_sequence(1e4 * X)
        found = local_lipschitz(F, mu, geometry="euclidean").value
        assert float(found.max()) <= bounds.table(F, 1.0, 6).row("Thm 3.7, 4.5").value


@pytest.mark.parametrize("d", [1, 2])
def test_the_masked_row_is_that_of_its_dimension(d):
    par = AttentionParameters.from_bilinear(-np.eye(d), np.eye(d))
    row = bounds.table(SelfAttention(par, causal=True), 3.0).row("masked mean field")
    assert row.value == pytest.approx(bounds.masked_mean_field(1.0, 1.0, 3.0, dim=d), rel=1e-8)


@pytest.mark.parametrize("causal", [False, True])
def test_the_table_of_the_line_has_the_numbers_of_the_formulas(causal):
    par = AttentionParameters.from_bilinear([[-1.0]], [[1.0]])
    table = bounds.table(SelfAttention(par, causal=causal), 1.0, 10)
    upper = {
        "tokens": bounds.tokens(1, 1, 1, 10),
        "Thm 3.5": bounds.theorem_3_5(1, 1, 1),
        "mean field": bounds.mean_field(1, 1, 1),
    }
    masked = {
        "masked tokens": bounds.tokens(1, 1, 1, 10, causal=True),
        "masked mean field": bounds.masked_mean_field(1, 1, 1, dim=1),
    }
    expected = {
        "Thm 3.3, 4.3": bounds.theorem_3_3(1, 1, 1, 10),
        **(masked if causal else upper),
        "Thm 3.7, 4.5": math.sqrt(10),
        "Prop. 3.4": bounds.proposition_3_4(1, 1, 10),
        "two Diracs": bounds.two_dirac_lower(1, 1),
    }
    if causal:
        expected["two Diracs, masked"] = bounds.masked_two_dirac_lower(1, 1)
    assert [row.name for row in table.applicable] == list(expected)
    for name, value in expected.items():
        assert table.row(name).value == pytest.approx(value, rel=1e-8)
    assert table[0] is table.row("Thm 3.3, 4.3")


def test_rows_that_do_not_apply_say_why():
    heads = AttentionParameters.random(4, n_heads=2)
    biased = AttentionParameters.random(3, biases=True)
    turning = AttentionParameters.from_bilinear([[0.0, 1.0], [-1.0, 0.0]], np.eye(2))

    def reason(layer, name, **settings):
        row = bounds.table(layer, 1.0, **settings).row(name)
        assert not row.applicable
        return row.reason

    assert "number of tokens" in reason(heads, "Thm 3.3, 4.3")
    assert "cancel" in reason(heads, "two Diracs")
    assert "query bias" in reason(biased, "two Diracs")
    assert "no real eigenvalue" in reason(turning, "two Diracs")
    assert "not masked" in reason(SelfAttention(heads), "masked mean field")
    assert "is masked" in reason(SelfAttention(heads, causal=True), "Thm 3.5")


def test_another_kernel_gets_no_number_of_dot_products():
    for kernel in (l2, cosine(2.0), soft_cap(3.0, inner=l2), window(0.5)):
        F = SelfAttention(AttentionParameters.random(2), kernel=kernel)
        assert bounds.table(F, 1.0, 3).applicable == ()
        assert "kernel" in bounds.table(F, 1.0, 3)[0].reason
    F = SelfAttention(AttentionParameters.random(2), kernel=soft_cap(3.0), normalization=sigmoid)
    assert bounds.table(F, 1.0, 3).applicable == ()


def other_layer(seed, d, kind, causal):
    """Two heads, with a bias, that are capped or see squared distances."""
    g = torch.Generator().manual_seed(seed)
    if kind == "soft cap":
        par = AttentionParameters.random(
            d, n_heads=2, head_dim=2, biases=True, std=1.0, generator=g
        )
        return SelfAttention(par, causal=causal, kernel=soft_cap(0.8))
    W, V = (
        torch.randn(2, 2, d, dtype=F64, generator=g),
        torch.randn(2, 2, d, dtype=F64, generator=g),
    )
    par = AttentionParameters.tied_l2(W, V, torch.randn(2, d, 2, dtype=F64, generator=g))
    bias = torch.randn(2, 2, dtype=F64, generator=g)
    biased = AttentionParameters(
        par.query, par.key, par.value, par.output, query_bias=bias, key_bias=bias
    )
    return SelfAttention(biased, causal=causal, kernel=l2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["soft cap", "l2"])
@given(
    seed=st.integers(0, 10**6), d=st.integers(1, 3), radius=st.sampled_from([0.05, 0.4, 1.0, 2.5])
)
@settings(max_examples=15)
def test_no_constant_of_other_scores_exceeds_its_rows(kind, causal, seed, d, radius):
    F, g = other_layer(seed, d, kind, causal), torch.Generator().manual_seed(seed)
    n = 2 + seed % 5
    points = sampling.ball(n, d, radius=radius, batch_shape=(40,), generator=g)
    points[::2] /= points[::2].norm(dim=-1, keepdim=True) / radius
    logs = (3 * torch.randn(40, n, dtype=F64, generator=g)).log_softmax(-1)
    mu = ParticleMeasure(points, log_weights=logs, positions=np.arange(1, n + 1) / n)
    table = bounds.table(F, radius, n)
    tail = ", masked" if causal else ""
    row = table.row(("soft cap" if kind == "soft cap" else "L2") + tail)
    assert float(local_lipschitz(F, mu).value.max()) <= row.value
    if kind == "l2":
        tokens = local_lipschitz(F, ParticleMeasure.from_sequence(points), geometry="euclidean")
        assert float(tokens.value.max()) <= table.row("L2, n tokens").value


@pytest.mark.parametrize("rows", ["null key", "sigmoid"])
@given(seed=st.integers(0, 10**6), d=st.integers(1, 3), radius=st.sampled_from([0.3, 1.0, 2.0]))
@settings(max_examples=12)
def test_no_constant_under_another_normalisation_exceeds_its_row(rows, seed, d, radius):
    g, n = torch.Generator().manual_seed(seed), 2 + seed % 4
    par = AttentionParameters.random(d, n_heads=2, head_dim=d, std=1.0, generator=g)
    bias = torch.randn(2, d, dtype=F64, generator=g)
    par = AttentionParameters(par.query, par.key, par.value, par.output, query_bias=bias)
    beta = 4 * torch.randn(2, dtype=F64, generator=g) - 2
    F = SelfAttention(par, normalization=sigmoid if rows == "sigmoid" else sink(beta))
    points = sampling.ball(n, d, radius=radius, batch_shape=(40,), generator=g)
    points[::2] /= points[::2].norm(dim=-1, keepdim=True) / radius
    logs = (4 * torch.randn(40, n, dtype=F64, generator=g)).log_softmax(-1)
    found = local_lipschitz(F, ParticleMeasure(points, log_weights=logs)).value
    row = bounds.table(F, radius).row(rows)
    assert 0 < float(found.max()) <= row.value


@pytest.mark.parametrize(
    ("normalization", "causal"), [(sigmoid, False), (sigmoid, True), (sink(0.0), False)]
)
def test_a_bias_of_values_that_weights_do_not_leave_has_no_row(normalization, causal):
    """The rows said 1.5 and 3.0 where the constants are 20 and 42."""
    par = AttentionParameters([[1.0]], [[1.0]], [[1.0]], [[[1.0]]], value_bias=[[100.0]])
    biased = SelfAttention(par, causal=causal, normalization=normalization)
    Q = np.eye(2, 3)
    par = AttentionParameters(Q, Q, np.eye(3), np.eye(3)[None])
    after = SelfAttention(par, causal=causal, normalization=normalization)
    behind = Chain([LayerNorm([1.0, 1.0, 1.0], [0.0, 0.0, 100.0], 0.1), after])
    points = ([[1.0], [-1.0]], [[0.5, 0.0, -0.5], [-0.5, 0.5, 0.0]])
    for F, x in zip((biased, behind), points, strict=True):
        constant = float(local_lipschitz(F, ParticleMeasure.from_sequence(x)).value)
        said = [row for row in bounds.table(F, 1.0) if row.of.startswith(("W₂", "d₂"))]
        upper = [row for row in said if row.applicable and row.side == "upper"]
        assert all(row.value >= constant for row in upper)
        assert any("a bias of the values moves" in row.reason for row in said)


def test_a_null_key_halves_the_exponent():
    c = np.array([1.0, 4.0, 9.0, 16.0])
    root = np.hypot(1, c)
    expected = [bounds_oracles.joint(float(np.exp(x / 2) * m), float(m), float(x))
                for x, m in zip(c, root, strict=True)]  # fmt: skip
    np.testing.assert_allclose(bounds.mean_field(c, 1, 1, sink=0.0)[1:], expected[1:], rtol=1e-9)
    assert (bounds.mean_field(c, 1, 1, sink=c) <= root * 1.01 + c).all()
    # Where scores are small the other bound of the density is the less.
    less = bounds_oracles.joint(kernel_norm(0.1) / math.sqrt(1 + math.e), math.hypot(1, 0.1), 0.1)
    assert bounds.mean_field(0.1, 1, 1, sink=1.0) == pytest.approx(less, rel=1e-9)
    none = bounds.mean_field(c, 1, 1, sink=-np.array([200.0, 300, 400, 500]))
    np.testing.assert_allclose(none, bounds.mean_field(c, 1, 1), rtol=1e-12)
    # Two Diracs, A = −γI, the light one seen as much as it can be: 302.5 at c = 9.
    best = 0.0
    F = SelfAttention(
        AttentionParameters.from_bilinear([[-9.0]], [[1.0]]), normalization=sink(0.0)
    )
    for log_ratio in np.linspace(-14, -4, 41):
        mu = sampling.two_diracs(1.0, log_ratio, [1.0])
        best = max(best, float(local_lipschitz(F, mu).value))
    assert 300 < best <= bounds.table(F, 1.0).row("null key").value < 830
    biased = AttentionParameters([[1.0]], [[1.0]], [[1.0]], key_bias=[[1.0]])
    row = bounds.table(SelfAttention(biased, normalization=sink(0.0)), 1.0).row("null key")
    assert row.reason == "a key bias moves scores past the sink"
    with pytest.raises(ValueError, match="sink: expected numbers, or −∞"):
        bounds.mean_field(1, 1, 1, sink=math.inf)


def test_the_page_of_variants_has_the_numbers_of_the_functions():
    thin = AttentionParameters.from_bilinear(np.eye(2), np.eye(2))

    def row(name, par=thin, *, before=(), **kind):
        F = SelfAttention(par, **kind)
        return bounds.table(Chain([*before, F]) if before else F, 3.0).row(name).value

    plain, norm = bounds.mean_field(1, 1, 3.0), LayerNorm(torch.ones(9, dtype=F64), None, 1e-5)
    wide = AttentionParameters.from_bilinear(np.eye(9), np.eye(9))
    tilted = bounds_oracles.joint(math.exp(2) * kernel_norm(9.0), math.hypot(1, 9), 9.0)
    numbers = {
        "softmax of": f"{plain:,.0f}",
        "the same, masked": f"{bounds.masked_mean_field(1, 1, 3.0):,.0f}",
        "rotary positions": f"{row('bounded scores', kernel=rotary()):,.0f}",
        "ALiBi": f"{tilted:,.0f} at",
        "windows": f"{math.sqrt(2) * kernel_norm(9.0) + 9:,.0f}",
        "a null key": f"{bounds.mean_field(1, 1, 3.0, sink=0.0):.0f} at",
        "sigmoid": f"{row('sigmoid', normalization=sigmoid):.1f}",
        "soft cap": f"{row('soft cap', kernel=soft_cap(1.0)):.1f} at",
        "QK-norm": f"{row('bounded scores', kernel=qk_norm(eps=1e-2)):.0f} at",
        "RMSNorm": f"{row('mean field', wide, before=[norm]) / 1e7:.2f}e7 at",
        "L2, tied": f"{bounds.l2_mean_field(1, 1, 3.0, 1):.0f} at",
        "gated": f"{plain + 3 / 4:,.1f} at",
        "differential": f"{1.5 * plain:,.0f} at",
    }
    page = (Path(__file__).parents[2] / ".docs" / "variants.md").read_text().splitlines()
    for name, number in numbers.items():
        (line,) = (line for line in page if line.startswith(f"| {name}"))
        assert line.split("|")[3].strip().startswith(number), (name, number)
    alibi_row = row("bounded scores", kernel=alibi([1.0], length=4))
    assert f"{alibi_row:,.0f}" in "\n".join(page)


@pytest.mark.parametrize("c", [0.5, 4.0])
def test_windows_cost_the_root_of_two_and_position_biases_half_of_their_spread(c):
    g, worst = torch.Generator().manual_seed(3), 0.0
    logs = ((1 + 2 * c) * torch.randn(200, 6, dtype=F64, generator=g)).log_softmax(-1)
    points = 2 * torch.rand(200, 6, 1, dtype=F64, generator=g) - 1
    points[::2] = points[::2].sign()
    mu = ParticleMeasure(
        points, log_weights=logs, positions=torch.rand(200, 6, dtype=F64, generator=g)
    )
    D, M = kernel_norm(c), math.hypot(1, c)
    tilted = bounds_oracles.joint(math.e * D, M, c)
    for kernel, upper in ((window(0.4), 2**0.5 * D + c), (alibi([2.0]), tilted)):
        F = SelfAttention(AttentionParameters.from_bilinear([[-c]], [[1.0]]), kernel=kernel)
        found = float(local_lipschitz(F, mu).value.max())
        assert found <= upper
        worst = max(worst, found / upper)
    assert worst > 0.4


def test_rows_of_other_scores_have_the_numbers_of_the_formulas():
    par = AttentionParameters.from_bilinear([[-2.0]], [[3.0]])
    table = bounds.table(SelfAttention(par, kernel=soft_cap(1.5)), 1.2)
    expected = bounds.capped_mean_field(2.0, 3.0, 1.2, 1.5)
    assert table.row("soft cap").value == pytest.approx(expected, rel=1e-8)
    assert table.row("soft cap, masked").reason == "the layer is not masked"
    masked = bounds.table(SelfAttention(par, causal=True, kernel=soft_cap(1.5)), 1.2)
    expected = bounds.capped_mean_field(2.0, 3.0, 1.2, 1.5, causal=True)
    assert masked.row("soft cap, masked").value == pytest.approx(expected, rel=1e-8)
    tied = AttentionParameters.tied_l2([[2.0, 0.0], [0.0, 1.0]], [[1.0, 0.5]])
    F = SelfAttention(tied, kernel=l2)
    found = bounds.table(F, 1.2)
    norm_V = float(Layer.of(tied).norm_V[0])
    expected = bounds.l2_mean_field(4 / 2**0.5, norm_V, 1.2, 2)
    assert found.row("L2").value == pytest.approx(expected, rel=1e-8)
    assert "number of tokens" in found.row("L2, n tokens").reason
    expected = bounds.l2_attention_2(tied, 7)
    assert bounds.table(F, 1.2, 7).row("L2, n tokens").value == pytest.approx(expected, rel=1e-12)
    untied = bounds.table(SelfAttention(AttentionParameters.random(2), kernel=l2), 1.0, 3)
    assert "not tied" in untied.row("L2").reason
    free = AttentionParameters([[1.0, 0.0]], [[1.0, 0.0]], [[0.0, 1.0]])
    assert (
        "do not" in bounds.table(SelfAttention(free, kernel=l2), 1.0, 3).row("L2, n tokens").reason
    )


def test_the_text_is_aligned_and_the_html_escaped():
    table = bounds.table(AttentionParameters.random(2), 1.5, 4)
    lines = str(table).splitlines()
    assert "radius 1.5, n = 4" in lines[0]
    column = lines[1].index("side")
    assert {line[column : column + 5] for line in lines[2:]} == {"upper", "lower", "limit"}
    assert "<table" in table._repr_html_()
    assert table._repr_html_().count("<tr>") == 1 + len(table)


def test_radii_broadcast_and_bad_arguments_are_refused():
    par = AttentionParameters.random(3, n_heads=3, biases=True)
    together = Layer.of(par).theorem_3_3([0.5, 2.0], 7)
    assert together.shape == (2,)
    assert together[1] == Layer.of(par).theorem_3_3(2.0, 7)
    with pytest.raises(ValueError, match="radius: expected a number > 0"):
        bounds.table(par, 0.0)
    for n in (0, -3):
        with pytest.raises(ValueError, match="n: expected a whole number ≥ 1, got"):
            bounds.table(par, 1.0, n=n)
    with pytest.raises(KeyError, match=r"Thm 3\.5"):
        bounds.table(par, 1.0).row("Thm 9")


def test_a_dataset_holds_the_table():
    layer = AttentionParameters.random(4, n_heads=2)
    table = bounds.table(SelfAttention(layer), 1.5, 4)
    ds = table.to_dataset()
    assert ds.sizes == {"statement": len(table)}
    assert ds.attrs == {"radius": 1.5, "n": 4}
    for row in table:
        one = ds.sel(statement=row.name)
        assert bool(one.applicable) == row.applicable
        assert np.isnan(one.value) if row.value is None else float(one.value) == row.value
        words = (row.side, row.of, row.assumption, row.source, row.reason or "")
        assert (
            tuple(one[k].item() for k in ("side", "of", "assumption", "source", "reason")) == words
        )
    assert all("long_name" in v.attrs for v in ds.variables.values())


def test_a_matrix_of_small_rate_gets_a_smaller_number():
    table = bounds.table(AttentionParameters.from_bilinear(np.eye(2), np.eye(2)), 6.0)
    found = table.row("mean field").value
    assert found == pytest.approx(mean_field_by_rate(np.eye(2), 1.0, 6.0), rel=1e-8)
    assert found < 1e-3 * bounds.mean_field(1.0, 1.0, 6.0)


def test_a_query_bias_adds_to_the_mean_field_bound_although_the_rate_is_small():
    """The rate knows no bias: 288.7 where 302.5 is attained (A = V = 1, R = 3, bias 3)."""
    par = AttentionParameters([[1.0]], [[1.0]], [[1.0]], query_bias=[[3.0]], scale=1.0)
    expected = bounds.mean_field(1.0, 1.0, 3.0, shift=3.0)
    assert bounds.table(par, 3.0).row("mean field").value == pytest.approx(expected, rel=1e-8)


def test_tokens_reach_nothing_where_no_place_is_far_enough():
    assert bounds.tokens_lower(1.0, 0.1, 1) == 0
    assert bounds.masked_mean_field(1.0, 1.0, 1.0, p=1) == math.inf


def test_a_key_bias_adds_to_the_bound_of_capped_scores():
    # Without a cap it would drop out; under tanh the slope depends on the other token.
    eye = torch.eye(2, dtype=F64)
    mu = ParticleMeasure.from_sequence(torch.tensor([[1.0, 0], [-0.3, 0], [0.2, 0]], dtype=F64))
    for size, causal in itertools.product((0.0, 10.0, 100.0, 1000.0), (False, True)):
        par = AttentionParameters(eye, eye, eye, key_bias=[[0.0, size]], scale=1.0)
        F = SelfAttention(par, causal=causal, kernel=soft_cap(1.0))
        row = bounds.table(F, 1.0).row("soft cap, masked" if causal else "soft cap")
        assert float(local_lipschitz(F, mu).value) <= row.value <= 30 + 2 * size


def test_what_a_layer_says_of_itself_is_not_contradicted():
    F = SelfAttention(AttentionParameters.random(2), causal=True)
    assert bounds.table(F, 1.0, 256).row("tokens").reason == "the layer is masked"
    tied = AttentionParameters.tied_l2([[1.0]], [[1.0]])
    for bound in (bounds.l2_attention_2, bounds.l2_attention_inf, bounds.l2_attention_max):
        assert bound(SelfAttention(tied, kernel=l2), 16) == bound(tied, 16)
        with pytest.raises(ValueError, match="kernel=kernels.l2"):
            bound(SelfAttention(tied), 16)


def test_bounds_of_a_layer_in_single_precision_are_those_of_its_numbers():
    """A product of matrices in single precision is off by more than bounds are raised by."""
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        matrices = torch.randn(3, 2, 1, 4, generator=g)
        par = AttentionParameters(*matrices, torch.randn(2, 4, 1, generator=g))
        wide = par.to(torch.float64)
        single, double = (bounds.table(SelfAttention(each), 3.0) for each in (par, wide))
        for one, other in zip(single, double, strict=True):
            assert (one.value is None) == (other.value is None)
            if one.value is not None:
                assert float(one.value) == pytest.approx(float(other.value), rel=1e-12)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_two_diracs_do_not_depend_on_the_names_of_coordinates(order):
    A, V = np.diag(np.array([-800.0, -1.0])[order]), np.diag(np.array([0.0, 1.0])[order])
    row = bounds.table(SelfAttention(AttentionParameters.from_bilinear(A, V)), 1.0, 5)
    assert row.row("two Diracs").value == pytest.approx(bounds.two_dirac_lower(1.0, 1.0))
    large = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1e200]]))
    rows = bounds.table(large, 1.0, 5)
    assert rows.row("two Diracs").value < rows.row("mean field").value < np.inf


def test_bounds_at_the_ends_of_the_number_range():
    for c in (1e5, 1e10, 1e100):
        found = bounds.masked_mean_field(c, 1.0, 1.0, p=math.inf)
        assert found == pytest.approx(c + math.hypot(1, c), rel=2e-12)
        assert found >= (c + math.hypot(1, c)) * (1 - 1e-15)
    for c, p in itertools.product((1e6, 1e7, 1e8, 1e9), (1e15, 1e16, 1e17)):
        assert bounds.masked_mean_field(c, 1.0, 1.0, p=p) >= (c + math.hypot(1, c)) * (1 - 1e-15)
    for c, n in ((1e155, 2), (1e6, 1e300), (1e200, 5)):
        assert 0 < bounds.tokens_lower(c, 1.0, n) <= bounds.tokens(c, 1.0, 1.0, n)
    assert sigmoid_mean_field(1.0, 0.0, 1e160) == 0
    assert bounds.capped_mean_field(0.0, 1.0, 1.0, 1e308) == pytest.approx(1.0)
    wide = bounds.capped_mean_field(1.0, 1.0, 1.0, 1e308)
    assert wide == pytest.approx(bounds.capped_mean_field(1.0, 1.0, 1.0, 1e9))


@pytest.mark.parametrize("causal", [False, True])
def test_statements_about_tokens_do_not_apply_to_points_with_weights(causal):
    F = SelfAttention(AttentionParameters.from_bilinear([[0.0]], [[1.0]]), causal=causal)
    points, weights = torch.linspace(-1, 1, 20)[:, None].double(), [0.981] + [0.001] * 19
    mu = ParticleMeasure(points, weights, positions=torch.arange(1, 21) / 20)
    row = "masked tokens" if causal else "tokens"
    constant = float(local_lipschitz(F, mu, geometry="euclidean"))
    weighted, uniform = (bounds.table(F, 1.0, points=given) for given in (mu, points))
    assert "weights of their own" in weighted.row(row).reason
    assert uniform.row(row).applicable and float(uniform.row(row)) < constant
    for one in weighted:
        if one.applicable and one.side == "upper" and "Euclidean" in one.of:
            assert float(one) >= constant


@pytest.mark.parametrize("kind", [F64, torch.float32])
def test_points_on_the_sphere_are_in_its_ball_whatever_their_rounding(kind):
    F = SelfAttention(AttentionParameters.from_bilinear(np.eye(3), np.eye(3)).to(kind))
    points = sampling.sphere(1000, 3, generator=0, dtype=kind)
    assert bounds.table(F, 1.0, points=points).n == 1000
    with pytest.raises(ValueError, match=r"in the ball of radius 1, got 1\.0000\d"):
        bounds.table(F, 1.0, points=(1 + 1e-5) * points)


def test_atoms_without_mass_are_no_weights_of_their_own():
    F = SelfAttention(AttentionParameters.from_bilinear([[1.0]], [[1.0]]))
    padded = ParticleMeasure([[0.5], [-0.5], [0.0], [9.0]], [0.5, 0.5, 0.0, 0.0])
    found, wanted = (bounds.table(F, 1.0, points=t) for t in (padded, [[0.5], [-0.5]]))
    assert found.n == 2
    assert [(row.name, row.value) for row in found] == [(row.name, row.value) for row in wanted]
    for name in ("Thm 3.3, 4.3", "tokens", "Thm 3.7, 4.5", "Prop. 3.4", "far token"):
        for share in (0.9, 0.51):
            mu = ParticleMeasure([[0.5], [-0.5]], [share, 1 - share])
            assert not bounds.table(F, 1.0, points=mu).row(name).applicable
    single = torch.full((7,), 1 / 7, dtype=torch.float32)
    points = torch.linspace(-1, 1, 7, dtype=torch.float32)[:, None]
    short = SelfAttention(F.parameters.to(torch.float32))
    assert (
        bounds.table(short, 1.0, points=ParticleMeasure(points, single)).row("tokens").applicable
    )


def louder(self, parameters, points, positions):
    """Three times the score."""
    features = self.inner.features(parameters, points, positions).whole()
    return features._replace(q=3 * features.q)


def turned(self, at, features, *other):
    """Likewise, as a kernel turns features; it is its own derivative and transpose."""
    last = (features, *other)[-1]
    return last._replace(q=3 * last.q)


def biased(self, parameters, rows, columns):
    return 9 * (rows[..., None, :, None] - columns[..., None, None, :])


@pytest.mark.parametrize(
    ("kernel", "own"),
    [
        (dot_product, {"inner": dot_product, "features": louder}),
        (dot_product, {"activation": property(lambda self: lambda s: 3 * s)}),
        (dot_product, {"position_bias": biased}),
        (dot_product, {"reach": 0.3}),
        (soft_cap(2.0), {"features": louder}),
        (soft_cap(2.0), {"activation": property(lambda self: lambda s: 3 * s)}),
        (rotary(), {"turn": turned, "turn_push": turned, "turn_pull": turned}),
        (alibi([1.0]), {"position_bias": biased}),
        (qk_norm(), {"features": louder}),
    ],
)
def test_a_subclass_with_other_scores_does_not_inherit_bounds(kernel, own):
    other = object.__new__(type("Other", (type(kernel),), own))
    vars(other).update(vars(kernel))
    parameters = AttentionParameters.from_bilinear(-np.eye(2), np.eye(2))
    F = SelfAttention(parameters, kernel=other)
    mu = ParticleMeasure([[1.0, 0.0], [-1.0, 0.0]], [0.1, 0.9], positions=[0.5, 0.5])
    for points in (None, mu):
        found = bounds.table(F, 1.0, n=2, points=points).applicable
        assert {row.name for row in found} <= {"at the points"}
    assert not len(F.score_matrices)
    if {"features", "turn"} & set(own):
        with pytest.raises(NotImplementedError, match="ball_bounds: expected a kernel that says"):
            F.ball_bounds(mu, 0.1)
