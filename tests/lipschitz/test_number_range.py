"""Certificates do not depend on the unit, also where squares leave the number range."""

from __future__ import annotations

import math

import pytest
import torch

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, local_lipschitz
from meanfield.attention import kernels, normalizations
from meanfield.attention.ball_bounds import norm_from_above
from meanfield.layers import MLP, Bounded, Pointwise, contractive, invert
from meanfield.lipschitz import ball_upper, cache_error, certified_radius
from meanfield.lipschitz.certified import Readout

F64, F32 = torch.float64, torch.float32
UNITS = [(F64, 1e154), (F64, 1e-163), (F32, 1e19), (F32, 1e-24)]


@pytest.mark.parametrize(("dtype", "c"), UNITS)
def test_a_layer_is_inverted_in_any_unit(dtype, c):
    mu = ParticleMeasure(c * torch.tensor([[1.0], [2.0]], dtype=dtype))
    G = contractive(Pointwise(lambda x: x), 0.5, constant=1.0)
    found = invert(G, G(mu), rtol=1e-4)
    off = ((found.measure.points - mu.points) / c).abs().max()
    assert found.error.isfinite() and off <= float(found.error / c) < 1e-3


@pytest.mark.parametrize("radius", [1e-100, 1e-163])
def test_a_bounded_map_moves_as_far_in_any_unit(radius):
    F = SelfAttention(AttentionParameters.from_bilinear([[0.0]], [[1.0]]))
    mu = ParticleMeasure([[1.0], [2.0]])
    bounds = Bounded(F, 1.0, "l2").ball_bounds(mu, torch.full((2,), radius, dtype=F64))
    assert float(bounds.displacement.max()) >= radius


@pytest.mark.parametrize(("dtype", "c"), [(F64, 1.0), *UNITS])
def test_a_certified_radius_does_not_depend_on_the_unit_of_the_scores(dtype, c):
    x = ParticleMeasure(torch.tensor([[3.0, 1.0]], dtype=dtype))
    net = Pointwise(lambda x: x, lipschitz=1.0, curvature=0.0)
    found = certified_radius(net, Readout(c * torch.eye(2, dtype=dtype)), x)
    bent = Pointwise(torch.sin, lipschitz=1.0, curvature=1.0)
    one, other = (
        float(certified_radius(bent, Readout(u * torch.eye(2, dtype=dtype)), x)) for u in (1.0, c)
    )
    assert one == pytest.approx(other, rel=1e-5)
    assert 1.4142 < float(found) <= 2**0.5 * (1 + 1e-6)


@pytest.mark.parametrize(("dtype", "c"), [(F64, 1e-150), (F64, 1e-163), (F32, 1e-24)])
def test_a_ball_of_a_feed_forward_layer_does_not_depend_on_the_unit(dtype, c):
    F = MLP(torch.full((1, 2), c, dtype=dtype), torch.ones(1, 1, dtype=dtype), activation="tanh")
    mu = ParticleMeasure(torch.ones(1, 2, dtype=dtype) / c)
    inside = local_lipschitz(F, mu.replace(0 * mu.points))  # at distance √2/c
    assert float(inside.value) <= float(ball_upper(F, mu, 1.42 / c)) < 1.01 * float(inside.value)


@pytest.mark.parametrize("c", [1e-150, 1e-163])
def test_a_ball_of_a_gated_layer_does_not_depend_on_the_unit(c):
    inner = torch.full((1, 2), c, dtype=F64)
    F = MLP(inner, torch.ones(1, 1, dtype=F64), activation="tanh", gate=inner)
    mu = ParticleMeasure(torch.ones(1, 2, dtype=F64) / c)
    known = MLP(inner / c, torch.ones(1, 1, dtype=F64), activation="tanh", gate=inner / c)
    bound = float(ball_upper(known, ParticleMeasure([[1.0, 1.0]]), 0.5))
    assert float(ball_upper(F, mu, 0.5 / c)) / c == pytest.approx(bound)


def test_of_weights_that_are_no_number_a_norm_is_not_known():
    unknown = torch.tensor([[math.nan, 0.0], [0.0, 0.0]], dtype=F64)
    assert float(norm_from_above(unknown)) == math.inf


def test_a_constant_that_an_infinite_rise_refutes_is_refuted():
    F = Pointwise(lambda x: torch.where(x > 1, 1e160 * (x - 3), 0 * x))
    G = contractive(F, 0.5, constant=1.0)
    logs = torch.tensor([-690.0, 0.0], dtype=F64).log_softmax(-1)
    mu = ParticleMeasure([[3.0], [0.0]], log_weights=logs)
    found = invert(G, mu, strict=False)
    assert not bool(found.converged) and float(found.error) == math.inf


@pytest.mark.parametrize("c", [1e-163, 1e-200, 1e200])
def test_the_error_of_a_cache_does_not_depend_on_the_unit_of_the_values(c):
    keys = values = torch.tensor([[1.0], [2.0]], dtype=F64)
    one, other = (
        cache_error([[1.0]], (keys, u * values), (keys, 2 * u * values), epsilon=0.1)
        for u in (1.0, c)
    )
    for name in ("value", "gap", "slope"):
        assert float(getattr(other, name) / c) == pytest.approx(float(getattr(one, name)))
    steps = [
        cache_error([[1.0]], None, (keys, u * values), within=(0.1, 0.1 * u), epsilon=0.1)
        for u in (1.0, c)
    ]
    assert float(steps[1].value / c) == pytest.approx(float(steps[0].value))
    far = cache_error([[1.0]], (keys, values), (keys, 2 * values), epsilon=1e200)
    assert float(far.value) >= 3.0  # the hulls: from 1 to 4


@pytest.mark.parametrize("c", [1e-78, 1e-82, 1e-165, 1e-250, 1e155, 1e250])
@pytest.mark.parametrize("shared", [0.0, 1.0])
def test_the_error_of_a_cache_does_not_depend_on_the_unit_of_the_keys(c, shared):
    """Two tokens that two of another cache stand for; a coordinate is the same in all keys."""
    keys = c * torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, 0.0]], dtype=F64)
    keys[:, 1] = c * shared
    values = torch.tensor([[1.0], [1.0], [0.0]], dtype=F64)
    new = (keys[[2, 2, 2]], values)
    found = cache_error([[0.0, 0.0]], (keys, values), new, epsilon=0.01 / c, scale=1.0)
    truth = 2 * math.cosh(0.01) / (2 * math.cosh(0.01) + 1) - 2 / 3
    assert truth <= float(found.value) < 1.02 * truth
    for scale in (1.0, c):  # queries in the other unit, or keys that are small by the scale
        shift = torch.tensor([[0.3 / c, 0.0]], dtype=F64)
        pair = (keys * (scale / c), values), (new[0] * (scale / c), values)
        far = [
            cache_error(shift * (c / scale), *pair, epsilon=e * 0.01 / scale, scale=1.0)
            for e in (1.0, 1e50)
        ]
        assert float(far[0].gap) <= float(far[0].value) < 1.1 * float(far[0].gap)
        assert 1.0 <= float(far[1].value) < 1 + 1e-12  # the hulls
        steps = cache_error(shift * (c / scale), None, pair[0], within=(0.1 * scale, 0.1))
        assert 0.1 < float(steps.value) < 0.3


@pytest.mark.parametrize(("dtype", "far"), [(F64, 1e80), (F64, 1e150), (F32, 1e12), (F32, 1e18)])
@pytest.mark.parametrize("kernel", [kernels.l2, kernels.dot_product])
def test_where_an_absent_atom_is_has_no_part_in_a_ball_of_sigmoids(dtype, far, kernel):
    eye = torch.eye(2, dtype=dtype)
    parameters = AttentionParameters(0.01 * eye, 0.01 * eye, eye)
    F = SelfAttention(parameters, kernel=kernel, normalization=normalizations.sigmoid)
    weights = torch.tensor([0.5, 0.5, 0.0], dtype=dtype)
    near, away = (
        ParticleMeasure(torch.tensor([[1.0, 0], [0, 1], [x, 0]], dtype=dtype), weights=weights)
        for x in (1.0, far)
    )
    for epsilon in (0.0, 0.1):
        bound = float(ball_upper(F, away, epsilon))
        assert bound >= float(local_lipschitz(F, near).value) * (1 - 1e-5)
        assert bound == pytest.approx(float(ball_upper(F, near, epsilon)), rel=1e-5)


def test_a_mass_that_underflows_is_no_absent_atom_in_a_ball_of_sigmoids():
    eye = torch.eye(2, dtype=F64)
    parameters = AttentionParameters(0.01 * eye, 0.01 * eye, eye)
    F = SelfAttention(parameters, normalization=normalizations.sigmoid)
    logs = torch.tensor([0.0, -800.0], dtype=F64).log_softmax(-1)
    mu = ParticleMeasure([[1.0, 0.0], [1e200, 0.0]], log_weights=logs)
    assert float(ball_upper(F, mu, 0.1)) == math.inf
    # The first token comes to see the other's 1e305, with a weight of e^−750, by half more.
    mu = ParticleMeasure([[0.0, 1.0], [1e305, 0.0]], log_weights=logs + torch.tensor([0.0, 50.0]))
    least = 0.49 * math.exp(-750 + 305 * math.log(10))
    moved = F.ball_bounds(mu, torch.tensor([1e-27, 0.0], dtype=F64)).displacement
    assert least <= float(moved[0]) < 10 * least


@pytest.mark.parametrize(("dtype", "size"), [(F32, 1.06e4), (F32, 1e5), (F64, 7.5e4), (F64, 1e6)])
def test_no_class_is_certified_where_attention_may_turn_to_a_token_that_has_none(dtype, size):
    one = torch.ones(1, 1, dtype=dtype)
    F = SelfAttention(AttentionParameters.from_bilinear(size * one, one))
    bias = torch.tensor([1.0, 0.0], dtype=dtype)
    readout = Readout(torch.tensor([[1.0], [-1.0]], dtype=dtype), bias, token=0)
    mu = ParticleMeasure(torch.tensor([[0.01], [-1.0]], dtype=dtype))
    other = mu.replace(torch.tensor([[-0.001], [-1.0]], dtype=dtype))
    assert int(readout(F(mu)).argmax()) == 0 < int(readout(F(other)).argmax())
    assert 0.001 < float(certified_radius(F, readout, mu)) < 0.011
