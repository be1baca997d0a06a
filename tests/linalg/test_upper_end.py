"""How far the norm may exceed the value that a Krylov iteration has found."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.polynomial import chebyshev

from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.errors import ConvergenceError
from meanfield.linalg import Dense, Lanczos, LinearMap, krylov, operator_norm
from meanfield.linalg.bidiagonalisation import Bidiagonalisation, Steps
from meanfield.linalg.norms import largest_block_norm
from meanfield.linalg.upper_end import start_tangent, upper_end, worst_upper_end
from meanfield.lipschitz import local_lipschitz
from meanfield.measures import ParticleMeasure

F64 = torch.float64


def diagonal(values: torch.Tensor) -> LinearMap:
    """Maps with these singular values (*batch, n) along the axes."""
    return LinearMap.diagonal(values[..., None])


@given(
    seed=st.integers(0, 10**6),
    steps=st.integers(1, 8),
    log_cosine=st.floats(-12, 0),
    decay=st.sampled_from([1e-4, 1e-2, 0.3]),
)
def test_the_bound_holds_for_every_spectrum_and_angle(seed, steps, log_cosine, decay):
    generator = torch.Generator().manual_seed(seed)
    values = torch.exp(-decay * torch.rand(40, dtype=F64, generator=generator).cumsum(0))
    start = torch.randn(40, dtype=F64, generator=generator) / values**4
    cosine = 10.0**log_cosine
    start[0] = 0.0
    start *= math.sqrt(1 - cosine**2) / start.norm()
    start[0] = cosine
    process = Bidiagonalisation(diagonal(values), start[None])
    for _ in range(steps):
        process.advance()
    sigma = torch.from_numpy(process.triples()[1][:, 0])
    tangent = math.sqrt(1 - cosine**2) / cosine
    end = float(upper_end(sigma, process.steps, tangent))
    assert float(values[0]) <= end * (1 + 1e-9)
    assert end <= float(sigma) * worst_upper_end(tangent, steps) * (1 + 1e-9)


@given(seed=st.integers(0, 10**6), steps=st.integers(1, 5), excess=st.floats(0.01, 3))
def test_the_end_is_where_the_christoffel_function_of_the_start_is_its_share(seed, steps, excess):
    """1/Σ aⱼ(s)² = min ‖p(JᵀJ)b‖² over polynomials p of degree k with p(s²) = 1."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(12, dtype=F64, generator=generator).sort(descending=True).values
    start = torch.randn(12, dtype=F64, generator=generator)
    start /= start.norm()
    process = Bidiagonalisation(diagonal(values), start[None])
    for _ in range(steps):
        process.advance()
    sigma = torch.from_numpy(process.triples()[1][:, 0])
    # ‖J‖ is at least the norm of B with the last remainder beside it: s below is not possible.
    sides = (process.steps.alphas, process.steps.betas)
    alphas, betas = (torch.from_numpy(side[0]).diag_embed() for side in sides)
    beside = torch.nn.functional.pad(alphas, (0, 1)) + torch.nn.functional.pad(betas, (1, 0))
    s = float(torch.linalg.matrix_norm(beside, 2)) * (1 + excess)
    # p = 1 + (t − s²) q(t): the least squares problem in q, in the basis of Chebyshev.
    t = values.numpy() ** 2
    basis = chebyshev.chebvander(2 * t / s**2 - 1, steps - 1) * (t - s**2)[:, None]
    weighted = basis * start.numpy()[:, None]
    q = np.linalg.lstsq(weighted, -start.numpy(), rcond=None)[0]
    christoffel = float(((start.numpy() + weighted @ q) ** 2).sum())
    tangent = math.sqrt(1 / christoffel - 1)
    assert float(upper_end(sigma, process.steps, tangent)) == pytest.approx(s, rel=1e-6)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("tangent", [0.5, 10.0, 1e4])
def test_the_bound_is_attained_by_the_spectrum_of_the_chebyshev_polynomial(steps, tangent):
    degree = 2 * steps - 1
    theta = worst_upper_end(tangent, steps) ** -2
    t = np.cos(np.arange(steps) * np.pi / degree)
    nodes = np.append(1.0, theta * (1 - t**2))
    # q at the nodes, where t q(λ) is the Chebyshev polynomial: ±1/t, and at λ = 1 with t = i sinh.
    sinh = math.sqrt(1 / theta - 1)
    last = (-1) ** (steps - 1) * math.sinh(degree * math.asinh(sinh)) / sinh
    q = np.append(last, (-1.0) ** np.arange(steps) / t)
    # The start whose Krylov space has q(JᵀJ)b as Ritz vector of the value θ.
    powers = chebyshev.chebvander(2 * nodes - 1, steps - 1) * ((nodes - theta) * q)[:, None]
    cosine_squared = 1 / (1 + tangent**2)
    shares = np.append(cosine_squared, np.linalg.solve(powers[1:].T, -cosine_squared * powers[0]))
    assert (shares > 0).all()
    assert shares.sum() == pytest.approx(1, rel=1e-6)
    start = torch.from_numpy(np.sqrt(shares / shares.sum()))
    process = Bidiagonalisation(diagonal(torch.from_numpy(np.sqrt(nodes))), start[None])
    for _ in range(steps):
        process.advance()
    sigma = torch.from_numpy(process.triples()[1][:, 0])
    assert float(sigma) * worst_upper_end(tangent, steps) == pytest.approx(1.0, rel=1e-5)
    end = float(upper_end(sigma, process.steps, tangent))
    assert end == pytest.approx(1.0, rel=1e-5)


def test_steps_beyond_the_end_of_a_space_tell_nothing_more():
    """As of a map in a batch whose others go on."""
    sigma, limits = torch.ones(1, dtype=F64), np.array([[0.8, 0.6, 0.5, 0.1]])
    ended, padded = (
        float(upper_end(sigma, Steps(part, part), 5.0))
        for part in (limits, np.pad(limits, ((0, 0), (0, 2))))
    )
    assert padded == pytest.approx(ended, rel=1e-12)
    assert ended > 1 + 1e-3


@pytest.mark.parametrize("size", [2, 3, 50])
@pytest.mark.parametrize("miss", [0.9, 0.5, 0.05])
def test_starts_come_closer_than_the_angle_as_often_as_promised(size, miss):
    draws = 20_000
    generator = torch.Generator().manual_seed(1)
    random = torch.randn(draws, size, dtype=F64, generator=generator)
    start = random / random.norm(dim=1, keepdim=True)
    bound = start_tangent(size, miss)
    cosine = start[:, 0].abs() / start.norm(dim=1)
    missed = float(((1 - cosine**2).sqrt() / cosine > bound).double().mean())
    assert missed <= miss
    assert missed >= 0.3 * miss  # the promise is not an idle one


@pytest.mark.parametrize("upper_rtol", [1e-3, 1e-6])
def test_the_iteration_goes_on_until_the_upper_end_is_near(upper_rtol):
    values = torch.stack([torch.linspace(1, 0.2, 200), torch.linspace(2, 0.1, 200)]).double()
    least = operator_norm(diagonal(values), solver=Lanczos(), upper_rtol=math.inf)
    found = operator_norm(diagonal(values), solver=Lanczos(), upper_rtol=upper_rtol)
    assert bool((found.upper <= (1 + upper_rtol) * found.value).all())
    assert not bool((least.upper <= (1 + upper_rtol) * least.value).any())
    assert bool((found.value <= values[:, 0] * (1 + 1e-12)).all())
    assert bool((values[:, 0] <= found.upper * (1 + 1e-12)).all())
    blocks, _ = largest_block_norm(diagonal(values), solver=Lanczos(), upper_rtol=upper_rtol)
    assert float(blocks.value) <= 2.0 * (1 + 1e-12) <= float(blocks.upper) * (1 + 2e-12)
    assert float(blocks.upper) <= (1 + upper_rtol) * float(blocks.value)


def test_a_hidden_direction_shows_in_the_upper_end_and_is_found_when_that_must_be_near():
    # Every other singular value is 1: the iteration is over in a few steps, flagged converged.
    values = torch.ones(2000, dtype=F64)
    values[0], values[1:6] = 1.3, torch.linspace(0.2, 0.9, 5, dtype=F64)
    start = torch.randn(1, 2000, dtype=F64, generator=torch.Generator().manual_seed(0))
    found = operator_norm(
        diagonal(values), rtol=2e-2, upper_rtol=math.inf, solver=Lanczos(max_steps=3)
    )
    assert float(start[0, 0] / start.norm()) < 0.05
    assert float(found.value) < 1.3 < float(found.upper)
    sure = operator_norm(diagonal(values), solver=Lanczos(), upper_rtol=1e-3)
    assert float(sure.value) == pytest.approx(1.3, rel=1e-3)


@pytest.mark.parametrize("overlap", [1e-5, 1e-8, 1e-11])
@pytest.mark.parametrize("second", [0.3, 0.9, 0.999])
def test_starts_that_hardly_see_the_top_direction_show_it_in_double_precision(
    monkeypatch, second, overlap
):
    """With probability 1 - 1e-9 a start on this sphere sees 8e-12 of it."""
    size = 24_576
    values = second * 0.97 ** (torch.arange(size, dtype=F64) / 20)
    values[0] = 1.0
    start = torch.randn(1, size, dtype=F64, generator=torch.Generator().manual_seed(1))
    start[0, 0] = 0.0
    start = start * ((1 - overlap**2) ** 0.5 / start.norm())
    start[0, 0] = overlap
    monkeypatch.setattr(krylov, "_random_start", lambda *_: start)
    for most in (3, 6, 12, 24):
        found = operator_norm(diagonal(values), solver=Lanczos(max_steps=most), strict=False)
        assert float(found.upper) >= 1 - 1e-14


@pytest.mark.parametrize("solver", [Dense(), Lanczos()])
@pytest.mark.parametrize("rtol", [-1.0, 2.0])
def test_tolerances_that_mean_nothing_are_refused(rtol, solver):
    for norm in (operator_norm, largest_block_norm):
        with pytest.raises(ValueError, match=f"rtol: expected a number ≥ 0 and < 1, got {rtol}"):
            norm(diagonal(torch.ones(30, dtype=F64)), rtol=rtol, solver=solver)
        with pytest.raises(ValueError, match="upper_rtol: expected a number ≥ 0, got -0.1"):
            norm(diagonal(torch.ones(30, dtype=F64)), upper_rtol=-0.1, solver=solver)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_steps": 0}, "max_steps: expected a whole number ≥ 1, got 0"),
        ({"miss": 0.0}, "miss: expected a number between 0 and 1, got 0.0"),
    ],
)
def test_settings_of_an_iteration_that_mean_nothing_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        Lanczos(**settings)


@pytest.mark.parametrize(
    ("excess", "starts", "least"),
    [
        pytest.param(1e-2, 150, 0, marks=pytest.mark.slow),
        pytest.param(1e-3, 150, 1, marks=pytest.mark.slow),
        pytest.param(1e-4, 150, 10, marks=pytest.mark.slow),
        (1e-4, 30, 2),
    ],
)
def test_what_rounding_hides_at_the_end_of_the_space_is_below_the_upper_end(excess, starts, least):
    """In single precision the remainder that holds the direction is taken for rounding."""
    values = torch.ones(300)
    values[150] = 1 + excess
    overlooked = missed = 0
    for seed in range(starts):
        found = operator_norm(
            diagonal(values),
            solver=Lanczos(generator=torch.Generator().manual_seed(seed)),
        )
        overlooked += float(found.value) < (1 + excess) * (1 - 2e-7)
        missed += float(found.upper) < (1 + excess) * (1 - 2e-7)
    assert overlooked >= least
    assert missed <= 1


def test_the_process_is_a_factorisation():
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(2, 50, dtype=F64, generator=generator)
    values[1, 4:] = 0.0  # this process comes to its end
    start = torch.randn(2, 50, dtype=F64, generator=generator)
    process = Bidiagonalisation(diagonal(values), start / start.norm(dim=1, keepdim=True))
    for _ in range(30):
        process.advance()
    k, steps = process.products, process.steps
    alphas, betas = torch.from_numpy(steps.alphas), torch.from_numpy(steps.betas)
    eye = torch.eye(k + 1, dtype=F64).expand(2, -1, -1)
    right, left = process.right.combine(eye), process.left.combine(eye[:, :k, :k])
    small = torch.diag_embed(alphas) + torch.diag_embed(betas[:, :-1], 1)
    torch.testing.assert_close(right[:, :k] * values[:, None], small.mT @ left)
    rest = small @ right[:, :k]
    rest[:, -1] += betas[:, -1:] * right[:, k]
    torch.testing.assert_close(left * values[:, None], rest)
    for vectors in (right[:1], left[:1]):
        torch.testing.assert_close(
            vectors @ vectors.mT, eye[:1, : vectors.shape[1], : vectors.shape[1]]
        )


def test_maps_of_zero_in_a_batch_and_batches_of_none():
    values = torch.stack([torch.zeros(300), torch.linspace(1, 0.2, 300)]).double()
    settings = {"rtol": 1e-1, "upper_rtol": 1e-6, "solver": Lanczos(max_steps=12)}
    with pytest.raises(ConvergenceError, match=r"upper/value - 1 = \d\.\d+e-\d+ is above"):
        operator_norm(diagonal(values), **settings)
    nothing = operator_norm(diagonal(values[:0]), solver=Lanczos())
    assert nothing.value.shape == nothing.upper.shape == (0,)


@pytest.mark.slow
def test_a_sweep_of_2000_layers_has_no_constant_above_its_upper_end():
    g, below = torch.Generator().manual_seed(0), []
    for seed in range(20):
        par = AttentionParameters.random(8, n_heads=2, std=0.5 + seed % 10 / 5, generator=g)
        F = SelfAttention(par, causal=seed >= 10)
        X = torch.randn(100, 8, 8, dtype=F64, generator=g)
        X = X - X.mean(-1, keepdim=True)
        mu = ParticleMeasure.from_sequence(X / X.square().mean(-1, keepdim=True).sqrt())
        found = local_lipschitz(F, mu, solver=Lanczos(max_steps=200), strict=False)
        exact = local_lipschitz(F, mu, solver=Dense()).value
        assert found.miss == 1e-9
        below.append(found.upper < exact * (1 - 1e-12))
    assert len(torch.cat(below)) == 2000 and not bool(torch.cat(below).any())


def test_no_costly_product_is_made_that_a_look_would_have_spared(monkeypatch):
    """With more than 2¹⁴ coordinates; of small maps the looks cost more."""
    entries = torch.linspace(0, 0.1, 2**14 + 2, dtype=torch.float64).reshape(-1, 2).clone()
    entries[0, 0] = 1.0
    large, small = LinearMap.diagonal(entries), LinearMap.diagonal(entries[:100])
    found = [operator_norm(J, solver=Lanczos()).n_matvecs for J in (large, small)]
    monkeypatch.setattr(krylov, "_STEPS", 1)
    fewest = [operator_norm(J, solver=Lanczos()).n_matvecs for J in (large, small)]
    assert found[0] == fewest[0] == 7  # 9 with a look in four
    assert fewest[1] < found[1] == 5
