"""The Sinkhorn divergence: its limit, its gradients, and what is asked of KeOps."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from meanfield.errors import MissingExtraError
from meanfield.measures import ParticleMeasure
from meanfield.transport import (
    certify,
    conditional_sinkhorn_divergence,
    conditional_w2,
    entropic,
    sinkhorn_divergence,
    w2,
)


def clouds(n: int, m: int, d: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n + m)
    x = torch.randn(n, d, dtype=torch.float64, generator=generator)
    return x, 1.3 * torch.randn(m, d, dtype=torch.float64, generator=generator) + 0.5


def test_the_divergence_tends_to_the_square_of_the_distance() -> None:
    x, y = clouds(40, 50)
    exact = float(w2(x, y)) ** 2
    errors = [abs(float(sinkhorn_divergence(x, y, blur=b)) - exact) for b in (0.5, 0.02)]
    assert errors[1] < 0.03 * exact  # what the annealing leaves, whatever the blur
    assert errors[1] < errors[0]


def test_the_divergence_is_zero_at_equality_and_differentiable() -> None:
    x, _ = clouds(20, 20)
    assert float(sinkhorn_divergence(x, x)) == pytest.approx(0.0, abs=1e-12)
    moved = (x + torch.tensor([3.0, 0.0], dtype=torch.float64)).requires_grad_()
    (gradient,) = torch.autograd.grad(sinkhorn_divergence(moved, x, scaling=0.95), moved)
    # Of ‖t‖² for a translation by t = (3, 0), shared among 20 points.
    expected = torch.tensor([6.0 / 20, 0.0], dtype=torch.float64).expand(20, 2)
    torch.testing.assert_close(gradient, expected, rtol=0.02, atol=0.01)


def test_costs_are_right_and_differentiable_twice() -> None:
    x, y = (t[None].requires_grad_() for t in clouds(5, 4, 3))
    direct = (x.detach()[:, :, None] - y.detach()[:, None]).square().sum(-1) / 2
    torch.testing.assert_close(entropic._HalfSquares.apply(x, y), direct)
    assert torch.autograd.gradcheck(entropic._HalfSquares.apply, (x, y))
    assert torch.autograd.gradgradcheck(entropic._HalfSquares.apply, (x, y))


def test_beyond_the_memory_of_matrices_keops_is_asked_for(monkeypatch) -> None:
    x, y = clouds(40, 33)
    monkeypatch.setattr(entropic, "_MEMORY", 1e5)
    monkeypatch.setattr(entropic.importlib.util, "find_spec", lambda _: None)
    for pair in ((x, y), (y, x)):
        with pytest.raises(MissingExtraError, match=r"of 40 points.* needs .*install pykeops"):
            sinkhorn_divergence(*pair)
    assert float(sinkhorn_divergence(x[:10], y[:9])) > 0  # these fit
    asked = {}

    class Online:
        def __init__(self, *_: object, **settings: object) -> None:
            asked.update(settings)

        def __call__(self, a: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
            return a.sum()

    monkeypatch.setattr(entropic.importlib.util, "find_spec", lambda _: "there")
    monkeypatch.setattr("geomloss.SamplesLoss", Online)
    assert float(sinkhorn_divergence(x, y, blur=0.1)) == pytest.approx(2.0)
    assert asked["backend"] == "online" and asked["blur"] == 0.1
    assert "cost" not in asked  # KeOps takes differences by itself


@pytest.mark.slow
@pytest.mark.parametrize("d", [2, 32])
def test_matrices_take_the_memory_that_is_stated(d: int) -> None:
    script = f"""
import resource, torch
from meanfield.transport import entropic, sinkhorn_divergence
x, y = torch.randn(2, 2100, {d}, dtype=torch.float64)
sinkhorn_divergence(x[:50], y[:50], blur=0.5)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
x.requires_grad_(), y.requires_grad_()
sinkhorn_divergence(x, y, blur=1.0, scaling=0.1).backward()
held = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
print(held / (8 * 2100**2 * entropic._MATRICES))
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout.split()[-1]) < 1.2  # KeOps may speak before


def test_conditions_fit_into_the_memory_of_matrices_one_at_a_time(monkeypatch) -> None:
    x, y, s, t = conditioned(5, 30, 30)
    s, t = s + np.arange(30) // 6, t + np.arange(30) // 6
    found = conditional_sinkhorn_divergence(x, y, conditions=(s, t))
    monkeypatch.setattr(entropic, "_MEMORY", 2.5 * 28 * 9 * 8)  # two at a time
    together, divergence = [], entropic._divergence

    def counted(a: torch.Tensor, *rest: object, **settings: float) -> torch.Tensor:
        together.append(len(a))
        return divergence(a, *rest, **settings)

    monkeypatch.setattr(entropic, "_divergence", counted)
    again = conditional_sinkhorn_divergence(x, y, conditions=(s, t))
    np.testing.assert_allclose(again, found, rtol=1e-12)
    assert together == [2] * 5


@pytest.mark.gpu
def test_sinkhorn_stays_on_the_device(device: str) -> None:
    x, y = (t.to(device) for t in clouds(60, 50))
    weights = ParticleMeasure(x)
    assert sinkhorn_divergence(weights, y).device == x.device


# ------------------------------------------------------------------ conditional


def conditioned(seed: int, n: int, m: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(n, 2)), rng.normal(size=(m, 2)) + 0.5
    return x, y, np.arange(n) % 2 / 4.0, np.arange(m) % 2 / 4.0


def test_it_is_the_mean_over_conditions() -> None:
    x, y, s, t = conditioned(0, 8, 6)
    settings = {"conditions": (s, t), "blur": 0.3}
    found = conditional_sinkhorn_divergence(x, y, **settings)
    parts = [sinkhorn_divergence(x[k::2], y[k::2], blur=0.3) for k in (0, 1)]
    assert isinstance(found, np.floating)
    np.testing.assert_allclose(found, np.mean(parts), rtol=5e-3)  # another annealing
    x[:2], y[:2] = -3, 3  # one box round all of them and round each condition: the same
    found = conditional_sinkhorn_divergence(x, y, **settings)
    parts = [sinkhorn_divergence(x[k::2], y[k::2], blur=0.3) for k in (0, 1)]
    np.testing.assert_allclose(found, np.mean(parts), rtol=1e-12)
    a, b = (np.where(labels > 0, 3.0, 1.0) / (2 * len(labels)) for labels in (s, t))
    found = conditional_sinkhorn_divergence((x, a), (y, b), **settings)
    np.testing.assert_allclose(found, parts[0] / 4 + 3 * parts[1] / 4, rtol=1e-12)
    assert conditional_sinkhorn_divergence(x, y, conditions=(s, t + 0.1)) == np.inf
    assert conditional_sinkhorn_divergence((x, a), y, conditions=(s, t)) == np.inf
    with pytest.raises(ValueError, match="penalty: expected"):
        conditional_sinkhorn_divergence(x, y, conditions=(s, t), penalty=-0.5)


def test_one_atom_has_a_conditional_divergence_too() -> None:
    """NumPy takes a tensor of one truth value for a number."""
    found = conditional_sinkhorn_divergence([[0.0]], [[3.0]], conditions=([0.5], [0.5]))
    assert float(found) == pytest.approx(9.0)
    assert float(sinkhorn_divergence([[3.0]], [[3.0]])) == 0  # of two clouds in one place


def test_with_little_blur_it_is_the_conditional_distance_squared() -> None:
    x, y, s, t = conditioned(1, 8, 6)
    for penalty in (None, 0.0, 3.0):
        truth = conditional_w2(x, y, conditions=(s, t), penalty=penalty) ** 2
        found = conditional_sinkhorn_divergence(
            x, y, conditions=(s, t), penalty=penalty, blur=0.01, scaling=0.99
        )
        np.testing.assert_allclose(found, truth, rtol=2e-3)


@pytest.mark.parametrize("penalty", [None, 3.0])
def test_its_gradient_is_that_of_differences(penalty: float | None) -> None:
    x, y, s, t = conditioned(2, 6, 6)
    settings = {"conditions": (s, t), "penalty": penalty, "blur": 0.5, "scaling": 0.97}
    points = torch.tensor(x, requires_grad=True)
    conditional_sinkhorn_divergence(points, torch.tensor(y), **settings).backward()
    way, step = np.random.default_rng(1).normal(size=x.shape), 1e-5
    ends = [conditional_sinkhorn_divergence(x + e * way, y, **settings) for e in (step, -step)]
    along = (ends[0] - ends[1]) / (2 * step)
    # The annealing is not run to convergence: the envelope theorem holds up to what is left.
    np.testing.assert_allclose(float((points.grad * torch.tensor(way)).sum()), along, rtol=1e-2)


def test_batches_and_absent_atoms() -> None:
    x, y, s, t = conditioned(3, 6, 6)
    weights = np.array([0.25, 0.25, 0.25, 0.25, 0, 0])
    both = conditional_sinkhorn_divergence(
        (np.stack([x, x + 1]), weights), (np.stack([y, y]), weights), conditions=(s, t)
    )
    few = conditional_sinkhorn_divergence(x[:4], y[:4], conditions=(s[:4], t[:4]))
    assert both.shape == (2,)
    np.testing.assert_allclose(both[0], few, rtol=1e-12)


@pytest.mark.parametrize("start", [0.0, 64.0])
@pytest.mark.parametrize("far", [0.0, 1e6, math.nan])
def test_where_an_atom_without_mass_is_makes_no_difference(far: float, start: float) -> None:
    rough = {"blur": 0.5, "scaling": 0.5}  # of which the diameter is felt
    rng = np.random.default_rng(3)
    x, y = torch.from_numpy(start + rng.normal(size=(2, 5, 2)))
    place = torch.full((1, 2), far, dtype=torch.float64)
    blank = ParticleMeasure(torch.cat([x, torch.zeros_like(place)]), weights=[0.2] * 5 + [0.0])
    padded = blank.replace(torch.cat([x, place]))
    for one, other in ((padded, y), (y, padded)):
        bare = (x, y) if one is padded else (y, x)
        # What is measured from the mean is rounded where the mean is.
        torch.testing.assert_close(
            sinkhorn_divergence(one, other, **rough),
            sinkhorn_divergence(*bare, **rough),
            rtol=1e-12,
            atol=0,
        )
    s = ([0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1])
    found = conditional_sinkhorn_divergence(padded, y, conditions=s, **rough)
    known = conditional_sinkhorn_divergence(x, y, conditions=(s[1], s[1]), **rough)
    torch.testing.assert_close(found, known, rtol=1e-12, atol=0)
    torch.testing.assert_close(padded.mean(), x.mean(0))
    torch.testing.assert_close(padded.covariance(), torch.cov(x.T, correction=0))


def test_potentials_of_geomloss_are_a_lower_bound_once_they_are_certified() -> None:
    """Its own exceed the cost of some pairs: what they say may lie above W₂²."""
    from geomloss import SamplesLoss

    rng = np.random.default_rng(4)
    x, y = rng.normal(size=(60, 2)), rng.normal(size=(50, 2)) + 0.5
    loss = SamplesLoss("sinkhorn", p=2, blur=0.05, debias=False, potentials=True)
    f, g = (2 * t.numpy().reshape(-1) for t in loss(torch.as_tensor(x), torch.as_tensor(y)))
    costs = np.square(x[:, None] - y).sum(-1)
    assert (f[:, None] + g > costs).any()
    truth, found = float(w2(x, y)), certify(x, y, potentials=(f, g))
    assert 0.95 * truth < float(found.lower) <= truth <= float(found.upper)
    assert (found.potentials[0][:, None] + found.potentials[1] <= costs + 1e-12).all()


def test_pairs_of_a_batch_have_no_part_in_one_another() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 2, 20, 2, generator=generator)
    x[1], y[1] = x[1] + 1e7, y[1] + 1e7
    alone = [float(sinkhorn_divergence(*pair)) for pair in zip(x, y, strict=True)]
    assert sinkhorn_divergence(x, y).tolist() == pytest.approx(alone, rel=1e-5)


def test_an_empty_batch_has_no_divergences() -> None:
    none = torch.zeros(0, 4, 2, dtype=torch.float64)
    assert sinkhorn_divergence(none, none[:, :3]).shape == (0,)
    mu = ParticleMeasure(none, positions=none[..., 0])
    assert conditional_sinkhorn_divergence(mu, mu).shape == (0,)
