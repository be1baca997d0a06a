"""Operator norms: dense and Lanczos against singular values, and their errors when they fail."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meanfield.errors import ConvergenceError
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


def test_the_residual_bounds_the_distance_to_a_singular_value():
    matrices = random_matrices(3, (4,), 60, 60, 0.01)
    linear_map = as_map(matrices, (20, 3), (20, 3))
    for steps in (2, 5, 10, 20):
        found = operator_norm(linear_map, solver=Lanczos(max_steps=steps), rtol=0, strict=False)
        values = torch.linalg.svdvals(matrices)
        distance = (values - found.value[:, None]).abs().amin(-1)
        assert (distance <= found.residual * found.value * (1 + 1e-12)).all()
        assert (found.value <= values[:, 0] * (1 + 1e-12)).all()
        assert not found.converged.any()


def test_the_residual_is_that_of_the_singular_triple():
    matrices = random_matrices(5, (), 30, 24, 0.02)
    linear_map = as_map(matrices, (8, 3), (10, 3))
    found = operator_norm(linear_map, solver=Lanczos(max_steps=6), rtol=0, strict=False)
    v = found.direction.flatten()
    u = matrices @ v / found.value
    defect = torch.linalg.vector_norm(matrices.mT @ u - found.value * v) / found.value
    torch.testing.assert_close(found.residual, defect)


def test_not_converged_raises_or_is_flagged():
    matrices = random_matrices(0, (2,), 40, 40, 1e-3)
    linear_map = as_map(matrices, (40, 1), (40, 1))
    settings = {"solver": Lanczos(max_steps=2), "rtol": 1e-10}
    with pytest.raises(
        ConvergenceError, match=r"error .* is above rtol = 1.00e-10 \(4 rtol\) after 3"
    ):
        operator_norm(linear_map, **settings)
    assert not operator_norm(linear_map, **settings, strict=False).converged.any()


@both_solvers
def test_the_zero_map_has_norm_zero(solver):
    found = operator_norm(as_map(torch.zeros(2, 6, 4, dtype=F64), (4, 1), (6, 1)), solver=solver)
    assert found.value.tolist() == [0.0, 0.0]
    assert found.converged.all()


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
    assert torch.isfinite(estimate.upper).all() or entry > 1e307


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


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6))
def test_blocks_that_cannot_be_the_largest_need_not_converge(seed):
    generator = torch.Generator().manual_seed(seed)
    matrices = torch.randn(2, 40, 12, 14, dtype=F64, generator=generator)
    linear_map = as_map(matrices, (1, 14), (1, 12))
    expected, index = torch.linalg.svdvals(matrices)[..., 0].max(-1)
    found, block = largest_block_norm(linear_map, solver=Lanczos(), rtol=1e-4)
    # Two blocks may be closer to each other than the accuracy asked for.
    torch.testing.assert_close(found.value, expected, rtol=1e-4, atol=0)
    every = operator_norm(linear_map, solver=Lanczos(), rtol=1e-4)
    assert found.n_matvecs <= every.n_matvecs
    assert index.shape == block.shape


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


def test_single_precision_is_right_to_its_digits():
    matrices = random_matrices(1, (2,), 50, 50, 0.05).float()
    for solver in (Dense(), Lanczos()):
        found = operator_norm(as_map(matrices, (50, 1), (50, 1)), solver=solver, rtol=1e-3)
        assert found.value.dtype == torch.float32
        torch.testing.assert_close(found.value, torch.ones(2), rtol=1e-5, atol=0)


def test_large_batches_are_factored_in_pieces_and_the_thread_number_is_kept():
    matrices = random_matrices(2, (3000,), 6, 5, 0.3)
    threads = torch.get_num_threads()
    found = operator_norm(as_map(matrices, (5, 1), (3, 2)), solver=Dense())
    torch.testing.assert_close(found.value, torch.ones(3000, dtype=F64))
    assert torch.get_num_threads() == threads


# --- the largest singular values ---

SPECTRA = {
    "apart": [5.0, 3.0, 2.0, 1.0, 0.5, 0.25],
    "repeated": [2.0, 2.0, 2.0, 1.0, 1.0, 0.5],
    "clustered": [2.0, 2.0 - 1e-9, 2.0 - 2e-9, 1.0, 1.0 - 1e-9, 0.5],
    "all equal": [1.0] * 12,
    "rank two": [3.0, 1.0],
}


def with_spectrum(values: list[float], batch: tuple[int, ...], rows: int, columns: int):
    u = torch.linalg.qr(torch.randn(*batch, rows, rows, dtype=F64))[0]
    v = torch.linalg.qr(torch.randn(*batch, columns, columns, dtype=F64))[0]
    s = torch.zeros(rows, columns, dtype=F64)
    s.diagonal()[: len(values)] = torch.tensor(values, dtype=F64)
    return u @ s @ v.mT


def test_the_upper_end_of_a_factorisation_is_above_the_norm_and_hugs_it():
    generator = torch.Generator().manual_seed(3)
    matrices = torch.randn(500, 6, 4, generator=generator)
    estimate = operator_norm(LinearMap.pointwise(matrices[:, None]))
    truth = torch.linalg.matrix_norm(matrices.double(), 2)
    assert (estimate.upper.double() >= truth).all()
    assert (estimate.upper.double() <= (1 + 1e-5) * truth).all()


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
