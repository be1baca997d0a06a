"""No bound is exceeded by ascent in points and log-weights, over layers that are not symmetric.

Each start of a search is one case. The default run is a sample; the slow one goes through some
thousand cases over d = 1, 2, 3, 8, up to 50 atoms, c = ‖A‖R² from 0.01 to 12.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, bounds, sampling
from meanfield.bounds.layer import Layer
from meanfield.bounds.rates import mean_field_by_rate
from meanfield.experiments.sharpness import climb
from meanfield.lipschitz import worst_case
from tests.benchmarks import bench_bounds

F64 = torch.float64
SIZES = (0.01, 0.1, 0.5, 1.0, 2.0, 4.0, 6.0, 9.0, 12.0)
KINDS = ("negative", "symmetric", "general", "skew", "positive")


def layer(seed: int, d: int, c: float, kind: str) -> AttentionParameters:
    """‖A‖ = c and ‖V‖ = 1: on the unit ball the bounds are those of c."""
    g = torch.Generator().manual_seed(seed)
    A, V = torch.randn(2, d, d, dtype=F64, generator=g)
    if kind == "symmetric":
        A = A + A.mT
    elif kind == "skew" and d > 1:
        A = A - A.mT
    elif kind == "positive":
        A = A @ A.mT
    elif kind == "negative":
        A, V = -torch.eye(d, dtype=F64), torch.eye(d, dtype=F64)
    A, V = (M / torch.linalg.matrix_norm(M, 2) for M in (A, V))
    return AttentionParameters.from_bilinear(c * A, V)


def weighted(seed, d, n, c, kind, causal, *, starts, steps) -> float:
    """Largest constant found over the bound."""
    F = SelfAttention(layer(seed, d, c, kind), causal=causal)
    g = torch.Generator().manual_seed(seed)
    _, found = worst_case(F, 1.0, n_atoms=n, starts=starts, steps=steps, generator=g)
    bound = bounds.masked_mean_field if causal else bounds.mean_field
    upper = bound(c, 1.0, 1.0)
    if not causal:
        A = F.parameters.A[0].numpy()
        upper = min(upper, mean_field_by_rate(A, 1.0, 1.0) * (1 + 1e-9))
    return float(found.value) / upper


def uniform(seed, d, n, c, kind, causal, *, starts, steps) -> float:
    """The same for n tokens of equal weight, against the bound for n."""
    F = SelfAttention(layer(seed, d, c, kind), causal=causal)
    g = torch.Generator().manual_seed(seed)
    X = sampling.sphere(n, d, batch_shape=(starts,), generator=g)
    found = climb(F, ParticleMeasure.from_sequence(X), 1.0, steps=steps)[1]
    return float(found.value.max()) / bounds.tokens(c, 1.0, 1.0, n, causal=causal)


def campaign(attack, configurations, **effort) -> dict[bool, float]:
    worst = {False: 0.0, True: 0.0}
    for seed, (d, n, c, kind, causal) in enumerate(configurations):
        worst[causal] = max(worst[causal], attack(seed, d, n, c, kind, causal, **effort))
    return worst


SAMPLE = [
    (1, 3, 0.01, "negative", False),
    (1, 4, 4.0, "negative", True),
    (2, 5, 1.0, "general", False),
    (2, 8, 9.0, "skew", True),
    (3, 4, 2.0, "symmetric", False),
    (3, 6, 0.1, "positive", True),
    (8, 3, 6.0, "general", False),
    (2, 3, 12.0, "positive", False),
]
WHOLE = [
    (d, n, c, kind, causal)
    for (d, n), c, kind, causal in itertools.product(
        ((1, 2), (1, 12), (2, 5), (2, 50), (3, 8), (8, 6)), SIZES, KINDS, (False, True)
    )
]


def test_no_weighted_measure_exceeds_its_bound():
    worst = campaign(weighted, SAMPLE, starts=2, steps=10)
    assert 0.5 < max(worst.values()) <= 1 + 1e-9


def test_no_sequence_exceeds_its_bound():
    worst = campaign(uniform, SAMPLE, starts=1, steps=8)
    assert 0.3 < max(worst.values()) <= 1 + 1e-9


@pytest.mark.slow
def test_a_thousand_weighted_measures_do_not_exceed_their_bounds():
    few = [one for one in WHOLE if one[1] < 20]
    worst = campaign(weighted, few[:: len(few) // 60], starts=16, steps=40)
    assert 0.9 < worst[False] <= 1 + 1e-9
    assert 0.3 < worst[True] <= 1 + 1e-9


@pytest.mark.slow
def test_a_hundred_sequences_do_not_exceed_their_bounds():
    worst = campaign(uniform, WHOLE[:: len(WHOLE) // 40], starts=3, steps=25)
    assert max(worst.values()) <= 1 + 1e-9


@pytest.mark.parametrize(
    "seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (3, 4, 5))]
)
def test_a_query_bias_adds_to_the_average_only(seed):
    g = torch.Generator().manual_seed(seed)
    d = 1 + seed % 3
    A, V = torch.randn(2, d, d, dtype=F64, generator=g)
    bias = 3 * torch.randn(1, d, dtype=F64, generator=g)
    par = AttentionParameters(A, torch.eye(d, dtype=F64), V, query_bias=bias, scale=1.0)
    layer = Layer.of(par)
    for causal in (False, True):
        _, found = worst_case(
            SelfAttention(par, causal=causal), 1.0, n_atoms=4, starts=2, steps=8, generator=g
        )
        bound = bounds.masked_mean_field if causal else bounds.mean_field
        upper = float(bound(layer.norm_A, layer.norm_V, 1.0, shift=layer.shift)[0])
        assert float(found.value) <= upper * (1 + 1e-9)
        without = float(bound(layer.norm_A, layer.norm_V, 1.0)[0])
        assert without < upper


CLIMBED = {name: attack for name, attack in bench_bounds.attacks() if not name.endswith("p = 6")}


@pytest.mark.parametrize("name", list(CLIMBED))
def test_ascent_in_points_weights_and_displacement_exceeds_no_bound(name):
    g = torch.Generator().manual_seed(1)
    found = bench_bounds.climbed(CLIMBED[name], 40, 4, 2, steps=12, g=g)
    assert 0.1 < float(found.max()) <= 1 + 1e-9


@pytest.mark.slow
def test_no_bound_is_exceeded_in_thousands_of_ascents():
    # The whole campaign, 10,000 of each: tests/benchmarks/bench_bounds.py.
    found = bench_bounds.campaign(1000, 60)
    assert all(0.1 < one["largest_ratio"] <= 1 + 1e-9 for one in found.values())
