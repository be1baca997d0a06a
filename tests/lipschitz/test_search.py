"""Worst-case search: it reaches the known optimum and never falls below the hand-built inputs."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch

from meanfield import bounds, sampling
from meanfield.attention import AttentionParameters, SelfAttention, kernels
from meanfield.lipschitz import compare_lemma_3_2, local_lipschitz, worst_case
from meanfield.measures import ParticleMeasure

F64 = torch.float64
FAST = {"starts": 2, "steps": 30}


@pytest.mark.parametrize(
    ("radius", "best"),
    [(0.5, 1.0), (1.0, 3.0686796), (3.0, 50897.671)],
)
def test_the_best_two_atoms_of_the_line_are_found(radius, best):
    # Optima by differential evolution over places and weight; at R = ½ the pair is collapsed.
    F = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]))
    mu, constant = worst_case(F, radius, **FAST)
    assert float(constant.value) == pytest.approx(best, rel=1e-5)
    assert float(mu.points.abs().max()) <= radius
    assert bool(constant.converged)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_search_reaches_the_hand_built_inputs_and_stays_below_the_bound(seed, causal):
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(2, 2, dtype=F64, generator=generator) - torch.eye(2, dtype=F64)
    F = SelfAttention(AttentionParameters.from_bilinear(A, torch.eye(2, dtype=F64)), causal)
    radius = 1.3
    _, constant = worst_case(F, radius, starts=2, steps=10)
    try:
        pair = sampling.critical_pair(A)
    except ValueError:
        built = 1.0
    else:
        z = bounds.two_dirac_best_log_ratio(pair.scaling, radius)
        hand = sampling.two_diracs(
            radius, z, pair.direction, heavy_at=pair.heavy_at, positioned=causal
        )
        built = float(local_lipschitz(F, hand).value)
    norm_A = float(torch.linalg.matrix_norm(A, 2))
    bound = bounds.masked_mean_field if causal else bounds.mean_field
    assert built * (1 - 1e-2) <= float(constant.value) <= bound(norm_A, 1.0, radius)


def test_one_atom_is_a_measure_too():
    F = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]))
    mu, constant = worst_case(F, 1.0, n_atoms=1, **FAST)
    assert mu.n_particles == 1
    assert float(constant) == pytest.approx(1.0, rel=1e-12)  # V


def test_a_derivative_that_looks_at_no_point_is_searched():
    _, constant = worst_case(lambda mu: mu, 1.0, dim=2, **FAST)
    assert float(constant) == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_the_search_needs_no_gradients_of_its_caller(without):
    F = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]))
    with without():
        _, constant = worst_case(F, 1.0, **FAST)
    assert float(constant) == float(worst_case(F, 1.0, **FAST)[1])


def test_more_atoms_are_never_worse():
    F = SelfAttention(AttentionParameters.random(2, std=1.5))
    two, constant = worst_case(F, 1.0, starts=2, steps=10)
    _, more = worst_case(F, 1.0, n_atoms=4, candidates=[two], starts=2, steps=10)
    assert float(more.value) >= float(constant.value) * (1 - 1e-9)


def test_a_seed_decides_the_search():
    F = SelfAttention(AttentionParameters.random(2))
    again = [worst_case(F, 1.0, starts=4, steps=5)[1].value for _ in range(2)]
    assert torch.equal(*again)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"radius": 0.0}, "radius: expected a number > 0"),
        ({"n_atoms": 0}, "n_atoms: expected a whole number ≥ 1"),
        ({"starts": 0}, "starts: expected a whole number ≥ 1"),
        ({"steps": 0}, "steps: expected a whole number ≥ 1"),
        ({"candidates": [ParticleMeasure([[3.0]])]}, "ball of radius 1"),
        ({"candidates": [ParticleMeasure([[1.0 + 1e-8]])]}, "ball of radius 1"),
        (
            {"candidates": [ParticleMeasure([[0.1, 0.1]])]},
            "candidates: expected points of dimension 1",
        ),
        ({"candidates": [ParticleMeasure([[0.1]] * 3)]}, "at most 2 atoms"),
    ],
)
def test_bad_arguments_are_refused(arguments, words):
    F = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]))
    with pytest.raises(ValueError, match=words):
        worst_case(F, **({"radius": 1.0} | arguments))
    with pytest.raises(ValueError, match="dim: expected"):
        worst_case(lambda mu: F(mu), 1.0)


def test_directions_that_do_not_matter_do_not_disturb_the_ascent():
    # The worst pair lies along the first axis, as on the line; elsewhere gradients are rounding.
    A = torch.diag(torch.tensor([-1.0, -0.5], dtype=torch.float64))
    F = SelfAttention(AttentionParameters.from_bilinear(A, torch.eye(2, dtype=torch.float64)))
    for n_atoms in (2, 3):
        found = worst_case(F, 1.5, n_atoms=n_atoms, starts=2, steps=30)[1]
        assert float(found.value) == pytest.approx(18.178531, rel=1e-6)


def test_candidates_may_come_one_by_one():
    F = lambda mu: mu.replace(mu.points**3)  # noqa: E731
    known = [ParticleMeasure([[1.0], [-1.0]])]
    settings = {"n_atoms": 2, "dim": 1, "starts": 1, "steps": 1}
    assert float(worst_case(F, 1.0, **settings)[1]) < 2.9
    found = worst_case(F, 1.0, candidates=iter(known), **settings)[1]
    assert float(found) == pytest.approx(3.0)


def test_candidates_on_the_sphere_are_in_the_ball_whatever_their_rounding() -> None:
    F = SelfAttention(AttentionParameters.random(3, generator=0))
    points = sampling.sphere(50, 3, generator=0, dtype=torch.float32)
    assert float(points.double().norm(dim=-1).max()) > 1
    given = {"n_atoms": 50, "starts": 1, "steps": 1, "generator": 0}
    mu, _ = worst_case(F, 1.0, candidates=[ParticleMeasure(points)], **given)
    assert float(mu.points.norm(dim=-1).max()) <= 1


def test_candidates_may_have_atoms_without_mass_anywhere_or_be_none() -> None:
    F = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]))
    far = ParticleMeasure([[1.0], [-1.0], [9.0]], weights=[0.1, 0.9, 0.0])
    none = ParticleMeasure(torch.zeros(0, 2, 1, dtype=torch.float64))
    given = {"starts": 1, "steps": 1, "generator": 0}
    mu, found = worst_case(F, 1.0, n_atoms=3, candidates=[far, none], **given)
    known = local_lipschitz(F, far)
    assert float(found.value) >= float(known.value) * (1 - 1e-6)
    assert float(mu.points.abs().max()) <= 1.0 + 1e-9


def test_a_layer_of_single_precision_is_asked_for_in_double() -> None:
    single = AttentionParameters.from_bilinear([[-1.0]], [[1.0]]).to(torch.float32)
    with pytest.raises(TypeError, match="float64.*got torch.float32; take SelfAttention"):
        worst_case(SelfAttention(single), 1.0, n_atoms=2)


def test_parameters_that_record_gradients_are_searched_without_a_warning() -> None:
    A = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    F = SelfAttention(AttentionParameters.from_bilinear(A, [[1.0]]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        worst_case(F, 1.0, n_atoms=2, starts=1, steps=2, generator=0)


@pytest.mark.parametrize(
    ("question", "asked", "argument"),
    [
        (
            functools.partial(worst_case, radius=1.0, n_atoms=3, starts=2, steps=2),
            "worst_case",
            "positioned",
        ),
        (
            lambda F, **how: compare_lemma_3_2(F, torch.eye(2).double(), **how),
            "compare_lemma_3_2",
            "conditional",
        ),
    ],
)
def test_a_kernel_that_looks_at_positions_asks_for_the_argument_that_gives_them(
    question, asked, argument
):
    F = SelfAttention(AttentionParameters.random(2, generator=0), kernel=kernels.rotary())
    with pytest.raises(ValueError, match=f"positions.*{asked} .*{argument}=True"):
        question(F)
    question(F, **{argument: True})


@pytest.mark.parametrize(("A", "radius"), [(8.0, 2.0), (-1.0, 10.0)])
def test_two_diracs_of_either_branch_are_starts_at_weights_however_small(A, radius):
    """The only other start has all its atoms in one place."""
    F = SelfAttention(AttentionParameters.from_bilinear([[A]], [[1.0]]))
    _, constant = worst_case(F, radius, starts=1, steps=1)
    pair = sampling.critical_pair([[A]])
    z = bounds.two_dirac_best_log_ratio(pair.scaling, radius)
    hand = sampling.two_diracs(radius, z, pair.direction, heavy_at=pair.heavy_at)
    assert float(constant.value) >= 0.99 * float(local_lipschitz(F, hand).value) > 2


def test_a_candidate_of_fewer_atoms_is_the_same_measure_at_positions_of_its_own():
    candidate = ParticleMeasure([[1.0], [-1.0]], weights=[0.2, 0.8])
    given = {"candidates": [candidate], "n_atoms": 4, "dim": 1, "starts": 1, "steps": 1}
    best, _ = worst_case(lambda mu: mu.replace(mu.points**3), 1.0, positioned=True, **given)
    assert float(best.mean()) == pytest.approx(-0.6, rel=1e-12)
    assert best.positions.tolist() == [0.25, 0.5, 0.75, 1.0]
