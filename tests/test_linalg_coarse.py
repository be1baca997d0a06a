"""A coarse model of a linear map: what it corrects, and that nothing rests on it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meanfield.linalg import CoarseSpace, LinearMap, operator_norm
from meanfield.linalg.bidiagonalisation import Bidiagonalisation
from meanfield.linalg.coarse import CoarseModel
from meanfield.linalg.davidson import Davidson
from meanfield.linalg.ritz import top_ritz

F64 = torch.float64
N, D, P = 14, 30, 2


def crowded(seed: int, batch: tuple[int, ...] = (), noise: float = 0.02) -> torch.Tensor:
    """C ⊗ M and noise: C dominated by one shape, M with many values close to the top."""
    generator = torch.Generator().manual_seed(seed)

    def orthogonal(size: int) -> torch.Tensor:
        return torch.linalg.qr(torch.randn(*batch, size, size, dtype=F64, generator=generator)).Q

    shapes = torch.cat([torch.ones(1, dtype=F64), 0.5 * torch.rand(N - 1, generator=generator)])
    features = 1 - 0.004 * torch.arange(D, dtype=F64)
    C = orthogonal(N) @ (shapes[:, None] * orthogonal(N))
    M = orthogonal(D) @ (features[:, None] * orthogonal(D))
    whole = torch.einsum("...ij,...ab->...iajb", C, M).reshape(*batch, N * D, N * D)
    disturbance = torch.randn(*batch, N * D, N * D, dtype=F64, generator=generator)
    return whole + noise * disturbance / math.sqrt(N * D)


def coarse(matrix: torch.Tensor, shapes: torch.Tensor, factor: float = 1.0) -> CoarseSpace:
    """The exact ZᵀJΦ, times a factor, with the Z of the largest images."""
    batch, p = matrix.shape[:-2], shapes.shape[-1]
    images = matrix.unflatten(-1, (N, D)).transpose(-2, -1) @ shapes[..., None, :, :]
    # (*batch, N·D, D, p): by output atom.
    by_atom = images.unflatten(-3, (N, D)).flatten(-3)
    Z = torch.linalg.svd(by_atom, full_matrices=False)[0][..., :p]
    model = torch.einsum("...ns,...naxr->...sarx", Z, images.unflatten(-3, (N, D)))
    model = factor * model.flatten(-4, -3).flatten(-2)
    return CoarseSpace(
        shapes,
        lambda y: (model @ y.flatten(-2)[..., None]).reshape(len(y), *batch, p, D),
        lambda z: (model.mT @ z.flatten(-2)[..., None]).reshape(len(z), *batch, p, D),
        (p, D),
        (p, D),
    )


def top_shapes(matrix: torch.Tensor) -> torch.Tensor:
    """The shapes over the particles of the map's top right singular vector."""
    v = torch.linalg.svd(matrix)[2][..., 0, :].unflatten(-1, (N, D))
    return torch.linalg.svd(v)[0][..., :P]


def as_map(matrix: torch.Tensor, space: CoarseSpace | None) -> LinearMap:
    batch = matrix.shape[:-2]
    return LinearMap(
        matvec=lambda x: (matrix @ x.reshape(*batch, -1, 1)).reshape(*batch, N, D),
        rmatvec=lambda z: (matrix.mT @ z.reshape(*batch, -1, 1)).reshape(*batch, N, D),
        in_shape=(N, D),
        out_shape=(N, D),
        batch_shape=batch,
        dtype=matrix.dtype,
        coarse=None if space is None else lambda: space,
    )


@pytest.mark.parametrize("batch", [(), (3,)])
def test_corrections_find_a_crowded_top_in_fewer_steps(batch):
    matrix = crowded(1, batch)
    exact = torch.linalg.matrix_norm(matrix, 2)
    with_model = as_map(matrix, coarse(matrix, top_shapes(matrix)))
    settings = {"method": "lanczos", "rtol": 1e-6}
    found = operator_norm(with_model, **settings)
    plain = operator_norm(as_map(matrix, None), **settings)
    assert found.n_matvecs < 0.7 * plain.n_matvecs
    for estimate in (found, plain):
        torch.testing.assert_close(estimate.value, exact, rtol=2e-6, atol=0)
        assert (estimate.value <= exact * (1 + 1e-12)).all()
        assert (estimate.upper >= exact * (1 - 1e-12)).all()


@pytest.mark.parametrize("scale", [1.0, 0.0])
def test_a_batch_with_a_map_that_is_done_before_the_corrections(scale):
    """Of rank one, or zero: its vectors come to an end, and the others go on."""
    matrix = crowded(9, (2,))
    generator = torch.Generator().manual_seed(9)
    u, v = torch.randn(2, N, D, dtype=F64, generator=generator)
    x, y = torch.randn(N, generator=generator), torch.randn(D, generator=generator)
    v = (x[:, None] * y).to(F64)
    matrix[1] = scale * u.flatten()[:, None] * v.flatten() / u.norm() / v.norm()
    found = operator_norm(
        as_map(matrix, coarse(matrix, top_shapes(matrix))), method="lanczos", rtol=1e-8
    )
    exact = torch.linalg.matrix_norm(matrix, 2)
    torch.testing.assert_close(found.value, exact, rtol=1e-8, atol=0)
    assert found.converged.all()
    assert torch.isfinite(found.direction).all()


def test_residuals_and_errors_are_those_of_the_triple_that_comes_back():
    matrix = crowded(2)
    space = coarse(matrix, top_shapes(matrix))
    exact = float(torch.linalg.matrix_norm(matrix, 2))
    # 9 and more steps: after the Krylov space.
    for steps in (9, 10, 12, 14):
        found = operator_norm(
            as_map(matrix, space), method="lanczos", rtol=0.0, max_steps=steps, strict=False
        )
        v, sigma = found.direction.flatten(), float(found.value)
        u = matrix @ v / sigma
        assert float(v.norm()) == pytest.approx(1.0, abs=1e-12)
        assert float((matrix @ v).norm()) == pytest.approx(sigma, rel=1e-12)
        defect = float((matrix.mT @ u - sigma * v).norm()) / sigma
        assert float(found.residual) == pytest.approx(defect, rel=1e-6, abs=1e-13)
        assert 1 - sigma / exact <= float(found.error) * (1 + 1e-9) + 1e-13
        assert found.n_matvecs == steps
        assert not bool(found.converged)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_the_factorisation_holds_after_every_correction(dtype):
    matrix = crowded(3, (2,)).to(dtype)
    space = coarse(matrix, top_shapes(matrix))
    linear_map = as_map(matrix, space)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(2, N * D, dtype=dtype, generator=generator)
    process = Bidiagonalisation(linear_map, start / start.norm(dim=-1, keepdim=True))
    for _ in range(4):
        process.advance()
    corrections = Davidson(process, CoarseModel(space, generator))
    accuracy = {"rtol": 0, "atol": 50 * torch.finfo(dtype).eps}
    for step in range(5, 10):
        corrections.advance()
        assert corrections.size == corrections.products == step
        unit = torch.eye(step, dtype=dtype).expand(2, -1, -1)
        V, U = corrections.right.combine(unit), corrections.left.combine(unit)
        left, values, right, residuals = corrections.triples()
        B = (left @ (values[..., None] * right)).to(dtype)
        torch.testing.assert_close(V @ V.mT, unit, **accuracy)
        torch.testing.assert_close(U @ U.mT, unit, **accuracy)
        torch.testing.assert_close(matrix @ V.mT, U.mT @ B, **accuracy)
        rest = matrix.mT @ U.mT - V.mT @ B.mT
        torch.testing.assert_close(V @ rest, torch.zeros_like(unit), **accuracy)
        true = (rest @ left.to(dtype)).norm(dim=1).double() / values
        torch.testing.assert_close(residuals[:, :2], true[:, :2], rtol=1e-3, atol=1e-5)
        # Of the others upper bounds.
        assert (residuals >= true * (1 - 1e-3) - 1e-5).all()


@pytest.mark.parametrize("factor", [0.0, 0.3, 5.0, -1.0, math.inf])
def test_a_wrong_model_costs_steps_and_nothing_else(factor):
    matrix = crowded(4)
    exact = float(torch.linalg.matrix_norm(matrix, 2))
    space = coarse(matrix, top_shapes(matrix), factor)
    found = operator_norm(as_map(matrix, space), method="lanczos", rtol=1e-6)
    assert float(found.value) == pytest.approx(exact, rel=2e-6)
    assert float(found.value) <= exact * (1 + 1e-12)
    assert float(found.upper) >= exact * (1 - 1e-12)


def test_corrections_that_do_not_help_are_given_up():
    """Right shapes, and features that have nothing to do with the map's."""
    matrix = crowded(7)
    exact = float(torch.linalg.matrix_norm(matrix, 2))
    other = coarse(crowded(8), top_shapes(crowded(8)))
    space = replace(other, shapes=top_shapes(matrix))
    found = operator_norm(as_map(matrix, space), method="lanczos", rtol=1e-6)
    plain = operator_norm(as_map(matrix, None), method="lanczos", rtol=1e-6)
    assert 12 < found.n_matvecs <= plain.n_matvecs + 16
    assert float(found.value) == pytest.approx(exact, rel=2e-6)
    assert exact * (1 - 1e-12) <= float(found.upper) < 1.5 * exact


def test_a_model_that_points_nowhere_near_the_top_is_left():
    """The shapes of the smallest singular vectors: Lanczos goes on as it would without."""
    matrix = crowded(5)
    v = torch.linalg.svd(matrix)[2][-1].unflatten(-1, (N, D))
    space = coarse(matrix, torch.linalg.svd(v)[0][:, :P])
    found = operator_norm(as_map(matrix, space), method="lanczos", rtol=1e-6)
    exact = float(torch.linalg.matrix_norm(matrix, 2))
    assert float(found.value) == pytest.approx(exact, rel=2e-6)
    plain = operator_norm(as_map(matrix, None), method="lanczos", rtol=1e-6)
    assert found.n_matvecs <= plain.n_matvecs + 5


def test_an_upper_end_asked_for_leaves_the_krylov_space_alone():
    """Only that tells how large the norm may be, step by step."""
    matrix = crowded(6)
    linear_map = as_map(matrix, coarse(matrix, top_shapes(matrix)))
    exact = float(torch.linalg.matrix_norm(matrix, 2))
    found = operator_norm(linear_map, method="lanczos", upper_rtol=2e-2)
    assert exact <= float(found.upper) <= 1.02 * float(found.value)
    short = operator_norm(linear_map, method="lanczos", max_basis=10, rtol=1e-6)
    assert float(short.value) == pytest.approx(exact, rel=2e-6)


@given(seed=st.integers(0, 10**6), sigma=st.floats(0.5, 2.0))
def test_the_correction_is_that_of_the_inverse_formed(seed, sigma):
    """t = (σ² − A)⁻¹ (r − εv), ⟨t, v⟩ = 0, up to its length."""
    generator = torch.Generator().manual_seed(seed)
    n, d = 5, 3
    shapes = torch.linalg.qr(torch.randn(n, 2, dtype=F64, generator=generator)).Q
    inner = torch.randn(6, 6, dtype=F64, generator=generator)
    inner = inner / torch.linalg.matrix_norm(inner, 2) * min(sigma, 1.0) * 0.98
    space = CoarseSpace(
        shapes,
        lambda y: (y.flatten(-2) @ inner.mT).reshape(-1, 2, 3),
        lambda z: (z.flatten(-2) @ inner).reshape(-1, 2, 3),
        (2, d),
        (2, 3),
    )
    lifted = torch.einsum("np,de->ndpe", shapes, torch.eye(d, dtype=F64)).reshape(n * d, 2 * d)
    A = lifted @ inner.mT @ inner @ lifted.mT
    r, v = torch.randn(2, n * d, dtype=F64, generator=generator)
    v = v / v.norm()
    shifted = torch.linalg.inv(sigma**2 * torch.eye(n * d, dtype=F64) - A)
    expected = shifted @ (r - (v @ shifted @ r) / (v @ shifted @ v) * v)
    model = CoarseModel(space, generator)
    t = model.corrected(r[None], v[None], torch.tensor([sigma], dtype=F64))[0]
    torch.testing.assert_close(t / t.norm(), expected / expected.norm(), rtol=1e-8, atol=1e-8)
    share = float((lifted.mT @ v).square().sum())
    assert float(model.share(v[None])) == pytest.approx(share)


@given(
    seed=st.integers(0, 10**6),
    rank=st.integers(0, 12),
    block=st.integers(1, 6),
    log_scale=st.sampled_from([-250, 0, 250]),
)
def test_ritz_values_are_lower_bounds_and_their_vectors_orthonormal(seed, rank, block, log_scale):
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(2, 14, rank, dtype=F64, generator=generator)
    A = left @ torch.randn(2, rank, 12, dtype=F64, generator=generator)
    scaled = 10.0**log_scale * A
    start = torch.randn(2, 12, block, dtype=F64, generator=generator)
    values, vectors = top_ritz(lambda x: scaled @ x, lambda z: scaled.mT @ z, start, 12, 1e-10)
    values = values / 10.0**log_scale
    exact = torch.linalg.svdvals(A)
    top = float(exact.max()) if rank else 1.0
    for i in range(min(values.shape[-1], 12)):
        assert (values[:, i] <= exact[:, i] + 1e-7 * top).all()
    torch.testing.assert_close(values[:, 0], exact[:, 0], rtol=1e-5, atol=1e-9)
    gram = vectors @ vectors.mT
    lengths = gram.diagonal(dim1=-2, dim2=-1)
    assert (((lengths - 1).abs() < 1e-6) | (lengths < 1e-6)).all()
    assert (gram - torch.diag_embed(lengths)).abs().max() < 1e-6
