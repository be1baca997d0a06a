"""Products with the linearisation between few atoms, in NumPy, beside the matrices and torch's."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch

from meanfield.attention import (
    AttentionParameters,
    SelfAttention,
    kernels,
    normalizations,
)
from meanfield.attention.small_products import SmallProducts
from meanfield.attention.tangent import AttentionTangent
from meanfield.linalg import Dense, Lanczos, LinearMap, operator_norm
from meanfield.lipschitz import local_lipschitz
from meanfield.measures import ParticleMeasure
from tests.maps import small_maps as small

F64 = torch.float64
KERNELS = {name: kernel for name, kernel in small.KERNELS.items() if kernel.is_linear}
ROWS = {"softmax": normalizations.softmax} | {
    name: small.NORMALIZATIONS[name] for name in ("sigmoid", "sink")
}


def cloud(n: int, weights: str, dtype: torch.dtype = F64) -> ParticleMeasure:
    mu = small.cloud(n=n, absent=weights == "uneven", dtype=dtype)
    logs = None if weights == "uniform" else mu.log_weights
    positions = torch.linspace(0, 1, n, dtype=dtype)  # sorted
    return ParticleMeasure(mu.points, log_weights=logs, positions=positions)


def layer(kernel: str, rows: str, causal: bool, dtype: torch.dtype = F64) -> SelfAttention:
    return small.attention(causal, dtype=dtype, kernel=KERNELS[kernel], normalization=ROWS[rows])


def tangent_of(F: SelfAttention, mu: ParticleMeasure, geometry: str) -> AttentionTangent:
    return AttentionTangent(F.weights(mu), geometry)


# What the products ask: whether rows are shifted (the softmax without gain) and tilts are 1.
ASKED = itertools.product(
    ("dot product", "soft cap"),
    ("softmax", "sigmoid"),
    (False,),
    ("uniform", "uneven"),
    ("euclidean", "wasserstein"),
    (F64, torch.float32),
)
EVERY = itertools.product(KERNELS, ROWS, (True,), ("uneven",), ("wasserstein",), (F64,))


@pytest.mark.parametrize(
    ("kernel", "rows", "causal", "weights", "geometry", "dtype"), [*ASKED, *EVERY]
)
def test_arrays_and_tensors_are_products_with_the_matrix(
    kernel, rows, causal, weights, geometry, dtype
):
    mu = cloud(7, weights, dtype)
    J = tangent_of(layer(kernel, rows, causal, dtype), mu, geometry).as_linear_map()
    forth, back = J.matvec.arrays(), J.rmatvec.arrays()
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(7, 3, generator=generator, dtype=dtype) for _ in range(2))
    held = x.clone(), y.clone()
    dense = J.to_dense()
    room = 400 * torch.finfo(dtype).eps * float(torch.linalg.matrix_norm(dense, 2))
    for given, product, arrays, matrix in (
        (x, J.matvec, forth, dense),
        (y, J.rmatvec, back, dense.mT),
    ):
        wanted = matrix @ given.flatten()
        found = arrays(given.numpy().reshape(1, -1))
        assert found.shape == (1, 21)
        assert found.dtype == given.numpy().dtype
        for one in (torch.from_numpy(found).flatten(), product(given).flatten()):
            torch.testing.assert_close(one, wanted, rtol=0, atol=room)
    assert torch.equal(x, held[0])
    assert torch.equal(y, held[1])


@pytest.mark.parametrize(
    ("weights", "geometry"), [("uniform", "euclidean"), ("uneven", "wasserstein")]
)
def test_rows_that_are_nearly_one_hot_keep_their_digits(weights, geometry):
    """As in tensors: the entry of the largest weight is taken off each row of scores.

    Values do not move here, so that what is left is as small as the other weights.
    """
    eye = torch.eye(3, dtype=F64)
    F = SelfAttention(AttentionParameters(eye[:2], eye[:2], eye[2:].expand(2, 3), eye[:, :2]))
    mu = cloud(12, weights)
    J = tangent_of(F, mu.replace(mu.points * 4), geometry).as_linear_map()
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    x[:, 2] = 0.0
    forth, back = J @ x, J.T @ x
    assert float(forth.abs().amax(-1).min()) < 1e-4
    found = torch.from_numpy(J.matvec.arrays()(x.numpy().reshape(1, -1))).view(12, 3)
    torch.testing.assert_close(found, forth, rtol=1e-11, atol=1e-15)
    found = torch.from_numpy(J.rmatvec.arrays()(x.numpy().reshape(1, -1))).view(12, 3)
    torch.testing.assert_close(found, back, rtol=1e-11, atol=1e-15)


def test_weights_far_below_the_others_are_finite():
    """Tilts and weights of e^-900 and less, in one exponential."""
    logs = torch.tensor([0.0, -900.0, -1.0], dtype=F64).log_softmax(-1)
    points = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]], dtype=F64)
    mu = ParticleMeasure(points, log_weights=logs)
    F = SelfAttention(AttentionParameters.random(2, generator=0))
    J = tangent_of(F, mu, "wasserstein").as_linear_map()
    x = np.ones((1, 6))
    for product, matrix in ((J.matvec, J.to_dense()), (J.rmatvec, J.to_dense().mT)):
        found = product.arrays()(x)
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, x @ matrix.mT.numpy(), rtol=1e-12)


@pytest.mark.parametrize(
    ("why", "at"),
    [
        ("a batch", lambda F, mu: tangent_of(F, mu.expand(3), "euclidean")),
        ("many atoms", lambda F, mu: tangent_of(F, cloud(300, "uniform"), "euclidean")),
        ("unsorted", lambda F, mu: tangent_of(layer("window", "softmax", True), ParticleMeasure(
            mu.points, positions=mu.positions.flip(0)), "euclidean")),
        ("not kept", lambda F, mu: AttentionTangent(F.weights(mu), memory=0)),
        ("in blocks", lambda F, mu: AttentionTangent(F.weights(mu), block_size=2)),
        ("no linear kernel", lambda F, mu: tangent_of(
            SelfAttention(F.parameters, kernel=kernels.l2), mu, "euclidean")),
    ],
)  # fmt: skip
def test_others_have_no_such_form(why, at):
    F, mu = layer("dot product", "softmax", False), cloud(7, "uniform")
    J = at(F, mu).as_linear_map()
    assert J.matvec.arrays() is None, why
    assert J.rmatvec.arrays() is None, why


def test_maps_that_are_made_of_others_take_none_of_their_arrays():
    """A sum that kept the arrays of its first term would be iterated on as that term."""
    F, mu = layer("dot product", "softmax", False), cloud(40, "uneven")
    J = tangent_of(F, mu, "wasserstein").as_linear_map()
    one = LinearMap.identity(J.in_shape)
    for made in (2 * J, J + one, one + J, J @ one, one @ J, J - one):
        truth = float(torch.linalg.matrix_norm(made.to_dense(), 2))
        assert float(operator_norm(made, solver=Lanczos())) == pytest.approx(truth, rel=1e-4)
    turned = operator_norm(J.T, solver=Lanczos())
    assert float(turned) == pytest.approx(float(operator_norm(J, solver=Dense())), rel=1e-4)


def test_a_sinkhorn_layer_has_the_potentials_in_its_products():
    J = small.MAPS["attention, sinkhorn"]().linearize(cloud(40, "uniform"))
    truth = float(torch.linalg.matrix_norm(J.to_dense(), 2))
    assert float(operator_norm(J, solver=Lanczos())) == pytest.approx(truth, rel=1e-4)


@pytest.mark.parametrize("name", ["matvec", "rmatvec"])
@pytest.mark.parametrize("wrong", [0.5, 2.0])
def test_wrong_products_of_arrays_are_not_believed(monkeypatch, name, wrong):
    """The value and the residual are of the map's own products."""
    right = getattr(SmallProducts, name)

    def some_rows(self, vectors):
        out = right(self, vectors)
        out[:, ::2] *= wrong
        return out

    monkeypatch.setattr(SmallProducts, name, some_rows)
    F, mu = layer("dot product", "softmax", False), cloud(40, "uneven")
    J = F.linearize(mu, geometry="wasserstein")
    truth = float(torch.linalg.matrix_norm(J.to_dense(), 2))
    found = operator_norm(J, solver=Lanczos(), strict=False)
    assert float(found.value) <= truth * (1 + 1e-12)
    assert not bool(found.converged)
    sigma = torch.linalg.vector_norm(J @ found.direction)
    torch.testing.assert_close(found.value, sigma)


def test_constants_are_iterated_on_in_arrays(monkeypatch):
    """At tens of atoms, alone and in a map of measures."""
    calls = []
    right = SmallProducts.matvec
    monkeypatch.setattr(
        SmallProducts, "matvec", lambda self, v: calls.append(len(v[0])) or right(self, v)
    )
    F, mu = layer("dot product", "softmax", True), cloud(100, "uneven")
    found = local_lipschitz(F, mu, solver=Lanczos())
    assert calls
    assert set(calls) == {300}
    assert len(calls) < found.n_matvecs
    dense = local_lipschitz(F, mu, solver=Dense())
    assert float(found.particle) == pytest.approx(float(dense.particle), rel=1e-4)
    calls.clear()
    copied = copy.deepcopy(F.linearize(mu))
    assert float(operator_norm(copied, solver=Lanczos())) > 0
    assert calls
