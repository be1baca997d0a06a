"""Self-attention as a map of measures: against the double-loop oracle, and its laws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meanfield.attention import AttentionParameters, SelfAttention, kernels
from meanfield.attention.normalizations import sink, softmax
from meanfield.attention.tangent import AttentionTangent
from meanfield.linalg import Lanczos, operator_norm
from meanfield.maps import linearize
from meanfield.measures import ParticleMeasure, split
from tests import oracles
from tests.strategies import Problem, layer, problems

F64 = torch.float64


def attention(problem: Problem) -> SelfAttention:
    return SelfAttention(AttentionParameters(**problem.layer), causal=problem.causal)


def close(actual: torch.Tensor, expected: np.ndarray, floor: float = 1e-300) -> None:
    """To 1e-10 of the largest entry; `floor` is the rounding of the oracle itself."""
    expected = torch.as_tensor(np.asarray(expected, float))
    scale = float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10 * scale + floor)


# --- the map ---


@given(problems())
def test_the_map_agrees_with_double_loops(problem: Problem):
    image = attention(problem)(problem.measure)
    expected = oracles.attention_map(
        problem.points, problem.log_weights, problem.layer, **problem.mask
    )
    close(image.points, expected)


@given(problems(), st.integers(1, 5))
def test_the_field_agrees_with_double_loops_anywhere(problem: Problem, m: int):
    x = np.random.default_rng(m).normal(size=(m, problem.points.shape[1]))
    gamma = attention(problem).field(problem.measure)
    if problem.causal:
        s = np.linspace(problem.positions[problem.alive].min(), 1.0, m)
        actual = gamma(x, s)
    else:
        s, actual = np.zeros(m), gamma(x)
    expected = [
        oracles.field(
            x[i],
            problem.points,
            problem.log_weights,
            problem.layer,
            position=s[i],
            **problem.mask,
        )
        for i in range(m)
    ]
    close(actual, np.array(expected))


@given(problems())
def test_the_field_at_the_atoms_is_the_map(problem: Problem):
    F, mu = attention(problem), problem.measure
    arguments = (mu.points, mu.positions) if problem.causal else (mu.points,)
    torch.testing.assert_close(F.field(mu)(*arguments), F(mu).points)


@given(problems(), st.randoms(use_true_random=False))
def test_permuting_the_atoms_permutes_the_images(problem: Problem, random):
    F, mu = attention(problem), problem.measure
    order = list(range(mu.n_particles))
    random.shuffle(order)
    positions = None if mu.positions is None else mu.positions[order]
    shuffled = ParticleMeasure(
        mu.points[order], log_weights=mu.log_weights[order], positions=positions
    )
    torch.testing.assert_close(F(shuffled).points, F(mu).points[order])


@given(problems(), st.integers(2, 3))
def test_splitting_atoms_changes_nothing(problem: Problem, copies: int):
    F, mu = attention(problem), problem.measure
    torch.testing.assert_close(F(split(mu, copies)).points, split(F(mu), copies).points)


@given(problems(weight_kinds=["zeros"]))
def test_weight_zero_is_absence(problem: Problem):
    F, mu = attention(problem), problem.measure
    alive = mu.log_weights > -math.inf
    positions = None if mu.positions is None else mu.positions[alive]
    rest = ParticleMeasure(
        mu.points[alive], log_weights=mu.log_weights[alive], positions=positions
    )
    torch.testing.assert_close(F(mu).points[alive], F(rest).points)


@given(problems(layer_kinds=["single_head", "multi_head"]))
def test_a_key_bias_has_no_effect(problem: Problem):
    F, mu = attention(problem), problem.measure
    par = F.parameters
    bias = torch.randn(par.key.shape[:2], dtype=F64, generator=torch.Generator().manual_seed(0))
    biased = AttentionParameters(**problem.layer, key_bias=bias)
    moved = SelfAttention(biased, causal=problem.causal)
    close(moved(mu).points, F(mu).points)
    assert not torch.equal(F.kernel.features(biased, mu.points, None).k_centre, bias)


@given(problems(causal=True))
def test_masked_output_ignores_later_positions(problem: Problem):
    F, mu = attention(problem), problem.measure
    middle = mu.positions.median()
    later = mu.positions > middle
    moved = mu.replace(torch.where(later[:, None], mu.points + 5.0, mu.points))
    torch.testing.assert_close(F(moved).points[~later], F(mu).points[~later])


def test_ties_see_each_other():
    F = SelfAttention(AttentionParameters.from_bilinear([[0.0]], [[1.0]]), causal=True)
    mu = ParticleMeasure([[1.0], [3.0], [8.0]], positions=[0.5, 0.5, 1.0])
    assert F(mu).points.squeeze(-1).tolist() == pytest.approx([2.0, 2.0, 4.0], rel=1e-15)


@given(problems(layer_kinds=["bilinear"]))
def test_images_lie_in_v_times_the_hull(problem: Problem):
    # In every direction an image lies between the extremes of V y over the atoms.
    F, mu = attention(problem), problem.measure
    alive = mu.log_weights > -math.inf
    values = mu.points[alive] @ F.parameters.V[0].mT
    directions = torch.randn(mu.dim, 20, dtype=F64)
    images, hull = F(mu).points[alive] @ directions, values @ directions
    slack = 1e-9 * (1 + values.abs().max())
    assert (images <= hull.amax(0) + slack).all()
    assert (images >= hull.amin(0) - slack).all()


def test_a_gaussian_goes_to_the_gaussian_of_the_formula():
    rng = np.random.default_rng(0)
    d, n = 2, 200_000
    fields = layer(rng, d, "biased", 0.4)
    root = 0.5 * rng.normal(size=(d, d))
    mean, cov = rng.normal(size=d), root @ root.T
    points = torch.as_tensor(mean + rng.normal(size=(n, d)) @ root.T)
    x = torch.as_tensor(rng.normal(size=(5, d)))
    gamma = SelfAttention(AttentionParameters(**fields)).field(ParticleMeasure(points))
    image_mean, _ = oracles.gaussian_image(mean, cov, fields)
    at_mean = gamma(torch.as_tensor(mean)[None])[0]
    # 5 standard errors of a mean of n samples, with room for the weights of the softmax
    torch.testing.assert_close(at_mean, torch.as_tensor(image_mean), rtol=0, atol=0.05)
    slope = gamma(x) - gamma(torch.zeros_like(x))
    par = AttentionParameters(**fields)
    expected = x @ (par.V @ torch.as_tensor(cov) @ par.A).sum(0).mT
    torch.testing.assert_close(slope, expected, rtol=0, atol=0.1)


def test_batches_are_computed_as_one_by_one():
    generator = torch.Generator().manual_seed(0)
    par = AttentionParameters.random(4, n_heads=2, biases=True, generator=generator)
    points = torch.randn(3, 2, 7, 4, dtype=F64, generator=generator)
    positions = torch.randint(4, (3, 2, 7), generator=generator).double() / 4
    for causal in (False, True):
        F = SelfAttention(par, causal=causal)
        mu = ParticleMeasure(points, positions=positions)
        one_by_one = torch.stack([torch.stack([F(m).points for m in row]) for row in mu])
        torch.testing.assert_close(F(mu).points, one_by_one)


def test_a_light_weight_of_e_minus_900_is_attended_when_the_scores_say_so():
    # Heavy at −R, light at R, A = −1, R² = 450: the scores differ by 2R² = 900, attention is ½.
    F = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]))
    mu = ParticleMeasure([[math.sqrt(450)], [-math.sqrt(450)]], log_weights=[-900.0, 0.0])
    heavy = float(F(mu).points[1, 0])
    assert abs(heavy) < 1e-9
    light = float(F(mu).points[0, 0])
    assert light == pytest.approx(-math.sqrt(450), rel=1e-12)


def test_float32_stays_float32_and_agrees():
    par = AttentionParameters.random(4, n_heads=2, biases=True)
    mu = ParticleMeasure.from_sequence(torch.randn(9, 4, dtype=F64))
    for causal in (False, True):
        exact = SelfAttention(par, causal)(mu).points
        single = SelfAttention(par.to(torch.float32), causal)(mu.to(torch.float32)).points
        assert single.dtype == torch.float32
        torch.testing.assert_close(single.double(), exact, rtol=1e-5, atol=1e-5)


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


@given(problems())
def test_the_dense_tangent_agrees_with_the_formula_in_double_loops(problem: Problem):
    F, mu = attention(problem), problem.measure
    alive = problem.alive
    expected = oracles.jacobian(
        problem.points[alive],
        problem.log_weights[alive],
        problem.layer,
        positions=None if problem.positions is None else problem.positions[alive],
        causal=problem.causal,
    )
    n, d = mu.n_particles, mu.dim
    matrix = F.linearize(mu).to_dense().reshape(n, -1, n, d)
    close(matrix[alive][:, :, alive].reshape(expected.shape), expected)
    absent = ~alive
    assert matrix[absent].abs().sum() == matrix[:, :, absent].abs().sum() == 0


@given(problems(weight_kinds=["uniform", "dirichlet"]), st.integers(0, 10**6))
def test_products_agree_with_differences_and_with_each_other(problem: Problem, seed: int):
    F, mu = attention(problem), problem.measure
    generator = torch.Generator().manual_seed(seed)
    eps = torch.randn(mu.points.shape, dtype=F64, generator=generator)
    linear_map = F.linearize(mu)
    moved = linear_map.matvec(eps)
    exact = oracles.tangent_by_complex_step(
        lambda x: oracles.attention_map(x, problem.log_weights, problem.layer, **problem.mask),
        problem.points,
        eps.numpy(),
    )
    close(moved, exact)
    zeta = torch.randn(moved.shape, dtype=F64, generator=generator)
    forward, backward = (zeta * moved).sum(), (linear_map.rmatvec(zeta) * eps).sum()
    bound = zeta.norm() * moved.norm() + linear_map.rmatvec(zeta).norm() * eps.norm()
    assert abs(forward - backward) <= 1e-12 * bound


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


@given(problems())
def test_the_weighted_tangent_agrees_entry_by_entry(problem: Problem):
    F, mu = attention(problem), problem.measure
    alive = problem.alive
    expected = oracles.jacobian(
        problem.points[alive],
        problem.log_weights[alive],
        problem.layer,
        positions=None if problem.positions is None else problem.positions[alive],
        causal=problem.causal,
        weighted=True,
    )
    n, d = mu.n_particles, mu.dim
    matrix = F.linearize(mu, geometry="wasserstein").to_dense().reshape(n, -1, n, d)
    close(matrix[alive][:, :, alive].reshape(expected.shape), expected)


@pytest.mark.parametrize("geometry", ["euclidean", "wasserstein"])
@pytest.mark.parametrize("memory", [0, 2**30])
@given(problem=problems(), size=st.integers(1, 3))
def test_blocks_and_recomputation_give_the_same_products(problem, size, geometry, memory):
    F, mu = attention(problem), problem.measure
    dense = F.linearize(mu, geometry=geometry).to_dense()
    tangent = AttentionTangent(F.weights(mu), geometry=geometry, memory=memory, block_size=size)
    blocked = tangent.as_linear_map()
    eps = torch.randn(mu.points.shape, dtype=F64)
    zeta = torch.randn(blocked.out_shape, dtype=F64)
    scale = dense.abs().max() * 10 + 1e-300
    torch.testing.assert_close(
        blocked.matvec(eps).flatten() / scale, dense @ eps.flatten() / scale
    )
    torch.testing.assert_close(
        blocked.rmatvec(zeta).flatten() / scale, dense.mT @ zeta.flatten() / scale
    )


@given(problems())
def test_the_derivative_of_the_field_agrees_with_the_oracle(problem: Problem):
    F, mu = attention(problem), problem.measure
    expected = oracles.field_jacobians(
        problem.points, problem.log_weights, problem.layer, **problem.mask
    )
    alive = problem.alive
    actual = linearize(F, mu).field.to_dense()
    par, radius = F.parameters, float(mu.points.abs().max())
    norms = float(par.V.norm() * par.A.norm())
    close(actual[alive], expected[alive], floor=norms * (1e-14 * radius) ** 2)
    field_map = F.linearisation(mu).field
    torch.testing.assert_close(field_map.to_dense(), actual)
    one_by_one = torch.stack(list(field_map._images()), -1)
    # Products subtract means, so they are right relative to ‖V‖‖A‖R², not to a tiny covariance.
    scale = 1e-300 + norms * radius**2 * mu.n_particles
    torch.testing.assert_close(one_by_one.reshape(actual.shape) / scale, actual / scale)
    zeta = torch.randn(mu.n_particles, 1, actual.shape[-2], dtype=F64)
    expected_back = zeta @ actual
    torch.testing.assert_close(field_map.rmatvec(zeta) / scale, expected_back / scale)


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


def test_heads_add_up_to_the_layer():
    par = AttentionParameters.random(4, n_heads=2, biases=True)
    mu = ParticleMeasure.from_sequence(torch.randn(5, 4, dtype=F64))
    alone = [SelfAttention(par.head(h))(mu).points for h in (0, -1)]
    torch.testing.assert_close(SelfAttention(par)(mu).points, sum(alone) + par.output_bias)
    with pytest.raises(IndexError):
        par.head(2)


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
    exact = SelfAttention(parameters, causal=causal).linearize(mu, geometry=geometry)
    low = SelfAttention(parameters.to(torch.float32), causal=causal)
    J = low.linearize(mu.to(torch.float32), geometry=geometry)
    size = float(torch.linalg.matrix_norm(exact.to_dense(), 2))
    for _ in range(3):
        x = torch.nn.functional.normalize(torch.randn(240, generator=generator), dim=0)
        x = x.reshape(12, 20)
        for product, true in ((J.matvec, exact.matvec), (J.rmatvec, exact.rmatvec)):
            assert float((product(x).double() - true(x.double())).norm()) < 1e-4 * size
    off = torch.linalg.matrix_norm(J.to_dense().double() - exact.to_dense(), 2)
    assert float(off) < 1e-4 * size
    found = operator_norm(J, solver=Lanczos(), rtol=1e-4)
    assert float(found.value) == pytest.approx(size, rel=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_the_derivative_of_the_field_keeps_its_digits_too(causal):
    generator = torch.Generator().manual_seed(1)
    parameters = AttentionParameters.random(6, n_heads=2, generator=generator)
    points = 100 * torch.randn(9, 6, dtype=F64, generator=generator)
    positions = torch.arange(9, dtype=F64) / 9 if causal else None
    mu = ParticleMeasure(points, positions=positions)
    exact = SelfAttention(parameters, causal=causal).linearisation(mu).field
    low = SelfAttention(parameters.to(torch.float32), causal=causal)
    field = low.linearisation(mu.to(torch.float32)).field
    scale = 1e-4 * max(1.0, float(exact.to_dense().abs().max()))
    x = torch.randn(9, 1, 6, generator=generator)
    for product, true in ((field.matvec, exact.matvec), (field.rmatvec, exact.rmatvec)):
        assert float((product(x).double() - true(x.double())).abs().max()) < scale


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
def test_an_absent_atom_far_away_takes_no_digit(kernel, causal):
    tied = AttentionParameters.tied_l2(torch.randn(2, 2).double(), torch.eye(2).double())
    par = tied if kernel is kernels.l2 else AttentionParameters.random(2)
    F = SelfAttention(par, causal=causal, kernel=kernel)
    points, positions = torch.randn(4, 2, dtype=torch.float64), torch.arange(1, 5) / 5
    mu = ParticleMeasure(points, positions=positions.double())
    padded = ParticleMeasure(
        torch.cat([points, torch.full((1, 2), 1e12, dtype=torch.float64)]),
        [0.25] * 4 + [0.0],
        positions=[*positions.tolist(), 0.9],
    )
    torch.testing.assert_close(F(padded).points[:4], F(mu).points, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(F.largest_logits(padded), F.largest_logits(mu), rtol=1e-13, atol=0)
