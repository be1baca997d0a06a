"""The coarse model of attention's linearisation against the matrix formed, and what it is for."""

from __future__ import annotations

import math

import pytest
import torch

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, sampling
from meanfield.attention import coarse
from meanfield.attention.coarse import diffuse_shape, turning_shape
from meanfield.attention.heads import JoinedHeads
from meanfield.linalg import LinearMap, operator_norm
from meanfield.measures import stack

F64 = torch.float64


def problem(seed, *, n=9, d=6, heads=2, causal=False, batch=(), geometry="euclidean"):
    generator = torch.Generator().manual_seed(seed)
    parameters = AttentionParameters.random(d, n_heads=heads, dtype=F64, generator=generator)
    points = torch.randn(*batch, n, d, dtype=F64, generator=generator)
    weights = torch.rand(*batch, n, dtype=F64, generator=generator)
    weights = weights / weights.sum(-1, keepdim=True)
    positions = torch.randperm(n, generator=generator).to(F64) / n if causal else None
    if positions is not None:
        positions = positions.expand(*batch, n)
    mu = ParticleMeasure(points, weights, positions=positions)
    F = SelfAttention(parameters, causal=causal)
    return F, mu, F.linearize(mu, geometry=geometry)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("geometry", ["euclidean", "wasserstein"])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_the_model_is_the_compression_of_the_matrix(heads, causal, geometry, batch):
    d, n = 6, 9
    _, _, J = problem(1, heads=heads, causal=causal, batch=batch, geometry=geometry)
    space = J.coarse()
    p, q = space.in_shape[0], space.out_shape[0]
    gram = space.shapes.mT @ space.shapes
    torch.testing.assert_close(gram, torch.eye(p, dtype=F64).expand_as(gram))
    units = torch.eye(p * d, dtype=F64).reshape(-1, *(1 for _ in batch), p, d)
    model = space.matvec(units.expand(-1, *batch, p, d))
    # J on Φy of the same y.
    lifted = space.shapes @ units
    images = torch.stack([J.matvec(x) for x in lifted])
    # Some Z with orthonormal columns takes one to the other.
    flat = images.movedim(0, -1).flatten(-2)
    Z = torch.linalg.lstsq(flat.mT, model.movedim(0, -1).flatten(-2).mT).solution
    torch.testing.assert_close((Z.mT @ flat), model.movedim(0, -1).flatten(-2))
    torch.testing.assert_close(Z.mT @ Z, torch.eye(q, dtype=F64).expand(*batch, q, q))
    # And the transpose is the transpose.
    duals = torch.eye(q * d, dtype=F64).reshape(-1, *(1 for _ in batch), q, d)
    pulled = space.rmatvec(duals.expand(-1, *batch, q, d)).flatten(-2)
    torch.testing.assert_close(pulled.movedim(0, -1), model.flatten(-2).movedim(0, -1).mT)
    assert space.shapes.shape == (*batch, n, p)


@pytest.mark.parametrize("geometry", ["euclidean", "wasserstein"])
@pytest.mark.parametrize("causal", [False, True])
def test_recomputed_blocks_give_the_same_model(geometry, causal):
    F, mu, J = problem(2, n=40, d=8, causal=causal, geometry=geometry)
    blocks = F.linearize(mu, geometry=geometry, memory=0, block_size=7)
    # One pass smooths less than three: the shapes differ, so compare with as many.
    ours, theirs = J.matvec.__self__, blocks.matvec.__self__
    torch.testing.assert_close(turning_shape(ours), turning_shape(theirs))
    exact = operator_norm(J, method="dense").value
    for linear_map in (J, blocks):
        found = operator_norm(linear_map, method="lanczos", rtol=1e-9)
        torch.testing.assert_close(found.value, exact, rtol=1e-9, atol=0)


@pytest.mark.parametrize("geometry", ["euclidean", "wasserstein"])
def test_shapes_against_their_definitions(geometry):
    F, mu, J = problem(3, geometry=geometry, heads=2)
    par, tangent = F.parameters, J.matvec.__self__
    x, a = mu.points, mu.weights
    ratio = (a[:, None] / a).sqrt() if geometry == "wasserstein" else torch.ones(9, 9, dtype=F64)
    squares, gram = torch.zeros(9, dtype=F64), torch.zeros(9, 9, dtype=F64)
    for h in range(2):
        q, k = par.scale[h] * x @ par.query[h].mT, x @ par.key[h].mT
        P = torch.softmax(q @ k.mT + a.log(), -1)
        M, v = ratio * P, x @ par.value[h].mT
        o = P @ v
        for j in range(9):
            for i in range(9):
                turn = float(q[i].norm() * par.key[h].norm())
                squares[j] += (M[i, j] * (v[j] - o[i]).norm() * turn) ** 2
        gram += M.mT @ M
    torch.testing.assert_close(turning_shape(tangent), squares.sqrt())
    top = torch.linalg.eigh(gram).eigenvectors[:, -1].abs()
    found = diffuse_shape(tangent)
    assert float(found @ top / found.norm()) > 0.999
    assert (found >= 0).all()


def test_the_known_directions_are_the_top_of_the_value_map():
    generator = torch.Generator().manual_seed(4)
    parameters = AttentionParameters.random(40, n_heads=4, dtype=F64, generator=generator)
    heads = JoinedHeads(parameters)
    directions = heads.value_directions()
    whole = parameters.V.sum(0)
    _, values, right = torch.linalg.svd(whole)
    torch.testing.assert_close(
        torch.linalg.vector_norm(whole @ directions[0]), values[0], rtol=1e-3, atol=0
    )
    torch.testing.assert_close(directions @ directions.mT, torch.eye(8, dtype=F64))
    # Together they hold nearly all of the first few.
    assert ((right[:4] @ directions.mT).square().sum(-1) > 0.9).all()
    # And are known from then on.
    assert JoinedHeads(parameters).value_directions() is directions


def test_value_maps_that_leave_the_number_range_spoil_a_start_and_no_more():
    """WVy does of the unit y that a start is sought from, and not at points this small."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, w = torch.randn(4, 1, 60, 60, dtype=F64, generator=generator)
    par = AttentionParameters(*(x.to(torch.float32) for x in (q, k, 8e37 * v, 1e-37 * w)))
    points = (1e-3 * torch.randn(4, 60, dtype=F64, generator=generator)).to(torch.float32)
    J = SelfAttention(par).linearize(ParticleMeasure(points))
    exact = float(operator_norm(J, method="dense").value)
    found = operator_norm(J, method="lanczos")
    assert float(found.value) == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize("shapes", [2, 3])
@pytest.mark.parametrize("geometry", ["euclidean", "wasserstein"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_model_is_the_same_in_blocks(shapes, geometry, causal, monkeypatch):
    monkeypatch.setattr(coarse, "_DOMINATED", 0.0 if shapes == 2 else math.inf)
    # As many passes as where the transition matrices are recomputed.
    monkeypatch.setattr(coarse, "_SMOOTHING", 1)
    F, mu, J = problem(10, n=23, d=6, causal=causal, geometry=geometry)
    blocks = F.linearize(mu, geometry=geometry, memory=0, block_size=4)
    one, other = J.coarse(), blocks.coarse()
    torch.testing.assert_close(other.shapes, one.shapes)
    units = torch.eye(shapes * 6, dtype=F64).reshape(-1, shapes, 6)
    torch.testing.assert_close(other.matvec(units), one.matvec(units))
    torch.testing.assert_close(other.start, one.start)


def test_a_batch_is_dominated_by_turns_if_all_of_it_is():
    generator = torch.Generator().manual_seed(8)
    parameters = AttentionParameters.random(
        96, n_heads=4, std=0.05, dtype=F64, generator=generator
    )
    F = SelfAttention(parameters, causal=True)
    turning = sampling.adversarial(parameters.A[0], 60.0, 64)
    spread = ParticleMeasure.from_sequence(torch.randn(64, 96, dtype=F64, generator=generator))
    shapes = []
    for batch in ([turning, turning], [turning, spread], [spread, spread]):
        J = F.linearize(stack(batch))
        shapes.append(J.coarse().in_shape[0])
        alone = [float(operator_norm(F.linearize(mu), method="lanczos").value) for mu in batch]
        both = operator_norm(J, method="lanczos").value
        torch.testing.assert_close(both, torch.tensor(alone, dtype=F64), rtol=2e-4, atol=0)
    assert shapes == [2, 3, 3]


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_fewer_atoms_than_shapes(n, causal):
    _, _, J = problem(5, n=n, d=6, causal=causal)
    exact = operator_norm(J, method="dense").value
    found = operator_norm(J, method="lanczos", rtol=1e-10)
    torch.testing.assert_close(found.value, exact, rtol=1e-9, atol=1e-300)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_weights_at_the_end_of_the_number_range(dtype):
    generator = torch.Generator().manual_seed(6)
    parameters = AttentionParameters.random(4, n_heads=2, dtype=dtype, generator=generator)
    points = torch.randn(12, 4, dtype=dtype, generator=generator)
    logs = torch.linspace(0, -900, 12, dtype=dtype)
    logs[5] = -math.inf
    mu = ParticleMeasure(points, log_weights=logs - logs.logsumexp(0))
    J = SelfAttention(parameters).linearize(mu, geometry="wasserstein")
    exact = operator_norm(J, method="dense").value
    found = operator_norm(J, method="lanczos", rtol=1e-9 if dtype == F64 else 1e-4)
    torch.testing.assert_close(found.value, exact, rtol=1e-8 if dtype == F64 else 1e-4, atol=0)


@pytest.mark.parametrize("geometry", ["euclidean", "wasserstein"])
@pytest.mark.parametrize("inputs", ["spread", "ties", "collapsed", "far weights", "two", "one"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dominated", [False, True])
def test_the_norm_is_between_its_ends_with_the_model(
    inputs, geometry, causal, dominated, monkeypatch
):
    """Against singular values of the matrix assembled column by column."""
    # Which model there is must not matter.
    monkeypatch.setattr(coarse, "_DOMINATED", 0.0 if dominated else math.inf)
    generator = torch.Generator().manual_seed(9)
    n, d = {"two": 2, "one": 1}.get(inputs, 24), 20
    parameters = AttentionParameters.random(d, n_heads=2, dtype=F64, generator=generator)
    points = 0.3 * torch.randn(n, d, dtype=F64, generator=generator)
    logs = torch.rand(n, dtype=F64, generator=generator)
    if inputs == "ties":
        points[:] = points[0].clone()
    if inputs == "collapsed":
        points = points[torch.arange(n) % 3] + 1e-8 * points
    if inputs == "far weights":
        logs = torch.linspace(0, -900, n, dtype=F64)
    positions = torch.arange(n, dtype=F64) / n if causal else None
    mu = ParticleMeasure(points, log_weights=logs - logs.logsumexp(0), positions=positions)
    J = SelfAttention(parameters, causal=causal).linearize(mu, geometry=geometry)
    units = torch.eye(n * d, dtype=F64).reshape(-1, n, d)
    exact = float(torch.linalg.matrix_norm(torch.stack([J.matvec(e).flatten() for e in units]), 2))
    found = operator_norm(J, method="lanczos", rtol=1e-4)
    assert found.converged
    assert float(found.value) == pytest.approx(exact, rel=1e-4)
    assert float(found.value) <= exact * (1 + 1e-10)
    assert float(found.upper) >= exact * (1 - 1e-10)
    assert exact - float(found.value) <= (float(found.error) + 1e-10) * exact


def steps(J: LinearMap, with_model: bool) -> int:
    linear_map = J
    if not with_model:
        linear_map = LinearMap(
            J.matvec, J.rmatvec, J.in_shape, J.out_shape, J.batch_shape, J.dtype, J.device
        )
    return operator_norm(linear_map, method="lanczos", max_steps=100).n_matvecs


def test_a_spread_out_layer_takes_fewer_products():
    """LayerNormed inputs of a layer as a transformer starts with: crowded singular values."""
    generator = torch.Generator().manual_seed(7)
    d = 192
    parameters = AttentionParameters.random(
        d, n_heads=6, std=0.02 * 2, dtype=torch.float32, generator=generator
    )
    points = torch.nn.functional.layer_norm(torch.randn(160, d, generator=generator), (d,))
    F = SelfAttention(parameters, causal=True)
    J = F.linearize(ParticleMeasure.from_sequence(points))
    assert J.coarse().in_shape[0] == 3
    with_model, without = steps(J, True), steps(J, False)
    assert with_model <= 12
    assert with_model < 0.8 * without


def test_adversarial_inputs_take_few_products():
    generator = torch.Generator().manual_seed(8)
    parameters = AttentionParameters.random(
        96, n_heads=4, std=0.05, dtype=torch.float32, generator=generator
    )
    F = SelfAttention(parameters, causal=True)
    mu = sampling.adversarial(parameters.A[0].double(), 60.0, 64).to(torch.float32)
    J = F.linearize(mu)
    space = J.coarse()
    # Turns are all that matters, and two directions come near to the best of them.
    assert space.in_shape[0] == 2
    units = torch.eye(2 * 96).reshape(-1, 2, 96)
    _, _, right = torch.linalg.svd(space.matvec(units).flatten(1).mT)
    known = torch.linalg.qr(space.start.flatten(1).mT).Q
    assert float((right[0] @ known).norm()) > 0.9
    assert steps(J, True) <= 4
    assert steps(J, True) < steps(J, False)
