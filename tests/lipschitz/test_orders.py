"""Constants in other norms: W_p against oracles, bounds and splitting, ‖J‖_∞ against oracles."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, bounds, split
from meanfield.attention import kernels
from meanfield.bounds.layer import Layer
from meanfield.lipschitz import infinity_norm, local_lipschitz, local_order
from meanfield.maps import linearize
from tests import oracles
from tests.attention.input_bounds_oracles import case
from tests.bounds import bounds_oracles

F64 = torch.float64
ORDERS = (1.0, 2.0, math.inf)


@pytest.mark.parametrize("p", ORDERS)
def test_on_the_line_it_is_the_norm_of_the_dense_matrix_of_atoms_stored_twice(p):
    F = SelfAttention(AttentionParameters.from_bilinear([[-0.7]], [[1.0]]))
    mu = ParticleMeasure([[1.0], [-0.4], [0.3]], weights=[0.2, 0.5, 0.3])
    layer = {"query": [[[-0.7]]], "key": [[[1.0]]], "value": [[[1.0]]], "scale": 1.0}

    def expected(nu):
        J = oracles.jacobian(nu.points.numpy(), nu.log_weights.numpy(), layer)
        return bounds_oracles.order_norm(J, nu.weights.numpy(), p)

    found = local_order(F, mu, p=p)
    assert float(found.lower) == pytest.approx(float(found.upper), rel=1e-12)
    # Two copies are enough for p = 2; for the others the supremum is over ever finer splits.
    assert expected(split(mu)) <= float(found.upper) * (1 + 1e-12)
    assert float(found.upper) == pytest.approx(expected(split(mu, copies=30)), rel=5e-2)


@pytest.mark.parametrize("p", ORDERS)
@given(seed=st.integers(0, 2**31))
@settings(max_examples=12)
def test_the_interval_is_ordered_and_below_the_a_priori_bound(p, seed):
    F, mu = case(seed, heads=1)
    found = local_order(F, mu, p=p)
    assert float(found.lower) <= float(found.upper)
    assert float(found.upper) <= 3 * float(found.lower)  # d ≤ 4: √d at most for one block
    if p == 2:
        assert float(found.upper) == pytest.approx(float(local_lipschitz(F, mu).value), rel=1e-8)
    layer = Layer.of(F)
    radius = float(mu.points.norm(dim=-1).max())
    bound = bounds.masked_mean_field if F.causal else bounds.mean_field
    upper = float(bound(layer.norm_A, layer.norm_V, radius, p=p, shift=layer.shift)[0])
    assert float(found.lower) <= upper * (1 + 1e-9)


@pytest.mark.parametrize("p", ORDERS)
@given(seed=st.integers(0, 2**31))
@settings(max_examples=8)
def test_no_displacement_of_split_atoms_is_stretched_more_than_the_upper_end(p, seed):
    F, mu = case(seed)
    g = torch.Generator().manual_seed(seed)
    fine = split(mu, copies=3)
    f = torch.randn(40, *fine.points.shape, dtype=F64, generator=g)
    f = torch.where(torch.rand(40, fine.n_particles, 1, generator=g) < 0.6, 0.0, f)
    moved = torch.stack([F.linearize(fine).matvec(one) for one in f])
    lengths = [x.norm(dim=-1) for x in (moved, f)]
    if p == math.inf:
        sizes = [x.amax(-1) for x in lengths]
    else:
        sizes = [(fine.weights * x**p).sum(-1) ** (1 / p) for x in lengths]
    upper = float(local_order(F, mu, p=p).upper)
    assert (sizes[0] <= upper * sizes[1] * (1 + 1e-9)).all()


@pytest.mark.parametrize("seed", range(3))
def test_in_the_plane_the_lower_end_is_that_of_the_best_direction(seed):
    par = AttentionParameters.random(2, generator=torch.Generator().manual_seed(seed), std=1.0)
    F, mu = SelfAttention(par), ParticleMeasure([[1.0, 0.5], [-1.0, 0.3], [0.2, -0.8]])
    angles = torch.linspace(0, math.pi, 2000, dtype=F64)
    e, at = torch.stack([angles.cos(), angles.sin()], -1), linearize(F, mu)
    T, S = at.atoms.to_dense().reshape(3, 2, 3, 2), at.field.to_dense()
    T.diagonal(0, 0, 2).sub_(S.movedim(0, -1))
    sums = torch.einsum("iajb,ea->eijb", T, e).norm(dim=-1).sum(-1)
    sums = sums + torch.einsum("iab,ea->eib", S, e).norm(dim=-1)
    found = local_order(F, mu, p=math.inf)
    assert float(found.lower) == pytest.approx(float(sums.max()), rel=1e-5)


def test_absent_atoms_and_bad_arguments():
    F = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]))
    absent = ParticleMeasure([[5.0], [1.0], [-1.0]], weights=[0.0, 0.5, 0.5])
    present = ParticleMeasure([[1.0], [-1.0]])
    for p in ORDERS:
        one, other = (local_order(F, mu, p=p) for mu in (absent, present))
        torch.testing.assert_close(one.upper, other.upper)
    with pytest.raises(ValueError, match="p: expected 1, 2 or ∞"):
        local_order(F, present, p=3.0)
    with pytest.raises(ValueError, match="without batch axes"):
        local_order(F, ParticleMeasure(torch.zeros(2, 3, 1, dtype=F64)), p=1.0)


def _order_one_on_the_line(A: float, points: list, logs: list):
    """maxⱼ Σᵢ (aᵢ/aⱼ)|Pᵢⱼ(1 + A xᵢ(xⱼ − oᵢ))| + |A Varᵢ| in 60 digits."""
    with mpmath.workdps(60):
        x, a = [mpmath.mpf(v) for v in points], [mpmath.exp(mpmath.mpf(v)) for v in logs]
        columns = [mpmath.mpf(0)] * len(x)
        for i, xi in enumerate(x):
            raw = [aj * mpmath.exp(A * xi * xj) for aj, xj in zip(a, x, strict=True)]
            P = [each / sum(raw) for each in raw]
            o = sum(p * xj for p, xj in zip(P, x, strict=True))
            columns[i] += abs(A * sum(p * (xj - o) ** 2 for p, xj in zip(P, x, strict=True)))
            for j, xj in enumerate(x):
                columns[j] += a[i] / a[j] * abs(P[j] * (1 + A * xi * (xj - o)))
        return float(max(columns))


@pytest.mark.parametrize(("radius", "light"), [(3.0, -20.0), (10.0, -500.0), (18.0, -690.0)])
def test_light_atoms_at_order_one(radius, light):
    F = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]))
    points, logs = [radius, -radius], [light, math.log1p(-math.exp(light))]
    found = local_order(F, ParticleMeasure([[p] for p in points], log_weights=logs), p=1)
    expected = _order_one_on_the_line(-1.0, points, logs)
    assert float(found.lower) == pytest.approx(expected, rel=1e-9)
    assert float(found.upper) == pytest.approx(expected, rel=1e-9)


def test_ratios_of_weights_out_of_range_are_refused_at_order_one():
    F = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]))
    mu = ParticleMeasure([[20.0], [-20.0]], log_weights=[-800.0, 0.0])
    with pytest.raises(OverflowError, match="expected ratios of weights that float64 holds"):
        local_order(F, mu, p=1)
    assert float(local_order(F, mu, p=2).lower) == float(local_lipschitz(F, mu).value)


@pytest.mark.parametrize("kernel", [kernels.l2, kernels.dot_product])
@pytest.mark.parametrize("causal", [False, True])
def test_the_infinity_norm_is_the_largest_row_sum(kernel, causal):
    generator = torch.Generator().manual_seed(0)
    parameters = AttentionParameters.random(4, n_heads=2, generator=generator)
    F = SelfAttention(parameters, kernel=kernel, causal=causal)
    X = 2 * torch.randn(7, 4, generator=generator, dtype=torch.float64)
    mu = ParticleMeasure.from_sequence(X)
    J = linearize(F, mu).atoms.to_dense()
    found = infinity_norm(F, mu)
    assert float(found.value) == pytest.approx(float(J.abs().sum(-1).max()), rel=1e-12)
    assert 4 * found.token + found.feature == int(J.abs().sum(-1).argmax())
    image = (J @ found.direction.flatten()).reshape(7, 4)
    assert float(image[found.token, found.feature]) == pytest.approx(float(found.value))


def test_the_last_row_counts_and_so_does_a_map_into_another_dimension():
    def widen(mu):
        return mu.replace(torch.cat([mu.points, 3 * mu.points[..., :1]], -1))

    found = infinity_norm(widen, ParticleMeasure([[1.0, 2.0], [3.0, 4.0]]))
    assert (float(found.value), found.feature) == (3.0, 2)

    def last(mu):
        factor = mu.points.new_ones(mu.points.shape)
        factor[..., -1, -1] = 5.0
        return mu.replace(factor * mu.points)

    found = infinity_norm(last, ParticleMeasure([[1.0, 2.0], [3.0, 4.0]]))
    assert (float(found.value), found.token, found.feature) == (5.0, 1, 1)


def test_a_batch_has_no_infinity_norm():
    with pytest.raises(ValueError, match="without batch axes"):
        infinity_norm(lambda mu: mu, ParticleMeasure(torch.zeros(2, 3, 1, dtype=torch.float64)))


@pytest.mark.parametrize("p", [1, math.inf])
def test_blocks_of_0_have_no_part_in_single_precision_either(p):
    points = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    par = AttentionParameters.random(2, generator=0)
    single, double = (
        local_order(
            SelfAttention(par.to(dtype), causal=True),
            ParticleMeasure.from_sequence(points.to(dtype)),
            p=p,
        )
        for dtype in (torch.float32, torch.float64)
    )
    assert float(single.lower) == pytest.approx(float(double.lower), rel=1e-4)


@pytest.mark.parametrize("p", [1, math.inf])
@pytest.mark.parametrize("power", [-290, -160, 155, 160, 290])
def test_the_ends_are_linear_in_the_values_whatever_their_size(p, power):
    par = AttentionParameters.random(3, n_heads=3, generator=0)
    logs = 3 * torch.randn(6, dtype=F64, generator=torch.Generator().manual_seed(1))
    points = torch.randn(6, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    mu = ParticleMeasure(points, log_weights=logs.log_softmax(-1))
    near, far = (
        local_order(
            SelfAttention(AttentionParameters(par.query, par.key, c * par.value, par.output)),
            mu,
            p=p,
        )
        for c in (1.0, 10.0**power)
    )
    assert 0 < float(near.lower) < 0.999 * float(near.upper)
    for end in ("lower", "upper"):
        expected = float(getattr(near, end))
        assert float(getattr(far, end)) / 10.0**power == pytest.approx(expected, rel=1e-9)
