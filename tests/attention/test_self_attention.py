"""Self-attention as a map of measures: against the double-loop oracle, and its laws."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meanfield.attention import AttentionParameters, SelfAttention, kernels
from meanfield.attention.normalizations import sink, softmax
from meanfield.attention.tangent import AttentionTangent
from meanfield.linalg import Lanczos, operator_norm
from meanfield.lipschitz import local_lipschitz
from meanfield.maps import linearize
from meanfield.measures import ParticleMeasure
from tests import oracles
from tests.attention import kernel_oracles as slow
from tests.strategies import Problem, problems

F64 = torch.float64


def attention(problem: Problem) -> SelfAttention:
    return SelfAttention(AttentionParameters(**problem.layer), causal=problem.causal)


def double_loop(problem: Problem) -> slow.Case:
    return slow.Case(*problem[:4], ("dot",), ("softmax",), problem.causal)


def close(actual: torch.Tensor, expected: np.ndarray, floor: float = 1e-300) -> None:
    """To 1e-10 of the largest entry; `floor` is the rounding of the oracle itself."""
    expected = torch.as_tensor(np.asarray(expected, float))
    scale = float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10 * scale + floor)


# --- the map ---


@given(problems())
def test_the_map_and_its_derivatives_agree_with_double_loops(problem: Problem):
    F, mu, alive = attention(problem), problem.measure, problem.alive
    whole = problem.points, problem.log_weights, problem.layer
    close(F(mu).points, slow.attention_map(double_loop(problem)))
    positions = None if problem.positions is None else problem.positions[alive]
    n, d = mu.n_particles, mu.dim
    for geometry in ("euclidean", "wasserstein"):
        expected = oracles.jacobian(
            problem.points[alive],
            problem.log_weights[alive],
            problem.layer,
            positions=positions,
            causal=problem.causal,
            weighted=geometry == "wasserstein",
        )
        matrix = F.linearize(mu, geometry=geometry).to_dense().reshape(n, -1, n, d)
        close(matrix[alive][:, :, alive].reshape(expected.shape), expected)
        assert not matrix[~alive].any() and not matrix[:, :, ~alive].any()
    par, radius = F.parameters, float(mu.points.abs().max())
    # Slopes are covariances of the points: rounding of these counts, beside their spread.
    slopes, rounding = oracles.field_jacobians(*whole, **problem.mask)[alive], 1e-14 * radius
    size = float(par.V.norm() * par.A.norm())
    spread = (abs(slopes).max() / size) ** 0.5 if size else 0.0
    floor = size * rounding * (rounding + spread)
    close(linearize(F, mu).field.to_dense()[alive], slopes, floor=floor)


@given(problems(), st.integers(1, 5))
def test_the_field_agrees_with_double_loops_anywhere(problem: Problem, m: int):
    x = np.random.default_rng(m).normal(size=(m, problem.points.shape[1]))
    gamma = attention(problem).field(problem.measure)
    if problem.causal:
        s = np.linspace(problem.positions[problem.alive].min(), 1.0, m)
        actual = gamma(x, s)
    else:
        s, actual = np.zeros(m), gamma(x)
    case = double_loop(problem)
    close(actual, np.array([slow.field(case, *at) for at in zip(x, s, strict=True)]))


def test_the_map_goes_through_torch_func_transforms():
    par = AttentionParameters.random(3)
    for causal in (False, True):
        F = SelfAttention(par, causal=causal)
        points = torch.randn(4, 5, 3, dtype=F64)
        batched = torch.func.vmap(lambda x, F=F: F(ParticleMeasure.from_sequence(x)).points)
        expected = F(ParticleMeasure.from_sequence(points)).points
        torch.testing.assert_close(batched(points), expected)
        loss = torch.func.grad(lambda x, F=F: F(ParticleMeasure.from_sequence(x)).points.sum())
        assert torch.isfinite(loss(points[0])).all()


# --- the tangent ---


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch's own
@pytest.mark.parametrize("positions", [[0.0, 0.5, 0.5, 1.0], [0.5, 1.0, 0.0, 0.5]])
def test_a_recorded_masked_layer_has_the_same_tangent_in_order_or_not(positions):
    F = SelfAttention(AttentionParameters.random(3, n_heads=2, head_dim=2), causal=True)
    mu = ParticleMeasure(torch.randn(4, 3, dtype=F64), positions=positions)
    assert (AttentionTangent(F.weights(mu)).weights.order is None) == (
        positions == sorted(positions)
    )
    _, push = torch.func.linearize(lambda x: F(mu.replace(x)).points, mu.points)
    eps = torch.randn(4, 3, dtype=F64)
    torch.testing.assert_close(F.linearize(mu).matvec(eps), push(eps))
    torch.testing.assert_close(F.linearize(mu).to_dense() @ eps.flatten(), push(eps).flatten())


def test_covariances_of_close_atoms_far_from_the_origin_keep_their_digits():
    # Two atoms 1e-6 apart at distance 1e4: V Cov A = p(1−p) 1e-12 A, formed from differences.
    A = torch.tensor([[-1.0]], dtype=F64)
    F = SelfAttention(AttentionParameters.from_bilinear(A, [[1.0]]))
    x = torch.tensor([[1e4], [1e4 + 1e-6]], dtype=F64)
    gap = float(x[1, 0] - x[0, 0])
    mu = ParticleMeasure(x)
    p = torch.sigmoid(-x[:, 0] * gap)
    expected = -(p * (1 - p)) * gap**2
    torch.testing.assert_close(
        linearize(F, mu).field.to_dense().flatten(), expected, rtol=1e-9, atol=0
    )


def test_a_map_made_before_a_step_of_an_optimiser_gives_no_gradient():
    """It stays the map that it was, and says so where it would be trained in silence."""
    mu = ParticleMeasure(torch.randn(5, 4, dtype=F64))
    module = torch.nn.MultiheadAttention(4, 2, batch_first=True).to(F64)
    matrices = [torch.nn.Parameter(torch.randn(4, 4, dtype=F64)) for _ in range(4)]
    biases = [torch.nn.Parameter(torch.randn(4, dtype=F64)) for _ in range(3)]
    scale = torch.nn.Parameter(torch.tensor(0.5, dtype=F64))
    for make, parts in (
        (lambda: AttentionParameters.from_module(module), list(module.parameters())),
        (
            lambda: AttentionParameters(*matrices, *biases, scale=scale),
            [*matrices, *biases, scale],
        ),
        # Through copies in another precision, and a sum.
        (lambda: AttentionParameters(*((m + m).float() for m in matrices)).to(F64), matrices),
    ):
        F = SelfAttention(make())
        for _ in range(2):  # gradients add up as long as nothing changes
            F(mu).points.square().sum().backward()
        for part in parts:
            F = SelfAttention(make())
            before = F(mu).points.detach()
            with torch.no_grad():
                part.mul_(1.1)
            assert torch.equal(F(mu).points, before)
            with pytest.raises(RuntimeError, match="AttentionParameters: .* some changed since"):
                F(mu).points.square().sum().backward()


def test_parameters_share_no_memory_with_what_they_were_made_of():
    arrays = [torch.randn(4, 4, dtype=F64) for _ in range(4)]
    arrays += [torch.randn(4, dtype=F64) for _ in range(3)] + [torch.ones(1, dtype=F64)]
    F = SelfAttention(AttentionParameters(*arrays))
    mu = ParticleMeasure(torch.randn(5, 4, dtype=F64))
    before = F(mu).points
    for array in arrays:
        array.mul_(2.0)
    assert torch.equal(F(mu).points, before)


def test_derivatives_of_the_field_record_no_gradient():
    # Of parameters one would be that of V and A alone, without that of the covariances.
    A = torch.tensor([[-1.0]], dtype=F64, requires_grad=True)
    F = SelfAttention(AttentionParameters.from_bilinear(A, [[1.0]]))
    mu = ParticleMeasure(torch.tensor([[1.0], [2.0]], dtype=F64, requires_grad=True))
    assert not linearize(F, mu).field.to_dense().requires_grad
    at = F.linearisation(mu)
    assert not at.field.to_dense().requires_grad and not at.atoms.to_dense().requires_grad


def test_a_row_that_sees_no_mass_leaves_the_others_their_derivative():
    F = SelfAttention(AttentionParameters.from_bilinear([[1.0]], [[1.0]]), causal=True)
    x, places = torch.tensor([[3.0], [1.0], [2.0]], dtype=F64), torch.tensor([0.1, 0.5, 0.9])
    mu = ParticleMeasure(x, weights=[0.0, 0.4, 0.6], positions=places.double())
    without = ParticleMeasure(x[1:], weights=[0.4, 0.6], positions=places[1:].double())
    J, rest = F.linearize(mu), F.linearize(without).to_dense()
    torch.testing.assert_close(J.to_dense()[1:, 1:], rest)
    assert float(J.to_dense()[0].abs().max()) == float(J.to_dense()[:, 0].abs().max()) == 0
    torch.testing.assert_close(J.matvec(torch.ones_like(x))[1:, 0], rest.sum(-1))


# --- wrong arguments ---


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"query": np.full((1, 2, 3), np.nan)}, ValueError, "query.*NaN"),
        ({"query": np.zeros(3)}, ValueError, "query: expected a matrix"),
        ({"key": np.zeros((1, 2, 4))}, ValueError, "key: expected the shape of query"),
        ({"value": np.zeros((2, 2, 3))}, ValueError, "value: expected shape"),
        ({"value": np.zeros((1, 2, 4))}, ValueError, "value: expected shape"),
        ({"output": np.zeros((1, 3, 5))}, ValueError, "output: expected shape"),
        ({"query_bias": np.zeros(3)}, ValueError, "query_bias: expected shape"),
        ({"value_bias": np.zeros((1, 5))}, ValueError, "value_bias: expected shape"),
        ({"output_bias": np.zeros(2)}, ValueError, "output_bias: expected shape"),
        ({"scale": [1.0, 2.0]}, ValueError, "scale: expected"),
        ({"scale": math.nan}, ValueError, "scale.*NaN"),
        ({"key": torch.zeros(1, 2, 3)}, TypeError, "float64.*float32"),
        ({"query": torch.zeros(1, 2, 3, dtype=torch.bool)}, TypeError, "torch.bool"),
    ],
)
def test_bad_parameters_are_refused(change, error, words):
    good = {
        "query": np.ones((1, 2, 3)),
        "key": np.ones((1, 2, 3)),
        "value": np.ones((1, 2, 3)),
        "output": np.ones((1, 3, 2)),
    }
    AttentionParameters(**good)
    with pytest.raises(error, match=words):
        AttentionParameters(**(good | change))


def test_several_heads_need_an_output():
    with pytest.raises(ValueError, match="output.*got None"):
        AttentionParameters(*(np.ones((2, 2, 3)) for _ in range(3)))


def test_measures_that_do_not_fit_are_refused():
    F = SelfAttention(AttentionParameters.random(3), causal=True)
    plain = SelfAttention(AttentionParameters.random(3))
    tokens = ParticleMeasure.from_sequence(torch.randn(4, 3, dtype=F64))
    with pytest.raises(ValueError, match="with positions"):
        F(ParticleMeasure(tokens.points))
    with pytest.raises(ValueError, match="with positions"):
        F.linearize(ParticleMeasure(tokens.points))
    with pytest.raises(ValueError, match=r"dimension 3, got dimension 2"):
        plain(ParticleMeasure.from_sequence(torch.randn(4, 2, dtype=F64)))
    with pytest.raises(TypeError, match="float64.*float32"):
        plain(tokens.to(torch.float32))
    with pytest.raises(TypeError, match="ParticleMeasure"):
        plain(tokens.points)
    with pytest.raises(ValueError, match="geometry"):
        plain.linearize(tokens, geometry="hyperbolic")
    with pytest.raises(ValueError, match="before all the mass"):
        F.field(tokens)(torch.zeros(1, 3, dtype=F64), 0.1)
    with pytest.raises(ValueError, match="s: expected positions"):
        F.field(tokens)(torch.zeros(1, 3, dtype=F64))
    with pytest.raises(ValueError, match=r"x: expected shape"):
        plain.field(tokens)(torch.zeros(1, 2, dtype=F64))


def test_bilinear_parameters_give_back_a_and_v():
    A, V = torch.randn(2, 3, 3, dtype=F64), torch.randn(2, 3, 3, dtype=F64)
    par = AttentionParameters.from_bilinear(A, V)
    torch.testing.assert_close(par.A, A)
    torch.testing.assert_close(par.V, V)
    with pytest.raises(ValueError, match="square"):
        AttentionParameters.from_bilinear(A[..., :2], V)


@pytest.mark.gpu
def test_the_device_agrees_with_the_cpu(device):
    par = AttentionParameters.random(8, n_heads=2, biases=True)
    mu = ParticleMeasure.from_sequence(torch.randn(50, 8, dtype=F64))
    for causal in (False, True):
        here, there = SelfAttention(par, causal), SelfAttention(par.to(device), causal)
        torch.testing.assert_close(there(mu.to(device)).points.cpu(), here(mu).points)
        eps = torch.randn_like(mu.points)
        moved = there.linearize(mu.to(device)).matvec(eps.to(device)).cpu()
        torch.testing.assert_close(moved, here.linearize(mu).matvec(eps))


@pytest.mark.parametrize("scale", [1.0, 300.0, 1e6])
@pytest.mark.parametrize("geometry", ["euclidean", "wasserstein"])
@pytest.mark.parametrize("causal", [False, True])
def test_products_keep_their_digits_where_attention_is_on_one_atom(scale, geometry, causal):
    """Values of size s less their mean, times keys of size s, would be s² units of rounding."""
    generator = torch.Generator().manual_seed(0)
    parameters = AttentionParameters.random(20, n_heads=2, std=0.7, generator=generator)
    points = scale * torch.randn(12, 20, dtype=F64, generator=generator)
    logs = torch.log_softmax(2 * torch.randn(12, dtype=F64, generator=generator), 0)
    positions = torch.arange(12, dtype=F64) / 12 if causal else None
    mu = ParticleMeasure(points, log_weights=logs, positions=positions)
    whole = SelfAttention(parameters, causal=causal).linearisation(mu, geometry=geometry)
    low = SelfAttention(parameters.to(torch.float32), causal=causal)
    single = low.linearisation(mu.to(torch.float32), geometry=geometry)
    exact, J = whole.atoms, single.atoms
    size = float(torch.linalg.matrix_norm(exact.to_dense(), 2))
    for _ in range(3):
        x = torch.nn.functional.normalize(torch.randn(240, generator=generator), dim=0)
        x = x.reshape(12, 20)
        for product, true in ((J.matvec, exact.matvec), (J.rmatvec, exact.rmatvec)):
            assert float((product(x).double() - true(x.double())).norm()) < 1e-4 * size
        x = x[:, None]
        for name in ("matvec", "rmatvec"):
            of_field = getattr(single.field, name)(x).double()
            off = of_field - getattr(whole.field, name)(x.double())
            assert float(off.norm()) < 1e-4 * size
    off = torch.linalg.matrix_norm(J.to_dense().double() - exact.to_dense(), 2)
    assert float(off) < 1e-4 * size
    found = operator_norm(J, solver=Lanczos(), rtol=1e-4)
    assert float(found.value) == pytest.approx(size, rel=1e-4)


@pytest.mark.parametrize("geometry", ["euclidean", "wasserstein"])
def test_attention_almost_on_one_atom_keeps_its_digits_in_the_matrix(geometry):
    """vⱼ − oᵢ is 4e-9 at the atom that a row sees, and a difference would leave 6e-8 of it."""
    # The first coordinate makes the scores, 20 apart at a size of 1e6; the second is the value.
    bilinear, value = [[1e6, 0.0], [0.0, 0.0]], [[0.0, 1.0]]
    points = torch.tensor([[1.0, 1.0], [1.0 - 2e-5, -1.0], [1.0 - 1e-4, 7.0]])
    logs = torch.tensor([0.2, 0.7, 0.1]).log()
    mu = ParticleMeasure(points, log_weights=logs)
    par = AttentionParameters.from_bilinear(bilinear, value)
    exact = SelfAttention(par).linearize(mu.to(F64), geometry=geometry).to_dense()
    low = SelfAttention(par.to(torch.float32)).linearize(mu, geometry=geometry)
    size = float(torch.linalg.matrix_norm(exact, 2))
    by_products = torch.stack([low.matvec(e.reshape(3, 2)).flatten() for e in torch.eye(6)], -1)
    for matrix in (low.to_dense(), by_products):
        off = float(torch.linalg.matrix_norm(matrix.double() - exact, 2))
        assert off < 1e-3 * size


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 300.0), (F64, 1e7)])
@pytest.mark.parametrize("memory", [0, 2**30])
@pytest.mark.parametrize("normalization", [softmax, sink(1.0)])
def test_rows_sum_to_one_where_scores_leave_no_room_for_their_sum(
    dtype, size, memory, normalization
):
    """Beside scores of 1e14 the log of a sum of three equal terms has one digit left."""
    x = size * torch.tensor([[1.0], [1.0], [-1.0], [1.0], [-1.0]], dtype=dtype)
    par = AttentionParameters.from_bilinear([[1.0]], [[1.0]]).to(dtype)
    F = SelfAttention(par, normalization=normalization)
    J = AttentionTangent(
        F.weights(ParticleMeasure(x)), memory=memory, block_size=2
    ).as_linear_map()
    same = (x == x.mT).to(dtype)
    expected = same / same.sum(-1, keepdim=True)  # the values that a row sees are all equal
    by_products = torch.stack([J.matvec(e[:, None])[:, 0] for e in torch.eye(5, dtype=dtype)], -1)
    # A mean of values is known to eps · size, and is multiplied by queries of that size.
    room = 8 * torch.finfo(dtype).eps * size**2
    torch.testing.assert_close(by_products, expected, rtol=0.0, atol=room)
    # In the matrix of the softmax differences are taken before means.
    exact = 1e-5 if normalization is softmax else room
    torch.testing.assert_close(J.to_dense(), expected, rtol=0.0, atol=exact)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", [kernels.dot_product, kernels.l2, kernels.alibi([0.5])])
@pytest.mark.parametrize("far", [1e12, 1e40])
def test_an_absent_atom_far_away_takes_no_digit(kernel, causal, far):
    tied = AttentionParameters.tied_l2(torch.randn(2, 2).double(), torch.eye(2).double())
    par = tied if kernel is kernels.l2 else AttentionParameters.random(2)
    F = SelfAttention(par, causal=causal, kernel=kernel)
    points, positions = torch.randn(4, 2, dtype=torch.float64), torch.arange(1, 5) / 5
    mu = ParticleMeasure(points, positions=positions.double())
    padded = ParticleMeasure(
        torch.cat([points, torch.full((1, 2), far, dtype=torch.float64)]),
        [0.25] * 4 + [0.0],
        positions=[*positions.tolist(), 0.9],
    )
    torch.testing.assert_close(F(padded).points[:4], F(mu).points, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(F.largest_logits(padded), F.largest_logits(mu), rtol=1e-13, atol=0)


def test_products_in_several_threads_are_those_of_one():
    n = 300
    mu = ParticleMeasure(torch.randn(n, 3, dtype=torch.float64))
    J = linearize(SelfAttention(AttentionParameters.random(3, generator=0)), mu).atoms
    ways = torch.randn(40, n, 3, dtype=torch.float64)
    wanted = [(J.matvec(way), J.rmatvec(way)) for way in ways]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda way: (J.matvec(way), J.rmatvec(way)), ways))
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def test_an_absent_atom_beside_a_very_light_first_one_changes_no_constant():
    F = SelfAttention(AttentionParameters.from_bilinear([[1.0]], [[1.0]]))
    points = [[0.0], [1.0], [2.0]]
    mu = ParticleMeasure(points, log_weights=[-1500.0, 0.0, -math.inf])
    alone = ParticleMeasure(points[:2], log_weights=[-1500.0, 0.0])
    assert float(local_lipschitz(F, mu)) == pytest.approx(float(local_lipschitz(F, alone)))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "settings",
    [{}, {"causal": True}, {"kernel": kernels.window(0.3)}, {"normalization": sink(0.1)}],
    ids=["plain", "masked", "window", "sink"],
)
def test_an_atom_with_mass_that_is_nowhere_gives_no_number(settings, bad):
    F = SelfAttention(AttentionParameters.random(2, generator=0), **settings)
    mu = ParticleMeasure.from_sequence(torch.randn(5, 2, dtype=torch.float64))
    points = mu.points.clone()
    points[1] = bad
    nu = mu.replace(points)
    assert F(nu).points[1].isnan().all() and F.largest_logits(nu).isnan().all()


def test_an_absent_atom_whose_scores_overflow_takes_no_attention():
    F = SelfAttention(AttentionParameters.from_bilinear([[1.0]], [[1.0]]))
    mu = ParticleMeasure([[100.0], [50.0], [1e307]], weights=[0.5, 0.5, 0.0])
    torch.testing.assert_close(F(mu).points[:2], F(ParticleMeasure([[100.0], [50.0]])).points)
