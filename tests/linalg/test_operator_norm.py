"""Operator norms: dense and Lanczos against singular values, and their errors when they fail."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meanfield.linalg import Dense, Lanczos, LinearMap, operator_norm
from meanfield.linalg.norms import largest_block_norm

F64 = torch.float64

both_solvers = pytest.mark.parametrize(
    "solver", [Dense(), Lanczos()], ids=lambda solver: type(solver).__name__
)


def as_map(matrices: torch.Tensor, in_shape, out_shape, **extra) -> LinearMap:
    batch = matrices.shape[:-2]

    def matvec(e):
        return (matrices @ e.reshape(*batch, -1, 1)).reshape(*batch, *out_shape)

    def rmatvec(z):
        return (matrices.mT @ z.reshape(*batch, -1, 1)).reshape(*batch, *in_shape)

    return LinearMap(
        matvec, rmatvec, in_shape, out_shape, batch_shape=batch, dtype=matrices.dtype, **extra
    )


def random_matrices(seed: int, batch, rows: int, columns: int, decay: float) -> torch.Tensor:
    """With singular values e^{−decay·k}: from clustered to dominated by one."""
    generator = torch.Generator().manual_seed(seed)
    full = torch.randn(*batch, rows, columns, dtype=F64, generator=generator)
    u, s, vh = torch.linalg.svd(full, full_matrices=False)
    s = torch.exp(-decay * torch.arange(s.shape[-1], dtype=F64)).expand(s.shape)
    return u @ (s[..., None] * vh)


@both_solvers
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    decay=st.sampled_from([0.0, 1e-3, 0.1, 3.0]),
    log_scale=st.sampled_from([-300, 0, 250]),
)
def test_both_methods_give_the_largest_singular_value(
    seed, rows, columns, decay, log_scale, solver
):
    scale = 10.0**log_scale
    matrices = scale * random_matrices(seed, (3,), 2 * rows, 3 * columns, decay)
    linear_map = as_map(matrices, (columns, 3), (rows, 2))
    found = operator_norm(linear_map, solver=solver, rtol=1e-11)
    torch.testing.assert_close(found.value / scale, torch.ones(3, dtype=F64), rtol=1e-10, atol=0)
    image = linear_map.matvec(found.direction) / scale
    torch.testing.assert_close(torch.linalg.vector_norm(image, dim=(-2, -1)), found.value / scale)


# One matrix, and so many that they are scaled and their Gram matrices are factored.
few_and_many = pytest.mark.parametrize("count", [1, 100])


@few_and_many
@pytest.mark.parametrize("shape", [(3, 2), (2, 3)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "entry"),
    [
        (torch.float32, 3.3e38),
        (torch.float32, 1e-38),
        (torch.float32, 1e-45),
        (F64, 1.7e308),
        (F64, 5e-324),
        (F64, 0.0),
    ],
    ids=str,
)
def test_norms_are_right_at_the_ends_of_the_number_range(dtype, entry, shape, count):
    matrix = torch.zeros(shape, dtype=dtype)
    matrix[0, 0], matrix[1, 1] = -entry, entry / 2
    estimate = operator_norm(LinearMap.pointwise(matrix.expand(count, 1, *shape)))
    assert (estimate.value == matrix.abs().max()).all() and (estimate.residual == 0).all()
    assert (estimate.upper <= estimate.value * (1 + 1e-4)).all()


@few_and_many
@pytest.mark.parametrize("entry", [math.inf, math.nan])
def test_entries_beyond_the_number_range_are_said_to_be(entry, count):
    matrices = torch.full((count, 2, 2), entry, dtype=F64)
    with pytest.raises(OverflowError, match="range of torch.float64"):
        operator_norm(as_map(matrices, (2, 1), (2, 1)), solver=Dense())
    with pytest.raises(OverflowError, match="range of torch.float64"):
        largest_block_norm(as_map(matrices[None], (1, 2), (1, 2)), solver=Dense())


@pytest.mark.parametrize("solver", ["lanczos", Lanczos, 300], ids=str)
def test_what_is_no_solver_is_refused(solver):
    for norm in (operator_norm, largest_block_norm):
        with pytest.raises(
            TypeError, match=r"solver: expected None, or a NormSolver such as Dense"
        ):
            norm(as_map(torch.eye(2), (2, 1), (2, 1)), solver=solver)


@both_solvers
@given(
    seed=st.integers(0, 10**6),
    blocks=st.sampled_from([1, 2, 4, 7, 12, 25]),
    spread=st.sampled_from([0.0, 1.0, 30]),
)
def test_the_largest_block_is_the_norm_of_the_block_diagonal(seed, blocks, spread, solver):
    generator = torch.Generator().manual_seed(seed)
    matrices = torch.randn(2, blocks, 3, 4, dtype=F64, generator=generator)
    matrices *= (spread * torch.randn(2, blocks, 1, 1, dtype=F64, generator=generator)).exp()
    linear_map = as_map(matrices, (1, 4), (1, 3))
    found, block = largest_block_norm(linear_map, solver=solver, rtol=1e-9)
    norms = torch.linalg.svdvals(matrices)[..., 0]
    expected, index = norms.max(-1)
    torch.testing.assert_close(found.value, expected)
    torch.testing.assert_close(norms.gather(-1, block[..., None]).squeeze(-1), expected)
    inside = matrices.gather(-3, index[..., None, None, None].expand(2, 1, 3, 4)).squeeze(-3)
    image = (inside @ found.direction.mT).squeeze(-1)
    torch.testing.assert_close(torch.linalg.vector_norm(image, dim=-1), expected)


def test_blocks_of_a_transformers_width_are_not_assembled():
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(2, 384, 384, dtype=F64, generator=generator)
    linear_map = as_map(matrices, (1, 384), (1, 384))
    found, _ = largest_block_norm(linear_map)
    assert 0 < found.n_matvecs < 384
    expected = torch.linalg.matrix_norm(matrices, 2).max()
    torch.testing.assert_close(found.value, expected, rtol=1e-4, atol=0)


def test_a_small_block_of_clustered_values_is_not_waited_for():
    small = torch.linspace(1.0, 0.9, 300, dtype=F64)
    matrices = torch.stack([torch.cat([small.new_tensor([3.0]), small[1:]]), small]).diag_embed()
    linear_map = as_map(matrices, (1, 300), (1, 300))
    found, block = largest_block_norm(linear_map, solver=Lanczos())
    assert found.converged and block == 0
    assert found.n_matvecs < 0.6 * operator_norm(linear_map, solver=Lanczos()).n_matvecs


@pytest.mark.parametrize(
    ("batch", "size", "is_factored"),
    [((), 320, True), ((), 400, False), ((8,), 256, False), ((4,), 128, True), ((400,), 48, True)],
)
def test_small_maps_are_factored_if_they_are_few(batch, size, is_factored):
    matrices = random_matrices(0, batch, size, size, 0.1)
    linear_map = as_map(matrices, (size, 1), (size, 1))
    with torch.no_grad():
        found = operator_norm(linear_map)
    assert (found.miss == 0) == is_factored
    torch.testing.assert_close(found.value, torch.ones(batch, dtype=F64), rtol=1e-4, atol=0)
    assert bool((found.upper >= 1 - 1e-12).all()) and bool(found.converged.all())


def test_a_gradient_goes_through_batches_that_an_iteration_would_take():
    matrices = random_matrices(0, (8,), 256, 256, 0.1).requires_grad_()
    value = operator_norm(as_map(matrices, (256, 1), (256, 1))).value
    (gradient,) = torch.autograd.grad(value.sum(), matrices)
    torch.testing.assert_close(
        gradient.square().sum((1, 2)), torch.ones(8, dtype=F64), rtol=1e-9, atol=0
    )


def test_large_batches_are_factored_in_pieces_and_the_thread_number_is_kept():
    matrices = random_matrices(2, (3001,), 6, 5, 0.3)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = operator_norm(as_map(matrices, (5, 1), (3, 2)), solver=Dense())
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(found.value, torch.ones(3001, dtype=F64))


# ------------------------------------------------------------------ many factorisations


@pytest.mark.parametrize(("count", "n"), [(1100, 2), (300, 4), (20, 16), (3, 70)])
@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_factorisations_of_many_matrices_are_those_of_lapack(count, n, dtype):
    generator = torch.Generator().manual_seed(n)
    matrices = torch.randn(count, n, n, generator=generator, dtype=dtype)
    matrices[0] = 0.0
    matrices[1] = torch.eye(n, dtype=dtype)  # every vector is a top one
    found = operator_norm(LinearMap.pointwise(matrices[:, None]), solver=Dense())
    room = 32 * n * torch.finfo(dtype).eps
    truth = torch.linalg.matrix_norm(matrices, 2)
    torch.testing.assert_close(found.value, truth, rtol=room, atol=0)
    assert float(found.residual.max()) < room and bool(found.converged.all())


@pytest.mark.parametrize("upper_rtol", [3e-4, 5e-4, 1e-3])
def test_an_upper_end_with_its_rounding_is_as_near_as_asked(upper_rtol):
    """The iteration goes on until it is, so that the answer converges."""
    for seed in range(8):
        matrix = random_matrices(seed, (), 200, 200, 0.01).float()
        linear_map = as_map(matrix, (200, 1), (200, 1))
        found = operator_norm(linear_map, solver=Lanczos(), upper_rtol=upper_rtol)
        assert float(found.upper) <= (1 + upper_rtol) * float(found.value)


def test_the_upper_end_of_few_rows_counts_the_length_of_their_sums():
    n = 100_000
    J = LinearMap.pointwise(torch.full((1, 1, n), 1 / 3))
    found = operator_norm(J, solver=Dense(), strict=False)
    assert float(found.upper) >= n**0.5 / 3


@pytest.mark.parametrize(("dtype", "usual"), [(torch.float32, 1e-3), (F64, 1e-9)])
def test_no_smaller_miss_is_promised_than_rounding_hides(dtype, usual):
    J = LinearMap.pointwise(torch.diag(torch.linspace(1, 2, 60, dtype=dtype))[None])
    found = operator_norm(J, solver=Lanczos(miss=1e-20), strict=False)
    assert found.miss > (1e-6 if dtype == torch.float32 else 1e-12)
    for miss, promised in ((0.01, 0.01), (None, usual)):
        assert operator_norm(J, solver=Lanczos(miss=miss), rtol=1e-3).miss == promised


def test_complex_vectors_keep_their_imaginary_parts():
    A = LinearMap.pointwise(torch.tensor([[[0.0, -1.0], [1.0, 0.0]]]).double()).to_scipy()
    np.testing.assert_array_equal(A @ np.array([1, 1j]), [-1j, 1])
    np.testing.assert_array_equal(A.H @ np.array([1, 1j]), [1j, -1])
