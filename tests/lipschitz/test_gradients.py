"""Gradients of local constants against central differences, and where there is none."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import pytest
import torch

from meanfield import bounds
from meanfield.attention import AttentionParameters, SelfAttention, kernels, normalizations
from meanfield.layers import MLP, Chain, LayerNorm, Pointwise, Residual
from meanfield.linalg import Lanczos
from meanfield.lipschitz import (
    Readout,
    ball_upper,
    certified_radius,
    infinity_norm,
    local_lipschitz,
    local_order,
    one_sided,
)
from meanfield.lipschitz.differentiable import _check_simple
from meanfield.maps import Linearisation, Map, linearize
from meanfield.measures import ParticleMeasure, pushforward
from tests.maps.small_maps import draw

F64 = torch.float64
D, N = 3, 4


def matrices(seed=0):
    """What one block is made of."""
    shapes = {"query": (2, 2, D), "key": (2, 2, D), "value": (2, 2, D), "output": (2, D, 2)}
    shapes |= {"bias": (2, 2), "gain": (D,), "inner": (5, D), "outer": (D, 5)}
    return {name: draw(*s, seed=seed + k) for k, (name, s) in enumerate(shapes.items())}


def layer(w, **kind):
    parts = AttentionParameters(w["query"], w["key"], w["value"], w["output"], w["bias"])
    return SelfAttention(parts, **kind)


def block(w, **kind):
    attends = Residual(Chain([LayerNorm(w["gain"]), layer(w, **kind)]))
    return Chain([attends, Residual(MLP(w["inner"], w["outer"]))])


def norms_of_torch(w):
    """Its own derivative of a layer norm, forwards and then backwards, is wrong."""

    def normed(x):
        return torch.nn.functional.layer_norm(x, (D,), w["gain"])

    def before(mu):
        return layer(w)(mu.replace(normed(mu.points)))

    return Chain([Residual(before), Pointwise(normed)])


def two_blocks(w):
    return Chain([block(w, causal=True), block({n: t.flip(0) for n, t in w.items()})])


MAPS = {
    "plain": layer,
    "causal": lambda w: layer(w, causal=True),
    "l2": lambda w: layer(w, kernel=kernels.l2),
    "rotary": lambda w: layer(w, kernel=kernels.rotary(base=100.0, length=4.0)),
    "sinkhorn": lambda w: layer(w, normalization=normalizations.sinkhorn(rtol=1e-14)),
    "sigmoid": lambda w: layer(w, normalization=normalizations.sigmoid),
    "mlp": lambda w: MLP(w["inner"], w["outer"]),
    "block": block,
    "two blocks": two_blocks,
    "norms of torch": norms_of_torch,
}


def measure(points, scores):
    n = points.shape[-2]
    order = torch.tensor([2, 0, 3, 1])[:n]
    positions = (1 + order).to(F64) / n
    return ParticleMeasure(points, log_weights=scores.log_softmax(-1), positions=positions)


def central(f, at, along, step=1e-3):
    """The derivative of f along a direction, by differences of fourth order."""

    def apart(h):
        return float(f(at + h * along)) - float(f(at - h * along))

    return (8 * apart(step) - apart(2 * step)) / (12 * step)


@pytest.mark.parametrize(
    ("name", "geometry"),
    [*((name, "wasserstein") for name in MAPS), ("causal", "euclidean"), ("block", "euclidean")],
)
def test_gradients_are_those_of_central_differences(name, geometry):
    given = {"points": draw(N, D, seed=50), "scores": draw(N, seed=51)} | matrices(7)

    def constant(**changed):
        w = given | changed
        mu = measure(w["points"], w["scores"])
        return local_lipschitz(MAPS[name](w), mu, geometry=geometry).value

    asking = {key: value.clone().requires_grad_() for key, value in given.items()}
    constant(**asking).backward()
    for keys in (["points"], ["scores"], list(matrices())):
        along = {key: draw(*given[key].shape, seed=90 + k) for k, key in enumerate(keys)}

        def moved(h, along=along):
            return constant(**{key: given[key] + h * step for key, step in along.items()})

        grads = {key: asking[key].grad for key in keys if asking[key].grad is not None}
        found = sum(float((grad * along[key]).sum()) for key, grad in grads.items())
        assert found == pytest.approx(central(moved, 0.0, 1.0), rel=1e-6, abs=1e-10)


def splitting_case():
    """A measure whose largest component is that of an atom that splits."""
    points = torch.tensor([[1.4, 0.02], [-1.4, 0.0], [0.02, -0.03]], dtype=F64)
    mu = ParticleMeasure(points, weights=[0.4, 0.4, 0.2])
    A = torch.tensor([[-1.0, 0.02], [-0.01, -1.0]], dtype=F64)
    return mu, A, torch.tensor([[-1.0, 0.02], [0.0, -0.7]], dtype=F64)


def test_the_gradient_of_the_splitting_component():
    mu, A, V = splitting_case()

    def constant(A, points):
        F = SelfAttention(AttentionParameters.from_bilinear(A, V))
        return local_lipschitz(F, mu.replace(points))

    a, x = A.clone().requires_grad_(), mu.points.clone().requires_grad_()
    found = constant(a, x)
    assert found.splitting > found.particle
    found.value.backward()
    for at, grad, f in [
        (A, a.grad, lambda A: constant(A, mu.points).value),
        (mu.points, x.grad, lambda x: constant(A, x).value),
    ]:
        along = draw(*at.shape, seed=3)
        assert float((grad * along).sum()) == pytest.approx(central(f, at, along), rel=1e-7)


@pytest.mark.parametrize("size", [1e-170, 1e170])
@pytest.mark.parametrize("geometry", ["wasserstein", "euclidean"])
def test_constants_whose_squares_leave_the_number_range_have_gradients(size, geometry):
    mu, A, V = splitting_case()

    def gradient(V):
        x = mu.points.clone().requires_grad_()
        F = SelfAttention(AttentionParameters.from_bilinear(A, V))
        local_lipschitz(F, mu.replace(x), geometry=geometry).value.backward()
        return x.grad

    torch.testing.assert_close(gradient(size * V) / size, gradient(V), rtol=1e-9, atol=1e-12)


def test_a_batch_has_the_gradients_of_its_measures():
    w = matrices(3)
    points, scores = draw(3, N, D, seed=5), draw(3, N, seed=6)
    x = points.clone().requires_grad_()
    local_lipschitz(block(w), measure(x, scores)).value.sum().backward()
    for one in range(3):
        alone = points[one].clone().requires_grad_()
        local_lipschitz(block(w), measure(alone, scores[one])).value.backward()
        torch.testing.assert_close(x.grad[one], alone.grad, rtol=1e-9, atol=1e-12)


def test_a_batch_in_which_both_components_win():
    split, A, V = splitting_case()
    spread = ParticleMeasure([[0.5, 0.2], [-0.3, 1.0], [2.0, -0.3]], weights=[0.02, 0.18, 0.8])
    x = torch.stack([split.points, spread.points]).requires_grad_()
    mu = ParticleMeasure(x, log_weights=torch.stack([split.log_weights, spread.log_weights]))
    F = SelfAttention(AttentionParameters.from_bilinear(A, V))
    found = local_lipschitz(F, mu)
    assert (found.splitting > found.particle).tolist() == [True, False]
    found.value.sum().backward()
    for one, nu in enumerate((split, spread)):
        alone = nu.points.clone().requires_grad_()
        local_lipschitz(F, nu.replace(alone)).value.backward()
        torch.testing.assert_close(x.grad[one], alone.grad, rtol=1e-9, atol=1e-12)


def test_atoms_of_weight_0_get_no_gradient():
    x = draw(N, D, seed=21).requires_grad_()
    logs = torch.tensor([0.5, 0.0, 0.25, 0.25], dtype=F64).log().requires_grad_()
    local_lipschitz(layer(matrices()), ParticleMeasure(x, log_weights=logs)).value.backward()
    for grad, asks in ((x.grad, x), (logs.grad, logs)):
        assert bool(grad.isfinite().all()) and float(grad.norm()) > 0.1, asks
        assert float(grad[1].norm()) < 1e-14


def test_light_atoms_keep_the_gradient():
    """At weights of e^-18 the worst displacement has entries of e^9 before it is weighted."""
    logs = torch.tensor([0.0, -18.0], dtype=F64).log_softmax(-1)

    def constant(x):
        F = SelfAttention(AttentionParameters.from_bilinear([[-9.0]], [[1.0]]))
        return local_lipschitz(F, ParticleMeasure(x, log_weights=logs)).value

    at = torch.tensor([[1.0], [-1.0]], dtype=F64)
    x = at.clone().requires_grad_()
    constant(x).backward()
    along = draw(2, 1, seed=4)
    expected = central(constant, at, along, step=1e-4)
    assert float((x.grad * along).sum()) == pytest.approx(expected, rel=1e-6)


# --- where there is none ---


def test_nothing_is_recorded_where_nothing_asks():
    w, mu = matrices(), measure(draw(N, D), draw(N))
    assert not local_lipschitz(layer(w), mu).value.requires_grad
    w["query"].requires_grad_()
    with torch.no_grad():
        assert not local_lipschitz(layer(w), mu).value.requires_grad
    assert local_lipschitz(layer(w), mu).value.requires_grad
    logs = draw(N).log_softmax(-1).requires_grad_()  # alone
    mu = ParticleMeasure(draw(N, D), log_weights=logs)
    assert local_lipschitz(layer(matrices()), mu).value.requires_grad


@pytest.mark.parametrize("name", ["query", "key", "value", "output", "query_bias", "scale"])
def test_any_part_of_a_layer_may_ask_for_a_gradient_alone(name):
    parts = {m: torch.eye(2, dtype=F64)[None] for m in ("query", "key", "value", "output")}
    parts |= {"query_bias": torch.ones(1, 2, dtype=F64), "scale": torch.ones(1, dtype=F64)}
    mu = ParticleMeasure([[0.3, 0.0], [-0.5, 0.2], [1.0, 0.4]])
    parts[name] = parts[name].clone().requires_grad_()
    value = local_lipschitz(SelfAttention(AttentionParameters(**parts)), mu).value
    (slope,) = torch.autograd.grad(value, parts[name])
    assert float(slope.abs().max()) > 1e-6


@pytest.mark.parametrize("solver", [None, Lanczos()])
def test_a_double_singular_value_is_refused(solver):
    scale = torch.tensor(2.0, dtype=F64, requires_grad=True)
    mean = SelfAttention(
        AttentionParameters.from_bilinear(torch.zeros(2, 2).double(), torch.eye(2).double())
    )
    F, mu = Chain([mean, Pointwise(lambda x: scale * x)]), ParticleMeasure(draw(N, 2))
    found = local_lipschitz(F, mu, solver=solver)
    assert float(found.value.detach()) == pytest.approx(2)
    with pytest.raises(ValueError, match=r"expected a largest singular value that is simple"):
        found.value.backward()
    local_lipschitz(F, mu, solver=solver, strict=False).value.backward()
    assert float(scale.grad) == pytest.approx(1)


@pytest.mark.parametrize("name", ["pointwise", "residual", "function"])
def test_the_norm_of_a_linear_layer_is_refused_with_the_way_that_gives_its_gradient(name):
    W = draw(D, D).requires_grad_()
    F = {
        "pointwise": Pointwise(lambda z: z @ W.T),
        "residual": Residual(Pointwise(lambda z: z @ W.T)),
        "function": lambda mu: mu.replace(mu.points @ W),
    }[name]
    mu = ParticleMeasure(draw(N, D, seed=1))
    with pytest.raises(ValueError, match="strict=False .* as in a linear layer"):
        local_lipschitz(F, mu).value.backward()
    value = local_lipschitz(F, mu, strict=False).value
    (found,) = torch.autograd.grad(value, W)
    matrix = W + torch.eye(D, dtype=F64) if name == "residual" else W
    norm = torch.linalg.matrix_norm(matrix, 2)
    torch.testing.assert_close(value, norm)
    torch.testing.assert_close(found, torch.autograd.grad(norm, W)[0])


@pytest.mark.parametrize("geometry", ["wasserstein", "euclidean"])
@pytest.mark.parametrize("asks", ["points", "log_weights"])
def test_what_a_linear_map_does_not_depend_on_has_the_gradient_0(geometry, asks):
    parts = {"points": draw(N, 1), "log_weights": draw(N).log_softmax(0)}
    parts[asks].requires_grad_()
    mu = ParticleMeasure(parts["points"], log_weights=parts["log_weights"])
    value = local_lipschitz(
        lambda mu: mu.replace(3 * mu.points), mu, geometry=geometry, strict=False
    )
    (found,) = torch.autograd.grad(value.value, parts[asks])
    torch.testing.assert_close(found, torch.zeros_like(parts[asks]))


def away_from_peers(mu):
    """sin x less half its mean over the atoms at the same position: twice as steep for parts."""
    same = (mu.positions[:, None] == mu.positions).to(mu.dtype) * mu.weights
    values = torch.sin(mu.points)
    return mu.replace(values - 0.5 * same / same.sum(-1, keepdim=True) @ values)


@pytest.mark.parametrize(("residual", "is_known"), [(0.0099, True), (0.0101, False)])
def test_the_vector_has_to_be_known_to_a_tenth(residual, is_known):
    """The angle is at most the residual over the gap, which is 1 − 0.9."""
    F = Pointwise(lambda x: x * torch.tensor([1.0, 0.9], dtype=F64))
    mu = ParticleMeasure([[1.0, 2.0]])
    found = local_lipschitz(F, mu)
    loose = replace(found, residual=torch.full_like(found.value, residual))
    refused = contextlib.nullcontext() if is_known else pytest.raises(ValueError, match="simple")
    with refused:
        _check_simple(linearize(F, mu), loose, torch.tensor(True), rtol=1e-9)


def test_a_tie_of_two_atoms_that_split_is_refused():
    x = torch.tensor([[0.3], [-0.3], [1.0]], dtype=F64, requires_grad=True)
    mu = ParticleMeasure(x, positions=[0.2, 0.4, 0.6])
    found = local_lipschitz(away_from_peers, mu)
    assert float(found.splitting) == pytest.approx(2 * float(found.particle))
    with pytest.raises(ValueError, match="simple"):
        found.value.backward()
    alone = ParticleMeasure(x[1:], positions=[0.4, 0.6])
    local_lipschitz(away_from_peers, alone).value.backward()
    assert x.grad.flatten().tolist() == pytest.approx([0.0, math.sin(0.3), 0.0])


def test_a_tie_of_the_two_components_is_refused():
    """Of A = −a the splitting component grows with a, and passes the other one once."""

    def constant(a):
        points = torch.tensor([[4.0], [0.0]], dtype=F64, requires_grad=True)
        F = SelfAttention(AttentionParameters.from_bilinear([[-a]], [[1.0]]))
        mu = ParticleMeasure(points, [1 / 17, 16 / 17])
        return local_lipschitz(F, mu), points

    low, high = 0.0, 1.0
    for _ in range(52):
        middle = (low + high) / 2
        found, _ = constant(middle)
        low, high = (middle, high) if found.particle > found.splitting else (low, middle)
    for a, tied in ((low, True), (0.9 * low, False), (1.1 * low, False)):
        found, points = constant(a)
        if tied:
            with pytest.raises(ValueError, match="largest singular value that is simple"):
                found.value.backward()
        else:
            found.value.backward()
            assert float(points.grad.norm()) > 0


def test_only_measures_whose_gradient_is_wanted_are_refused():
    mu, A, V = splitting_case()
    tie = torch.zeros_like(mu.points)
    x = torch.stack([mu.points, tie]).requires_grad_()
    F = Residual(SelfAttention(AttentionParameters.from_bilinear(A, V)), 0.3)
    value = local_lipschitz(F, ParticleMeasure(x)).value
    value[0].backward(retain_graph=True)
    with pytest.raises(ValueError, match="simple"):
        value[1].backward()


class Liar(Map):
    """Declares a derivative that is not its own."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, mu):
        return mu.replace(torch.sin(mu.points))

    def linearisation(self, mu, *, geometry="euclidean"):
        own = super().linearisation(mu, geometry=geometry)
        return Linearisation(self.factor * own.atoms, self.factor * own.field)


def test_a_declared_derivative_that_is_not_that_of_the_map_is_refused(monkeypatch):
    x = draw(N, D).requires_grad_()
    with pytest.raises(ValueError, match="Liar: expected a map whose derivative is that of its"):
        local_lipschitz(Liar(1.001), ParticleMeasure(x))
    monkeypatch.setattr("meanfield.maps.map.check_declared", lambda *_, **__: None)
    value = local_lipschitz(Liar(1.001), ParticleMeasure(x)).value
    with pytest.raises(ValueError, match="check the linearisation"):
        value.backward()


def test_the_second_derivative_is_refused():
    x = draw(N, D, seed=2).requires_grad_()
    value = local_lipschitz(layer(matrices()), measure(x, draw(N))).value
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(value, x, create_graph=True)


def test_a_map_that_is_not_declared_to_move_atoms_alone_has_the_same_gradient():
    net = torch.nn.Sequential(
        torch.nn.Linear(D, 8), torch.nn.Tanh(), torch.nn.Linear(8, D)
    ).double()
    mu, found = ParticleMeasure(draw(N, D)), []
    for F in (Pointwise(net), lambda mu: pushforward(net, mu)):
        net.zero_grad()
        local_lipschitz(F, mu).value.backward()
        found.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    assert len(found[0]) == 3
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", MAPS)
def test_what_is_not_differentiable_has_no_gradient_rather_than_that_of_a_part(name):
    w, readout = matrices(), Readout(torch.eye(D, dtype=F64))

    def numbers(asks):
        parts = {key: value.clone().requires_grad_(asks) for key, value in w.items()}
        F = MAPS[name](parts)
        mu = measure(draw(N, D).requires_grad_(asks), draw(N).requires_grad_(asks))
        with contextlib.suppress(NotImplementedError):
            yield F.local_upper(mu)
        yield bounds.local_upper(F, mu)
        at = linearize(F, mu)
        yield from (at.atoms.to_dense(), at.field.to_dense(), at.atoms @ mu.points)
        with contextlib.suppress(NotImplementedError):
            yield from F.ball_bounds(mu, 0.01)
            yield ball_upper(F, mu, 0.01)
            yield ball_upper(F, mu, 0.01, solver=Lanczos())
            found = certified_radius(F, readout, mu)
            yield from (found.value, found.margin, found.first_order)
        for p in (1, 2, math.inf):
            ends = local_order(F, mu, p=p)
            yield from (ends.lower, ends.upper)
        yield infinity_norm(F, mu).value
        yield one_sided(F, mu).value

    plain = list(numbers(asks=False))
    for found, value in zip(numbers(asks=True), plain, strict=True):
        assert not found.requires_grad
        torch.testing.assert_close(found, value)


def test_a_bound_that_a_stranger_declares_has_no_gradient():
    class Scaled(Map):
        def __init__(self, factor):
            self.factor = factor

        def __call__(self, mu):
            return mu.replace(self.factor * mu.points)

        def local_upper(self, mu):
            return self.factor.abs().expand(mu.batch_shape)

    F = Scaled(torch.tensor(2.0, dtype=F64, requires_grad=True))
    assert not F.local_upper(ParticleMeasure(draw(N, D))).requires_grad
