"""Bounds in a ball, of layers and networks: exact at radius 0, and of the parts that they say."""

from __future__ import annotations

import math
from functools import reduce
from itertools import pairwise

import pytest
import torch

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention
from meanfield.attention.normalizations import sinkhorn
from meanfield.layers import (
    MLP,
    Bounded,
    Chain,
    Clip,
    LayerNorm,
    Particlewise,
    Pointwise,
    Residual,
    RMSNorm,
    Sum,
)
from meanfield.layers.mlp import ACTIVATIONS
from meanfield.linalg import Lanczos
from meanfield.lipschitz import ball_upper, local_lipschitz
from meanfield.maps import BallBounds
from meanfield.maps import map as maps_module
from meanfield.maps.intervals import Intervals
from meanfield.measures import pushforward
from tests.maps import small_maps as small
from tests.maps.small_maps import D, attention, draw, layer_norm, mlp, pre_norm

F64 = torch.float64
ALONE = ["particlewise subclass", "sine", "gated"]
ALONE += ["attention, dot product", "attention, dot product, causal"]
COMPOSED = ["layer norm", "layer norm without ε", "rms norm", "parallel", "network"]
COMPOSED += ["post-norm", "post-norm, causal", "pre-norm", "pre-norm, causal"]
MAPS = {
    **{name: small.MAPS[name] for name in ALONE + COMPOSED},
    **{name: lambda name=name: mlp(activation=name) for name in ACTIVATIONS},
    "gated by relu": lambda: mlp(True, "relu"),
    "three blocks": lambda: Chain([pre_norm(), mlp(), pre_norm(True), mlp(), pre_norm()]),
}


def cloud(seed, n=3):
    """Three atoms, weighted and positioned, one pair at one position."""
    logs = draw(n, seed=seed + 1).log_softmax(-1)
    return ParticleMeasure(
        1.5 * draw(n, D, seed=seed), log_weights=logs, positions=[0.5, 0.2, 0.5]
    )


def derivative(F, mu, x):
    """D^½JD^−½ at the points x of measures with the weights of μ, by automatic differentiation."""
    J = torch.func.jacrev(lambda y: F(mu.replace(y)).points)(x)
    half = (0.5 * (mu.log_weights[:, None] - mu.log_weights)).exp()[:, None, :, None]
    return (half * J).flatten(2, 3).flatten(0, 1)


def norm(matrix):
    return torch.linalg.matrix_norm(matrix, 2)


@pytest.mark.parametrize("name", list(MAPS))
def test_at_radius_zero_nothing_changes_and_then_everything_grows(name, monkeypatch):
    F, mu = MAPS[name](), cloud(8)
    near = maps_module.ball_bounds(F, mu, 0.0)
    assert float(near.change) <= 1e-9 * float(near.constant)
    assert (near.displacement == 0).all()
    assert float(ball_upper(F, mu, 0.0)) <= float(F.local_upper(mu)) * (1 + 1e-9)
    # What is beyond the constant itself at the least radii is rounding of the large factors.
    least = float(ball_upper(F, mu, 1e-13))
    assert least == pytest.approx(float(local_lipschitz(F, mu).value), rel=1e-4)
    radii = torch.tensor([0.0, 1e-6, 1e-3, 0.1, 3.0, 1e3, math.inf], dtype=F64)
    found = maps_module.ball_bounds(F, mu, radii[:, None])
    for parts in (found.upper, found.displacement):
        for less, more in pairwise(parts.expand(7, *parts.shape[1:])):
            assert (less <= more * (1 + 1e-9)).all()
    monkeypatch.setattr(maps_module, "_FACTORED", 0)
    monkeypatch.setattr(maps_module, "_FACTORED_ENTRIES", 0)
    # Without factored constants it is put together from the bounds of the parts.
    loose = float(ball_upper(F, mu, 0.0))
    assert loose == pytest.approx(float(F.local_upper(mu)), rel=1e-8)
    assert float(ball_upper(F, mu, 1e-3)) >= float(found.upper.expand(7)[2]) * (1 - 1e-9)
    value = float(local_lipschitz(F, mu).value)
    assert 1 - 1e-9 <= float(ball_upper(F, mu, 1e-13, solver=Lanczos())) / value <= 1.01


def test_the_change_of_a_norm_is_attained_at_small_radii():
    # Along (1/√3, √(2/3)) of x̂ and a direction across it, both weights 1.
    x = torch.tensor([2.0, 0.0, 0.0], dtype=F64)
    mu = ParticleMeasure(x[None])
    h = torch.tensor([3**-0.5, (2 / 3) ** 0.5, 0.0], dtype=F64)
    for sign in (1, -1):
        F, eps = RMSNorm(torch.ones(3, dtype=F64), 0.0), 1e-4
        moved = derivative(F, mu, mu.points + sign * eps * h) - derivative(F, mu, mu.points)
        assert float(norm(moved)) == pytest.approx(float(F.ball_bounds(mu, eps).change), rel=1e-3)


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_slopes_and_their_changes_are_within_their_bounds(name):
    act = ACTIVATIONS[name]
    x = torch.linspace(-12, 12, 240_001, dtype=F64)
    slope = torch.func.jvp(act.function, (x,), (torch.ones_like(x),))[1]
    assert act.lowest_slope <= float(slope.min()) <= act.lowest_slope + 1e-4
    assert act.highest_slope * (1 - 1e-4) <= float(slope.max()) <= act.highest_slope
    if act.curvature < math.inf:
        bend = ((slope[1:] - slope[:-1]) / (x[1] - x[0])).abs().max()
        assert act.curvature * (1 - 1e-3) <= float(bend) <= act.curvature
    for shift in (1, 37, 2_000, 30_000):
        radii = torch.full_like(x[shift:], float(shift * (x[1] - x[0])) * (1 + 1e-9))
        allowed = act.slope_change(x[shift:], slope[shift:], radii)
        assert ((slope[:-shift] - slope[shift:]).abs() <= allowed * (1 + 1e-6) + 1e-12).all()
        steepest = act.steepest(x[shift:], slope[shift:], radii)
        assert (slope[:-shift].abs() <= steepest * (1 + 1e-6) + 1e-12).all()


def test_a_gate_changes_with_what_it_multiplies_and_both_slopes_count_at_a_kink():
    F, at = MLP([[1.0]], [[1.0]], activation="silu", gate=[[1.0]]), ParticleMeasure([[0.0]])
    moved = derivative(F, at, at.points + 0.01) - derivative(F, at, at.points)
    assert float(norm(moved)) <= float(F.ball_bounds(at, 0.01).change)
    assert float(MLP([[1.0]], [[1.0]], activation="relu").local_upper(at)) >= 1


@pytest.mark.parametrize(("inner", "gate", "bias"), [(0.1, 10.0, 1.0), (10.0, 0.1, 0.0)])
def test_a_gate_moves_by_its_own_rows_and_what_it_multiplies_by_its_own(inner, gate, bias):
    """At 0 the derivative of silu(gx)(wx + b) turns at the rate gw + g²b/2, all but attained."""
    F = MLP([[inner]], [[1.0]], inner_bias=[bias], activation="silu", gate=[[gate]])
    at, radius = ParticleMeasure([[0.0]]), 1e-3
    moved = float(norm(derivative(F, at, at.points + radius) - derivative(F, at, at.points)))
    assert moved == pytest.approx(radius * (gate * inner + gate**2 * bias / 2), rel=1e-2)
    assert moved <= float(F.ball_bounds(at, radius).change) <= 1.05 * moved


@pytest.mark.parametrize("name", COMPOSED)
def test_radii_may_differ_from_atom_to_atom_and_absent_atoms_do_not_count(name):
    F, mu = MAPS[name](), cloud(2)
    with_absent = ParticleMeasure(
        torch.cat([mu.points, 7.0 * torch.eye(1, D, dtype=F64)]),
        weights=torch.cat([mu.weights, torch.zeros(1, dtype=F64)]),
        positions=[0.5, 0.2, 0.5, 0.1],
    )
    radii = torch.tensor([0.02, 0.0, 0.01], dtype=F64)
    alone = F.ball_bounds(mu, radii)
    both = F.ball_bounds(with_absent, torch.cat([radii, torch.tensor([9.0], dtype=F64)]))
    assert float(both.upper) == pytest.approx(float(alone.upper), rel=1e-9)
    torch.testing.assert_close(both.displacement[:3], alone.displacement, rtol=1e-9, atol=0)
    assert float(alone.upper) <= float(F.ball_bounds(mu, 0.02).upper) * (1 + 1e-12)


def test_a_normalisation_that_may_meet_its_pole_is_unbounded():
    mu = ParticleMeasure([[1.0, -1.0, 0.0]])
    F = Chain([LayerNorm(torch.ones(3, dtype=F64), None, 0.0), attention()])
    assert float(ball_upper(F, mu, 1.0)) < math.inf
    assert float(ball_upper(F, mu, 2.0)) == math.inf
    # Images stay bounded all the same; −x, whose image is opposite, is 2√2 away.
    assert float(F.maps[0].ball_bounds(mu, 3.0).displacement) >= 2 * 3**0.5
    assert float(F.maps[0].ball_bounds(mu, 2.0).displacement) <= 2 * 3**0.5 * (1 + 1e-8)
    assert float(ball_upper(Pointwise(torch.sin), mu, 0.1)) == math.inf


def test_what_is_not_known_is_infinite_and_not_a_number_never():
    unknown, zero = torch.tensor(math.inf, dtype=F64), torch.zeros((), dtype=F64)
    first = BallBounds.of(zero, zero, zero, zero[None])
    second = BallBounds.of(unknown, unknown, unknown, unknown[None])
    for each in (second.after(first), first.after(second)):
        assert not torch.isnan(torch.stack([each.constant, each.change, each.upper])).any()
        assert float(each.upper) >= 0


@pytest.mark.parametrize(
    ("first", "second", "change", "upper"),
    [((1.0, 0.5, 1.2), (2.0, 1.0, 2.5), 2.2, 3.0), ((1.0, 0.5, 1.5), (2.0, 1.0, 2.2), 2.1, 3.3)],
)
def test_the_change_of_a_product_is_the_less_of_its_two_sums(first, second, change, upper):
    one, other = (
        BallBounds.of(*(torch.tensor(x, dtype=F64) for x in each), torch.zeros(1, dtype=F64))
        for each in (first, second)
    )
    found = other.after(one)
    assert float(found.constant) == 2.0
    assert float(found.change) == pytest.approx(change, rel=1e-12)
    assert float(found.upper) == pytest.approx(upper, rel=1e-12)


class Bent(Particlewise):
    """x ↦ Bx, declared to have a derivative that changes by `bend` times the largest radius."""

    def __init__(self, matrix, bend):
        self.matrix, self.bend = matrix, bend

    def __call__(self, mu):
        return mu.replace(mu.points @ self.matrix.mT)

    def products(self, mu):
        return lambda eps: eps @ self.matrix.mT, lambda zeta: zeta @ self.matrix

    def ball_bounds(self, mu, radii, *, splitting=True):
        size = torch.linalg.matrix_norm(self.matrix, 2)
        change = self.bend * radii.amax(-1)
        return BallBounds.of(size, change, size + change, (size + change)[..., None] * radii)


@pytest.mark.parametrize("splitting", [False, True])
def test_the_change_of_a_chain_is_that_of_the_theorem(splitting):
    """Bends of 0 but for two maps, so that the other terms can be told apart."""
    mu, eps = ParticleMeasure(draw(4, D, seed=3), weights=[0.1, 0.2, 0.3, 0.4]), 0.01
    # Nearly singular, and not in the same directions: products of norms are far above norms.
    steps = [torch.diag(10.0 ** draw(D, seed=k)) @ torch.linalg.qr(draw(D, D, seed=k))[0]
             for k in range(5)]  # fmt: skip
    bends = [0.0, 0.3, 0.0, 2.0, 0.0]
    maps = [Bent(B, bend) for B, bend in zip(steps, bends, strict=True)]
    found = Chain(maps).ball_bounds(mu, eps, splitting=splitting)

    terms, grown, radii = [], 1.0, torch.full((4,), eps, dtype=F64)
    for k, (step, bend) in enumerate(zip(steps, bends, strict=True)):
        if not splitting:  # together, in L², all atoms move by that much
            radii = radii.minimum(grown * eps / mu.weights.sqrt())
        terms.append(bend * float(radii.max()) * grown)
        products = [reduce(torch.matmul, steps[j : k + 1][::-1]) for j in range(k + 1)]
        after = [float(norm(product)) for product in products[1:]] + [1.0]
        change = sum(size * term for size, term in zip(after, terms, strict=True))
        grown = float(norm(products[0])) + change
        radii = (float(norm(step)) + bend * float(radii.max())) * radii
    assert float(found.constant) == pytest.approx(float(norm(products[0])), rel=1e-6)
    assert float(found.change) == pytest.approx(change, rel=1e-6)


@pytest.mark.parametrize("solver", [None, Lanczos()])
def test_an_interval_has_the_larger_of_both_components(solver):
    """An atom whose query loses what it pays itself: splitting it is worse than moving it."""
    F = SelfAttention(AttentionParameters.from_bilinear([[-20.0]], [[1.0]]))
    double = Pointwise(lambda x: 2 * x, lipschitz=2.0, curvature=0.0)
    mu = ParticleMeasure([[0.0], [1.0]])
    found = Intervals.of([F, double, double], mu, solver).norms
    at = F.linearisation(mu, geometry="wasserstein")
    least, most = (float(norm(part.to_dense()).max()) for part in (at.atoms, at.field))
    assert least < 0.95 * most
    for place, factor in ((1, 1), (2, 2), (3, 4)):
        assert float(found[place, 0]) == pytest.approx(factor * most, rel=1e-6)
    # None is known of an interval with a map that has no derivative.
    maps = [double, Pointwise(torch.relu, lipschitz=1.0), double]
    kinked = Intervals.of(maps, ParticleMeasure([[0.0]]), solver).norms.tril(-1)
    assert kinked.isinf().nonzero().tolist() == [[2, 0], [2, 1], [3, 0], [3, 1]]


def test_parts_without_a_bound_are_named():
    mu = cloud(1)
    with pytest.raises(NotImplementedError, match="F: expected a map .* got <lambda>"):
        ball_upper(Chain([layer_norm(), lambda nu: pushforward(torch.tanh, nu)]), mu, 0.1)
    plan = SelfAttention(AttentionParameters.random(D), normalization=sinkhorn())
    with pytest.raises(NotImplementedError, match="under the sigmoid, got Sinkhorn"):
        ball_upper(Residual(plan), mu, 0.1)
    with pytest.raises(ValueError, match="lipschitz: expected a number ≥ 0"):
        Pointwise(torch.sin, lipschitz=-1.0)


def test_a_constant_at_fixed_weights_says_nothing_of_atoms_that_split():
    F = Bounded(lambda mu: mu.replace(mu.points.flip(-2)), 1.0)
    mu = ParticleMeasure([[1.0], [2.0]])
    with pytest.raises(NotImplementedError):
        F.ball_bounds(mu, 0.1)
    assert float(F.ball_bounds(mu, 0.1, splitting=False).upper) == 1.0


def test_by_a_constant_in_the_mean_an_atom_moves_with_the_others():
    F = Bounded(lambda mu: mu.replace(mu.mean()[..., None, :].expand(mu.points.shape)), 1.0)
    bound = F.ball_bounds(ParticleMeasure([[1.0], [2.0]]), torch.tensor([0.0, 1.0]).double(),
                          splitting=False)  # fmt: skip
    assert (bound.displacement >= 0.5).all()  # the mean moves by half of what one atom does


def test_branches_add_their_bounds_and_a_residual_scales_them():
    mu, one, other = cloud(3), small.MAPS["sine"](), mlp()
    parts = [maps_module.ball_bounds(F, mu, 0.1) for F in (one, other)]
    both = Sum([one, other]).ball_bounds(mu, 0.1)
    torch.testing.assert_close(both.change, parts[0].change + parts[1].change)
    torch.testing.assert_close(both.displacement, parts[0].displacement + parts[1].displacement)
    for scale in (-0.5, 2.0):
        found = Residual(one, scale).ball_bounds(mu, 0.1)
        torch.testing.assert_close(found.change, abs(scale) * parts[0].change)
        moved = 0.1 + abs(scale) * parts[0].displacement
        torch.testing.assert_close(found.displacement, moved.expand_as(found.displacement))


def test_a_clipped_derivative_changes_only_where_the_ball_meets_the_sphere():
    for length, change in ((0.9, 0.0), (1.1, 1.0), (1.3, 1.0), (1.5, 1.0)):
        mu = ParticleMeasure([[length, 0.0]])
        assert float(maps_module.ball_bounds(Clip(1.2), mu, 0.2).change) == change


@pytest.mark.parametrize(
    ("logs", "radii"), [([-800.0, 0.0], [0.5, 0.0]), ([math.log(0.5)] * 2, [1e-170, 0.0])]
)
def test_the_displacement_of_light_atoms_and_small_radii_is_no_0(logs, radii):
    one = SelfAttention(AttentionParameters.from_bilinear([[1.0]], [[1.0]]))
    F = Chain([Residual(one), Residual(one)])
    mu = ParticleMeasure([[0.3], [1.0]], log_weights=logs)
    found = F.ball_bounds(mu, torch.tensor(radii, dtype=torch.float64), splitting=False)
    assert float(found.displacement[0]) >= radii[0]


@pytest.mark.parametrize("F", [MLP([[1.0]], [[1.0]]), Residual(MLP([[1.0]], [[1.0]]))])
@pytest.mark.parametrize("radius", [-1.0, math.nan])
def test_no_map_takes_a_radius_below_0(F, radius):
    with pytest.raises(ValueError, match="radii: expected numbers ≥ 0"):
        F.ball_bounds(ParticleMeasure([[0.0], [1.0]]), radius)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_of_the_bounds_of_a_map_and_those_by_its_constant_the_smaller_count(factor):
    F, mu = mlp(), cloud(8)
    own = maps_module.ball_bounds(F, mu, 0.1)
    found = maps_module.ball_bounds(Bounded(F, factor * float(own.upper)), mu, 0.1)
    assert float(found.upper) == pytest.approx(min(factor, 1.0) * float(own.upper))
    assert (found.displacement <= own.displacement).all()
    assert float(found.change) <= float(own.change)
