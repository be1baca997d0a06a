"""Calls as users of POT, GeomLoss or pandas would write them."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from scipy import sparse

from meanfield.errors import ConvergenceError
from meanfield.measures import ParticleMeasure
from meanfield.transport import (
    Coupling,
    TransportResult,
    sinkhorn_divergence,
    solve_conditional_w2,
    solve_w2,
    solve_wp,
    w1,
    w2,
)

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(6, 2)), RNG.normal(size=(7, 2))
A, B = RNG.dirichlet(np.ones(6)), RNG.dirichlet(np.ones(7))
TRUTH = float(
    solve_w2(
        ParticleMeasure(torch.as_tensor(X), torch.as_tensor(A)),
        ParticleMeasure(torch.as_tensor(Y), torch.as_tensor(B)),
    ).value
)


def test_points_and_weights_as_pairs_or_by_keyword() -> None:
    assert w2((X, A), (Y, B)) == pytest.approx(TRUTH, rel=1e-14)
    assert w2(X, Y, weights=(A, B)) == pytest.approx(TRUTH, rel=1e-14)
    assert w2(X, (Y, B), weights=(A, None)) == pytest.approx(TRUTH, rel=1e-14)
    assert w2((X, A), (Y, B)) ** 2 == pytest.approx(TRUTH**2, rel=1e-14)
    assert float(solve_w2((X, A), (Y, B))) == pytest.approx(TRUTH, rel=1e-14)
    as_tensors = w2((torch.as_tensor(X), torch.as_tensor(A)), (torch.as_tensor(Y), B.tolist()))
    assert float(as_tensors) == pytest.approx(TRUTH, rel=1e-14)
    assert w1(X, Y) == pytest.approx(float(solve_wp(X, Y, 1)), rel=1e-14)


def test_numpy_in_numpy_out() -> None:
    found = solve_w2((X, A), (Y, B))
    assert isinstance(found.value, np.floating)
    assert found.value.dtype == np.float64
    assert isinstance(found.relative_width, np.ndarray | np.floating)
    assert found.potentials is not None
    assert found.coupling is not None
    plan = found.coupling
    arrays = (*found.potentials, plan.rows, plan.log_mass, plan.mass, plan.dense(), plan.source)
    assert all(isinstance(t, np.ndarray) for t in (*arrays, plan.barycentric_map()))
    assert all(isinstance(t, np.ndarray) for t in (*plan.marginals(), *plan.sample(3)))
    assert plan.cost() == pytest.approx(TRUTH**2, rel=1e-12)
    batch = solve_w2(np.stack([X, X + 1]), np.stack([Y, Y]))
    assert isinstance(batch.value, np.ndarray)
    assert batch.value.shape == (2,)
    assert solve_w2(X.astype(np.float32), Y.astype(np.float32)).value.dtype == np.float32
    assert isinstance(sinkhorn_divergence(X, Y, blur=0.5), np.floating)
    assert "TransportResult" in repr(batch)
    # A measure or a tensor on either side: tensors come back.
    assert isinstance(w2(torch.as_tensor(X), Y), torch.Tensor)


def test_the_plan_in_other_forms() -> None:
    plan = solve_w2((X, A), (Y, B)).coupling
    assert plan is not None
    matrix = plan.to_scipy()
    assert sparse.issparse(matrix)
    np.testing.assert_array_equal(matrix.toarray(), plan.dense())
    np.testing.assert_allclose(matrix.sum(0), B, atol=1e-15)
    batch = solve_w2(np.stack([X, X]), np.stack([Y, Y])).coupling
    assert batch is not None
    with pytest.raises(ValueError, match="batch of shape"):
        batch.to_scipy()
    assert batch.dense().shape == (2, 6, 7)


def test_conditional_samples_keep_positions_and_batches_stay_apart() -> None:
    places = torch.arange(6).div(2, rounding_mode="floor").double() / 2
    mu, nu = (
        ParticleMeasure(torch.as_tensor(t), positions=places) for t in (X, X[::-1].copy() + 1)
    )
    plan = solve_conditional_w2(mu, nu).coupling
    assert plan is not None
    draws = plan.sample(200, generator=torch.Generator().manual_seed(1))
    assert torch.equal(places[draws.rows], places[draws.cols])
    batch = solve_w2(torch.as_tensor(np.stack([X, X + 9])), torch.as_tensor(X)).coupling
    assert batch is not None
    pairs = batch.sample(50)
    assert pairs.source.shape == (2, 50, 2)
    assert float(pairs.source[1].min()) > 5 > float(pairs.source[0].max())


def test_an_answer_keeps_its_points_when_the_arrays_change() -> None:
    x, y = X.copy(), Y.copy()
    found = solve_w2(x, y)
    x *= 100.0
    y[:] = 0.0
    assert found.coupling is not None
    assert found.coupling.cost() == pytest.approx(float(found.value) ** 2, rel=1e-12)


def test_draws_have_the_masses_of_the_plan_and_padding_is_never_drawn() -> None:
    mass = torch.tensor([[0.25, 0.75, 0.0], [0.1, 0.2, 0.7]], dtype=torch.float64)
    index = torch.arange(3).expand(2, -1)
    points = torch.eye(3, dtype=torch.float64).expand(2, -1, -1)
    plan = Coupling(points, points + 1, index, index, mass.log())
    draws = plan.sample(4000, generator=3)
    shares = torch.stack([(draws.rows == k).double().mean(-1) for k in range(3)], -1)
    torch.testing.assert_close(shares, mass, rtol=0, atol=0.03)
    assert float(shares[0, 2]) == 0
    torch.testing.assert_close(draws.target, draws.source + 1)
    with pytest.raises(ValueError, match="size: expected a whole number"):
        plan.sample(0)


@pytest.mark.gpu
def test_draws_are_made_where_the_plan_is(device: str) -> None:
    plan = solve_w2(torch.as_tensor(X).to(device), torch.as_tensor(Y).to(device)).coupling
    assert plan is not None
    for generator in (None, 3):
        assert plan.sample(5, generator=generator).source.device.type == torch.device(device).type


def test_data_frames() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=["u", "v"])
    assert w2((frame, A), (pandas.DataFrame(Y), pandas.Series(B))) == pytest.approx(TRUTH)
    with pytest.raises(TypeError, match="array or tensor of real numbers"):
        w2(pandas.DataFrame({"a": ["x", "y"]}), Y)


@pytest.mark.parametrize("solve", [w2, w1, solve_w2])
def test_the_call_of_pot_is_met_with_ours(solve) -> None:
    with pytest.raises(TypeError, match=r"\(\(x, a\), \(y, b\)\)") as met:
        solve(A, B, np.zeros((6, 7)))
    assert f"{solve.__name__}(x, y, weights=(a, b))" in str(met.value)


@pytest.mark.parametrize(
    ("arguments", "settings", "error", "match"),
    [
        ((A, B), {}, ValueError, r"mu\[:, None\]"),
        (((X, np.ones(6)), Y), {}, ValueError, r"got 6; divide.*weights / weights.sum\(\)"),
        ((X, Y), {"weights": (np.ones(6), None)}, ValueError, "total mass of 1, got 6"),
        (((X, A), Y), {"weights": (A, None)}, ValueError, "comes with its own"),
        (
            (ParticleMeasure(X), torch.as_tensor(Y)),
            {"weights": (A, None)},
            ValueError,
            "comes with its own",
        ),
        ((X, Y), {"weights": (A, B, None)}, ValueError, "pair"),
        (((X, A[:3]), Y), {}, ValueError, "total mass|one number per particle"),
        ((X, (Y, -B)), {}, ValueError, "total mass|≥ 0"),
        ((X.astype(np.float32), Y), {}, TypeError, "float32"),
    ],
)
def test_what_cannot_be_meant_is_refused_clearly(arguments, settings, error, match) -> None:
    with pytest.raises(error, match=match):
        w2(*arguments, **settings)


# ------------------------------------------------------------------ long solves


def clouds(n: int, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(n, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    return x, 1.2 * y + 0.3


@pytest.mark.parametrize("limit", [0.01, 0.3])
def test_a_time_limit_is_kept_and_the_answer_comes_with_the_error(limit) -> None:
    x, y = clouds(8000)
    solve_w2(x[:50], y[:50])  # POT is imported
    start = time.process_time()
    with pytest.raises(ConvergenceError) as late:
        solve_w2(x, y, time_limit=limit)
    # On a busy machine wall time means nothing; the work that is begun is what counts.
    assert time.process_time() - start < 3
    found = late.value.result
    assert isinstance(found, TransportResult) and not found.converged
    assert 0 <= float(found.lower) < float(found.upper)


def test_what_no_memory_holds_is_refused(monkeypatch) -> None:
    from meanfield.transport import solve

    monkeypatch.setattr(solve, "_MOST_PAIRS", 200_000)
    x, y = clouds(500)
    with pytest.raises(ValueError, match=r"expected at most 2e\+05 pairs.*got 500 × 500 = 2e\+05"):
        solve_w2(x, y)
    assert solve_w2(x, x + 1e-3).converged  # nearest partners have no such limit


@pytest.mark.parametrize("distance", [w2, sinkhorn_divergence], ids=["w2", "sinkhorn"])
def test_transforms_that_hide_values_are_told_the_way_that_works(distance):
    x, y = torch.randn(2, 5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with pytest.raises(RuntimeError, match=r"requires_grad and backward\(\)"):
        torch.func.grad(lambda z: distance(z, y))(x)
    x.requires_grad_()
    distance(x, y).backward()
    assert x.grad is not None and bool(torch.isfinite(x.grad).all())
