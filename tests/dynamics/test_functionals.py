"""Functionals of a measure against sums over pairs, and their laws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from meanfield import ParticleMeasure, dynamics, measures, merge
from meanfield.dynamics import functionals, merging
from meanfield.measures import split, stack


def cloud(n: int = 30, d: int = 3, seed: int = 0) -> ParticleMeasure:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g, dtype=torch.float64)
    logs = torch.randn(n, generator=g, dtype=torch.float64).log_softmax(0)
    return ParticleMeasure(x, log_weights=logs)


def with_absent(mu: ParticleMeasure) -> ParticleMeasure:
    far = torch.full((1, mu.dim), 1e3, dtype=mu.dtype)
    nothing = torch.full((1,), -math.inf, dtype=mu.dtype)
    # First: a stand-in taken by its place would be the absent atom.
    return ParticleMeasure(
        torch.cat([far, mu.points]), log_weights=torch.cat([nothing, mu.log_weights])
    )


A = torch.tensor([[0.5, -0.3, 0.1], [0.2, 0.4, 0.0], [0.0, 0.7, -0.6]], dtype=torch.float64)
FUNCTIONALS = {
    "log_energy": lambda mu: dynamics.log_energy(mu, A),
    "cluster_count": lambda mu: dynamics.cluster_count(mu, 0.7),
}


@pytest.mark.parametrize("block", [1, 50, 2**22])
def test_the_energy_is_its_sum_over_pairs_whatever_the_blocks(block, monkeypatch):
    monkeypatch.setattr(functionals, "_BLOCK", block)
    mu = cloud()
    x, a = mu.points.numpy(), mu.weights.numpy()
    pairs = [(i, j) for i in range(len(x)) for j in range(len(x))]
    energy = sum(a[i] * a[j] * math.exp(A.numpy() @ x[i] @ x[j]) for i, j in pairs)
    assert float(dynamics.log_energy(mu, A)) == pytest.approx(math.log(energy), rel=1e-12)


@pytest.mark.parametrize("name", FUNCTIONALS)
def test_order_splitting_and_absence_change_nothing(name):
    mu, function = cloud(), FUNCTIONALS[name]
    order = torch.randperm(30, generator=torch.Generator().manual_seed(1))
    shuffled = ParticleMeasure(mu.points[order], log_weights=mu.log_weights[order])
    for other in (shuffled, split(mu, 2), with_absent(mu)):
        torch.testing.assert_close(function(other), function(mu), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", FUNCTIONALS)
def test_a_batch_is_its_members(name):
    members = [cloud(seed=s) for s in range(3)]
    together = FUNCTIONALS[name](stack(members))
    for k, mu in enumerate(members):
        torch.testing.assert_close(together[k], FUNCTIONALS[name](mu))


def test_the_energy_neither_overflows_nor_vanishes():
    mu = ParticleMeasure([[1.0], [-1.0]], log_weights=[0.0, -900.0])
    B = torch.tensor([[2000.0]], dtype=torch.float64)
    assert float(dynamics.log_energy(mu, B)) == pytest.approx(2000)
    assert float(dynamics.log_energy(mu, -B)) == pytest.approx(2000 - 900 + math.log(2))


@pytest.mark.parametrize(
    ("dtype", "power"), [(torch.float32, -80), (torch.float32, 80), (None, -600), (None, 600)]
)
def test_sizes_whose_squares_leave_the_number_range_change_nothing_but_the_unit(dtype, power):
    mu = cloud().to(dtype or torch.float64)
    unit = 2.0**power
    scaled = mu.replace(unit * mu.points)
    for step in (0.3, 0.7):
        found = dynamics.clusters(scaled, unit * step)
        assert torch.equal(found.labels, dynamics.clusters(mu, step).labels)
        assert merge(scaled, unit * step).n_particles == merge(mu, step).n_particles


# --- clusters ---


@pytest.mark.parametrize("block", [measures._BLOCK, 150])
def test_clusters_are_the_components_of_the_graph_of_short_distances(monkeypatch, block):
    from scipy.sparse.csgraph import connected_components
    from scipy.spatial.distance import cdist

    monkeypatch.setattr(measures, "_BLOCK", block)
    for seed in range(10):
        mu = cloud(60, 2, seed)
        scale = 0.1 + 0.1 * seed
        graph = cdist(mu.points, mu.points) <= scale
        count, labels = connected_components(graph)
        found = dynamics.clusters(mu, scale)
        assert found.count == count
        assert merging.meets(mu, scale) == (count < 60)
        pairs = found.labels[:, None] == found.labels
        np.testing.assert_array_equal(pairs, labels[:, None] == labels)
        masses = found.log_masses.exp()
        assert (masses.diff() <= 0).all()
        for c in range(count):
            inside = (found.labels == c).numpy()
            weights = mu.weights.numpy()[inside]
            assert float(masses[c]) == pytest.approx(weights.sum())
            centre = weights @ mu.points.numpy()[inside] / weights.sum()
            np.testing.assert_allclose(found.centres[c], centre, atol=1e-12)


def test_light_clusters_keep_their_logarithms_and_absent_atoms_have_none():
    mu = ParticleMeasure(
        [[0.0], [5.0], [5.1], [9.0]], log_weights=[0.0, -900.0, -900.0, -math.inf]
    )
    found = dynamics.clusters(mu, 0.5)
    assert found.labels.tolist() == [0, 1, 1, -1]
    assert float(found.log_masses[1]) == pytest.approx(-900 + math.log(2))
    assert float(found.centres[1, 0]) == pytest.approx(5.05)


def test_collapsed_clusters_far_from_the_origin_are_told_apart():
    mu = ParticleMeasure([[1e4], [1e4 + 1e-9], [1e4 + 5e-9]])
    assert dynamics.clusters(mu, 2e-9).labels.tolist() == [0, 0, 1]


def test_a_chain_is_one_cluster_and_a_scale_of_zero_joins_equal_points():
    chain = ParticleMeasure(torch.arange(50, dtype=torch.float64)[:, None])
    assert dynamics.clusters(chain, 1.0).count == 1
    assert dynamics.clusters(chain, 0.999).count == 50
    twins = ParticleMeasure([[0.0], [0.0], [1e-100]])
    assert dynamics.clusters(twins, 0.0).count == 2


def test_clusters_refuse_what_they_cannot_label():
    with pytest.raises(ValueError, match="without batch axes"):
        dynamics.clusters(stack([cloud(), cloud()]), 0.1)
    with pytest.raises(ValueError, match="scale"):
        dynamics.clusters(cloud(), -1.0)
    with pytest.raises(ValueError, match="A: expected shape"):
        dynamics.log_energy(cloud(), torch.eye(2))
