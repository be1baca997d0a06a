"""Bounds behind a normalisation, at points, and for bounded scores."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, bounds, sampling
from meanfield.attention.kernels import alibi, cosine, dot_product, l2, qk_norm, rotary, soft_cap
from meanfield.bounds.scores import by_oscillation
from meanfield.layers import MLP, Chain, LayerNorm, Residual, RMSNorm
from meanfield.lipschitz import local_lipschitz
from meanfield.transport import conditional_w2, w2
from tests import oracles, strategies

F64 = torch.float64
BOUNDED = {
    "rotary": rotary(length=9.0),
    "partial rotary": rotary(dim=2, length=9.0),
    "qk norm": qk_norm(1.3, 0.7, eps=0.05),
    "cosine": cosine(2.0, eps=0.1),
    "alibi": alibi([0.5, 0.1], length=3.0),
    "capped rotary": soft_cap(1.5, inner=rotary(length=9.0)),
    "rotary qk norm": rotary(length=9.0, inner=qk_norm(eps=0.05)),
}


def norm_layer(d: int, g: torch.Generator, *, centred: bool, eps: float = 1e-2):
    weight, bias = (
        torch.rand(d, dtype=F64, generator=g) + 0.5,
        torch.randn(d, dtype=F64, generator=g),
    )
    return LayerNorm(weight, bias, eps) if centred else RMSNorm(weight, eps)


def random_parameters(d: int, g: torch.Generator, *, groups: int = 2) -> AttentionParameters:
    def draw(*shape):
        return torch.randn(*shape, dtype=F64, generator=g)

    return AttentionParameters(
        *(draw(2, 4, d), draw(groups, 4, d), draw(groups, 3, d), draw(2, d, 3)),
        query_bias=draw(2, 4),
        key_bias=draw(groups, 4),
        value_bias=draw(groups, 3),
        output_bias=draw(d),
    )


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("kernel", [dot_product, l2, *BOUNDED.values()])
def test_an_absorbed_gain_changes_nothing(kernel, centred):
    g = torch.Generator().manual_seed(0)
    N = norm_layer(3, g, centred=centred)
    par = random_parameters(3, g, groups=1)
    mu = ParticleMeasure.from_sequence(torch.randn(6, 3, dtype=F64, generator=g))
    whole = SelfAttention(par, kernel=kernel)(N(mu)).points
    absorbed = SelfAttention(par.after(N), kernel=kernel)(N.gain.unit(mu)).points
    torch.testing.assert_close(absorbed, whole, rtol=1e-11, atol=1e-11)


def test_only_a_norm_is_absorbed():
    par = AttentionParameters.random(2)
    with pytest.raises(TypeError, match="norm: expected LayerNorm or RMSNorm, got SelfAttention"):
        par.after(SelfAttention(par))
    with pytest.raises(ValueError, match="norm: expected one of dimension 2, got 3"):
        par.after(RMSNorm(torch.ones(3, dtype=F64)))


@given(
    seed=st.integers(0, 10**6),
    d=st.integers(2, 4),
    kind=st.sampled_from(strategies.LAYERS),
    centred=st.booleans(),
    causal=st.booleans(),
    eps=st.sampled_from([0.0, 1e-3, 0.5]),
)
@settings(max_examples=6)
def test_no_constant_behind_a_norm_exceeds_a_row(seed, d, kind, centred, causal, eps):
    g = torch.Generator().manual_seed(seed)
    par = AttentionParameters(**strategies.layer(np.random.default_rng(seed), d, kind, 1.0))
    F = Chain([norm_layer(d, g, centred=centred, eps=eps), SelfAttention(par, causal=causal)])
    mu = ParticleMeasure.from_sequence(torch.randn(5, d, dtype=F64, generator=g))
    radius = float(mu.points.norm(dim=-1).max())
    table = bounds.table(F, radius, points=mu)
    wasserstein, euclidean = (
        float(local_lipschitz(F, mu, geometry=geometry).value)
        for geometry in ("wasserstein", "euclidean")
    )
    for row in table.applicable:
        if row.side == "upper":
            found = euclidean if row.of.startswith("Euclidean") else wasserstein
            assert found <= row.value * (1 + 1e-9), row.name
    anywhere = bounds.table(F, radius)
    if eps > 0:
        row = "masked mean field" if causal else "mean field"
        assert table.row(row).value <= anywhere.row(row).value
    else:
        assert anywhere.row("tokens").reason
        assert anywhere["tokens"] == anywhere.row("tokens") and anywhere[0] == anywhere.rows[0]


def test_what_bounds_attention_is_multiplied_by_the_constant_of_the_norm():
    par = AttentionParameters.random(2)
    F = Chain([RMSNorm([1.0, 1.0], 0.25), SelfAttention(par)])
    table, inner = bounds.table(F, 3.0, 5), 2**0.5 * 3 / (9 + 2 * 0.25) ** 0.5
    alone = bounds.table(SelfAttention(par), inner, 5)
    for name in ("Thm 3.3, 4.3", "tokens", "Thm 3.5", "mean field"):
        assert table.row(name).value == pytest.approx(2 * alone.row(name).value, rel=1e-7)
    mu = ParticleMeasure.from_sequence(torch.ones(5, 2, dtype=F64))  # σ² = 1 + 0.25
    found = bounds.table(F, 3.0, points=mu).row("tokens").value
    assert found == pytest.approx(alone.row("tokens").value / 1.25**0.5, rel=1e-7)


def test_a_small_ball_is_small_behind_a_norm():
    F = Chain([RMSNorm([1.0, 1.0], 1.0), SelfAttention(AttentionParameters.random(2))])
    points = torch.tensor([[3.0, 4.0], [0.1, 0.0]], dtype=F64)
    lengths = F.maps[0](ParticleMeasure(points)).points.norm(dim=-1)
    for x, expected in zip(points, lengths, strict=True):
        from meanfield.bounds.layer import Layer
        from meanfield.bounds.statements import Question

        found = Question.of(Layer.of(F), float(x.norm()), None, None)
        assert found.radius == pytest.approx(float(expected)) and found.slope == pytest.approx(1.0)


def test_theorem_c_3_is_its_formula_and_bounds_the_constant():
    g = torch.Generator().manual_seed(1)
    for k in range(20):
        par = random_parameters(3, g)
        X = (1 + k % 3) * torch.randn(6, 3, dtype=F64, generator=g)
        F = SelfAttention(par, causal=bool(k % 2))
        table = bounds.table(F, 100.0, points=X)
        A, V, x = par.A.numpy(), par.V.numpy(), X.numpy()
        total = 0.0
        for h in range(2):
            pull = par.scale[h].item() * par.key[h].numpy().T @ par.query_bias[h].numpy()
            r = max(np.linalg.norm(a - b) for a in x for b in x)
            U = max(np.linalg.norm(A[h] @ a + pull) for a in x)
            W = max(np.linalg.norm(A[h].T @ a) for a in x)
            norm = np.linalg.norm(V[h], 2)
            total += norm * math.sqrt(3 * (6 + 6 * U**2 * r**2 + W**2 * r**2))
        found = table.row("Thm C.3").value
        assert found == pytest.approx(total, rel=1e-8)
        mu = ParticleMeasure.from_sequence(X)
        assert float(local_lipschitz(F, mu, geometry="euclidean").value) <= found


def test_behind_a_norm_theorem_c_3_sees_the_points_that_the_norm_makes():
    g = torch.Generator().manual_seed(2)
    N, F = norm_layer(3, g, centred=True), SelfAttention(random_parameters(3, g))
    X = 5 * torch.randn(6, 3, dtype=F64, generator=g)
    unit = N.gain.unit(ParticleMeasure.from_sequence(X))
    absorbed = SelfAttention(F.parameters.after(N))
    expected = bounds.table(absorbed, 9.0, points=unit).row("Thm C.3").value
    expected *= float(N.gain.unit.local_upper(ParticleMeasure.from_sequence(X)))
    found = bounds.table(Chain([N, F]), 99.0, points=X).row("Thm C.3").value
    assert found == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("causal", [False, True])
def test_bounded_scores_bound_every_constant(name, causal):
    g = torch.Generator().manual_seed(2)
    worst = 0.0
    for k in range(6):
        radius, n = (0.3, 1.0, 2.0)[k % 3], 3 + k % 3
        par = random_parameters(3, g)
        F = SelfAttention(par, causal=causal, kernel=BOUNDED[name])
        shape = {"radius": radius, "batch_shape": (40,), "generator": g}
        points = torch.cat([sampling.ball(n, 3, **shape), sampling.sphere(n, 3, **shape)])
        logs = (3 * torch.randn(80, n, dtype=F64, generator=g)).log_softmax(-1)
        mu = ParticleMeasure(points, log_weights=logs, positions=np.arange(1, n + 1) / n)
        row = bounds.table(F, radius).row("bounded scores" + (", masked" if causal else ""))
        worst = max(worst, float(local_lipschitz(F, mu).value.max()) / row.value)
        sizes = F.feature_sizes(radius)
        features = F.kernel.features(par, points, mu.positions)
        assert bool(
            (features.whole_keys().k.norm(dim=-1).amax((0, 2)) <= sizes.key * 1.0001).all()
        )
        assert bool((features.q.norm(dim=-1).amax((0, 2)) <= sizes.query * 1.0001).all())
    assert 1e-3 < worst <= 1


@pytest.mark.parametrize("kernel", [rotary(length=3.0), alibi([2.0])], ids=["rotary", "alibi"])
def test_scores_that_look_at_positions_have_a_constant_in_the_conditional_distance_alone(kernel):
    eye = torch.eye(2, dtype=F64)
    F = SelfAttention(AttentionParameters.from_bilinear(eye, eye), kernel=kernel)
    row = bounds.table(F, 1.0).row("bounded scores")
    assert row.of == "conditional d₂, all measures"
    mu = ParticleMeasure.from_sequence([[0.8, 0.0], [0.0, 0.8], [-0.8, 0.4]])
    nu = mu.replace(mu.points[[1, 0, 2]])
    assert float(w2(mu, nu)) == 0 and float(w2(F(mu), F(nu))) > 0.05
    assert float(conditional_w2(F(mu), F(nu))) <= row.value * float(conditional_w2(mu, nu))
    blind = SelfAttention(F.parameters, kernel=qk_norm(eps=0.01))
    assert bounds.table(blind, 1.0).row("bounded scores").of == "W₂, all measures"


def test_without_frequencies_rotary_scores_are_dot_products_of_a_known_oscillation():
    par = AttentionParameters.random(4, head_dim=2)
    F = SelfAttention(par, kernel=rotary(frequencies=[0.0]))
    Q, K = (float(torch.linalg.matrix_norm(M[0], 2)) for M in (par.query, par.key))
    c = float(par.scale[0]) * Q * K * 1.5**2
    V = float(torch.linalg.matrix_norm(par.V[0], 2))
    expected = by_oscillation(V, 1.5, 2 * c, c / 1.5, c)
    found = bounds.table(F, 1.5).row("bounded scores").value
    assert found == pytest.approx(expected, rel=1e-8)
    biased = SelfAttention(par, kernel=alibi([-0.5], length=3.0))
    expected = by_oscillation(V, 1.5, 2 * c + 1.5, c / 1.5, c)
    found = bounds.table(biased, 1.5).row("bounded scores").value
    assert found == pytest.approx(expected, rel=1e-8)


def test_the_far_token_reaches_its_row():
    g = torch.Generator().manual_seed(3)
    seen = 0
    for k in range(20):
        d, n, radius = 1 + k % 3, (2, 5, 30)[k % 3], (1.0, 2.0)[k % 2]
        A, V = torch.randn(2, d, d, dtype=F64, generator=g)
        if k == 0:
            A = -torch.eye(d, dtype=F64)
        F = SelfAttention(AttentionParameters.from_bilinear(A, V))
        row = bounds.table(F, radius, n).row("far token")
        if not row.applicable:
            continue
        seen += 1
        x = radius * torch.linalg.svd(A)[2][0]
        u = A @ x
        unit = u / u.norm()
        height = unit @ x + math.log(n - 1) / u.norm()
        across = x - (unit @ x) * unit
        if float(across.norm()) > 1e-6:
            width = max(radius**2 - float(height) ** 2, 0.0) ** 0.5
            y = height * unit - width * across / across.norm()
        else:
            y = height * unit
        mu = ParticleMeasure(torch.stack([y, *[x] * (n - 1)]))
        found = float(local_lipschitz(F, mu, geometry="euclidean").value)
        assert row.value <= found * (1 + 1e-9)
    assert seen > 8
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=F64)
    F = SelfAttention(AttentionParameters.from_bilinear(9 * turn, np.eye(2)))
    row = bounds.table(F, 1.0, 2).row("far token")
    assert bounds.tokens_lower(9.0, 1.0, 2) <= row.value <= 1.1 * bounds.tokens_lower(9.0, 1.0, 2)


@pytest.mark.parametrize(("c", "n"), [(0.5, 2), (1.0, 5), (3.0, 3), (3.0, 221), (4.0, 1000)])
def test_one_light_token_reaches_what_few_and_many_tokens_have_from_below(c, n):
    lower, logs = bounds.tokens_lower(c, 1.0, n), math.log(n - 1)
    assert lower == pytest.approx(math.sqrt((n - 1) * (1 + c * c + logs)) / 2, rel=1e-12)
    cos = -logs / (2 * c)  # of the angle by which A turns
    turn = np.array([[cos, -math.sqrt(1 - cos**2)], [math.sqrt(1 - cos**2), cos]])
    F = SelfAttention(AttentionParameters.from_bilinear(c * turn, np.eye(2)))
    mu = ParticleMeasure([[-1.0, 0.0], *[[1.0, 0.0]] * (n - 1)])
    f = torch.zeros(n, 2, dtype=F64)
    f[0] = torch.as_tensor(turn[:, 0])
    assert bounds.tokens_lower(1.0, 1.0, 12) < 0.5 * math.sqrt(11 * (2 + math.log(11)))  # > e²
    moved = torch.func.jvp(lambda x: F(mu.replace(x)).points, (mu.points,), (f,))[1]
    assert float(moved[1:].norm()) == pytest.approx(lower, rel=1e-12)
    assert lower < bounds.tokens(c, 1.0, 1.0, n)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("c", "n"), [(3.0, 50), (9.0, 10), (9.0, 50), (30.0, 300)])
def test_three_clusters_reach_what_n_tokens_have_from_below(c, n, causal):
    z = np.linspace(-1, 1, 20_001)
    formula = math.sqrt(2 * (n - 2)) * c * np.sqrt(1 - z**2) / (2 + (n - 2) * np.exp(-c * (1 + z)))
    lower, best = float(formula.max()), 0.0
    assert bounds.tokens_lower(c, 1.0, n) >= lower * (1 - 1e-6)
    F = SelfAttention(AttentionParameters.from_bilinear(-c * np.eye(2), np.eye(2)), causal=causal)
    for z in np.linspace(-0.9, 0.9, 46):
        points = np.tile([-1.0, 0.0], (n, 1))
        points[:2] = [[z, math.sqrt(1 - z * z)], [z, -math.sqrt(1 - z * z)]]
        f = torch.zeros(n, 2, dtype=F64)
        f[0, 0], f[1, 0] = 0.5**0.5, -(0.5**0.5)
        mu = ParticleMeasure.from_sequence(points)
        moved = torch.func.jvp(lambda x, mu=mu: F(mu.replace(x)).points, (mu.points,), (f,))[1]
        best = max(best, float(moved.norm()))
    assert 0.99 * lower <= best <= bounds.tokens(c, 1.0, 1.0, n, causal=causal)
    assert bounds.tokens(c, 1.0, 1.0, n, causal=causal) < 1.75 * lower
    far = bounds.tokens_lower(1e4, 1.0, n)
    assert far == pytest.approx(1e4 * math.sqrt((n - 2) / 2), rel=1e-3)


@pytest.mark.parametrize("n", [1, 2, 17])
def test_theorem_3_2_of_l2_attention_is_the_printed_form(n):
    g = torch.Generator().manual_seed(5)
    W, V = (torch.randn(2, 4, 2, dtype=F64, generator=g) for _ in range(2))
    O = torch.randn(4, 4, dtype=F64, generator=g)  # noqa: E741
    par = AttentionParameters.tied_l2(*oracles.outputs_by_inputs(W, V, O))
    found = bounds.l2_theorem_3_2(par, n)
    # The smallest W^V of the same values: W^V less what W^Q does not see.
    projected = [W[h] @ torch.linalg.pinv(W[h]) @ V[h] for h in range(2)]
    norm = lambda M: float(torch.linalg.matrix_norm(M, 2))  # noqa: E731

    def stated(values, power=4):
        total = sum(norm(W[h]) ** power * norm(values[h]) ** 2 for h in range(2))
        return math.sqrt(n / 2 * total) * (4 * bounds.l2_spread(n) + 1) * norm(O)

    assert found == pytest.approx(stated(projected), rel=1e-9)
    assert bounds.l2_theorem_3_2(par, n, value=V.mT) == pytest.approx(stated(V), rel=1e-9)
    assert bounds.l2_theorem_3_2(par, n, value=V.mT) > 1.2 * found
    one_wrong = V.mT + torch.tensor([0.0, 1.0])[:, None, None]
    mistakes = [(one_wrong, "another function of queries"), (V, "expected shape")]
    for wrong, words in (*mistakes, (V.mT[0], "expected shape")):
        with pytest.raises(ValueError, match=words):
            bounds.l2_theorem_3_2(par, n, value=wrong)
    assert bounds.l2_attention_2(par, n) <= found * (1 + 1e-9)
    F = SelfAttention(par, kernel=l2)
    table = bounds.table(F, 2.0, n)
    assert table.row("L2, Thm 3.2").value == found
    X = torch.randn(30, n, 4, dtype=F64, generator=g)
    measured = local_lipschitz(F, ParticleMeasure.from_sequence(X), geometry="euclidean")
    assert float(measured.value.max()) <= table.row("L2, n tokens").value <= found * (1 + 1e-9)
    # With ‖W^Q‖², as printed, it is no bound: W^Q → 10⁴ W^Q, x → 10⁻⁴ x takes J to 10⁸ J.
    W = 1e4 * W
    F = SelfAttention(AttentionParameters.tied_l2(*oracles.outputs_by_inputs(W, V, O)), kernel=l2)
    scaled = ParticleMeasure.from_sequence(X / 1e4)
    larger = local_lipschitz(F, scaled, geometry="euclidean").value
    assert larger.numpy() == pytest.approx(1e8 * measured.value.numpy(), rel=1e-3)
    assert stated(V, power=2) < float(larger.max()) <= stated(V)


def test_what_contradicts_the_map_or_the_ball_is_refused():
    par = AttentionParameters.random(2)
    N, F, X = RMSNorm([1.0, 1.0]), SelfAttention(par), torch.ones(3, 2, dtype=F64)
    for chain in (Chain([N, N, F]), Chain([F, N]), Chain([N]), MLP([[1.0, 0.0]], [[1.0], [0.0]])):
        with pytest.raises(TypeError, match="layer: expected SelfAttention, a Chain of LayerNorm"):
            bounds.table(chain, 1.0)
    with pytest.raises(
        ValueError, match=r"points: expected them in the ball of radius 1\.4, got 1\.41"
    ):
        bounds.table(F, 1.4, points=X)
    with pytest.raises(ValueError, match="points: expected them in the ball"):
        bounds.table(F, 1.4, points=torch.stack([0 * X[0], X[0]]))  # one within, one not
    with pytest.raises(ValueError, match="n: expected 3, the number of points, or None, got 4"):
        bounds.table(F, 2.0, 4, points=X)
    with pytest.raises(ValueError, match=r"points: expected one measure, .*\(5,\)"):
        bounds.table(F, 9.0, points=ParticleMeasure(torch.ones(5, 3, 2, dtype=F64)))
    with pytest.raises(ValueError, match="got a chain of a norm and a layer"):
        bounds.l2_attention_2(Chain([N, SelfAttention(par, kernel=l2)]), 3)
    table = bounds.table(SelfAttention(par, kernel=rotary()), 2.0, points=X)
    row = table.row("at the points")
    assert row.applicable
    assert table.row("mean field").reason and table.n == 3
    free = AttentionParameters([[1.0, 0.0]], [[1.0, 0.0]], [[0.0, 1.0]])
    assert (
        "do not" in bounds.table(SelfAttention(free, kernel=l2), 1.0, 3).row("L2, Thm 3.2").reason
    )


@pytest.mark.parametrize(
    ("centred", "d", "residual", "n"),
    [
        *((c, d, r, 20) for c, d in ((False, 1), (True, 2), (False, 2)) for r in (False, True)),
        (False, 1, True, 1100),  # not factored
        *(pytest.param(c, c + 1, r, 1100, marks=pytest.mark.slow) for c, r in ((0, 0), (1, 1))),
    ],
)
def test_bounds_behind_norms_in_single_precision_hold_where_their_derivative_vanishes(
    centred, d, residual, n
):
    for seed in range(1 + (n == 20)):
        par = AttentionParameters.random(d, head_dim=2, std=1.0, generator=seed)
        norm = (LayerNorm if centred else RMSNorm)(torch.full((d,), 3.0, dtype=F64))
        points = torch.randn(n, d, generator=torch.Generator().manual_seed(seed))

        def block(dtype, par=par, norm=norm):
            chain = Chain([type(norm)(norm.weight.to(dtype)), SelfAttention(par.to(dtype))])
            return Residual(chain) if residual else chain

        bound = float(bounds.local_upper(block(torch.float32), ParticleMeasure(points)))
        exact = block(F64), ParticleMeasure(points.double())
        assert float(local_lipschitz(*exact, upper_rtol=math.inf)) <= bound
        assert bound <= 1.001 * float(bounds.local_upper(*exact))
