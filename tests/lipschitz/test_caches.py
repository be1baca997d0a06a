"""Errors of smaller caches: known answers, and attacks that stay below the bound."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch

from meanfield.lipschitz import cache_error
from meanfield.lipschitz.remainders import Side, _log_excess
from tests.maps.small_maps import F64, draw

K, V = 4, 3


def output(q, keys, values, logs=0.0, sink=None, scale=1.0):
    """Attention by its definition."""
    scores = scale * q @ keys.mT + logs
    if sink is not None:
        scores = torch.cat([scores, torch.full_like(scores[..., :1], sink)], -1)
        values = torch.cat([values, torch.zeros_like(values[:1])])
    return scores.softmax(-1) @ values


def merged(keys, values):
    """The first two tokens at their mean, the last one dropped; and log-weights."""
    smaller = [torch.cat([x[:2].mean(0, keepdim=True), x[2:-1]]) for x in (keys, values)]
    return smaller, torch.tensor([2.0] + [1.0] * (len(keys) - 3), dtype=F64).log()


def rounded(keys, values, bits=4):
    return [
        (x / (step := x.abs().amax(-1, keepdim=True) / 2 ** (bits - 1))).round() * step
        for x in (keys, values)
    ], None


def case(seed):
    """Keys and values, what stands for them, log-weights, a sink, a query and a radius."""
    rng = np.random.default_rng(seed)
    n, steep = int(rng.integers(3, 12)), 10 ** float(rng.uniform(-1, 0.7))
    keys, values = steep * draw(n, K, seed=seed), draw(n, V, seed=seed + 1)
    kept = draw(n, seed=seed + 2).argsort()[: max(1, n // 2)]
    smaller, logs = [
        merged(keys, values),
        rounded(keys, values),
        ((keys[kept], values[kept]), None),
        ((draw(4, K, seed=seed + 5), draw(4, V, seed=seed + 6)), 3 * draw(4, seed=seed + 7)),
    ][seed % 4]
    sink = None if rng.random() < 0.5 else float(rng.normal())
    return (
        (keys, values),
        smaller,
        logs,
        sink,
        2 * draw(K, seed=seed + 9),
        10 ** rng.uniform(-2.5, 0.5),
    )


def climbed(change, centre, epsilon, starts, steps, seed=0):
    """The largest of a function found by projected ascent in a ball, ``change`` of (starts, K)."""
    step = torch.nn.functional.normalize(draw(starts, K, seed=seed), dim=-1)
    step[0] *= 1e-3
    x, best = (epsilon * step).requires_grad_(), 0.0
    for _ in range(steps):
        found = change(centre + x)
        best = max(best, float(found.detach().max()))
        (grad,) = torch.autograd.grad(found.sum(), x)
        moved_to = x.detach() + 0.3 * epsilon * torch.nn.functional.normalize(grad, dim=-1)
        length = moved_to.norm(dim=-1, keepdim=True)
        x = (moved_to * (epsilon / length).clamp_max(1.0)).requires_grad_()
    return best


def attack(seeds, starts, steps):
    ratios = []
    for seed in seeds:
        old, new, logs, sink, q, epsilon = case(seed)
        how = {"log_weights": logs, "sink": sink, "scale": 1.0, "epsilon": float(epsilon)}
        found = cache_error(q[None], old, new, **how)
        given = 0.0 if logs is None else logs

        def change(x, old=old, new=new, given=given, sink=sink):
            return (output(x, *old, 0.0, sink) - output(x, *new, given, sink)).norm(dim=-1)

        reached = climbed(change, q, float(epsilon), starts, steps, seed)
        assert reached <= float(found.value), seed
        ratios.append(reached / float(found.value))
    return ratios


def test_ascents_stay_below_the_bound_and_reach_it_in_small_balls():
    assert max(attack(range(24), starts=3, steps=8)) > 0.99


@pytest.mark.slow
def test_a_thousand_ascents_stay_below_the_bound():
    attack(range(100, 1100), starts=8, steps=40)


@pytest.mark.parametrize(
    ("a", "old", "logs", "new", "query", "epsilon", "truth"),
    [
        (1.0, [30.0, -30.0], [-900.0, 0.0], [-30.0], 0.0, 20.0, 60.0),
        (1.0, [0.0, 1000.0], [0.0, -900.0], [0.0], 0.0, 1.0, 1000.0),
        (1.0, [0.0, 1.0], None, [0.0], -760.0, 800.0, 1.0),
        *[(a, [0.0, 1.0], None, [0.0], -1.0, 3.0, 1.0) for a in (100.0, 300.0, 740.0, 750.0, 1e3)],
        (1.0, [0.0], None, [30.0], 30.0, 0.5, 30.0),  # ρ leaves the number range
        (1.0, [0.0, 1.0], None, [0.0, 3.0], 0.0, 0.5, 1.83),  # a token in both
    ],
)
def test_what_underflows_at_the_query_is_not_absent_from_the_ball(
    a, old, logs, new, query, epsilon, truth
):
    """The cache with log-weights is the second one: the change has no order."""
    old, new = (torch.tensor(x, dtype=F64)[:, None] for x in (old, new))
    logs = None if logs is None else torch.tensor(logs, dtype=F64)
    found = cache_error(
        [[a * query]], (new, new), (old, old), log_weights=logs, scale=1.0, epsilon=a * epsilon
    )
    assert truth * (1 - 1e-12) <= float(found.value) <= 2 * truth


def on_the_line(seed, steep=0.0):
    """Keys and values are numbers: suprema are found on a fine grid."""
    keys, values = (1 + 250 * steep) * draw(4, 1, seed=seed), draw(4, 1, seed=seed + 50)
    kept = 1 + seed % 3
    new = keys[:kept].clone(), values[:kept].clone()
    if seed % 2:
        new = tuple(x + 0.3 * draw(kept, 1, seed=seed + k) for k, x in enumerate(new))
    return (keys, values), new, (1 + 250 * steep) * draw(kept, seed=seed + 2)


@pytest.mark.parametrize("steep", [0.0, 0.5, 1.0])
def test_on_the_line_the_bound_is_near_the_largest_value_of_a_fine_grid(steep):
    ratios = []
    for seed in range(30):
        old, new, logs = on_the_line(seed, steep)
        q = draw(1, 1, seed=seed + 9)
        for epsilon in (0.1, 0.6):
            x = q + epsilon * torch.linspace(-1, 1, 401, dtype=F64)[:, None]
            largest = float((output(x, *old) - output(x, *new, logs)).abs().max())
            how = {"log_weights": logs, "scale": 1.0, "epsilon": epsilon}
            bound = float(cache_error(q, old, new, **how).value)
            assert largest <= bound, (seed, epsilon)
            ratios.append(largest / bound)
    assert sorted(ratios)[-8] > 0.99


def test_what_the_second_order_of_an_output_leaves_out_counts_its_denominator():
    """Tokens at the mean value take all of the attention: the first order is then the error."""
    keys = torch.tensor([[0.1], [-0.1], [3.0], [-3.0]], dtype=F64)
    values = torch.tensor([[1.0], [-1.0], [0.0], [0.0]], dtype=F64)
    at = torch.zeros(1, 1, dtype=F64)
    side = Side.of(keys, values, (at @ keys.mT).log_softmax(-1))
    for epsilon in (0.3, 1.0, 2.0):
        x = epsilon * torch.linspace(-1, 1, 41, dtype=F64)[:, None]
        linear = x @ side.derivative[0].mT
        beyond = (output(x, keys, values) - output(at, keys, values) - linear).norm(dim=-1)
        assert float(beyond.max()) <= float(side.moved(epsilon)[1])


@pytest.mark.parametrize("unit", [2.0**-600, 32.0, 2.0**600])
def test_powers_of_two_in_keys_and_values_change_digits_of_nothing(unit):
    old, new, logs, sink, q, epsilon = case(1)

    def found(of_keys, of_values):
        caches = [(of_keys * keys, of_values * values) for keys, values in (old, new)]
        how = {"log_weights": logs, "sink": sink, "epsilon": float(epsilon) / of_keys}
        return cache_error(q[None] / of_keys, *caches, **how)

    one, keys, values = found(1.0, 1.0), found(unit, 1.0), found(1.0, unit)
    for name, of_keys in (("value", 1.0), ("gap", 1.0), ("slope", unit)):
        assert torch.equal(getattr(keys, name), of_keys * getattr(one, name))
        assert torch.equal(getattr(values, name), unit * getattr(one, name))


def test_the_gap_and_the_slope_are_those_of_the_outputs():
    keys, values = draw(2, 8, K), draw(2, 8, V, seed=1)
    each = [merged(*pair)[0] for pair in zip(keys, values, strict=True)]
    new = [torch.stack(parts) for parts in zip(*each, strict=True)]
    logs, sink, q = merged(keys[0], values[0])[1], [0.3, -math.inf], draw(4, 3, K, seed=2)
    found = cache_error(q, (keys, values), new, log_weights=logs, sink=[*sink, *sink])
    for h in range(4):  # two heads in a row share keys
        g, own = h // 2, sink[h % 2]

        def change(x, g=g, own=own):
            old = output(x, keys[g], values[g], 0.0, own, K**-0.5)
            return old - output(x, new[0][g], new[1][g], logs, own, K**-0.5)

        torch.testing.assert_close(found.gap[h], change(q[h]).norm(dim=-1), rtol=1e-9, atol=0)
        torch.testing.assert_close(found.value[h], found.gap[h], rtol=1e-9, atol=0)
        for i, x in enumerate(q[h]):
            J = torch.func.jacrev(lambda y: change(y[None])[0])(x)
            torch.testing.assert_close(found.slope[h, i], torch.linalg.matrix_norm(J, 2))


@pytest.mark.parametrize("epsilon", [0.0, 1e-3, 30.0])
def test_the_same_cache_changes_nothing_in_any_order_and_precision(epsilon):
    keys, values, q = (draw(*s).half() for s in ((2, 9, K), (2, 9, V), (6, 5, K)))
    turned = keys.flip(1).float().numpy(), values.flip(1).double()
    found = cache_error(q, (keys, values), turned, epsilon=epsilon)
    assert found.value.shape == (6, 5)
    assert not found.value.any() and not found.gap.any() and not found.slope.any()


def test_each_group_of_heads_has_its_own_cache_and_log_weights():
    queries, keys, values = draw(4, 3, K), draw(2, 5, K, seed=1), draw(2, 5, 2, seed=2)
    new, logs = (keys[:, :3], values[:, :3] + 0.1), draw(2, 3, seed=3)
    how = {"epsilon": 0.1, "sink": 0.2}
    found = cache_error(queries, (keys, values), new, log_weights=logs, **how).value
    alone = [
        cache_error(
            queries[2 * g : 2 * g + 2],
            (keys[g], values[g]),
            tuple(t[g] for t in new),
            log_weights=logs[g],
            **how,
        ).value
        for g in range(2)
    ]
    torch.testing.assert_close(found, torch.cat(alone))


@pytest.mark.parametrize(("epsilon", "n"), [(0.0, 2), (0.5, 2), (0.5, 1100)])
@pytest.mark.parametrize("swapped", [False, True])
def test_where_one_cache_is_farther_out_than_the_other_the_hull_is_of_both(epsilon, n, swapped):
    """Queries choose one token of each: the outputs are those values."""
    keys = torch.linspace(-1.0, 1.0, n, dtype=F64)[:, None]
    near, far = (
        (1e-3 * keys, keys),
        (torch.ones(1, 1, dtype=F64), 90 * torch.ones(1, 1, dtype=F64)),
    )
    one, other = (far, near) if swapped else (near, far)
    found = cache_error([[-1e9]], one, other, scale=1.0, epsilon=epsilon)
    assert 91 * (1 - 1e-9) <= float(found.value) <= 2 * 91


@pytest.mark.parametrize("n", [9, 1200])
def test_far_away_the_hull_of_the_values_bounds(n):
    keys, values = draw(n, K), draw(n, V, seed=1)
    smaller, logs = merged(keys, values)
    old = keys, values
    found = cache_error(draw(1, K), old, smaller, log_weights=logs, epsilon=1e6)
    assert 0 < float(found.value) <= 1.5 * float(torch.cdist(values, values).max())
    one = torch.ones_like(values)
    opposite = cache_error(draw(1, K), (keys, one), (keys, -one), epsilon=1.0)
    assert 2 * V**0.5 * (1 - 1e-12) <= float(opposite.value) <= 2 * V**0.5 * (1 + 1e-9)


# ------------------------------------------------------------------ by a quantiser's steps


@pytest.mark.parametrize("epsilon", [0.0, 0.05, 1.0])
def test_no_cache_within_the_steps_changes_more(epsilon):
    ratios = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        n, sink = int(rng.integers(2, 9)), None if seed % 2 else 0.5
        keys, values = 2 * draw(n, K, seed=seed), draw(n, V, seed=seed + 1)
        delta, eta = (10 ** rng.uniform(-3, 0) * draw(n, seed=seed + s).abs() for s in (2, 3))
        q = draw(K, seed=seed + 4)
        how = {"scale": 1.0, "epsilon": epsilon, "sink": sink}
        found = cache_error(q[None], None, (keys, values), within=(delta, eta), **how)
        turns, shifts = draw(200, n, K, seed=seed + 5), draw(200, n, V, seed=seed + 6)
        x = q + epsilon * torch.nn.functional.normalize(draw(200, 1, K, seed=seed + 7), dim=-1)
        away = values - output(q[None], keys, values, 0.0, sink)
        turns[:100] = x[:100] * torch.sign(away @ draw(V, 100, seed=seed + 8)).mT[..., None]
        old_keys = keys + delta[:, None] * torch.nn.functional.normalize(turns, dim=-1)
        old_values = values + eta[:, None] * torch.nn.functional.normalize(shifts, dim=-1)
        largest = max(
            float((output(x[k], *old, 0.0, sink) - output(x[k], keys, values, 0.0, sink)).norm())
            for k, old in enumerate(zip(old_keys, old_values, strict=True))
        )
        assert largest <= float(found.value), seed
        assert math.isnan(float(found.gap))
        ratios.append(largest / float(found.value))
    assert max(ratios) > 0.3


@pytest.mark.parametrize("order", [2, 3])
def test_what_the_exponential_is_above_its_polynomial_is_not_taken_too_small(order):
    for r in (0.0, 1e-300, 1e-90, 1e-6, 1e-3, 1e-2, 0.5, 2.0, 20.0):
        least = max(r, 1e-100)  # below, it is taken for this
        terms = [least ** (j - 2) / math.factorial(j) for j in range(order, 100)]
        truth = math.log(2 * math.fsum(terms))
        found = float(_log_excess(torch.tensor(r, dtype=F64), order))
        assert found == pytest.approx(truth, rel=0, abs=1e-12)


def test_the_rounding_of_scores_at_the_edge_of_the_ball_is_counted():
    keys, values = torch.ones(2, 1), torch.tensor([[1.0], [-1.0]])
    found = cache_error([[0.0]], (keys, values), (keys[:1], values[:1]), epsilon=1e9)
    assert 1 + 1e-7 < float(found.value) < 1 + 1e-5
    # Whatever they are, outputs stay in the hulls of the values.
    found = cache_error([[0.0]], (values, values), (values[:1], values[:1]), epsilon=1e9)
    assert 2 <= float(found.value) < 2 * (1 + 1e-12)


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0])
def test_steps_count_for_the_longest_query_of_the_ball(epsilon):
    """Two tokens with one key: in the ball their true scores are ± (|q| + ε) δ from it."""
    keys, values = torch.zeros(2, 1), torch.tensor([[1.0], [-1.0]])
    given = {"within": (0.2, 0.0), "scale": 1.0, "epsilon": epsilon}
    found = float(cache_error([[0.5]], None, (keys, values), **given).value)
    truth = math.tanh((0.5 + epsilon) * 0.2)
    assert truth <= found <= truth * math.exp(3 * (0.5 + epsilon) * 0.2)


def test_steps_of_zero_change_nothing_and_steep_ones_stop_at_the_hull():
    keys, values, q = draw(6, K), draw(6, V, seed=1), draw(2, K, seed=2)
    same = cache_error(q, None, (keys, values), within=(0.0, 0.0), epsilon=2.0)
    assert same.value.tolist() == [0.0, 0.0]
    steep = cache_error(q, None, (1e3 * keys, values), within=(1e3, 0.5), epsilon=2.0)
    wide = 2 * float(torch.cdist(values, values).max()) + 0.5
    assert bool(((steep.value > 0) & (steep.value <= 1.001 * wide)).all())
    # At −ε the known cache answers −1, and one whose keys have changed places 1.
    ends = torch.tensor([[1.0], [-1.0]], dtype=F64)
    turned = cache_error([[0.0]], None, (ends, ends), within=(2.5, 0.0), scale=1.0, epsilon=1e3)
    assert 2 <= float(turned.value) <= 2.001


def test_where_the_output_itself_has_moved_steps_change_it_as_much_as_they_may():
    """A light token that the ball makes 20 times heavier: half of its change is the other's."""
    keys = values = torch.tensor([[0.0], [1.0]], dtype=F64)
    logs, delta, q, epsilon = torch.tensor([0.0, -9.0], dtype=F64), 0.01, 3.0, 3.0
    found = cache_error(
        [[q]], None, (keys, values), within=(delta, 0.0), log_weights=logs, scale=1.0,
        epsilon=epsilon,
    )  # fmt: skip
    x = torch.tensor([q + epsilon], dtype=F64)
    apart = torch.tensor([[-delta], [delta]], dtype=F64)
    change = (output(x, keys + apart, values, logs) - output(x, keys, values, logs)).abs()
    assert float(change) <= float(found.value) <= 2 * float(change)


def test_where_first_order_moves_the_output_steps_of_a_token_at_the_mean_change_it():
    """At the query its value is the mean, so that its score says nothing there."""
    keys, values = (torch.tensor([[1.0], [-1.0], [0.0]], dtype=F64) for _ in range(2))
    delta, q = torch.tensor([0.0, 0.0, 0.1], dtype=F64), torch.zeros(1, 1, dtype=F64)
    for epsilon in (0.001, 0.1):
        given = {"within": (delta, 0.0), "scale": 1.0, "epsilon": epsilon}
        found = cache_error(q, None, (keys, values), **given)
        apart = output(q + epsilon, keys + delta[:, None], values)
        change = float((apart - output(q + epsilon, keys, values)).abs())
        assert change <= float(found.value) <= 4 * change


@pytest.mark.parametrize("n", [2, 1400])  # of many tokens not all pairs are compared
def test_far_out_an_output_is_as_far_as_values_of_one_cache_from_those_of_the_other(n):
    keys = torch.linspace(-1, 1, n, dtype=F64)[:, None]
    ends = (-1.0) ** torch.arange(n, dtype=F64)[:, None]
    for centre in (0.0, 1e3):
        old, new = (keys, centre + ends), (keys, centre + 0 * ends)
        found = cache_error([[0.0]], old, new, epsilon=1e9)
        assert 1 <= float(found.value) <= 1 + 1e-6


def test_what_cancels_to_second_order_where_tokens_are_merged_is_seen():
    """Four tokens of one value, at ±a and ±b, at their mean: term by term nothing cancels."""
    keys, values, q = draw(8, K, seed=1), draw(8, V, seed=2), torch.zeros(K, dtype=F64)
    keys[:4], values[:4] = 0.3 * torch.eye(K).repeat_interleave(2, 0)[:4], values[0].clone()
    keys[1:4:2] *= -1
    new = [torch.cat([x[:4].mean(0, keepdim=True), x[4:]]) for x in (keys, values)]
    logs = torch.tensor([4.0, 1, 1, 1, 1], dtype=F64).log()
    how = {"log_weights": logs, "scale": 1.0, "epsilon": 0.03}
    bound = float(cache_error(q[None], (keys, values), new, **how).value)

    def change(x):
        return (output(x, keys, values) - output(x, *new, logs)).norm(dim=-1)

    assert 0.5 * bound < climbed(change, q, 0.03, starts=8, steps=30) <= bound


def test_the_second_order_of_a_signed_sum_is_no_less_than_it_is_anywhere():
    keys, values, signed = 3 * draw(1, 6, K), 5 * draw(1, 6, V, seed=1), draw(1, 6, seed=2)
    side = Side(signed, values[:, 0], values[..., 0], keys, keys)
    for size in (1, K):  # on the line it is that sum
        each = side._replace(gradients=keys[..., :size])
        steps = torch.nn.functional.normalize(draw(400, size, seed=3), dim=-1)
        t = 0.7 * steps @ each.gradients[0].mT
        found = ((signed[0] * t.square() / 2) @ values[0]).norm(dim=-1).max()
        bound = float(each.quadratic(signed, values, 0.7))
        assert float(found) <= bound * (1 + 1e-12)
        assert bound <= float(found) * (1 + 1e-12 if size == 1 else 2)


def test_of_one_token_the_step_of_its_value_is_all_that_changes():
    one = torch.ones(1, 2, dtype=F64)
    found = cache_error([[1.0, 0.0]], None, (one, one), within=(0.3, 0.5), epsilon=1.0)
    assert 0.5 <= float(found.value) <= 0.5 * (1 + 1e-12)


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cache": None}, "within: expected"),
        ({"within": (0.1, 0.1)}, "within: expected"),
        ({"cache": None, "within": (-0.1, 0.1)}, "at least 0, got a negative"),
        ({"cache": None, "within": 0.1}, "within: expected a pair"),
        ({"queries": draw(K)}, "queries: expected shape"),
        ({"queries": draw(3, 2, K), "cache": (draw(2, 5, K), draw(2, 5, V))}, "a multiple"),
        ({"cache": (draw(5, K + 1), draw(5, V))}, "keys of cache|cache: expected keys"),
        ({"cache": (draw(5, K), draw(4, V))}, "cache: expected keys"),
        ({"cache": (draw(5, K), draw(5, V + 1))}, "smaller: expected 1 groups"),
        ({"cache": (draw(5, K) * math.nan, draw(5, V))}, "keys of cache: expected finite"),
        ({"log_weights": [0.0]}, "log_weights: expected|smaller"),
        ({"log_weights": [-math.inf] * 4}, "log_weights: expected tokens of mass"),
        ({"log_weights": [0.0, math.inf, 0.0, 0.0]}, "all of finite mass"),
        ({"sink": [0.1, 0.2, 0.3]}, "sink: expected"),
        ({"epsilon": -0.1}, "epsilon"),
        ({"scale": 0.0}, "scale"),
    ],
)
def test_what_does_not_fit_is_refused(changed, message):
    good = {"queries": draw(2, K), "cache": (draw(5, K), draw(5, V)), "epsilon": 0.1}
    given = {"smaller": (draw(4, K), draw(4, V))} | good | changed
    with pytest.raises(ValueError, match=message):
        cache_error(given.pop("queries"), given.pop("cache"), given.pop("smaller"), **given)


def test_scores_beyond_the_number_range_are_refused_and_not_0():
    k, V = torch.tensor([[[1e200], [2e200]], [[1.0], [0.0]]], dtype=torch.float64)
    small = torch.tensor([[0.1], [0.2]]).double()
    for query, keys, sink in ((1e200, k, None), (1.0, small, math.inf)):
        with pytest.raises(OverflowError, match="scores leave the range"):
            cache_error([[0.0], [query]], None, (keys, V), within=(0.1, 0.1), sink=sink)


@pytest.mark.parametrize("shift", [0.0, 1e3, 1e8])
def test_rounding_of_log_weights_with_a_common_shift_is_counted(shift):
    """Beside the change in sixty digits, for the numbers as they are stored."""
    g = torch.Generator().manual_seed(0)
    for _ in range(10):
        query, keys, values, steps, more = (
            torch.randn(n, 2, dtype=torch.float64, generator=g) for n in (1, 3, 3, 3, 3)
        )
        other = keys + 0.01 * steps, values + 0.01 * more
        logs = torch.randn(3, dtype=torch.float64, generator=g) + shift
        found = cache_error(query, (keys, values), other, log_weights=logs)
        with mpmath.workdps(60):
            first, second = (
                exact_average(query[0], *cache, each)
                for cache, each in (((keys, values), torch.zeros(3)), (other, logs))
            )
            change = mpmath.sqrt(sum((x - y) ** 2 for x, y in zip(first, second, strict=True)))
            assert change <= mpmath.mpf(float(found.value))


def exact_average(query, keys, values, logs):
    scale = mpmath.mpf(len(query) ** -0.5)
    scores = [
        scale * mpmath.fdot(query.tolist(), key) + mpmath.mpf(log)
        for key, log in zip(keys.tolist(), logs.tolist(), strict=True)
    ]
    shares = [mpmath.exp(score - max(scores)) for score in scores]
    return [mpmath.fdot(shares, column) / sum(shares) for column in values.T.tolist()]
