"""Certified radii: exact for linear networks, and never beaten by attacks."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from meanfield import bounds
from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.layers import MLP, Bounded, Chain, Clip, LayerNorm, Pointwise, Residual, contractive
from meanfield.linalg import Lanczos
from meanfield.lipschitz import Readout, certified_radius
from meanfield.maps import BallBounds, Map
from meanfield.maps import map as map_module
from meanfield.measures import ParticleMeasure, stack
from tests.maps.small_maps import draw, linear

F64 = torch.float64
N, D, CLASSES = 5, 3, 4


def cloud(seed=0, *, weights=None):
    positions = (1 + torch.arange(N)).to(F64) / N
    return ParticleMeasure(draw(N, D, seed=seed), weights, positions=positions)


def attention(seed=3, causal=False):
    generator = torch.Generator().manual_seed(seed)
    parts = AttentionParameters.random(D, n_heads=1, std=0.6, generator=generator)
    return SelfAttention(parts, causal=causal)


def mlp(seed=5):
    return MLP(draw(4, D, seed=seed) / 2, draw(D, 4, seed=seed + 1) / 2, activation="tanh")


def readout(seed=11, token=None):
    return Readout(draw(CLASSES, D, seed=seed), draw(CLASSES, seed=seed + 1) / 4, token)


def pre_norm(causal=False):
    norm = LayerNorm(torch.ones(D, dtype=F64), eps=0.1)
    return Chain([Residual(Chain([norm, attention(causal=causal)])), Residual(mlp())])


def bounded(factor=0.5, radius=1.0):
    """Two blocks whose constants hold everywhere, by construction."""
    layers = []
    for seed in (3, 4):
        F = attention(seed)
        constant = bounds.table(F, radius, N).row("tokens").value
        layers.append(contractive(Chain([Clip(radius), F]), factor, constant=constant))
        layers.append(contractive(mlp(seed), factor, constant=mlp(seed).global_upper))
    return Chain(layers)


def deep():
    """Four blocks, eight maps: products of norms mean nothing, and norms of products do."""
    blocks = []
    for seed in range(4):
        norms = [LayerNorm(torch.ones(D, dtype=F64), eps=0.1)] * 2
        blocks.append(Residual(Chain([norms[0], attention(seed, causal=seed % 2 > 0)])))
        blocks.append(Residual(Chain([norms[1], mlp(seed)])))
    return Chain(blocks)


NETWORKS = {
    "deep": deep,
    "attention": attention,
    "causal": lambda: attention(causal=True),
    "pre-norm": pre_norm,
    "bounded": bounded,
    "linear": lambda: Chain([Pointwise(lambda x: 2 * x, 2.0, 0.0), linear()]),
}


def linear_attention():
    parts = AttentionParameters.from_bilinear(torch.zeros(D, D).double(), draw(D, D, seed=8))
    return Residual(SelfAttention(parts), 0.7)


@pytest.mark.parametrize("token", [None, 0])
@pytest.mark.parametrize("weights", [None, [0.1, 0.2, 0.3, 0.15, 0.25]])
def test_of_a_linear_network_it_is_the_distance_to_the_nearest_other_class(token, weights):
    mu, read = cloud(weights=weights), readout(token=token)
    F = Chain([linear_attention(), Pointwise(lambda x: x @ draw(D, D, seed=9), 99.0, 0.0)])
    found = certified_radius(F, read, mu)
    J = torch.func.jacrev(lambda x: read(F(mu.replace(x))))(mu.points).flatten(1)
    scores, c = read(F(mu)), int(found.label)
    assert c == int(scores.argmax())
    others = [k for k in range(CLASSES) if k != c]
    exact = min(float((scores[c] - scores[k]) / (J[c] - J[k]).norm()) for k in others)
    assert float(found.value) == pytest.approx(exact, rel=1e-6)
    assert float(found.value) <= exact
    assert float(found.first_order) == pytest.approx(exact, rel=1e-12)


def test_a_mean_moves_by_the_shares_of_atoms_that_are_there():
    mu = ParticleMeasure(draw(3, D), weights=[0.25, 0.75, 0.0])
    moved = torch.tensor([1.0, 2.0, math.inf], dtype=F64)
    assert float(readout().moved(moved, mu)) == pytest.approx(1.75)
    assert float(readout(token=1).moved(moved, mu)) == 2.0
    # And by no more than the L² norm of displacements says.
    assert float(readout().stretch(mu)) == 1.0
    assert float(readout(token=0).stretch(mu)) == pytest.approx(2.0)


def flipped(F, read, mu, radius, starts=1000, steps=4, seed=0):
    """Attacks by projected gradients from the sphere that change the class within the radius."""
    label = int(read(F(mu)).argmax())
    delta = draw(starts, N, D, seed=seed)
    many = mu.expand(starts)
    beaten = 0
    for step in range(steps + 1):
        delta = radius * delta / torch.linalg.vector_norm(delta, dim=(-2, -1), keepdim=True)
        delta.requires_grad_()
        scores = read(F(many.replace(mu.points + delta)))
        beaten += int((scores.argmax(-1) != label).sum())
        if step == steps:
            return beaten
        rest = scores.clone()
        rest[:, label] = -math.inf
        (grad,) = torch.autograd.grad((rest.amax(-1) - scores[:, label]).sum(), delta)
        size = torch.linalg.vector_norm(grad, dim=(-2, -1), keepdim=True).clamp_min(1e-12)
        delta = (delta + radius * grad / size).detach()
    return beaten


@pytest.mark.parametrize("name", NETWORKS)
def test_a_thousand_attacks_within_the_radius_never_change_the_class(name):
    F, mu = NETWORKS[name](), cloud(2)
    read = Readout(draw(CLASSES, F(mu).dim, seed=12))
    found = certified_radius(F, read, mu)
    assert 0 < float(found.value) <= float(found.first_order) * 1e6
    assert flipped(F, read, mu, float(found.value)) == 0
    assert flipped(F, read, mu, 50 * float(found.first_order), starts=50) > 0


def test_a_network_bounded_by_construction_has_a_radius_of_its_global_constant():
    F, mu, read = bounded(factor=0.5), cloud(4), readout()
    found = certified_radius(F, read, mu)
    widest = float(torch.cdist(read.weight, read.weight).max())
    # Mean over N tokens: a displacement of length ε moves the mean by ε/√N at most.
    least = float(found.margin) * math.sqrt(N) / (widest * 1.5**4)
    assert float(found.value) >= 0.999 * least


@pytest.mark.parametrize("weights", [None, [0.1, 0.2, 0.3, 0.15, 0.25]])
def test_depth_does_not_multiply(weights, monkeypatch):
    F, mu, read = deep(), cloud(2, weights=weights), readout(token=1)
    found = float(certified_radius(F, read, mu).value)
    monkeypatch.setattr(map_module, "_FACTORED", 0)
    without = float(certified_radius(F, read, mu).value)
    assert found > 1.5 * without > 0
    # Norms by an iteration, as a larger network would need them.
    iterated = certified_radius(F, read, mu, solver=Lanczos())
    assert float(iterated.value) == pytest.approx(found, rel=1e-2)


def test_larger_margins_have_larger_radii_and_level_classes_have_none():
    F, mu, read = pre_norm(), cloud(2), readout()
    small = certified_radius(F, read, mu)
    bias = read.bias + torch.nn.functional.one_hot(small.label, CLASSES)
    large = certified_radius(F, Readout(read.weight, bias), mu)
    assert float(large.value) > 1.01 * float(small.value)
    level = Readout(torch.ones(2, D, dtype=F64))
    assert float(certified_radius(F, level, mu).value) == 0


def test_a_batch_has_the_radii_of_its_inputs():
    F, read, inputs = pre_norm(), readout(token=1), [cloud(seed) for seed in range(3)]
    found = certified_radius(F, read, stack(inputs))
    for k, mu in enumerate(inputs):
        alone = certified_radius(F, read, mu)
        assert float(found.value[k]) == pytest.approx(float(alone.value), rel=1e-6)
        assert int(found.label[k]) == int(alone.label)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_the_radius_needs_no_gradients_of_its_caller(without):
    F, read = pre_norm(), readout()
    with without():
        found = certified_radius(F, read, cloud(2))
    assert float(found.value) == float(certified_radius(F, read, cloud(2)).value) > 0


def test_absent_tokens_do_not_count():
    F, read = attention(), readout()
    mu = cloud(2)
    padded = ParticleMeasure(
        torch.cat([mu.points, mu.points[:1]]),
        torch.cat([mu.weights, torch.zeros(1, dtype=F64)]),
        positions=torch.cat([mu.positions, mu.positions[:1]]),
    )
    one, other = certified_radius(F, read, mu), certified_radius(F, read, padded)
    assert float(one.value) == pytest.approx(float(other.value), rel=1e-6)


def test_what_does_not_fit_is_refused():
    F, mu = attention(), cloud()
    with pytest.raises(TypeError, match="readout: expected"):
        certified_radius(F, torch.nn.Linear(D, 2), mu)
    with pytest.raises(NotImplementedError, match="ball_bounds"):
        certified_radius(lambda nu: nu, readout(), mu)
    with pytest.raises(ValueError, match="readout: expected a measure on"):
        certified_radius(F, Readout(draw(2, D + 1)), mu)
    with pytest.raises(ValueError, match="token: expected one of 5"):
        certified_radius(F, readout(token=5), mu)


class Declared(Map):
    """The identity, with bounds in balls that are given."""

    def __init__(self, change, upper):
        self.change, self.upper = change, upper

    def __call__(self, mu):
        return mu

    def ball_bounds(self, mu, radii, *, splitting=True):
        each = torch.ones_like(radii[..., 0])
        far = torch.full_like(radii, math.inf)
        return BallBounds.of(each, self.change * each, self.upper * each, far)


@pytest.mark.parametrize(("change", "upper"), [(3.0, 99.0), (100.0, 2.0)])
@pytest.mark.parametrize("scales", [(1.0, 1.0, 1.0), (0.1, 10.0, 10.0)])
def test_the_radius_is_that_of_the_formulas(change, upper, scales):
    """Before x ↦ scales ∘ x a change counts by the gradient there, not by the norm of the scales.

    A bound of the constant does count by that norm.
    """
    mu = cloud(weights=[0.1, 0.2, 0.3, 0.15, 0.25])
    read = Readout([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]], token=0)
    by = torch.tensor(scales, dtype=F64)
    F = Chain([Declared(change, upper), Pointwise(lambda x: by * x, max(scales), 0.0)])
    found = certified_radius(F, read, mu)
    stretch = math.sqrt(0.3 / 0.1)
    least = 2 * scales[0] * (1 + stretch * change)
    steepest = min(least, 2 * max(scales) * stretch * upper)
    assert float(found.value) == pytest.approx(float(found.margin) / steepest, rel=0.05)
    assert float(found.value) * steepest <= float(found.margin)


# --- what layers that are bounded by construction declare ---


def test_a_bounded_map_declares_its_constant_in_every_ball():
    F = Bounded(attention(), 0.3)  # a claim: what is declared is taken as true
    found = F.ball_bounds(cloud(), 100.0, splitting=False)
    assert float(found.upper) == 0.3 and float(found.change) <= 0.6
    split = F.ball_bounds(cloud(), 100.0)
    assert float(split.upper) > 1
    mu = cloud(weights=[0.1, 0.2, 0.3, 0.15, 0.25])
    radii = torch.tensor([1.0, 0.0, 0.0, 2.0, 0.0], dtype=F64)
    moved = Bounded(lambda nu: nu, 0.5).ball_bounds(mu, radii, splitting=False).displacement
    both = math.sqrt(0.1 * 1 + 0.15 * 4)
    expected = 0.5 * both / mu.weights.sqrt()
    torch.testing.assert_close(moved, expected)
    chained = Chain([Declared(1.0, 0.5)]).ball_bounds(mu, radii, splitting=False)
    torch.testing.assert_close(chained.displacement, expected)
    far = Bounded(lambda nu: nu, 0.5, "max").ball_bounds(mu, radii, splitting=False)
    assert far.displacement.tolist() == pytest.approx([1.0] * N) and far.upper == math.inf
    alone = Bounded(Pointwise(torch.sin), 1.0).ball_bounds(mu, radii)
    assert alone.displacement.tolist() == pytest.approx(radii.tolist()) and alone.upper == 1


@pytest.mark.parametrize("norm", ["l2", "max"])
def test_how_far_an_atom_without_mass_may_go_moves_no_other(norm):
    mu = ParticleMeasure(torch.zeros(3, 1, dtype=F64), [0.0, 0.25, 0.75])
    radii = torch.tensor([9.0, 1.0, 0.0], dtype=F64)
    F = Bounded(lambda nu: nu, 0.5, norm)
    moved = F.ball_bounds(mu, radii, splitting=False).displacement
    expected = [0.5, 0.5 / 3**0.5] if norm == "l2" else [0.5, 0.5]
    assert moved[1:].tolist() == pytest.approx(expected) and bool(moved.isfinite().all())


def test_a_bounded_map_that_cannot_say_is_refused():
    with pytest.raises(NotImplementedError):
        Bounded(lambda nu: nu, 0.5).ball_bounds(cloud(), 0.1)


def test_a_displacement_that_reaches_the_margin_ends_the_radius():
    """A dead ReLU has slope 0 at −0.01; the class flips at 1.01, where its value is the margin."""
    F, mu = Pointwise(torch.relu, lipschitz=1.0), ParticleMeasure([[-0.01]])
    found = certified_radius(F, Readout([[-1.0], [0.0]], [1.0, 0.0]), mu)
    assert 0.5 < float(found.value) <= 1.01


def test_nothing_is_certified_of_a_token_that_is_absent():
    F = SelfAttention(AttentionParameters.random(2, generator=0))
    readout = Readout(torch.eye(2, dtype=torch.float64), token=2)
    padded = stack(
        [ParticleMeasure(torch.eye(3)[:, :2].double()), ParticleMeasure(torch.eye(2).double())]
    )
    with pytest.raises(ValueError, match="token: expected one that has mass"):
        certified_radius(F, readout, padded)


def test_a_readout_keeps_the_numbers_that_it_was_given():
    weight, bias = torch.eye(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    readout = Readout(weight, bias)
    weight *= 3
    bias += 1
    assert readout.weight.tolist() == [[1.0, 0.0], [0.0, 1.0]] and not readout.bias.any()


def test_a_readout_of_parameters_is_copied_whole_and_refuses_stale_gradients():
    p = torch.nn.Parameter(torch.eye(2, dtype=torch.float64))
    readout, mu = Readout(2 * p, p[0]), ParticleMeasure([[1.0, 0.0], [3.0, 4.0]])
    twin = copy.deepcopy(readout)
    assert twin(mu).equal(readout(mu)) and twin.weight is not readout.weight
    with torch.no_grad():
        p.mul_(1.1)
    for part in (readout.weight, readout.bias):
        with pytest.raises(RuntimeError, match="Readout: .* some changed since"):
            part.sum().backward()
