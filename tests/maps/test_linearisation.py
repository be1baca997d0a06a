"""The algebra of linear maps, linearisations of any map of measures, and wrong maps."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from meanfield.errors import NoDerivativeError
from meanfield.layers import Pointwise
from meanfield.linalg import LinearMap
from meanfield.lipschitz import (
    compare_lemma_3_2,
    local_lipschitz,
    localize,
    worst_case,
)
from meanfield.lipschitz.constant import constant_of
from meanfield.maps import linearize
from meanfield.maps.derivative_checks import check_light_atoms
from meanfield.measures import ParticleMeasure, split
from tests.maps import small_maps as small

F64 = torch.float64


def random_map(seed: int, rows=(3, 2), columns=(2, 4), batch=(2,), dense: bool = True):
    generator = torch.Generator().manual_seed(seed)
    size = (math.prod(rows), math.prod(columns))
    matrix = torch.randn(*batch, *size, generator=generator, dtype=F64)

    def product(matrix, shape):
        return lambda x: (matrix @ x.reshape(*batch, -1, 1)).reshape(*batch, *shape)

    J = LinearMap(
        product(matrix, rows),
        product(matrix.mT, columns),
        columns,
        rows,
        torch.Size(batch),
        dense=(lambda part: matrix.reshape(-1, *size)[part]) if dense else None,
    )
    return J, matrix


def same(J: LinearMap, matrix: torch.Tensor) -> None:
    """All that a map can say of itself says the same."""
    torch.testing.assert_close(J.to_dense(), matrix)
    torch.testing.assert_close(small.by_products(J), matrix)
    torch.testing.assert_close(small.by_products(J.T), matrix.mT)
    torch.testing.assert_close(J.T.to_dense(), matrix.mT)
    torch.testing.assert_close(J.T.T.to_dense(), matrix)
    assert (J.rows, J.columns) == tuple(matrix.shape[-2:])
    x = torch.randn(*J.batch_shape, *J.in_shape, dtype=F64)
    wanted = (matrix @ x.reshape(*J.batch_shape, -1, 1)).reshape(*J.batch_shape, *J.out_shape)
    torch.testing.assert_close(J @ x, wanted)


@pytest.mark.parametrize("dense", [True, False])
def test_the_algebra_is_that_of_matrices(dense):
    J, a = random_map(0, dense=dense)
    K, b = random_map(1, dense=dense)
    C, c = random_map(2, (2, 4), (5, 1))
    same(J, a)
    same(J + K, a + b)
    same(J - K, a - b)
    same(-J, -a)
    same(2.5 * J, 2.5 * a)
    same(J * 2, 2 * a)
    same(np.float64(2) * J, 2 * a)
    same(J @ C, a @ c)
    same((J + 2 * K) @ C, (a + 2 * b) @ c)
    same(C.T @ J.T, (a @ c).mT)
    same(J.T @ K, a.mT @ b)


def test_scipy_sees_the_same_map():
    J, a = random_map(0, batch=())
    J = J.T @ J + LinearMap.identity(J.in_shape)
    a = a.mT @ a + torch.eye(8, dtype=F64)
    scipy = J.to_scipy()
    x = np.arange(8.0)
    np.testing.assert_allclose(scipy @ x, a.numpy() @ x)
    np.testing.assert_allclose(scipy.T @ x, a.numpy().T @ x)
    np.testing.assert_allclose(scipy @ np.eye(8), a.numpy())
    K, b = random_map(1, batch=(1,))
    np.testing.assert_allclose(K.to_scipy().rmatvec(np.ones(6)), b[0].numpy().T @ np.ones(6))
    with pytest.raises(ValueError, match="expected one map, got a batch"):
        random_map(0)[0].to_scipy()


def test_identity_diagonal_and_pointwise_maps():
    eye = LinearMap.identity((3, 2), batch_shape=(2,))
    same(eye, torch.eye(6, dtype=F64).expand(2, 6, 6))
    factors = torch.randn(2, 3, 2, dtype=F64)
    same(LinearMap.diagonal(factors), torch.diag_embed(factors.flatten(1)))
    blocks = torch.randn(2, 3, 4, 2, dtype=F64)
    whole = torch.stack([torch.block_diag(*each) for each in blocks])
    same(LinearMap.pointwise(blocks), whole)
    single = LinearMap.identity((2, 1), dtype=torch.float32)
    assert single.to_dense().dtype == torch.float32
    J, a = random_map(0, (3, 2), (3, 2))
    same(eye + J, torch.eye(6, dtype=F64) + a)
    same(LinearMap.pointwise(blocks) @ (eye + J), whole @ (torch.eye(6, dtype=F64) + a))


def test_maps_that_do_not_fit_are_refused():
    J, _ = random_map(0)
    K, _ = random_map(1, (2, 4), (3, 1))
    with pytest.raises(ValueError, match=r"J @ K: expected K to map into \(2, 4\)"):
        J @ J
    with pytest.raises(ValueError, match="J \\+ K: expected two maps"):
        J + K
    with pytest.raises(ValueError, match="expected K with batch_shape"):
        J @ random_map(1, (2, 4), (3, 1), batch=())[0]
    with pytest.raises(ValueError, match="expected K with dtype"):
        J.T @ LinearMap.identity((3, 2), batch_shape=(2,), dtype=torch.float32)
    with pytest.raises(ValueError, match="expected x of shape"):
        J @ torch.zeros(2, 4, dtype=F64)
    for bad in ("J", None, 1j):
        with pytest.raises(TypeError):
            J * bad
        with pytest.raises(TypeError):
            J + bad


# ------------------------------------------------------------------ any map of measures


def test_a_causal_block_that_declares_nothing_serves_every_question():
    G, mu = small.Drift(), small.cloud()
    constant = local_lipschitz(G, mu)
    places = localize(constant, G, mu)
    assert places.heads is None
    assert float(places.particles.sum()) == pytest.approx(1)
    generator = torch.Generator().manual_seed(0)
    found, worst = worst_case(G, 1.5, n_atoms=3, generator=generator, starts=2, steps=2)
    again = local_lipschitz(G, found)
    assert float(again.value) == pytest.approx(float(worst.value), rel=1e-6)
    assert found.positions is not None
    compared = compare_lemma_3_2(G, mu.points, steps=(1e-3, 1e-5))
    top = compared.sel(perturbation="top", step=1e-5)
    value = float(compared["euclidean"])
    assert float(top["euclidean_secant"]) == pytest.approx(value, rel=1e-3)
    assert float(top["wasserstein_secant"]) == pytest.approx(value, rel=1e-3)


def refuse(F, words: str, mu: ParticleMeasure | None = None) -> None:
    for ask in (linearize, local_lipschitz):
        with pytest.raises((ValueError, TypeError), match=words):
            ask(F, small.cloud() if mu is None else mu)


class Cubed(torch.autograd.Function):
    """x³, with a reverse derivative alone."""

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, zeta):
        return 3 * ctx.saved_tensors[0] ** 2 * zeta


CENTRES = torch.tensor([[3.0, 1.0, 0.0], [-2.0, 0.5, 1.0]], dtype=F64)
# What torch has no forward derivative of, or one derivative alone, and the same in its formulas.
REVERSE_ALONE = {
    "autograd.Function": (Cubed.apply, lambda x: x**3),
    "cdist": (lambda x: torch.cdist(x, CENTRES), lambda x: apart(x).norm(dim=-1)),
    "cdist, p = 1": (lambda x: torch.cdist(x, CENTRES, p=1.0), lambda x: apart(x).abs().sum(-1)),
}


def apart(x):
    return x[..., :, None, :] - CENTRES


@pytest.mark.parametrize("kind", REVERSE_ALONE)
@pytest.mark.parametrize("batch", [(), (2,)])
def test_maps_without_a_forward_derivative_are_differentiated_backwards(kind, batch):
    given, formula = REVERSE_ALONE[kind]
    points = torch.randn(*batch, 5, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    logs = torch.arange(5.0, dtype=F64).log_softmax(-1)
    mu = ParticleMeasure(points, log_weights=logs.expand(*batch, 5))
    one, other = (
        linearize(lambda nu, T=T: nu.replace(T(nu.points) + T(nu.mean()[..., None, :])), mu)
        for T in (given, formula)
    )
    alone, formula_alone = (linearize(Pointwise(T), mu) for T in (given, formula))
    for J, K in (
        (one.atoms, other.atoms),
        (one.field, other.field),
        (alone.atoms, formula_alone.atoms),
        (alone.field, formula_alone.field),
    ):
        torch.testing.assert_close(J.to_dense(), K.to_dense())
        same(J, K.to_dense())


def test_a_map_too_large_to_be_differentiated_row_by_row_is_refused_with_what_helps():
    mu = ParticleMeasure(torch.randn(700, 3, dtype=F64))
    with pytest.raises(NotImplementedError, match="write distances as"):
        linearize(lambda nu: nu.replace(torch.cdist(nu.points, CENTRES, p=1.0)), mu)


@pytest.mark.parametrize("n", [5, 1500])
def test_a_map_without_any_derivative_ends_with_what_torch_says_of_it(n):
    class Old(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 3 * x

    with pytest.raises(RuntimeError, match="setup_context"):
        linearize(lambda nu: nu.replace(Old.apply(nu.points)), ParticleMeasure(torch.rand(n, 2)))


def test_maps_without_a_path_for_gradients_are_refused():
    ways = r"mu\.replace\(points\), or pushforward\(T, mu\)"
    refuse(lambda mu: mu.replace(2 * mu.points.detach()), ways)
    refuse(lambda mu: mu.replace(torch.tensor(mu.points.tolist(), dtype=F64)), ".")
    refuse(lambda mu: mu.replace(mu.points * float(mu.points.norm())), ".")
    refuse(lambda mu: mu.replace(mu.points * mu.points.norm().detach()), ways)
    for batch in (1, 3):
        points = torch.randn(batch, 4, 2, dtype=F64)
        refuse(lambda mu: mu.replace(mu.points.detach() ** 2), ways, ParticleMeasure(points))


@pytest.mark.parametrize("function", [lambda x: (1e5 * x).exp(), lambda x: (x - 2).log()])
def test_maps_whose_image_is_not_finite_are_refused_as_such(function):
    with pytest.raises(ValueError, match="expected a finite image, got one with NaN or infinite"):
        linearize(lambda mu: mu.replace(function(mu.points)), ParticleMeasure([[1.0], [2.0]]))


def test_maps_that_change_more_than_points_are_refused():
    ways = r"move points alone: mu\.replace\(points\), or pushforward\(T, mu\)"

    def reweighted(mu):
        logs = torch.zeros(mu.n_particles, dtype=F64)
        return ParticleMeasure(mu.points, log_weights=logs.log_softmax(-1))

    def moved_in_position(mu):
        return ParticleMeasure(mu.points, log_weights=mu.log_weights, positions=0.5 * mu.positions)

    refuse(reweighted, ways)
    refuse(split, ways)
    refuse(lambda mu: ParticleMeasure(mu.points[:-1]), ways)
    refuse(lambda mu: ParticleMeasure(mu.points, log_weights=mu.log_weights), ways)
    refuse(moved_in_position, ways)
    refuse(lambda mu: mu.points, r"expected a map that returns a ParticleMeasure, got .*Tensor")
    refuse(3, "expected a map of measures")
    logs = torch.tensor([0.0, -900, 0.0], dtype=F64).log_softmax(-1)

    def lighter(mu):
        return ParticleMeasure(
            2 * mu.points, log_weights=mu.log_weights - torch.tensor([0, 50.0, 0], dtype=F64)
        )

    refuse(lighter, ways, ParticleMeasure(torch.eye(3, dtype=F64), log_weights=logs))


def test_a_wrong_transpose_is_refused():
    refuse(lambda mu: mu.replace(small.Turned.apply(mu.points)), "forward and reverse derivatives")


def recentred(mu: ParticleMeasure) -> ParticleMeasure:
    """Attention whose keys are measured from their unweighted mean, which a softmax takes off."""
    x = mu.points
    scores = x @ (x - x.mean(0)).mT + mu.log_weights
    return mu.replace(scores.softmax(-1) @ x)


def beside_a_light_atom(seed: int, log_weight: float) -> ParticleMeasure:
    points = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed), dtype=F64)
    logs = torch.tensor([0.0, 0.0, 0.0, 0.0, log_weight], dtype=F64)
    return ParticleMeasure(points, log_weights=logs.log_softmax(0))


@pytest.mark.parametrize("log_weight", [-75.0, -900.0])
def test_rounding_is_not_multiplied_by_light_atoms(log_weight: float) -> None:
    """On some of these clouds rounding vanishes along one random direction: one is not enough."""
    for seed in range(60):
        mu = beside_a_light_atom(seed, log_weight)
        with pytest.raises(NoDerivativeError, match="rounding"):
            linearize(recentred, mu, geometry="wasserstein")
    plain = linearize(recentred, mu).atoms.to_dense()
    assert plain.abs().max() < 20

    def direct(mu: ParticleMeasure) -> ParticleMeasure:
        scores = mu.points @ mu.points.mT + mu.log_weights
        return mu.replace(scores.softmax(-1) @ mu.points)

    heavy = ParticleMeasure(mu.points[:4])
    found = linearize(direct, mu, geometry="wasserstein").atoms.to_dense()
    expected = linearize(direct, heavy, geometry="wasserstein").atoms.to_dense()
    torch.testing.assert_close(found[:12, :12], expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_rounding_in_one_direction_of_the_products_is_enough_to_refuse(transposed: bool) -> None:
    """The heavy atoms see the light one by J alone, or by its transpose alone."""
    mu = beside_a_light_atom(0, -75.0)
    right = LinearMap.identity((5, 3))

    def wrong(vectors: torch.Tensor) -> torch.Tensor:
        return vectors + 1e-3 * vectors.flip(0)

    J = replace(right, **{"rmatvec" if transposed else "matvec": wrong})
    check_light_atoms("F", mu, mu, right)
    with pytest.raises(NoDerivativeError, match="rounding"):
        check_light_atoms("F", mu, mu, J)
    heavy = ParticleMeasure(mu.points)
    check_light_atoms("F", heavy, heavy, J)  # nothing is light
    other = torch.zeros(5, 3, dtype=F64)
    other[2] = 1.0
    check_light_atoms("F", mu, mu, J, other)  # nothing of it is seen along this direction
    with pytest.raises(NoDerivativeError, match="rounding"):
        check_light_atoms("F", mu, mu, J, torch.ones_like(other))


def test_the_vector_that_attains_a_constant_is_asked_as_well() -> None:
    mu = ParticleMeasure(torch.eye(3, dtype=F64))
    at, asked = linearize(small.attention(), mu, geometry="wasserstein"), []
    constant = constant_of(replace(at, check_direction=asked.append))
    assert len(asked) == 1
    torch.testing.assert_close(asked[0], constant.direction)
