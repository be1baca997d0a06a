"""Gradients are those of finite differences, or between one-sided slopes."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from meanfield.measures import ParticleMeasure, stack
from meanfield.transport import (
    conditional_sinkhorn_divergence,
    conditional_w2,
    sinkhorn_divergence,
    solve_conditional_w2,
    solve_w2,
    solve_wp,
    w1,
    w2,
    wp,
)

F64 = torch.float64


def image(kind: str, x: Tensor) -> Tensor:
    """Images of a cloud, most of them with a known optimal map."""
    d = x.shape[1]
    generator = torch.Generator().manual_seed(1)
    if kind == "translated":
        return x + 1
    if kind == "reversed":
        return (1.3 * x + 1).flip(0)
    if kind == "monotone":
        return torch.tanh(x) + 1
    if kind == "affine":
        root = torch.randn(d, d, dtype=F64, generator=generator)
        return x @ (root @ root.T + 0.1 * torch.eye(d, dtype=F64)) - 2
    return torch.randn(x.shape, dtype=F64, generator=generator) * 1.2 + 0.3


def one_sided_slopes(mu: ParticleMeasure, nu: ParticleMeasure, way: Tensor) -> tuple:
    """Slopes of W₂ to the left and to the right as log a moves along a direction, mass kept."""
    step = 1e-5

    def at(t: float) -> float:
        logs = (mu.log_weights + t * way).log_softmax(-1)
        return float(w2(ParticleMeasure(mu.points, log_weights=logs), nu))

    here = at(0.0)
    return (here - at(-step)) / step, (at(step) - here) / step


@pytest.mark.parametrize("kind", ["translated", "reversed", "monotone", "affine", "other"])
@pytest.mark.parametrize("n", [10, 450])
def test_log_weight_gradients_lie_between_the_one_sided_slopes(kind: str, n: int) -> None:
    """W₂² is convex in the weights, with a kink at uniform ones: many potentials are optimal.

    Beyond 400 atoms the gradient used to be 0 where a bound without potentials closed the
    interval.
    """
    generator = torch.Generator().manual_seed(n)
    x, way = torch.randn(n, 2, dtype=F64, generator=generator), torch.zeros(n, dtype=F64)
    way[: n // 2] = 1.0
    mu, nu = ParticleMeasure(x), ParticleMeasure(image(kind, x))
    left, right = one_sided_slopes(mu, nu, way)
    logs = mu.log_weights.clone().requires_grad_()
    value = w2(ParticleMeasure(x, log_weights=logs.log_softmax(-1)), nu)
    (gradient,) = torch.autograd.grad(value, logs)
    slack = 1e-4 * (abs(left) + abs(right)) + 1e-6
    assert left - slack <= float(gradient @ way) <= right + slack
    assert float(gradient.norm()) > 1e-4


ORDERS = {"w1": w1, "w2": w2, "w1.5": partial(wp, p=1.5), "w4.5": partial(wp, p=4.5)}


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize(("n", "m", "d"), [(4, 5, 2), (3, 3, 2), (2, 2, 3), (1, 4, 2), (4, 3, 1)])
def test_distances_have_gradients(name: str, n: int, m: int, d: int) -> None:
    generator = torch.Generator().manual_seed(100 * n + m)
    tensors = [
        torch.randn(*shape, dtype=F64, generator=generator, requires_grad=True)
        for shape in ((n, d), (m, d), (n,), (m,))
    ]

    def of(x: Tensor, y: Tensor, s: Tensor, t: Tensor) -> Tensor:
        mu = ParticleMeasure(x, log_weights=s.log_softmax(-1))
        return ORDERS[name](mu, ParticleMeasure(y, log_weights=t.log_softmax(-1)))

    assert torch.autograd.gradcheck(of, tensors)


@pytest.mark.parametrize(
    ("dtype", "order", "move"),
    [(torch.float32, 10, 1e-5), (F64, 100, 1e-4), (F64, 3, 1e-200)],
)
def test_atoms_that_coincide_have_a_gradient_of_0_beside_a_small_distance(dtype, order, move):
    x = torch.tensor([[0.0, 0.0], [move, 0.0]], dtype=dtype, requires_grad=True)
    y = torch.tensor([[0.0, 0.0], [2 * move, 0.0]], dtype=dtype)
    wp(x, y, order).backward()
    expected = [[0.0, 0.0], [-(0.5 ** (1 / order)), 0.0]]  # W = |x − y| / 2^(1/p)
    torch.testing.assert_close(x.grad, torch.tensor(expected, dtype=dtype))


def test_nothing_flows_into_atoms_that_coincide() -> None:
    x = torch.tensor([[0.0, 0.0], [1.0, 0.0], [5.0, 1.0]], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([[0.0, 0.0], [1.0, 3.0], [5.0, 1.0]], dtype=torch.float64, requires_grad=True)
    w1(x, y).backward()
    wanted = torch.tensor([[0.0, 0.0], [0.0, -1 / 3], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(x.grad, wanted)
    torch.testing.assert_close(y.grad, -wanted)


@pytest.mark.parametrize("penalty", [None, 0.7, 40.0])
def test_conditional_distances_have_gradients(penalty: float | None) -> None:
    generator = torch.Generator().manual_seed(4)
    x, y, s, t = (
        torch.randn(*shape, dtype=F64, generator=generator, requires_grad=True)
        for shape in ((7, 2), (8, 2), (7,), (8,))
    )
    places_x = torch.tensor([0.2, 0.2, 0.2, 0.6, 0.6, 1.0, 1.0], dtype=F64)
    places_y = torch.tensor([0.2, 0.2, 0.6, 0.6, 0.6, 1.0, 1.0, 1.0], dtype=F64)

    def inside(logs: Tensor, places: Tensor) -> Tensor:
        """Log-weights that give each of the three positions a third."""
        parts = [logs[places == p].log_softmax(-1) - math.log(3) for p in (0.2, 0.6, 1.0)]
        return torch.cat(parts)

    def of(x: Tensor, y: Tensor, s: Tensor, t: Tensor) -> Tensor:
        mu = ParticleMeasure(x, log_weights=inside(s, places_x), positions=places_x)
        nu = ParticleMeasure(y, log_weights=inside(t, places_y), positions=places_y)
        return conditional_w2(mu, nu, penalty=penalty)

    assert torch.autograd.gradcheck(of, (x, y, s, t))


def test_an_infinite_distance_has_no_gradient_and_says_nothing_wrong() -> None:
    x = torch.zeros(2, 1, dtype=F64, requires_grad=True)
    mu = ParticleMeasure(x, positions=[0.5, 1.0])
    value = conditional_w2(mu, ParticleMeasure(x.detach(), positions=[0.25, 1.0]))
    assert float(value.detach()) == math.inf
    (gradient,) = torch.autograd.grad(value, x)
    assert torch.equal(gradient, torch.zeros_like(x))
    logs = torch.full((2,), -math.log(2), dtype=F64, requires_grad=True)
    weighted = ParticleMeasure(x.detach(), log_weights=logs, positions=[0.25, 1.0])
    (gradient,) = torch.autograd.grad(conditional_w2(weighted, mu), logs)
    assert torch.equal(gradient, torch.zeros_like(logs))


def test_an_infinite_distance_of_a_batch_takes_nothing_from_the_others() -> None:
    logs = torch.tensor([0.3, 0.7], dtype=F64).log().requires_grad_()
    x, y, s = torch.tensor([[0.0], [1.0]], dtype=F64), torch.zeros(2, 1, dtype=F64), np.ones(2)
    mu, nu = ParticleMeasure(x, log_weights=logs), ParticleMeasure(y)
    both = conditional_w2(mu.expand(2), nu, conditions=(s, np.stack([s, 2 * s])))
    assert torch.equal(both, torch.stack([w2(mu, nu), torch.tensor(math.inf, dtype=F64)]))
    parts = both[0], w2(mu, nu)
    gradients = [torch.autograd.grad(one, logs, retain_graph=True)[0] for one in parts]
    assert torch.allclose(*gradients) and bool((gradients[0] != 0).any())
    found = solve_conditional_w2(mu.expand(2), nu, conditions=(s, np.stack([s, 2 * s])))
    assert [bool(t.isfinite().all()) for t in found.potentials[0]] == [True, False]


def test_a_distance_without_potentials_refuses_log_weight_gradients_clearly() -> None:
    from dataclasses import replace

    from meanfield.transport.gradients import _valued
    from meanfield.transport.pairs import as_pair

    x = torch.randn(5, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    logs = torch.zeros(5, dtype=F64).log_softmax(-1).requires_grad_()
    found = solve_w2(x, x + 1)
    there, answer = found.found
    lost = {"f": np.full_like(answer.f, np.nan), "g": np.full_like(answer.g, np.nan)}
    bare = replace(found, found=(there, replace(answer, **lost)))
    weighted, uniform = ParticleMeasure(x, log_weights=logs), ParticleMeasure(x)
    for pair in (as_pair(weighted, uniform), as_pair(uniform, weighted)):
        with pytest.raises(RuntimeError, match="gradient in the points only"):
            _valued(pair, bare)


def sequence(z: Tensor) -> ParticleMeasure:
    return ParticleMeasure.from_sequence(z)


SECOND = {
    "w2": w2,
    "its square": lambda z, y: w2(z, y) ** 2,
    "both move": lambda z, y: w2(z, 2 * z[:5].sin() + y[:5]),
    "weighted": lambda z, y: w2((z, torch.arange(1, 7, dtype=F64) / 21), y) ** 2,
    "conditional": lambda z, y: conditional_w2(sequence(z), sequence(y)),
    "penalised": lambda z, y: conditional_w2(sequence(z), sequence(y), penalty=1.0),
    "batch": lambda z, y: w2(z.reshape(2, 3, 2), y.reshape(2, 3, 2)).prod(),
}


@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_in_the_points_are_those_of_differences(name):
    """The plan stays optimal nearby: zeros in their place were silent."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(6, 2, dtype=F64, generator=generator) for _ in range(2))

    def value(z: Tensor) -> Tensor:
        return SECOND[name](z, y)

    found = torch.autograd.functional.hessian(value, x).reshape(12, 12)

    def gradient(z: Tensor) -> Tensor:
        z = z.detach().requires_grad_()
        return torch.autograd.grad(value(z), z)[0].flatten()

    steps = 1e-5 * torch.eye(12, dtype=F64).reshape(12, 6, 2)
    wanted = [(gradient(x + step) - gradient(x - step)) / 2e-5 for step in steps]
    assert float(found.abs().max()) > 0.01
    torch.testing.assert_close(found, torch.stack(wanted), rtol=1e-6, atol=1e-8)


def test_the_second_derivative_at_atoms_that_coincide_is_that_of_the_formula() -> None:
    """W₂ = ((x₁² + (x₂ − 5)²) / 2)^½ at x = (0, 3): half of it is flat, the rest a cone."""
    x, y = (torch.tensor([[0.0], [t]], dtype=F64) for t in (3.0, 5.0))
    found = torch.autograd.functional.hessian(lambda z: w2(z, y), x).reshape(2, 2)
    torch.testing.assert_close(found, torch.tensor([[8**-0.5, 0.0], [0.0, 0.0]], dtype=F64))


@pytest.mark.parametrize(
    "value",
    [
        w1,
        lambda z, y: wp(z, y, 3),
        lambda z, y: w2((z, z[:, 0].softmax(0)), y),
        lambda z, y: w2(y, (z, z[:, 0].softmax(0))),
        lambda z, y: w2(z, z.detach()),
        lambda z, y: sinkhorn_divergence(z, y, blur=0.5),
        lambda z, y: conditional_sinkhorn_divergence(sequence(z), sequence(y)),
        lambda z, y: conditional_sinkhorn_divergence(sequence(z), sequence(y), penalty=1.0),
    ],
)
def test_other_second_derivatives_are_refused(value):
    """They would leave out how the plan moves, or are those of a distance of 0."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(6, 2, dtype=F64, generator=generator) for _ in range(2))
    x.requires_grad_()
    (first,) = torch.autograd.grad(value(x, y), x)
    assert bool(first.isfinite().all())
    with pytest.raises(NotImplementedError, match="expected a backward pass without create_graph"):
        torch.autograd.grad(value(x, y), x, create_graph=True)


@pytest.mark.parametrize(
    ("order", "dtype", "unit"),
    [
        *((p, F64, unit) for p in (1, 1.5, 3, 8) for unit in (1e-170, 1e-4, 1e4, 1e170)),
        *((p, torch.float32, unit) for p in (2, 10) for unit in (1e-15, 1e-5, 1e5, 1e15)),
        *((2, F64, unit) for unit in (1e-170, 1e170)),
    ],
)
def test_gradients_in_points_do_not_depend_on_the_unit(order, dtype, unit):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, 2, dtype=dtype, generator=generator) for n in (5, 4))

    def gradient(scale):
        z = (scale * x).requires_grad_()
        return torch.autograd.grad(wp(z, scale * y, order), z)[0]

    found, room = gradient(unit), 1e-10 if dtype == F64 else 1e-4
    assert float(found.abs().max()) > 0.1
    # A scale rounds the points, and W_p by as much.
    torch.testing.assert_close(found, gradient(1.0), rtol=1e3 * room, atol=room)


@pytest.mark.parametrize(
    ("order", "dtype", "unit"),
    [
        *((p, torch.float32, unit) for p, unit in ((2, 1e-25), (3, 1e-15), (2, 1e19))),
        *((p, F64, unit) for p, unit in ((2, 1e-140), (4, 1e-60))),
    ],
)
def test_gradients_in_weights_scale_with_the_unit(order, dtype, unit):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, 2, dtype=dtype, generator=generator) for n in (5, 4))
    logs = torch.full((5,), -math.log(5.0), dtype=dtype, requires_grad=True)

    def gradient(scale):
        value = wp(ParticleMeasure(scale * x, log_weights=logs), scale * y, order)
        return torch.autograd.grad(value, logs)[0] / scale

    room = 1e-10 if dtype == F64 else 1e-4
    assert float(gradient(1.0).abs().max()) > 1e-3
    torch.testing.assert_close(gradient(unit), gradient(1.0), rtol=1e2 * room, atol=room)


@pytest.mark.parametrize("order", [2, 3, 8])
@pytest.mark.parametrize("power", [-312, 310])
def test_gradients_in_weights_beyond_the_number_range_are_refused(order, power):
    logs = torch.zeros(1, dtype=F64, requires_grad=True)
    unit = 10.0 ** (power / order)
    mu = ParticleMeasure([[0.0]], log_weights=logs)
    with pytest.raises(RuntimeError, match="leave the number range here"):
        wp(mu, [[unit]], order)
    with torch.no_grad():
        assert float(wp(mu, [[unit]], order)) == pytest.approx(unit, rel=1e-14)


def test_the_gradient_in_a_weight_that_single_precision_does_not_hold_is_known() -> None:
    """W₂² = e⁻¹¹⁰ 10³⁶, so that ∂W₂/∂log a₂ is half of W₂; e⁻¹¹⁰ is 0 in single precision."""
    logs = torch.tensor([0.0, -110.0], requires_grad=True)
    mu = ParticleMeasure(torch.tensor([[0.0], [1e18]]), log_weights=logs)
    (found,) = torch.autograd.grad(w2(mu, torch.zeros(1, 1)), logs)
    assert float(found[1]) == pytest.approx(math.exp(-55) * 1e18 / 2, rel=1e-5)


def test_a_pair_beyond_the_number_range_takes_no_gradient_from_the_others():
    x = torch.tensor([[[1.0], [2.0]], [[1e-20], [2e-20]]], dtype=F64)
    y, start = torch.zeros(2, 1, 1, dtype=F64), torch.zeros(2, 2, dtype=F64, requires_grad=True)

    def gradient(k):
        logs = start[k].log_softmax(-1)
        value = wp(ParticleMeasure(x[k], log_weights=logs), y[k], 20)
        return torch.autograd.grad(value.sum(), start)[0]

    both = gradient(slice(None))
    torch.testing.assert_close(both[0], gradient(0)[0])
    assert float(both[0].abs().max()) > 0.01
    assert bool(both[1].isnan().all())
    with pytest.raises(RuntimeError, match="leave the number range"):
        gradient(1)


def test_a_tiny_group_takes_no_gradient_from_the_conditional_distance():
    s = torch.tensor([0.5, 0.5, 1.0, 1.0], dtype=F64)
    y = torch.tensor([[0.0], [1.0], [0.0], [3.0]], dtype=F64)
    found = []
    for near in (1e-170, 1e-9):
        x = y + torch.tensor([[near], [near], [1.0], [2.0]], dtype=F64)
        logs = torch.full((4,), -math.log(4.0), dtype=F64, requires_grad=True)
        value = conditional_w2(
            ParticleMeasure(x, log_weights=logs, positions=s), ParticleMeasure(y, positions=s)
        )
        found.append(torch.autograd.grad(value, logs)[0])
    assert float(found[0].abs().max()) > 0.1
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-6)


def test_nothing_flows_into_an_infinite_distance():
    x = torch.tensor([[-1.2e308]], dtype=F64, requires_grad=True)
    value = wp(x, torch.tensor([[1.2e308]], dtype=F64), 3)
    assert torch.autograd.grad(value, x)[0].isfinite().all()


def test_a_pair_that_is_masked_out_has_no_gradient_though_its_potentials_are_beyond():
    x = torch.tensor([[[1.0], [2.0]], [[1e-20], [2e-20]]], dtype=F64)
    start = torch.zeros(2, 2, dtype=F64, requires_grad=True)
    mu = ParticleMeasure(x, log_weights=start.log_softmax(-1))
    value = wp(mu, torch.zeros(2, 1, 1, dtype=F64), 20)
    (found,) = torch.autograd.grad(torch.where(value > 1e-9, value, 0.0).sum(), start)
    assert bool(found.isfinite().all()) and bool((found[1] == 0).all())


@pytest.mark.parametrize("place", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("distance", [w2, w1, partial(conditional_w2, penalty=1.0)])
def test_an_atom_without_mass_that_is_nowhere_leaves_the_others_their_gradients(
    distance, place: float
) -> None:
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(n, 2, dtype=F64, generator=generator) for n in (5, 4))
    scores = torch.tensor([0.0, 1.0, 2.0, 3.0, -math.inf], dtype=F64)
    nowhere = x.index_fill(0, torch.tensor([4]), place)
    nu = ParticleMeasure(y, positions=[0.1, 0.2, 0.3, 0.4])

    def gradients(points: Tensor) -> list[Tensor]:
        logs = scores.clone().requires_grad_()
        mu = ParticleMeasure(
            x, log_weights=logs.log_softmax(0), positions=[0.1, 0.2, 0.3, 0.4, 0.5]
        ).replace(points)
        values = distance(mu, nu), distance(stack([mu, mu, mu]), nu)[1]
        return [torch.autograd.grad(t, logs, retain_graph=True)[0] for t in values]

    for found, known in zip(gradients(nowhere), gradients(x), strict=True):
        assert float(known.abs().max()) > 0
        torch.testing.assert_close(found, known)
    mu = ParticleMeasure(x, scores.softmax(0)).replace(nowhere)
    both = solve_w2(mu, nu).potentials
    assert both is not None
    assert all(bool(t.isfinite().all()) for t in both)


@pytest.mark.parametrize(
    "distance",
    [
        lambda x, y, a: w2((x, a), y),
        lambda x, y, a: w1(x, y, weights=(a, None)),
        lambda x, y, a: conditional_w2(y, (x, a), conditions=([0, 1, 2], [0, 1, 2, 3]), penalty=1),
        lambda x, y, a: sinkhorn_divergence((x, a), y, blur=0.5),
    ],
)
def test_weights_that_are_tensors_keep_their_gradient_beside_points_of_numpy(distance) -> None:
    generator = torch.Generator().manual_seed(7)
    x, y = (torch.randn(n, 2, dtype=F64, generator=generator) for n in (4, 3))
    logs = torch.zeros(4, dtype=F64, requires_grad=True)
    found, known = (
        torch.autograd.grad(distance(*points, logs.softmax(0)), logs)[0]
        for points in ((x.numpy(), y.numpy()), (x, y))
    )
    assert float(known.abs().max()) > 0
    torch.testing.assert_close(found, known)
    for weights in ([0.25] * 4, np.full(4, 0.25)):
        assert not torch.is_tensor(distance(x.numpy(), y.numpy(), weights))


@pytest.mark.parametrize("penalty", [0.0, 0.3, 4.0])
def test_with_a_penalty_the_conditional_distance_has_a_gradient_in_the_conditions(penalty) -> None:
    generator = torch.Generator().manual_seed(8)
    x, s = (torch.randn(2, 5, k, dtype=F64, generator=generator) for k in (2, 3))
    y, t = (torch.randn(2, 4, k, dtype=F64, generator=generator) for k in (2, 3))
    logs = torch.randn(2, 5, dtype=F64, generator=generator).log_softmax(-1)
    mu = ParticleMeasure(x, log_weights=logs)

    def value(s: Tensor, t: Tensor) -> Tensor:
        return conditional_w2(mu, y, conditions=(s, t), penalty=penalty).sum()

    assert torch.autograd.gradcheck(
        value, (s.clone().requires_grad_(), t.clone().requires_grad_())
    )
    given = s.clone().requires_grad_()
    priced = mu.replace(torch.cat([x, penalty**0.5 * given], -1))
    known = sinkhorn_divergence(priced, torch.cat([y, penalty**0.5 * t], -1)).sum()
    found = conditional_sinkhorn_divergence(mu, y, conditions=(given, t), penalty=penalty).sum()
    torch.testing.assert_close(
        torch.autograd.grad(found, given)[0], torch.autograd.grad(known, given)[0]
    )


def test_positions_of_a_measure_have_a_gradient_where_they_have_a_price() -> None:
    generator = torch.Generator().manual_seed(9)
    x, y = (torch.randn(n, 2, dtype=F64, generator=generator) for n in (4, 3))
    nu = ParticleMeasure(y, positions=[0.0, 0.5, 1.0])

    def value(positions: Tensor) -> Tensor:
        return conditional_w2(ParticleMeasure(x, positions=positions), nu, penalty=2.0)

    places = torch.tensor([0.1, 0.4, 0.7, 0.9], dtype=F64, requires_grad=True)
    (found,) = torch.autograd.grad(value(places), places)
    assert bool((found != 0).all()) and torch.autograd.gradcheck(value, (places,))


@pytest.mark.parametrize(
    "distance", [conditional_w2, partial(conditional_sinkhorn_divergence, blur=0.5)]
)
@pytest.mark.parametrize("kind", ["NumPy", "single precision"])
def test_conditions_far_from_0_keep_value_and_gradient_beside_other_points(distance, kind) -> None:
    """Seconds of a date, of which single precision holds no differences below 128."""
    generator = torch.Generator().manual_seed(10)
    x, y = (torch.randn(n, 2, dtype=F64, generator=generator).float().double() for n in (4, 3))
    steps, others = torch.tensor([0.0, 1, 2, 3], dtype=F64), torch.tensor([0.3, 1.1, 2.7])

    def found(points: list, start: float) -> tuple[Tensor, Tensor]:
        s = (start + steps).requires_grad_()
        value = distance(*points, conditions=(s, start + others.double()), penalty=2.0)
        return value.detach().double(), torch.autograd.grad(value, s)[0]

    other = [t.numpy() if kind == "NumPy" else t.float() for t in (x, y)]
    for near, far in zip(found([x, y], 0.0), found(other, 1.7e9), strict=True):
        torch.testing.assert_close(far, near, rtol=2e-5, atol=2e-5)


def test_points_and_conditions_of_either_measure_have_their_gradients_together() -> None:
    generator = torch.Generator().manual_seed(11)
    x, s = (torch.randn(5, k, dtype=F64, generator=generator) for k in (2, 1))
    y, t = (torch.randn(4, k, dtype=F64, generator=generator) for k in (2, 1))

    def value(x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return conditional_w2(x, y, conditions=(s, t), penalty=0.5)

    for wanted in ((True, True, False), (False, False, True), (True, False, True)):
        given = [z.clone().requires_grad_(w) for z, w in zip((x, s, t), wanted, strict=True)]
        assert torch.autograd.gradcheck(value, tuple(given))
    steps = torch.arange(5, dtype=F64).requires_grad_()
    for penalty in (None, math.inf):  # nothing may change, and nothing does
        moved = x.clone().requires_grad_()
        found = conditional_w2(moved, x + 1, conditions=(steps, steps), penalty=penalty)
        into_x, into_s = torch.autograd.grad(found, (moved, steps), allow_unused=True)
        torch.testing.assert_close(into_x, torch.full_like(x, -0.2 / 2**0.5))
        assert into_s is None


@pytest.mark.parametrize("p", [1, 1.5, 2, 3])
def test_potentials_are_feasible_at_atoms_without_mass_of_both_measures(p) -> None:
    generator = torch.Generator().manual_seed(12)
    x, y = (torch.randn(n, 2, dtype=F64, generator=generator) for n in (7, 6))
    x[0] = y[1] = 9.0  # where neither has mass
    a = torch.tensor([0.0, 0.2, 0.3, 0.0, 0.1, 0.4, 0.0], dtype=F64)
    b = torch.tensor([0.5, 0.0, 0.0, 0.2, 0.3, 0.0], dtype=F64)
    nowhere = x.index_fill(0, torch.tensor([3]), math.inf)
    mu, nu = ParticleMeasure(x, a).replace(nowhere), ParticleMeasure(y, b)
    answer = solve_wp(mu, nu, p)
    assert answer.potentials is not None
    f, g = answer.potentials
    costs = torch.linalg.vector_norm(nowhere[:, None] - y, dim=-1) ** p
    left = costs - f[:, None] - g
    assert float(left.min()) >= -1e-12
    # And no smaller than they need be.
    assert float(left[a == 0][:, b > 0].amin(-1)[[0, 2]].max()) <= 1e-12
    assert float(left[:, b == 0].amin(0).max()) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_the_condition_of_an_atom_without_mass_is_no_matter(dtype) -> None:
    generator = torch.Generator().manual_seed(13)
    x, y = (torch.randn(n, 2, dtype=dtype, generator=generator) for n in (4, 3))
    mu = ParticleMeasure(x, torch.tensor([0.0, 0.2, 0.3, 0.5], dtype=dtype))
    near, far = ([place, 1.0, 2.0, 3.0] for place in (0.0, 1e300))
    for distance in (conditional_w2, partial(conditional_sinkhorn_divergence, blur=0.5)):
        known, found = (
            distance(mu, y, conditions=(s, [0.5, 1.5, 2.5]), penalty=4.0) for s in (near, far)
        )
        torch.testing.assert_close(found, known)


def test_gradients_in_weights_of_small_points_in_single_precision_are_those_in_double() -> None:
    """W = 1e-20: its power −2 is beyond single precision."""
    found = []
    for dtype in (torch.float32, torch.float64):
        x = 1e-20 * torch.tensor([[0.0], [1.0], [3.0]], dtype=dtype)
        logs = torch.tensor([0.1, 0.5, 0.4], dtype=dtype).log().requires_grad_()
        mu = ParticleMeasure(x, log_weights=logs.log_softmax(-1))
        wp(mu, x[:2], 3).backward()
        found.append(logs.grad.double())
    assert float(found[1].abs().max()) > 1e-21
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-25)
