"""Functionals of a measure against sums over pairs, and their laws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from meanfield import ParticleMeasure, dynamics, measures, merge
from meanfield.dynamics import functionals
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
    none = FUNCTIONALS[name](stack(members)[:0])
    assert none.shape == (0,) and none.dtype == together.dtype


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
        found = dynamics.cluster_count(scaled, unit * step)
        assert found == dynamics.cluster_count(mu, step)
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
        count, expected = connected_components(graph)
        merged, labels = measures.merge_labelled(mu, scale)
        assert int(dynamics.cluster_count(mu, scale)) == merged.n_particles == count
        assert functionals.meets(mu, scale) == (count < 60)
        pairs = labels[:, None] == labels
        np.testing.assert_array_equal(pairs, expected[:, None] == expected)
        for c in range(count):
            inside = (labels == c).numpy()
            weights = mu.weights.numpy()[inside]
            assert float(merged.weights[c]) == pytest.approx(weights.sum())
            centre = weights @ mu.points.numpy()[inside] / weights.sum()
            np.testing.assert_allclose(merged.points[c], centre, atol=1e-12)


@pytest.mark.parametrize(
    ("points", "scale", "count"),
    [
        ([1e4, 1e4 + 1e-9, 1e4 + 5e-9], 2e-9, 2),  # far from the origin
        (range(50), 1.0, 1),  # a chain
        (range(50), 0.999, 50),
        ([0.0, 0.0, 1e-100], 0.0, 2),  # equal points
    ],
)
def test_short_steps_join_and_longer_ones_do_not(points, scale, count):
    mu = ParticleMeasure([[float(x)] for x in points])
    assert int(dynamics.cluster_count(mu, scale)) == count


def test_light_clusters_count_and_absent_atoms_do_not():
    mu = ParticleMeasure(
        [[0.0], [5.0], [5.1], [9.0]], log_weights=[0.0, -900.0, -900.0, -math.inf]
    )
    assert int(dynamics.cluster_count(mu, 0.5)) == 2
    assert measures.merge_labelled(mu, 0.5)[1].tolist() == [0, 1, 1, -1]


def test_what_has_no_clusters_and_no_energy_is_refused():
    with pytest.raises(ValueError, match="scale"):
        dynamics.cluster_count(cloud(), -1.0)
    with pytest.raises(ValueError, match="A: expected shape"):
        dynamics.log_energy(cloud(), torch.eye(2))


def test_padding_by_blocks_of_absent_atoms_leaves_the_energy_and_its_gradient(monkeypatch):
    monkeypatch.setattr(functionals, "_BLOCK", 1)  # a row at a time: some are absent throughout
    x = torch.randn(2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole, padded = x.clone().requires_grad_(), x.clone().requires_grad_()
    one = dynamics.log_energy(ParticleMeasure(whole[:, :3]), A)
    other = dynamics.log_energy(ParticleMeasure(padded, [1 / 3] * 3 + [0.0] * 2), A)
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(
        *(torch.autograd.grad(e.sum(), t)[0] for e, t in ((one, whole), (other, padded)))
    )
