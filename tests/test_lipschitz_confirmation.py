"""Dominant directions almost orthogonal to the start: found by the iteration or a second start."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.linalg import LinearMap
from meanfield.lipschitz import local_lipschitz
from meanfield.measures import ParticleMeasure

F64 = torch.float64
SIZE = 300


class Linear:
    """x ↦ Mx on all atoms together, as a map of measures with its own linearisation."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix

    def __call__(self, mu: ParticleMeasure) -> ParticleMeasure:
        return mu.replace((self.matrix @ mu.points.reshape(-1)).reshape(mu.points.shape))

    def linearize(self, mu: ParticleMeasure, *, geometry: str) -> LinearMap:
        shape = (mu.n_particles, mu.dim)
        return LinearMap(
            matvec=lambda x: (self.matrix @ x.reshape(-1)).reshape(x.shape),
            rmatvec=lambda x: (self.matrix.mT @ x.reshape(-1)).reshape(x.shape),
            in_shape=shape,
            out_shape=shape,
        )


def dominated(overlap: float, rest: Tensor, top: float) -> Linear:
    """Singular values `rest` and `top`; the latter's direction has this overlap with the start."""
    start = torch.randn(1, SIZE, dtype=F64, generator=torch.Generator().manual_seed(0))[0]
    start = start / torch.linalg.vector_norm(start)
    generator = torch.Generator().manual_seed(1)
    others = torch.randn(SIZE, SIZE - 1, dtype=F64, generator=generator)
    across = others[:, 0] - (others[:, 0] @ start) * start
    v = across / torch.linalg.vector_norm(across) + overlap * start
    basis = torch.linalg.qr(torch.cat([v[:, None], others[:, 1:], start[:, None]], 1))[0]
    values = torch.cat([torch.tensor([top], dtype=F64), rest])
    return Linear((basis * values) @ basis.mT)


def measure() -> ParticleMeasure:
    return ParticleMeasure(torch.zeros(SIZE, 1, dtype=F64))


@pytest.mark.parametrize("top", [1.5, 10.0])
@pytest.mark.parametrize("overlap", [1e-2, 1e-5, 1e-8])
def test_a_spread_spectrum_shows_the_dominant_direction_whatever_the_start(overlap, top):
    F = dominated(overlap, torch.linspace(0, 1, SIZE - 1, dtype=F64), top)
    found = local_lipschitz(F, measure(), geometry="euclidean", method="lanczos")
    assert float(found.value) == pytest.approx(top, rel=1e-4)


@pytest.mark.parametrize("top", [1.5, 10.0])
@pytest.mark.parametrize("kind", ["flat", "low rank"])
def test_a_start_orthogonal_to_1e_8_is_confirmed_by_another(kind, top):
    # All other singular values are equal, or few: the iteration is over before rounding shows
    # the direction, and its residual is honest about the singular value it has found.
    rest = torch.ones(SIZE - 1, dtype=F64)
    if kind == "low rank":
        rest[6:] = 0.0
    F = dominated(1e-8, rest, top)
    found = local_lipschitz(F, measure(), geometry="euclidean", method="lanczos", confirm=1)
    assert float(found.value) == pytest.approx(top, rel=1e-4)
    assert bool(found.converged)
    image = F.matrix @ found.direction.reshape(-1)
    torch.testing.assert_close(torch.linalg.vector_norm(image), found.value)


def test_confirmation_costs_nothing_when_factored_and_changes_no_answer():
    F = SelfAttention(AttentionParameters.random(3, n_heads=3))
    mu = ParticleMeasure(torch.randn(4, 6, 3, dtype=F64))
    once, again = local_lipschitz(F, mu), local_lipschitz(F, mu, confirm=2)
    assert torch.equal(once.value, again.value)
    assert again.n_matvecs == 0
    steps = local_lipschitz(F, mu, method="lanczos", confirm=2, rtol=1e-8)
    torch.testing.assert_close(steps.particle, once.particle, rtol=1e-7, atol=0)
    generator = torch.Generator().manual_seed(5)
    drawn = local_lipschitz(F, mu, method="lanczos", confirm=1, rtol=1e-8, generator=generator)
    torch.testing.assert_close(drawn.particle, once.particle, rtol=1e-7, atol=0)
    with pytest.raises(ValueError, match="confirm: expected a number ≥ 0"):
        local_lipschitz(F, mu, confirm=-1)
