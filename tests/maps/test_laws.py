"""Laws that hold for every map of measures: a table of maps times a table of laws.

A map that is new goes into `tests/maps/small_maps.py`; a law that is new goes here.
"""

from __future__ import annotations

import functools
import inspect
import math

import pytest
import torch

from meanfield import attention, dynamics, layers
from meanfield.lipschitz import local_lipschitz
from meanfield.maps import Map, linearize
from meanfield.maps.autodiff import derivative_along
from meanfield.maps.map import as_map
from meanfield.measures import ParticleMeasure, split, stack
from tests.maps import small_maps as small
from tests.maps.small_maps import (
    F64,
    MAPS,
    cloud,
    dense_atoms,
    dense_derivative,
    dense_field,
    draw,
)
from tests.pretrained import small_models

# One of each family of checkpoints; the others differ in their configurations.
FAMILIES = [name for name in small_models.CASES if "," not in name]


@functools.cache
def block_of(name):
    return small_models.small(name).block(0, length=5)


def a_map(name, dtype=F64):
    return as_map(block_of(name) if name in FAMILIES else MAPS[name](dtype))


def clouds_for(F, count=1, **settings):
    """Measures in the dimension that the map says."""
    found = [cloud(seed, dim=F.dim or small.D, **settings) for seed in range(count)]
    return found[0] if count == 1 else found


def declared(question):
    """The answer of a map that need not have one."""
    try:
        return question()
    except NotImplementedError:
        pytest.skip("it declares none")


every_map = pytest.mark.parametrize("name", [*MAPS, *FAMILIES])


@pytest.mark.parametrize(
    ("name", "hard"),
    [(name, hard) for name in MAPS for hard in (False, True)]
    + [(name, True) for name in FAMILIES],
)
def test_the_linearisation_is_the_dense_derivative_in_both_geometries(name, hard):
    F = a_map(name)
    mu = clouds_for(F, hard=hard, n=4)
    jacobian, field = dense_derivative(F, mu), dense_field(F, mu)
    for geometry in ("euclidean", "wasserstein") if hard else ("wasserstein",):
        at = linearize(F, mu, geometry=geometry)
        wanted = dense_atoms(F, mu, geometry, jacobian)
        small.is_map(at.atoms, wanted, 1e-10)
        small.is_map(at.field, field, 1e-10)


@every_map
def test_the_forward_derivative_is_the_dense_one(name):
    F = a_map(name)
    mu = clouds_for(F, n=4)
    along = draw(*mu.points.shape, seed=3)
    wanted = torch.einsum("iajb,jb->ia", dense_derivative(F, mu), along)
    small.close(derivative_along(F, mu, along), wanted, 1e-10)


@every_map
def test_splitting_an_atom_changes_nothing(name):
    F = a_map(name)
    mu = clouds_for(F)
    copies = torch.tensor([0, 0, 1, 2, 3, 4])
    shares = torch.tensor([0.3, 0.7, 1, 1, 1, 1], dtype=F64).log()
    divided = ParticleMeasure(
        mu.points[copies],
        log_weights=mu.log_weights[copies] + shares,
        positions=mu.positions[copies],
    )
    small.close(F(divided).points, F(mu).points[copies], 1e-10)


@every_map
def test_an_absent_atom_changes_nothing(name):
    F = a_map(name)
    mu = clouds_for(F, absent=True)
    kept = mu.weights > 0
    without = ParticleMeasure(mu.points[kept], mu.weights[kept], positions=mu.positions[kept])
    small.close(F(mu).points[kept], F(without).points, 1e-10)


@every_map
def test_weights_and_positions_stay(name):
    F = a_map(name)
    mu = clouds_for(F)
    image = F(mu)
    assert torch.equal(image.log_weights, mu.log_weights)
    assert torch.equal(image.positions, mu.positions)


@every_map
def test_a_map_depends_on_what_it_declares_and_on_nothing_else(name):
    """Particle-wise: on no other atom. Causal: on earlier ones. Else on later ones as well."""
    F = a_map(name)
    mu = clouds_for(F)
    blocks = dense_atoms(F, mu).unflatten(0, (5, -1)).unflatten(2, (5, -1))
    reached = blocks.abs().amax((1, 3)) > 1e-12 * float(blocks.abs().max())
    later = mu.positions[:, None] < mu.positions
    earlier = mu.positions[:, None] > mu.positions
    assert bool(reached[later].any()) == (not F.causal and not F.particlewise)
    assert bool(reached[earlier].any()) == (not F.particlewise)


@every_map
def test_a_batch_is_its_measures_one_by_one(name):
    F = a_map(name)
    measures = clouds_for(F, 2)
    batch = stack(measures)
    small.close(F(batch).points, torch.stack([F(mu).points for mu in measures]), 1e-11)
    at = linearize(F, batch, geometry="wasserstein")
    alone = [linearize(F, mu, geometry="wasserstein") for mu in measures]
    small.is_map(at.atoms, torch.stack([one.atoms.to_dense() for one in alone]), 1e-11)
    small.is_map(at.field, torch.stack([one.field.to_dense() for one in alone]), 1e-11)


@pytest.mark.parametrize("name", MAPS)
def test_float32_in_is_float32_out(name):
    if name == "attention, sinkhorn":
        pytest.skip("its tolerance is for float64")
    F, mu = a_map(name, torch.float32), cloud(dtype=torch.float32)
    at = linearize(F, mu)
    assert F(mu).dtype == at.atoms.dtype == at.field.dtype == torch.float32
    assert at.atoms.to_dense().dtype == at.field.to_dense().dtype == torch.float32
    small.close(F(mu).points.double(), a_map(name)(mu.to(F64)).points, 1e-4)


@pytest.mark.parametrize("name", [name for name in (*MAPS, "gpt2") if name != "subclass"])
def test_the_dimension_that_is_declared_is_asked_for(name):
    F = a_map(name)
    if F.dim is None:
        pytest.skip("it takes any")
    with pytest.raises(ValueError, match=str(F.dim)):
        F(cloud(dim=F.dim + 1))


@pytest.mark.parametrize("name", [name for name in MAPS if a_map(name).heads])
def test_heads_add_up(name):
    F = a_map(name)
    mu = clouds_for(F)
    whole = linearize(F, mu).atoms.to_dense()
    small.close(sum(linearize(G, mu).atoms.to_dense() for G in F.heads), whole, 1e-10)


@pytest.mark.parametrize("name", MAPS)
def test_the_constant_is_the_norm_where_every_atom_is_stored_twice(name):
    F = a_map(name)
    mu = clouds_for(F)
    constant, doubled = (float(local_lipschitz(F, nu).value) for nu in (mu, split(mu)))
    twice = linearize(F, split(mu), geometry="wasserstein").atoms.to_dense()
    norm = float(torch.linalg.matrix_norm(twice, 2))
    assert [constant, doubled] == pytest.approx([norm, norm], rel=1e-8)


@pytest.mark.parametrize("name", MAPS)
def test_no_local_constant_is_above_the_bound_at_its_place(name):
    F = a_map(name)
    mu = stack([clouds_for(F), clouds_for(F, hard=True)])
    upper = declared(lambda: F.local_upper(mu))
    assert upper.shape == (2,)
    assert (local_lipschitz(F, mu).value <= upper * (1 + 1e-9)).all()


def divided(mu):
    """Every atom in two parts, one of them light."""
    shares = torch.tensor([-8.0, math.log1p(-math.exp(-8.0))], dtype=F64)
    return ParticleMeasure(
        mu.points.repeat_interleave(2, -2),
        log_weights=(mu.log_weights[:, None] + shares).flatten(),
        positions=mu.positions.repeat_interleave(2, -1),
    )


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("splitting", [False, True])
def test_ball_bounds_hold_for_all_that_is_drawn_and_have_the_shape_of_the_radii(name, splitting):
    F = a_map(name)
    mu = clouds_for(F)
    radii = torch.tensor([0.0, 0.01, 0.1], dtype=F64)[:, None].expand(3, 5)
    near = declared(lambda: F.ball_bounds(mu, radii, splitting=splitting))
    assert near.constant.shape == near.change.shape == near.upper.shape == (3,)
    assert near.displacement.shape == (3, 5)
    inner = divided(mu) if splitting else mu
    away = near.displacement.repeat_interleave(inner.n_particles // 5, -1)
    at, image = dense_atoms(F, inner), F(inner).points
    room = 1 + 1e-8
    assert float(torch.linalg.matrix_norm(at, 2)) <= float(near.constant[0]) * room
    for k, seed in ((0, 0), (1, 1), (2, 0), (2, 2)):
        step = draw(*inner.points.shape, seed=seed + 20)
        step = step / step.norm(dim=-1, keepdim=True) * float(radii[k, 0])
        nu = inner.replace(inner.points + step)
        change = torch.linalg.matrix_norm(dense_atoms(F, nu) - at, 2)
        moved = (F(nu).points - image).norm(dim=-1)
        assert float(local_lipschitz(F, nu).value) <= float(near.upper[k]) * room
        assert float(change) <= float(near.change[k]) * room + 1e-10
        assert (moved <= away[k] * room + 1e-12).all()


def test_every_map_that_is_exported_is_in_the_table():
    exported = [vars(module)[name] for module in (attention, dynamics, layers)
                for name in module.__all__]  # fmt: skip
    kinds = {kind for kind in exported if isinstance(kind, type) and issubclass(kind, Map)}
    base_classes = {layers.Particlewise}
    within = {layers.Bounded}  # what `contractive` puts into a residual layer
    assert kinds - base_classes - within <= {type(a_map(name)) for name in MAPS}


def test_a_layer_of_a_stranger_is_one_short_class():
    lines = inspect.getsource(small.Linear).strip().splitlines()
    assert len(lines) <= 25
