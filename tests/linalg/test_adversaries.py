"""Norms with parts that are wrong on purpose, misleading spectra, and random layers."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch

from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.linalg import (
    Lanczos,
    LinearMap,
    bidiagonalisation,
    certify,
    dense,
    krylov,
    operator_norm,
)
from meanfield.linalg.bidiagonalisation import Basis, Bidiagonalisation, lengths_of
from meanfield.linalg.norms import largest_block_norm
from meanfield.lipschitz import local_lipschitz
from meanfield.maps import linearize
from meanfield.measures import ParticleMeasure
from tests import oracles

F64 = torch.float64


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ------------------------------------------------------------------ wrong parts


@pytest.fixture(params=["arrays", "tensors"])
def kind(request, monkeypatch):
    """Vectors of an iteration on the host: small ones are arrays, unless none counts as small."""
    if request.param == "tensors":
        monkeypatch.setattr(bidiagonalisation, "_FEW_ENTRIES", 0)
    return np.asarray if request.param == "arrays" else torch.as_tensor


def _no_orthogonalisation(self, vectors, **_):
    length = torch.linalg.vector_norm(vectors, dim=-1)
    return vectors, length, length


def _against_the_newest_alone(self, vectors, **_):
    newest = torch.as_tensor(self.newest()) if self.count else torch.zeros_like(vectors)
    share = (newest * vectors).sum(-1, keepdim=True)
    rest = vectors - share * newest
    length = torch.linalg.vector_norm(rest, dim=-1)
    return rest, length, torch.hypot(share[:, 0], length)


def _noise_instead(self, vectors, **_):
    noise = torch.randn(vectors.shape, generator=seeded(int(self.count)), dtype=vectors.dtype)
    length = torch.linalg.vector_norm(vectors, dim=-1)
    return noise, torch.linalg.vector_norm(noise, dim=-1), length


@pytest.mark.parametrize(
    "wrong", [_no_orthogonalisation, _against_the_newest_alone, _noise_instead]
)
def test_value_and_residual_do_not_believe_the_basis(monkeypatch, wrong, kind):
    """They are measured by products made for it, whatever the iteration thinks it did."""

    def remainder(self, vectors, **how):
        return tuple(kind(part) for part in wrong(self, torch.as_tensor(vectors), **how))

    monkeypatch.setattr(Basis, "remainder", remainder)
    matrix = torch.randn(60, 50, generator=seeded(0), dtype=F64)
    J = LinearMap(
        lambda x: (matrix @ x[..., 0])[:, None],
        lambda y: (matrix.mT @ y[..., 0])[:, None],
        (50, 1),
        (60, 1),
    )
    found = operator_norm(J, solver=Lanczos(max_steps=40), strict=False)
    v = found.direction[:, 0]
    assert float(torch.linalg.vector_norm(v)) == pytest.approx(1, rel=1e-12)
    sigma = torch.linalg.vector_norm(matrix @ v)
    torch.testing.assert_close(found.value, sigma)
    defect = torch.linalg.vector_norm(matrix.mT @ (matrix @ v) / sigma - sigma * v) / sigma
    torch.testing.assert_close(found.residual, defect, rtol=1e-6, atol=1e-14)
    truth = torch.linalg.svdvals(matrix)
    assert float(found.value) <= float(truth[0]) * (1 + 1e-12)
    assert float((truth - sigma).abs().min()) <= float(defect * sigma) * (1 + 1e-9)
    if bool(found.converged):
        assert float(found.value) >= float(truth[0]) * (1 - 1e-3)


def test_vectors_nearly_in_the_span_are_made_orthogonal_twice(kind):
    """What one pass leaves is eps over the remainder's share, here 1e-6."""
    generator = seeded(2)
    grown = Basis(2, kind(torch.empty(0, dtype=F64)))
    for _ in range(20):
        grown.extend(kind(torch.randn(2, 50, generator=generator, dtype=F64)))
    for _ in range(5):
        held = grown.combine(torch.eye(grown.count, dtype=F64).expand(2, -1, -1))
        shares = torch.randn(2, 1, grown.count, generator=generator, dtype=F64)
        noise = 1e-10 * torch.randn(2, 50, generator=generator, dtype=F64)
        length, limit = lengths_of(*grown.extend(kind((shares @ held)[:, 0] + noise)))
        assert ((length > 1e-11) & (length < 1e-8)).all()
        assert (limit >= length).all()
    held = grown.combine(torch.eye(grown.count, dtype=F64).expand(2, -1, -1))
    eye = torch.eye(grown.count, dtype=F64).expand(2, -1, -1)
    torch.testing.assert_close(held @ held.mT, eye, rtol=0, atol=1e-13)


def test_what_the_basis_spans_already_leaves_nothing_but_a_limit(kind):
    grown = Basis(1, kind(torch.empty(0, dtype=F64)))
    grown.extend(kind(torch.tensor([[3.0, 4.0, 0.0]], dtype=F64)))
    length, limit = lengths_of(*grown.extend(kind(torch.tensor([[6.0, 8.0, 0.0]], dtype=F64))))
    assert length.item() == 0.0
    assert 0 < limit.item() < 1e-12
    assert not grown.newest().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_arrays_and_tensors_find_the_same(monkeypatch, dtype, batch):
    """The value and its evidence, of small maps on the host and as elsewhere."""
    matrices = torch.randn(*batch, 40, 60, generator=seeded(3), dtype=dtype)
    J = LinearMap(
        lambda x: matrices @ x, lambda y: matrices.mT @ y, (60, 1), (40, 1), batch, dtype=dtype
    )
    solver, eps = Lanczos(generator=1), torch.finfo(dtype).eps
    found = operator_norm(J, solver=solver)
    monkeypatch.setattr(bidiagonalisation, "_FEW_ENTRIES", 0)
    other = operator_norm(J, solver=solver)
    assert found.n_matvecs == other.n_matvecs
    for name in ("value", "upper", "direction"):
        rtol = 1e-3 if name == "direction" else 100 * eps
        torch.testing.assert_close(
            getattr(found, name), getattr(other, name), rtol=rtol, atol=1e-3 * (rtol == 1e-3)
        )
    truth = torch.linalg.matrix_norm(matrices, 2)
    torch.testing.assert_close(found.value, truth, rtol=1e-3, atol=0)


@pytest.mark.parametrize("kept", [math.nan, math.inf])
def test_products_that_are_not_finite_are_refused_of_either_kind(kind, kept):
    J = LinearMap(lambda x: kept * x, lambda y: kept * y, (50, 2), (50, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(OverflowError, match="leaves the range"):
            operator_norm(J, solver=Lanczos())


# ------------------------------------------------------------------ blocks


def test_the_upper_end_of_blocks_may_come_from_a_block_that_is_not_the_largest():
    """One block is known at once; a smaller one hides something that its start hardly sees."""
    sharp = torch.zeros(200, dtype=F64)
    sharp[0] = 1.0
    flat = torch.linspace(0.98, 0.5, 200, dtype=F64)
    J = LinearMap.diagonal(torch.stack([sharp, flat])[..., None])

    def solver():
        return Lanczos(max_steps=3, generator=seeded(0))

    candidate, _ = solver().largest(J, 1e-4, math.inf)
    every = certify(J, candidate)
    assert int(every.value.argmax()) == 0
    assert int(every.upper.argmax()) == 1
    found, block = largest_block_norm(J, upper_rtol=math.inf, solver=solver(), strict=False)
    assert int(block) == 0
    assert float(found.upper) == float(every.upper[1])
    sure, block = largest_block_norm(J, upper_rtol=1e-3, solver=Lanczos(generator=seeded(0)))
    assert int(block) == 0
    assert float(sure.upper) <= 1 + 1e-3
    assert sure.n_matvecs > found.n_matvecs


def test_a_block_that_may_be_the_largest_counts_until_it_has_converged():
    sharp = torch.zeros(200, dtype=F64)
    sharp[0] = 1.0
    flat = torch.linspace(1.02, 0.5, 200, dtype=F64)
    J = LinearMap.diagonal(torch.stack([sharp, flat])[..., None])
    found, block = largest_block_norm(
        J, upper_rtol=math.inf, solver=Lanczos(max_steps=4), strict=False
    )
    assert int(block) == 0
    assert not bool(found.converged)
    assert float(found.error) > 1e-4
    whole, block = largest_block_norm(J, solver=Lanczos(), rtol=1e-6)
    assert int(block) == 1
    assert float(whole.value) == pytest.approx(1.02, rel=1e-6)


# ------------------------------------------------------------------ spectra that mislead

SPECTRA = {
    "doublet 3e-4, small rest": torch.cat(
        [torch.tensor([1.0, 1 - 3e-4]), 0.1 * torch.rand(298, generator=seeded(0))]
    ),
    "doublet 3e-4, linear rest": torch.cat(
        [torch.tensor([1.0, 1 - 3e-4]), torch.linspace(0.9, 0, 298)]
    ),
    "plateau 1e-3 below a spike": torch.cat([torch.ones(1), torch.full((299,), 1 - 1e-3)]),
    "plateau 3e-3 below a spike": torch.cat([torch.ones(1), torch.full((299,), 1 - 3e-3)]),
    "plateau 2e-2 below a spike": torch.cat([torch.ones(1), torch.full((299,), 1 - 2e-2)]),
    "linear": torch.linspace(1, 0, 300),
    "geometric": 0.97 ** torch.arange(300),
}


def misled(
    values: torch.Tensor, starts: int, upper_rtol: float = 0.01, **settings
) -> tuple[int, int, float]:
    """How many of so many starts converge more than rtol off, or miss the upper end."""
    J = LinearMap.diagonal(values.double().expand(starts, -1)[..., None])
    solver = Lanczos(generator=seeded(1), **settings)
    found = operator_norm(J, upper_rtol=upper_rtol, solver=solver, strict=False)
    off = 1 - found.value / values.double().max()
    wrong = found.converged & (off > 1e-4)
    missed = found.upper < values.double().max() * (1 - 1e-14)
    return int(wrong.sum()), int(missed.sum()), float(off.max())


@pytest.mark.parametrize("miss", [0.05, 0.3])
@pytest.mark.parametrize("steps", [1, 3, 8])
@pytest.mark.parametrize("spectrum", ["plateau 3e-3 below a spike", "linear", "geometric"])
def test_upper_ends_miss_no_more_often_than_promised(spectrum, steps, miss):
    """With a promise that is broken more often, since one in a thousand is not seen to be."""
    settings = {"max_steps": steps, "upper_rtol": math.inf, "miss": miss}
    _, missed, _ = misled(SPECTRA[spectrum], 1000, **settings)
    assert missed <= 1000 * miss + 4 * math.sqrt(1000 * miss * (1 - miss))


@pytest.mark.parametrize("starts", [30, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_upper_ends_at_the_defaults_hold(spectrum, starts):
    _, missed, off = misled(SPECTRA[spectrum], starts)
    assert missed == 0
    # What has converged is never further off than the upper end lets it be.
    assert off <= 0.01


# ------------------------------------------------------------------ layers


def random_problem(seed: int) -> tuple[SelfAttention, ParticleMeasure]:
    """n = 60 … 150, d = 3 or 4, 1 to 3 heads, plain and causal, four laws of weights."""
    rng, generator = np.random.default_rng(seed), seeded(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=F64)

    n, d, heads = int(rng.integers(60, 151)), int(rng.integers(3, 5)), int(rng.integers(1, 4))
    par = AttentionParameters(
        rng.choice([0.3, 1.0, 1.4]) * draw(heads, d, d),
        draw(heads, d, d),
        draw(heads, d, d),
        draw(heads, d, d),
    )
    points = draw(n, d) * rng.choice([0.5, 1.5, 4.6])
    if rng.random() < 0.25:
        points = draw(5, d)[torch.from_numpy(rng.integers(5, size=n))] + 1e-3 * points
    logs = draw(n) * rng.choice([0.0, 1.0, 5.0])
    if rng.random() < 0.2:
        logs[int(rng.integers(n))] = -900.0
    positions = torch.arange(1, n + 1, dtype=F64) / n
    F = SelfAttention(par, causal=bool(rng.integers(2)))
    return F, ParticleMeasure(points, log_weights=logs.log_softmax(0), positions=positions)


def judged(seed: int, geometry: str) -> tuple[bool, float, bool, bool]:
    """Whether it converged, how far off the particle component is, upper end, field's end."""
    F, mu = random_problem(seed)
    found = local_lipschitz(
        F, mu, geometry=geometry, solver=Lanczos(generator=seeded(seed)), strict=False
    )
    at = linearize(F, mu, geometry=geometry)
    truth = float(torch.linalg.svdvals(at.atoms.to_dense())[0])
    if found.splitting is None:
        held = truth <= float(found.upper) * (1 + 1e-12)
        return bool(found.converged), 1 - float(found.particle) / truth, held, True
    apart = float(torch.linalg.matrix_norm(at.field.to_dense(), 2).max())
    held = max(truth, apart) <= float(found.upper) * (1 + 1e-12)
    off = abs(1 - float(found.splitting) / apart) <= 1e-4
    return bool(found.converged), 1 - float(found.particle) / truth, held, off


def campaign(seeds: range) -> dict[str, list]:
    """Seeds that converged more than rtol off, missed the upper end, or did not converge."""
    out: dict[str, list] = {"wrong": [], "missed": [], "unconverged": [], "field": []}
    for seed in seeds:
        geometry = ("wasserstein", "euclidean")[seed % 2]
        converged, off, held, field = judged(seed, geometry)
        if converged and off > 1e-4:
            out["wrong"].append((seed, off))
        if not held:
            out["missed"].append(seed)
        if not converged:
            out["unconverged"].append(seed)
        if converged and not field:
            out["field"].append(seed)
    return out


def test_random_layers_converge_to_the_norm():
    found = campaign(range(20))
    assert found == {"wrong": [], "missed": [], "unconverged": [], "field": []}


@pytest.mark.slow
def test_two_thousand_random_layers_converge_to_the_norm():
    found = campaign(range(2000))
    assert found["wrong"] == []
    assert found["field"] == []
    assert len(found["missed"]) <= 8


# ------------------------------------------------------------------ the ends of the number range


def causal_layer_with_denormal_tails(seed: int) -> tuple[SelfAttention, ParticleMeasure]:
    generator = seeded(seed)
    q, v, x = (torch.randn(*s, generator=generator) for s in ((4, 4), (4, 4), (8, 4)))
    F = SelfAttention(AttentionParameters.from_bilinear(0.06 * q, v), causal=True)
    return F, ParticleMeasure.from_sequence(35 * x)


@pytest.mark.parametrize(
    "seeds", [range(100, 200), pytest.param(range(600), marks=[pytest.mark.slow])]
)
def test_single_precision_with_denormal_tails_never_raises(seeds):
    """LAPACK's divide and conquer failed on 8 of 600 of these, the first of them seed 103."""
    for seed in seeds:
        F, mu = causal_layer_with_denormal_tails(seed)
        found = local_lipschitz(F, mu)
        dense = linearize(F, mu, geometry="wasserstein").atoms.to_dense().double()
        truth = float(torch.linalg.svdvals(dense)[0])
        assert float(found.particle) == pytest.approx(truth, rel=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1e3, 1e6, 3e7])
@pytest.mark.parametrize("seed", range(3))
def test_logits_up_to_1e15_have_the_derivatives_of_fifty_digits(seed, size, causal):
    """Rows are on one atom; what rounding leaves of the others was multiplied by the logits."""
    rng = np.random.default_rng(seed)
    n, d = 5, 3
    points = size * rng.normal(size=(n, d))
    logs = np.log(rng.dirichlet(np.ones(n)))
    positions = np.array([0.5, 0.1, 0.9, 0.5, 0.3])
    layer = {
        "query": rng.normal(size=(2, d, d)),
        "key": rng.normal(size=(2, d, d)),
        "value": rng.normal(size=(2, d, d)),
        "output": rng.normal(size=(2, d, d)),
    }
    F = SelfAttention(AttentionParameters(**layer), causal=causal)
    mu = ParticleMeasure(points, log_weights=logs, positions=positions)
    at = linearize(F, mu, geometry="wasserstein").atoms
    with oracles.mp.workdps(60):
        wanted = oracles.jacobian(
            oracles.exact(points),
            oracles.exact(mu.log_weights.numpy()),
            oracles.exact_layer(layer),
            positions=oracles.exact(positions),
            causal=causal,
            weighted=True,
        ).astype(float)
    norm = np.linalg.norm(wanted, 2)
    columns = torch.eye(n * d, dtype=F64).reshape(-1, n, d)
    forth = torch.stack([at.matvec(e).flatten() for e in columns], 1).numpy()
    back = torch.stack([at.rmatvec(e).flatten() for e in columns]).numpy()
    for found in (at.to_dense().numpy(), forth, back):
        assert np.abs(found - wanted).max() <= 1e-9 * norm
    found = local_lipschitz(F, mu)
    assert float(found.particle) == pytest.approx(float(norm), rel=1e-9)


def test_the_gap_behind_the_error_allows_for_what_the_second_value_may_still_be():
    """A Ritz value is below its singular value: alone it would make every gap too wide."""
    values = torch.cat([torch.tensor([1.0, 0.95]), torch.linspace(0.9, 0, 98)]).double()
    J = LinearMap.diagonal(values[:, None])
    within = 0
    for seed in range(50):
        start = torch.randn(1, 100, dtype=torch.float64, generator=seeded(seed))
        process = Bidiagonalisation(J, start / start.norm())
        for _ in range(6):
            process.advance()
        _, _, gap, _ = krylov._top_triples(process)
        within += float(gap) <= 1 - 0.95**2
    assert within >= 45


def test_it_stops_at_the_first_look_that_shows_enough():
    """Residuals of 4 rtol do where the gap says that the error is small enough."""
    J = LinearMap.diagonal(
        torch.cat([torch.ones(1), torch.linspace(0.3, 0, 99)])[:, None].double()
    )
    found = operator_norm(J, solver=Lanczos(), rtol=3e-5, upper_rtol=math.inf)
    assert 3e-5 < float(found.residual) <= 12e-5
    assert found.n_matvecs == 5
    again = operator_norm(J, solver=Lanczos(), rtol=1e-8, upper_rtol=math.inf)
    assert float(again.residual) <= 4e-8
    assert again.n_matvecs > 5


def test_without_a_second_value_the_error_is_the_residual():
    J = LinearMap.diagonal(torch.linspace(1, 0.5, 300, dtype=torch.float64)[:, None])
    for steps in (1, 2):
        found = operator_norm(J, solver=Lanczos(max_steps=steps), strict=False)
        assert float(found.error) == float(found.residual) > 0.01


@pytest.mark.parametrize("size", [20, 80])
@pytest.mark.parametrize("failure", ["nan", "error"])
def test_a_factorisation_that_fails_in_single_precision_is_done_again_in_double(
    failure, size, monkeypatch
):
    """LAPACK does both, on some matrices and not always; 80 is beyond torch's own."""
    of_torch, of_scipy, singles = torch.linalg.eigh, dense.eigh, []

    def failing(right, error, single):
        def eigh(matrix, **settings):
            if matrix.dtype != single:
                return right(matrix, **settings)
            singles.append(right)
            if failure == "error":
                raise error("did not converge")
            return tuple(x * math.nan for x in right(matrix, **settings))

        return eigh

    matrix = torch.randn(size, size, generator=seeded(1))
    truth = float(torch.linalg.matrix_norm(matrix.double(), 2))
    by_torch = failing(of_torch, torch.linalg.LinAlgError, torch.float32)
    monkeypatch.setattr(torch.linalg, "eigh", by_torch)
    monkeypatch.setattr(dense, "eigh", failing(of_scipy, np.linalg.LinAlgError, np.float32))
    found = operator_norm(LinearMap.pointwise(matrix[None]))
    assert singles == [of_torch if size == 20 else of_scipy]
    assert float(found.value) == pytest.approx(truth, rel=1e-6) and bool(found.converged)
