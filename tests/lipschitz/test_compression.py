"""Errors of compressed caches: known answers, and attacks that stay below the bound."""

from __future__ import annotations

import itertools

import pytest
import torch

from meanfield.attention import AttentionParameters, SelfAttention, kernels, normalizations
from meanfield.lipschitz import compression_error
from meanfield.lipschitz.remainders import Heads, Side, _moved
from meanfield.measures import ParticleMeasure, merge, split

F64 = torch.float64
D = 4


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def layer(seed=0, std=0.6, **kind):
    generator = torch.Generator().manual_seed(seed)
    parts = AttentionParameters.random(
        D, n_heads=2, head_dim=4, biases=True, std=std, generator=generator
    )
    return SelfAttention(parts, **kind)


def cache(n=8, seed=1):
    positions = (1 + torch.arange(n)).to(F64) / n
    logs = 0.5 * draw(n, seed=seed + 1)
    return ParticleMeasure(
        draw(n, D, seed=seed), log_weights=logs.log_softmax(-1), positions=positions
    )


def merged(mu):
    """The first two atoms at their mean, the last one dropped."""
    first = mu.weights[:2] / mu.weights[:2].sum()
    points = torch.cat([(first[:, None] * mu.points[:2]).sum(0, keepdim=True), mu.points[2:-1]])
    weights = torch.cat([mu.weights[:2].sum()[None], mu.weights[2:-1]])
    return ParticleMeasure(points, weights / weights.sum(), positions=mu.positions[1:-1])


LAYERS = {
    "dot product": {},
    "causal": {"causal": True},
    "rotary": {"kernel": kernels.rotary(base=100.0, length=6.0)},
    "alibi": {"kernel": kernels.alibi([0.5, 0.25], length=6.0)},
    "window": {"kernel": kernels.window(0.9), "causal": True},
}


def field(F, mu, at):
    gamma = F.field(mu)
    return (lambda x: gamma(x, at)) if F.causal or F.kernel.needs_positions else gamma


def largest_found(F, mu, nu, centre, epsilon, at, starts=4, steps=10, seed=0):
    """|Γ_μ(x) − Γ_ν(x)| by projected ascent from the centre and from points of the sphere."""
    one, other = field(F, mu, at), field(F, nu, at)
    delta = torch.nn.functional.normalize(draw(starts, D, seed=seed), dim=-1)
    delta[0] = 1e-3 * delta[0]
    x = (epsilon * delta).requires_grad_()
    best = torch.zeros((), dtype=F64)
    for _ in range(steps):
        apart = (one(centre + x) - other(centre + x)).norm(dim=-1)
        best = torch.maximum(best, apart.max().detach())
        (grad,) = torch.autograd.grad(apart.sum(), x)
        step = x.detach() + 0.3 * epsilon * torch.nn.functional.normalize(grad, dim=-1)
        length = step.norm(dim=-1, keepdim=True)
        x = (step * (epsilon / length).clamp_max(1.0)).requires_grad_()
    return float(best)


@pytest.mark.parametrize("name", LAYERS)
def test_ascents_never_exceed_the_bound(name):
    F, mu = layer(std=0.8, **LAYERS[name]), cache()
    nu, queries = merged(mu), draw(1, D, seed=9)
    for epsilon in (1e-3, 0.3):
        found = compression_error(F, mu, nu, queries, epsilon, positions=1.0)
        for k, centre in enumerate(queries):
            reached = largest_found(F, mu, nu, centre, epsilon, 1.0, seed=k)
            assert reached <= float(found.value[k]) * (1 + 1e-12)
            if epsilon == 1e-3:  # first order is exact
                assert float(found.value[k]) <= 1.01 * reached + 1e-3 * float(found.slope[k])


def random_case(seed):
    """A layer, two caches that may have little in common, a query and a radius."""
    generator = torch.Generator().manual_seed(seed)
    scale = float(torch.rand((), generator=generator)) * 1.5 + 0.1
    F = layer(seed, std=scale, **list(LAYERS.values())[seed % len(LAYERS)])
    mu = cache(int(torch.randint(3, 12, (), generator=generator)), seed)
    if seed % 3 == 0:
        nu = cache(4, seed + 100)
    elif seed % 3 == 1:
        nu = merged(mu)
    else:
        near = 0.1 * draw(*mu.points.shape, seed=seed)
        nu = mu.replace(mu.points + near)
    epsilon = 10 ** (3 * float(torch.rand((), generator=generator)) - 2.5)
    return F, mu, nu, 2 * draw(1, D, seed=seed + 7), epsilon


def attack(cases, **how):
    ratios = []
    for seed in cases:
        F, mu, nu, query, epsilon = random_case(seed)
        found = compression_error(F, mu, nu, query, epsilon, positions=1.0)
        reached = largest_found(F, mu, nu, query[0], epsilon, 1.0, seed=seed, **how)
        assert bool(found.value.isfinite().all())
        assert reached <= float(found.value) * (1 + 1e-12), f"case {seed}"
        ratios.append(reached / float(found.value))
    return ratios


def test_random_caches_stay_below_their_bounds():
    ratios = attack(range(15), starts=2, steps=6)
    assert max(ratios) > 0.99  # the bound is reached, where the radius is small


@pytest.mark.parametrize(
    ("a", "mu", "logs", "nu", "query", "epsilon", "truth"),
    [
        (1.0, [0.0, 1000.0], [0.0, -900.0], [0.0], 0.0, 1.0, 1000.0),
        (1.0, [30.0, -30.0], [-900.0, 0.0], [-30.0], 0.0, 20.0, 60.0),
        (1.0, [0.0, 1.0], None, [0.0], -760.0, 800.0, 1.0),
        *[(a, [0.0, 1.0], None, [0.0], -1.0, 3.0, 1.0) for a in (100.0, 300.0, 740.0, 750.0, 1e3)],
        (800.0, [0.0, 1.0], None, [0.0], -1.0, 2.0, 1.0),
        (1.0, [0.0], None, [30.0], 30.0, 0.5, 30.0),  # ρ leaves the number range
        (1.0, [0.0, 1.0], None, [0.0, 3.0], 0.0, 0.5, 1.83),  # an atom of equal weight in both
    ],
)
def test_what_underflows_at_the_query_is_not_absent_from_the_ball(
    a, mu, logs, nu, query, epsilon, truth
):
    F = SelfAttention(AttentionParameters.from_bilinear([[a]], [[1.0]]))
    mu = ParticleMeasure(torch.tensor(mu)[:, None].double(), log_weights=logs)
    nu = ParticleMeasure(torch.tensor(nu)[:, None].double())
    found = float(compression_error(F, mu, nu, [[query]], epsilon).value)
    assert truth * (1 - 1e-12) <= found <= 2 * truth


def on_the_line(seed, steep=0.0):
    """Scores see one coordinate, values are the other: suprema are found on a fine grid."""
    a, v, *x = draw(10, seed=seed).tolist()
    A, V = [[(2 + 500 * steep) * a, 0.0], [0.0, 0.0]], [[0.0, v]]
    F = SelfAttention(AttentionParameters.from_bilinear(A, V))
    logs = (2 + 500 * steep) * draw(4, seed=seed + 1)
    mu = ParticleMeasure(torch.tensor(x).double().reshape(4, 2), log_weights=logs.log_softmax(-1))
    kept = 1 + seed % 3
    nu = ParticleMeasure(mu.points[:kept], log_weights=logs[:kept].log_softmax(-1))
    if seed % 2:
        nu = ParticleMeasure(nu.points + 0.3 * draw(kept, 2, seed=seed + 2), nu.weights)
    if seed % 5 == 0:  # what was dropped has the mean value: it changes the sums alone
        points = mu.points.clone()
        points[kept:, 1] = (nu.weights @ nu.points)[1]
        mu = mu.replace(points)
    return F, mu, nu


def test_on_the_line_the_bound_is_near_the_largest_value_of_a_fine_grid():
    ratios = []
    grid = torch.linspace(-1, 1, 61, dtype=F64)[:, None] * torch.tensor([1.0, 0.0])
    for seed in range(60):
        F, mu, nu = on_the_line(seed)
        query = draw(1, 2, seed=seed + 9)
        for epsilon in (0.1, 0.6):
            x = query + epsilon * grid
            largest = float((F.field(mu)(x) - F.field(nu)(x)).abs().max())
            bound = float(compression_error(F, mu, nu, query, epsilon).value)
            assert largest <= bound * (1 + 1e-12), seed
            ratios.append(largest / bound if bound else 1.0)
    assert sorted(ratios)[-8] > 0.99


def test_steep_scores_and_light_atoms_stay_below_the_bound():
    grid = torch.linspace(-1, 1, 401, dtype=F64)[:, None] * torch.tensor([1.0, 0.0])
    hidden = 0
    for seed in range(40):
        F, mu, nu = on_the_line(seed, steep=(seed % 4) / 2)
        query = draw(1, 2, seed=seed + 9)
        for epsilon in (0.5, 3.0):
            x = query + epsilon * grid
            largest = float((F.field(mu)(x) - F.field(nu)(x)).abs().max())
            found = compression_error(F, mu, nu, query, epsilon)
            assert largest <= float(found.value) * (1 + 1e-12) + 1e-13, seed
            hidden += float(found.gap) < 1e-9 * largest
    assert hidden >= 3


def test_what_the_second_order_of_a_field_leaves_out_counts_its_denominator():
    """Atoms at the mean value take all of the attention: the first order is then the error."""
    x = torch.tensor([[0.1, 1.0], [-0.1, -1.0], [3.0, 0.0], [-3.0, 0.0]], dtype=F64)
    F = SelfAttention(AttentionParameters.from_bilinear([[1.0, 0.0], [0.0, 0.0]], [[0.0, 1.0]]))
    mu, at = ParticleMeasure(x), torch.zeros(1, 2, dtype=F64)
    weights = F.weights(mu)
    heads = Heads.of(F, weights, at, None)
    side = Side.of(heads, weights.scores(heads.queries, None).log_softmax(-1))
    away = (heads.values[:, None] - side.mean[:, :, None]).norm(dim=-1)
    for epsilon in (0.3, 1.0, 2.0):
        steps = epsilon * torch.linspace(-1, 1, 41, dtype=F64)[:, None] * torch.eye(2).double()[0]
        linear = (side.derivative[0, 0] @ steps.mT).mT
        beyond = (F.field(mu)(steps) - F.field(mu)(at) - linear).norm(dim=-1)
        assert float(beyond.max()) <= float(_moved(side, away, epsilon).beyond)


def test_the_bound_sees_values_and_output_by_their_product_alone():
    par, mu, x = layer().parameters, cache(), draw(1, D)
    layers = [
        SelfAttention(
            AttentionParameters(par.query, par.key, share * par.value, par.output / share)
        )
        for share in (1.0, 0.01)
    ]
    for epsilon, pair in itertools.product((0.03, 0.3), (layers, [G.heads[0] for G in layers])):
        found, other = (compression_error(G, mu, merged(mu), x, epsilon).value for G in pair)
        torch.testing.assert_close(other, found, rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("seed", [6, 24, 44, 72, 138, 141])
def test_two_heads_that_cancel_at_the_query_stay_below_the_bound(seed):
    """Their denominators differ away from it, so that first order cancels at the query alone."""
    F, mu, nu = on_the_line(seed)
    query = draw(1, 2, seed=seed + 9)
    A, V = F.parameters.A[0], F.parameters.V[0]
    flat = SelfAttention(AttentionParameters.from_bilinear(0 * A, V))
    gaps = [float(G.field(mu)(query) - G.field(nu)(query)) for G in (F, flat)]
    both = torch.stack([V, -gaps[0] / gaps[1] * V])
    G = SelfAttention(AttentionParameters.from_bilinear(torch.stack([A, 0 * A]), both))
    for epsilon in (0.3, 1.0):
        x = query + epsilon * torch.linspace(-1, 1, 41, dtype=F64)[:, None] * torch.eye(2)[0]
        found = compression_error(G, mu, nu, query, epsilon)
        assert float(found.gap) < 1e-12
        largest = float((G.field(mu)(x) - G.field(nu)(x)).norm(dim=-1).max())
        assert largest <= float(found.value) * (1 + 1e-12)


@pytest.mark.slow
def test_many_random_caches_stay_below_their_bounds():
    attack(range(1000), starts=8, steps=40)


@pytest.mark.parametrize("name", LAYERS)
def test_the_same_measure_changes_nothing(name):
    F, mu, queries = layer(**LAYERS[name]), cache(), draw(3, D, seed=5)
    found = compression_error(F, mu, mu, queries, 3.0, positions=1.0)
    assert found.value.tolist() == found.gap.tolist() == found.slope.tolist() == [0.0] * 3
    twice = compression_error(F, mu, split(mu, 3), queries, 0.3, positions=1.0)
    assert float(twice.value.max()) < 1e-13


def test_tokens_merged_where_they_stand_change_nothing_and_without_their_weight_they_do():
    F, mu = layer(), cache(6)
    mu = ParticleMeasure(mu.points[[0, 0, 0, 1, 2, 3]])
    small = merge(mu)
    assert small.n_particles == 4
    assert float(compression_error(F, mu, small, draw(1, D), 0.2).value) < 1e-13
    forgotten = ParticleMeasure(small.points)
    assert float(compression_error(F, mu, forgotten, draw(1, D), 0.2).gap) > 0.05


def test_without_scores_it_is_the_difference_of_the_means():
    V = draw(3, D, seed=2)
    F = SelfAttention(AttentionParameters.from_bilinear(torch.zeros(D, D).double(), V))
    mu, nu = cache(seed=3), cache(5, seed=4)
    found = compression_error(F, mu, nu, draw(2, D), 7.0)
    expected = float((V @ (mu.mean() - nu.mean())).norm())
    assert found.value.tolist() == pytest.approx([expected] * 2, rel=1e-8)


@pytest.mark.parametrize("name", LAYERS)
def test_the_gap_and_the_slope_are_those_of_the_fields(name):
    F, mu = layer(**LAYERS[name]), cache()
    nu, queries = merged(mu), draw(3, D, seed=6)
    found = compression_error(F, mu, nu, queries, 0.0, positions=0.95)
    one, other = field(F, mu, 0.95), field(F, nu, 0.95)
    gap = (one(queries) - other(queries)).norm(dim=-1)
    torch.testing.assert_close(found.gap, gap, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(found.value, gap, rtol=1e-8, atol=1e-13)
    for k, x in enumerate(queries):
        J = torch.func.jacrev(lambda y: (one(y[None]) - other(y[None]))[0])(x)
        torch.testing.assert_close(found.slope[k], torch.linalg.matrix_norm(J, 2))


def test_far_away_the_hull_of_the_values_bounds():
    F, mu = layer(std=2.0), cache()
    found = compression_error(F, mu, merged(mu), draw(1, D), 1e6)
    values = F.parameters.V @ mu.points.mT
    wide = sum(float(torch.cdist(v.mT, v.mT).max()) for v in values)
    assert 0 < float(found.value) <= 1.5 * wide


def test_one_head_is_bounded_by_itself():
    F, mu, x = layer(), cache(), draw(1, D)
    whole = compression_error(F, mu, merged(mu), x, 0.1)
    each = [float(compression_error(h, mu, merged(mu), x, 0.1).value) for h in F.heads]
    assert float(whole.value) <= sum(each) * (1 + 1e-12)


def test_single_precision_is_computed_in_double():
    F, mu, x = layer(), cache(), draw(1, D)
    low = SelfAttention(F.parameters.to(torch.float32))
    found = compression_error(
        low, mu.to(torch.float32), merged(mu).to(torch.float32), x.float(), 0.1
    )
    exact = compression_error(F, mu, merged(mu), x, 0.1)
    assert float(found.value) == pytest.approx(float(exact.value), rel=1e-4)


@pytest.mark.parametrize(
    ("F", "error"),
    [
        (layer(kernel=kernels.l2), NotImplementedError),
        (layer(kernel=kernels.cosine(2.0)), NotImplementedError),
        (layer(kernel=kernels.soft_cap(2.0)), NotImplementedError),
        (layer(normalization=normalizations.sigmoid), NotImplementedError),
        (lambda mu: mu, TypeError),
    ],
)
def test_what_is_not_proved_is_refused(F, error):
    mu = cache()
    with pytest.raises(error, match="expected"):
        compression_error(F, mu, merged(mu), draw(1, D), 0.1)


def test_what_does_not_fit_is_refused():
    F, mu, x = layer(causal=True), cache(), draw(1, D)
    with pytest.raises(ValueError, match="positions: expected those of the queries"):
        compression_error(F, mu, merged(mu), x, 0.1)
    with pytest.raises(ValueError, match="nu: expected atoms that every query sees"):
        compression_error(F, mu, merged(mu), x, 0.1, positions=0.2)
    with pytest.raises(ValueError, match="queries: expected shape"):
        compression_error(F, mu, merged(mu), x[0], 0.1, positions=1.0)
    with pytest.raises(ValueError, match="epsilon"):
        compression_error(F, mu, merged(mu), x, -0.1, positions=1.0)
    with pytest.raises(ValueError, match="nu: expected dimension"):
        compression_error(F, mu, ParticleMeasure(mu.points), x, 0.1, positions=1.0)
