"""Memory-linear attention and its derivatives, against oracles and dense attention."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, measures
from meanfield.attention import kernels, normalizations, streaming, weights
from meanfield.attention.streaming import attend

F64 = torch.float64


@pytest.fixture(params=["in blocks", "at once"])
def both_roads(monkeypatch, request):
    """Blocks of two rows or so, so that small cases have several; or torch's own derivatives."""
    if request.param == "in blocks":
        monkeypatch.setattr(streaming, "_FEW_ENTRIES", 0)
        for name in ("_BLOCK_ENTRIES", "_LARGE_BLOCK_ENTRIES"):
            monkeypatch.setattr(weights, name, 12)


def dense(q, k, v, w, row_positions=None, column_positions=None) -> Tensor:
    """The same from plain operations, with the matrix."""
    logits = q @ k.mT + w[..., None, :]
    if row_positions is not None:
        hidden = column_positions[..., None, :] > row_positions[..., :, None]
        logits = logits.masked_fill(hidden, -math.inf)
    return logits.softmax(-1) @ v


def operands(*batch: int, m: int = 5, n: int = 6, k: int = 3, v: int = 2) -> list[Tensor]:
    shapes = (*batch, m, k), (*batch, n, k), (*batch, n, v), (*batch, n)
    return [torch.randn(shape, dtype=F64) for shape in shapes]


ROWS = torch.tensor([0.5, 0.2, 0.0, 0.2, 1.0], dtype=F64)
COLUMNS = torch.tensor([0.0, 0.1, 0.2, 0.2, 0.6, 0.7], dtype=F64)
SIGHTS = {"everyone": (), "masked with ties": (ROWS, COLUMNS)}


@pytest.fixture(params=SIGHTS.values(), ids=SIGHTS.keys())
def places(request) -> tuple[Tensor, ...]:
    return request.param


def agree(of: Callable[[Callable], object], places: tuple[Tensor, ...]) -> None:
    """What `of` makes of streamed attention is what it makes of dense attention."""
    actual = of(lambda *x: attend(*x, *places))
    expected = of(lambda *x: dense(*x, *places))
    for one, other in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


# --- derivatives ---


@pytest.mark.parametrize(("n", "wanted"), [(256, 0), (257, 1)])
def test_torch_differentiates_the_formula_where_the_matrix_is_small(monkeypatch, n, wanted):
    calls = []
    apply = streaming._Streamed.apply
    monkeypatch.setattr(
        streaming._Streamed, "apply", lambda *given: calls.append(1) or apply(*given)
    )
    x = operands(m=256, n=n)
    attend(*x)
    assert not calls
    x[0].requires_grad_()
    attend(*x)
    assert len(calls) == wanted
    with torch.no_grad():
        attend(*x)
    assert len(calls) == wanted


@pytest.mark.usefixtures("both_roads")
def test_derivatives_of_ordinary_autograd_agree_with_differences(places):
    at = [x.requires_grad_() for x in operands(k=2, v=1)]

    def function(*x: Tensor) -> Tensor:
        return attend(*x, *places)

    assert torch.autograd.gradcheck(function, at, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(
        function, at, check_fwd_over_rev=True, check_rev_over_rev=True, check_batched_grad=True
    )


FIRST = (0, 1, 2, 3)


@pytest.mark.usefixtures("both_roads")
def test_higher_derivatives_agree_with_dense_attention(places):
    x, along, again = operands(), tuple(operands()), tuple(operands())
    jvp, grad = torch.func.jvp, torch.func.grad

    def slope(f: Callable) -> Callable:
        return grad(lambda *y: f(*y).square().sum(), argnums=FIRST)

    def push(f: Callable) -> Callable:
        return lambda *y: jvp(f, y, along)[1]

    def hessian(f: Callable) -> Callable:
        return torch.func.hessian(lambda *y: f(*y).square().sum(), argnums=(0, 3))

    agree(lambda f: hessian(f)(*x), places)
    agree(lambda f: jvp(slope(f), tuple(x), along), places)
    agree(lambda f: slope(push(f))(*x), places)
    agree(lambda f: jvp(push(f), tuple(x), again), places)
    agree(lambda f: jvp(lambda *y: jvp(slope(f), y, along)[1], tuple(x), again), places)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch's own
def test_the_recorded_linearisation_agrees_with_the_forward_derivative(places):
    x, along = operands(), tuple(operands())
    agree(lambda f: torch.func.jvp(f, tuple(x), along), places)
    image, push = torch.func.linearize(lambda *y: attend(*y, *places), *x)
    torch.testing.assert_close(image, dense(*x, *places))
    expected = torch.func.jvp(lambda *y: dense(*y, *places), tuple(x), along)[1]
    torch.testing.assert_close(push(*along), expected)


@pytest.mark.usefixtures("both_roads")
def test_mapping_over_an_axis_is_a_loop(places):
    q, k, v, w = operands()
    many_q, many_v = torch.randn(4, 5, 3, dtype=F64), torch.randn(6, 4, 2, dtype=F64)
    many_w = torch.randn(6, 4, dtype=F64)
    mapped = torch.func.vmap(attend, in_dims=(0, None, 1, 1, *[None] * len(places)))
    one_by_one = [
        attend(many_q[i], k, many_v[:, i], many_w[:, i], *places) for i in range(len(many_q))
    ]
    torch.testing.assert_close(mapped(many_q, k, many_v, many_w, *places), torch.stack(one_by_one))
    pushed = torch.func.vmap(
        lambda t: torch.func.jvp(lambda x: attend(x, k, v, w, *places), (q,), (t,))[1]
    )(many_q)
    one_by_one = [
        torch.func.jvp(lambda x: dense(x, k, v, w, *places), (q,), (t,))[1] for t in many_q
    ]
    torch.testing.assert_close(pushed, torch.stack(one_by_one))
    twice = torch.func.vmap(
        torch.func.vmap(lambda x: attend(x, k, v, w, *places), in_dims=1), in_dims=0
    )
    rows = torch.randn(2, 5, 3, 3, dtype=F64)
    expected = dense(rows.movedim(2, 1), k, v, w, *places)
    torch.testing.assert_close(twice(rows), expected)


@pytest.mark.usefixtures("both_roads")
def test_mapping_over_positions_is_a_loop():
    q, k, v, w = operands()
    rows = ROWS + torch.tensor([[0.0], [0.1], [0.3]], dtype=F64)
    columns = COLUMNS * torch.tensor([[1.0], [0.5], [0.0]], dtype=F64)
    mapped = torch.func.vmap(lambda s, t: attend(q, k, v, w, s, t))(rows, columns)
    one_by_one = [attend(q, k, v, w, s, t) for s, t in zip(rows, columns, strict=True)]
    torch.testing.assert_close(mapped, torch.stack(one_by_one))


@pytest.mark.usefixtures("both_roads")
def test_batch_axes_broadcast_as_in_dense_attention(places):
    q, k, v, w = operands(2, 1)
    q, w = torch.randn(3, 5, 3, dtype=F64), w[0]
    agree(lambda f: torch.func.vjp(f, q, k, v, w)[1](torch.ones(2, 3, 5, 2, dtype=F64)), places)


# --- weights and masks ---


@pytest.mark.usefixtures("both_roads")
def test_a_log_weight_pulls_by_its_share_of_attention():
    # ∂oᵢ/∂log aⱼ = Pᵢⱼ (vⱼ − oᵢ), where the score makes up for a weight of e^{−900} too.
    q = torch.tensor([[30.0], [0.0]], dtype=F64)
    k = torch.tensor([[30.0], [0.0], [1.0]], dtype=F64)
    v = torch.tensor([[1.0], [2.0], [4.0]], dtype=F64)
    w = torch.tensor([-900.0, 0.0, -math.inf], dtype=F64)
    slopes = torch.func.jacrev(lambda x: attend(q, k, v, x))(w)[:, 0]
    expected = torch.tensor([[-0.25, 0.25, 0.0], [0.0, 0.0, 0.0]], dtype=F64)
    torch.testing.assert_close(slopes, expected)
    torch.testing.assert_close(torch.func.jacfwd(lambda x: attend(q, k, v, x))(w)[:, 0], expected)


WEIGHTS = {
    "uniform": lambda n: torch.zeros(n, dtype=F64),
    "heavy-tailed": lambda n: 5 * torch.randn(n, dtype=F64),
    "half at e^-900": lambda n: torch.where(torch.arange(n) % 2 == 1, -900.0, 0.0).double(),
    "half absent": lambda n: torch.where(torch.arange(n) % 2 == 1, -math.inf, 0.0).double(),
    "a block absent": lambda n: torch.where(torch.arange(n) > n // 8, -math.inf, 0.0).double(),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("spread", [0.1, 1.0, 10.0])
def test_the_fused_kernel_is_as_accurate_as_blocks(causal: bool, kind: str, spread: float):
    n = 700  # several tiles of the kernel
    q, k, v, _ = operands(1, m=n, n=n, k=5, v=7)
    # Numbers that float32 holds: what differs below is arithmetic.
    q, k, v, w = (x.float().double() for x in (spread * q, k, v, WEIGHTS[kind](n)[None]))
    positions = torch.linspace(0, 1, n, dtype=F64)[None] if causal else None
    exact = dense(q, k, v, w, positions, positions)

    def errors(dtype: torch.dtype) -> tuple[float, float]:
        x = [t.to(dtype) for t in (q, k, v, w[..., None])]
        at = positions, positions, *x
        fused, blocks = streaming._fused(*at), streaming._blockwise(streaming._PLAIN, *at)[0]
        return tuple(float((t.double() - exact).abs().max()) for t in (fused, blocks))

    fused, blocks = errors(torch.float64)
    assert max(fused, blocks) < 1e-12
    fused, blocks = errors(torch.float32)
    assert fused <= 2 * blocks + 16 * torch.finfo(torch.float32).eps


def test_the_fused_kernel_is_left_where_it_does_not_apply():
    q, k, v, w = operands(1, m=6)

    def applies(logs: Tensor, *positions: Tensor | None) -> bool:
        return streaming._fused(*positions, q, k, v, logs[..., None]) is not None

    ties, increasing = COLUMNS[None], torch.arange(6.0, dtype=F64)[None]
    assert not applies(w, ties, ties)
    assert not applies(w, increasing, increasing + 0.5)
    assert not applies(w - math.inf, None, None)
    assert applies(w, increasing, increasing)
    # A row before all the mass
    w[:, 0] = -math.inf
    assert not applies(w, increasing, increasing)
    assert applies(w, None, None)


@pytest.mark.usefixtures("both_roads")
def test_rows_that_see_nothing_are_zero_and_so_are_their_derivatives():
    q, k, v, w = operands()
    w[0] = -math.inf
    at = (q, k, v, w)
    positions = torch.tensor([0.05, 0.05, 0.05, 0.3, 1.0], dtype=F64), COLUMNS

    def loss(*x: Tensor) -> Tensor:
        return attend(*x, *positions).square().sum()

    assert attend(*at, *positions)[:3].abs().sum() == 0
    seeing = tuple(s[3:] if i == 0 else s for i, s in enumerate(positions))
    rest = torch.func.grad(
        lambda *x: dense(x[0][3:], *x[1:], *seeing).square().sum(), argnums=FIRST
    )
    for actual, expected in zip(torch.func.grad(loss, argnums=FIRST)(*at), rest(*at), strict=True):
        torch.testing.assert_close(actual, expected)
    second = torch.func.jvp(torch.func.grad(loss), (q, *at[1:]), tuple(operands()))[1]
    assert torch.isfinite(second).all()
    assert second[:3].abs().sum() == 0


@pytest.mark.gpu
def test_the_device_agrees_with_the_cpu(places, device):
    x, along = operands(), tuple(operands())
    there = [s.to(device) for s in places]
    actual = torch.func.jvp(
        lambda *y: attend(*y, *there),
        tuple(t.to(device) for t in x),
        tuple(t.to(device) for t in along),
    )
    expected = torch.func.jvp(lambda *y: dense(*y, *places), tuple(x), along)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other)


@pytest.mark.parametrize("scores", ["", "causal"])
def test_no_score_of_an_atom_is_as_low_as_that_of_an_absent_one(scores):
    A, V = torch.tensor([[-1.0]]).double(), torch.tensor([[1.0]]).double()
    F = SelfAttention(AttentionParameters.from_bilinear(A, V), causal=bool(scores))
    points, places = [[1e16], [2e16], [0.0]], [0.1, 0.2, 0.3]
    mu = ParticleMeasure(points, weights=[0.5, 0.5, 0.0], positions=places)
    alone = ParticleMeasure(points[:2], positions=places[:2])
    torch.testing.assert_close(F(mu).points[:2], F(alone).points)
    light = ParticleMeasure([[1.0], [2.0], [3.0]], log_weights=[-1e32, -1e31, 0], positions=places)
    wanted = [[1.0], [2.0], [3.0]] if scores else [[3.0]] * 3
    torch.testing.assert_close(F(light).points, torch.tensor(wanted, dtype=F64))


@pytest.mark.parametrize("n", [3, 400])
def test_a_query_that_is_no_number_gives_none(n):
    q = torch.ones(1, n, 2, dtype=F64)
    q[0, 1] = math.nan
    k, v = torch.randn(2, 1, n, 2, dtype=F64)
    out = attend(q, k, v, torch.full((1, n), -math.log(n), dtype=F64))
    assert out[0, 1].isnan().all() and out[0, [0, 2]].isfinite().all()


class Learned(kernels.Kernel):
    """A position bias of one number."""

    needs_positions = True

    def __init__(self, slope):
        object.__setattr__(self, "slope", slope)

    def features(self, parameters, points, positions):
        return kernels.dot_product.features(parameters, points, positions)

    def position_bias(self, parameters, rows, columns):
        return -self.slope * (rows[..., :, None] - columns[..., None, :]).square()[..., None, :, :]


LEARNED = {
    "sink": lambda t: {"normalization": normalizations.sink(t)},
    "bias": lambda t: {"kernel": Learned(t)},
    "psi": lambda t: {"normalization": normalizations.RowWise(lambda s: t * torch.tanh(s))},
}


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("inner", [False, True], ids=["alone", "beside points"])
def test_numbers_of_kernels_and_normalisations_have_their_gradient_at_any_size(
    name, inner, monkeypatch
):
    mu = ParticleMeasure.from_sequence(torch.randn(12, 2, dtype=F64))
    points = mu.points.clone().requires_grad_(inner)
    par = AttentionParameters.random(2, generator=0)

    def loss(t):
        F = SelfAttention(par, **LEARNED[name](t))
        return (F(mu.replace(points)).points ** 2).sum()

    found = []
    for few in (2**16, 0):
        monkeypatch.setattr(streaming, "_FEW_ENTRIES", few)
        t = torch.tensor(0.7, dtype=F64, requires_grad=True)
        (gradient,) = torch.autograd.grad(loss(t), t)
        found += [gradient, torch.func.grad(loss)(t.detach())]
        found.append(torch.func.jvp(loss, (t.detach(),), (torch.ones_like(t),))[1])
        found.append(torch.func.grad(lambda s: torch.func.grad(loss)(s) + s)(t.detach()))
    t, h = torch.tensor(0.7, dtype=F64), 1e-6
    quotient = (loss(t + h) - loss(t - h)).detach() / (2 * h)
    for one in (*found[:3], *found[4:7]):
        torch.testing.assert_close(one.detach(), quotient, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found[3], found[7])


def test_positions_have_a_derivative_under_a_position_bias_at_any_size(monkeypatch):
    x, s = torch.randn(12, 2, dtype=F64), torch.linspace(0.1, 0.9, 12, dtype=F64)
    F = SelfAttention(AttentionParameters.random(2, generator=0), kernel=kernels.alibi([3.0]))
    way = torch.randn(12, dtype=F64)
    found = []
    for few in (2**16, 0):
        monkeypatch.setattr(streaming, "_FEW_ENTRIES", few)

        def image(t):
            mu = ParticleMeasure(x, positions=s)
            return F(measures._measure(mu.points, mu.log_weights, s + t * way)).points

        found.append(
            torch.func.jvp(image, (torch.zeros((), dtype=F64),), (torch.ones((), dtype=F64),))[1]
        )
    torch.testing.assert_close(*found)
    assert float(found[0].abs().max()) > 1e-3


def test_a_sink_has_its_derivative_behind_one_in_points(monkeypatch):
    """An outer level of torch.func, which inside of an inner one is wrapped."""
    mu = ParticleMeasure.from_sequence(torch.randn(12, 2, dtype=F64))
    par, found = AttentionParameters.random(2, generator=0), []

    def slope(t):
        F = SelfAttention(par, normalization=normalizations.sink(t))
        inner = torch.func.grad(lambda x: (F(mu.replace(x)).points ** 2).sum())
        return inner(mu.points).square().sum()

    for few in (2**16, 0):
        monkeypatch.setattr(streaming, "_FEW_ENTRIES", few)
        found.append(torch.func.grad(slope)(torch.tensor(0.7, dtype=F64)))
    torch.testing.assert_close(*found)
    assert float(found[0].abs()) > 1e-3
