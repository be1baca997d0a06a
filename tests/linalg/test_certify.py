"""Wrong norm solvers, which the certificate refuses or flags, and a user's own solver."""

from __future__ import annotations

import ast
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meanfield import linalg
from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.attention.tangent import AttentionTangent
from meanfield.errors import ConvergenceError
from meanfield.linalg import Candidate, Lanczos, LinearMap, NormSolver, certify
from meanfield.linalg.evidence import certify_largest, checked
from meanfield.linalg.norms import largest_block_norm
from meanfield.lipschitz import local_lipschitz
from meanfield.maps.map import constant_upper
from meanfield.measures import ParticleMeasure

F64 = torch.float64
VALUES = torch.tensor([3.0, 2.0, 1.0], dtype=F64)
J = LinearMap.diagonal(VALUES[:, None])
RIGHT = Candidate(
    direction=torch.tensor([[1.0], [0.0], [0.0]], dtype=F64),
    upper=torch.tensor(3.0, dtype=F64),
    miss=0.0,
    gap=torch.tensor(1 - (2 / 3) ** 2, dtype=F64),
)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vector(*entries: float) -> torch.Tensor:
    return torch.tensor(entries, dtype=F64)[:, None]


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=F64)


def test_a_right_candidate_has_converged():
    found = certify(J, RIGHT)
    assert bool(found.converged) and found.value == found.upper == 3.0
    assert found.residual == found.error == 0.0 and found.n_matvecs == 0
    assert certify(J, replace(RIGHT, upper=number(3 - 1e-14))).upper == 3.0  # rounded below it


REFUSED = {
    "twice the length": {"direction": 2 * RIGHT.direction},
    "no length": {"direction": vector(0, 0, 0)},
    "not a number": {"direction": vector(math.nan, 0, 0)},
    "infinite": {"direction": vector(math.inf, 0, 0)},
    "another shape": {"direction": vector(1, 0)},
    "a batch of one": {"direction": RIGHT.direction[None]},
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_is_no_unit_vector_is_refused(wrong):
    with pytest.raises(ValueError, match=r"direction: expected (unit vectors|shape)"):
        certify(J, replace(RIGHT, **REFUSED[wrong]))


@pytest.mark.parametrize("length", [0.5, 1.5])
def test_one_vector_of_a_batch_that_has_not_length_one_is_refused(length):
    batch = LinearMap.diagonal(VALUES[:, None].expand(2, 3, 1))
    both = torch.stack([RIGHT.direction, length * RIGHT.direction])
    with pytest.raises(ValueError, match=f"direction: expected unit vectors.*{length}"):
        certify(batch, Candidate(both, upper=RIGHT.upper.expand(2), miss=0.0))


@pytest.mark.parametrize("miss", [-0.1, 1.5, math.nan])
def test_a_miss_that_is_no_probability_is_refused(miss):
    with pytest.raises(ValueError, match="miss: expected a probability"):
        certify(J, replace(RIGHT, miss=miss))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"candidate": RIGHT.direction}, "candidate: expected a Candidate"),
        ({"rtol": "abc"}, "rtol: expected a number"),
        ({"upper_rtol": -1.0}, "upper_rtol: expected a number"),
        ({"candidate": replace(RIGHT, upper=3.0)}, "upper: expected a tensor, got 3.0"),
        (
            {"candidate": replace(RIGHT, direction=RIGHT.direction.float())},
            "direction: expected torch.float64, got torch.float32",
        ),
    ],
)
def test_what_is_no_candidate_and_no_tolerance_is_refused(given, message):
    with pytest.raises((TypeError, ValueError), match=message):
        certify(**{"linear_map": J, "candidate": RIGHT, **given})


@pytest.mark.parametrize("name", ["upper", "gap"])
def test_numbers_for_other_maps_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}: expected one number per map"):
        certify(J, replace(RIGHT, **{name: torch.ones(3, dtype=F64)}))


FLAGGED = {
    "no singular vector": {"direction": vector(0.8, 0.6, 0)},
    "no singular vector, and a gap made up": {"direction": vector(0.8, 0.6, 0), "gap": number(1)},
    "another singular vector": {"direction": vector(0, 1, 0)},
    "a vector mapped to little": {"direction": vector(0, 0, 1)},
    "no upper end": {"upper": number(math.inf)},
    "an upper end that is no number": {"upper": number(math.nan)},
    "an upper end far above": {"upper": number(3.1)},
    "an upper end below the value": {"upper": number(2.9)},
    "a negative upper end": {"upper": number(-3.0)},
}


@pytest.mark.parametrize("wrong", FLAGGED)
def test_wrong_candidates_never_converge(wrong):
    found = certify(J, replace(RIGHT, **FLAGGED[wrong]))
    assert found.converged.shape == () and not bool(found.converged)
    image = J @ found.direction
    torch.testing.assert_close(found.value, torch.linalg.vector_norm(image))
    assert float(found.upper) >= float(found.value)


@pytest.mark.parametrize("upper", [math.nan, 2.9, -1.0])
def test_an_upper_end_that_is_refuted_is_dropped_even_where_none_was_asked_for(upper):
    found = certify(J, replace(RIGHT, upper=number(upper)), upper_rtol=math.inf)
    assert float(found.upper) == math.inf and not bool(found.converged)
    without = certify(J, replace(RIGHT, upper=number(math.inf)), upper_rtol=math.inf)
    assert bool(without.converged)


@pytest.mark.parametrize(("excess", "is_near"), [(0.0099, True), (0.0101, False)])
def test_an_upper_end_counts_up_to_the_tolerance_asked_for(excess, is_near):
    found = certify(J, replace(RIGHT, upper=number(3.0 * (1 + excess))), upper_rtol=0.01)
    assert bool(found.converged) == is_near


def test_the_smaller_of_two_upper_ends_is_kept():
    """What weights of rows prove, √14 here, may be more than the solver knows."""
    weights = [torch.ones(3, 3, dtype=F64)]
    assert float(certify(J, replace(RIGHT, weights=weights)).upper) == 3.0
    unknown = replace(RIGHT, upper=number(math.inf), weights=weights)
    assert float(certify(J, unknown).upper) == pytest.approx(14**0.5)


def test_an_end_that_one_block_refutes_is_none_of_the_map():
    blocks = LinearMap.diagonal(torch.tensor([3.0, 2.0], dtype=F64)[:, None, None])
    upper, v = torch.tensor([3.0, 1.0], dtype=F64), torch.ones(2, 1, 1, dtype=F64)
    found, _ = certify_largest(blocks, Candidate(v, upper, 0.0), rtol=1e-4, upper_rtol=math.inf)
    assert float(found.upper) == math.inf and not bool(found.converged)


def test_a_wrong_gap_cannot_hide_a_large_residual():
    """At most four times rtol is believed, whatever the gap."""
    tilted = vector(math.cos(1e-2), math.sin(1e-2), 0)
    found = certify(J, replace(RIGHT, direction=tilted, gap=number(1e9)))
    assert float(found.error) < 1e-4 < float(found.residual) and not bool(found.converged)
    unknown = certify(J, replace(RIGHT, direction=tilted, gap=number(math.nan)))
    assert float(unknown.error) == float(unknown.residual)


def test_one_wrong_candidate_of_a_batch_is_flagged_alone():
    several = LinearMap.diagonal(VALUES[:, None].expand(2, 3, 1))
    directions = torch.stack([vector(0, 1, 0), RIGHT.direction])
    candidate = Candidate(directions, upper=torch.full((2,), 3.0, dtype=F64), miss=0.0)
    found = certify(several, candidate)
    assert found.converged.tolist() == [False, True]
    with pytest.raises(ConvergenceError, match="upper/value - 1 = 5.00e-01"):
        checked(found, 1e-4, 0.01, strict=True)


def test_the_zero_map_has_norm_zero_and_no_other():
    nothing = LinearMap.diagonal(torch.zeros(3, 1, dtype=F64))
    found = certify(nothing, replace(RIGHT, upper=number(0.0), gap=None))
    assert bool(found.converged) and found.value == found.upper == 0.0
    assert not bool(certify(nothing, RIGHT).converged)


@pytest.mark.parametrize("log_scale", [-320, -300, 0, 300, 307])
def test_products_are_right_at_the_ends_of_the_number_range(log_scale):
    scale = 10.0**log_scale
    found = certify(
        LinearMap.diagonal(scale * VALUES[:, None]), replace(RIGHT, upper=number(3 * scale))
    )
    assert bool(found.converged)
    assert float(found.value) == pytest.approx(3 * scale, rel=1e-3 if log_scale == -320 else 1e-15)


def test_only_the_certificate_makes_estimates():
    package = Path(linalg.__file__).parents[1]
    makers = [
        (path.name, function.name)
        for path in package.rglob("*.py")
        if "NormEstimate(" in (text := path.read_text(encoding="utf-8"))
        for function in ast.walk(ast.parse(text))
        if isinstance(function, ast.FunctionDef)
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("NormEstimate")
    ]
    assert makers == [("evidence.py", "_measured")]


# ------------------------------------------------------------------ a solver of one's own


def test_a_gradient_goes_through_the_value_of_a_factorisation():
    start = torch.randn(3, 6, 4, 5, dtype=F64, generator=torch.Generator().manual_seed(0))
    for matrices in (start, start.mT):
        ours, truth = matrices.clone().requires_grad_(), matrices.clone().requires_grad_()
        blocks = LinearMap.pointwise(ours[..., None, :, :])
        every = linalg.operator_norm(blocks).value.sum()
        largest = largest_block_norm(blocks)[0].value.sum()
        norms = torch.linalg.matrix_norm(truth, 2)
        (found,) = torch.autograd.grad(every + largest, ours)
        (wanted,) = torch.autograd.grad(norms.sum() + norms.amax(-1).sum(), truth)
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
def test_a_matrix_with_one_wrong_entry_is_not_that_of_the_map(scale):
    right = scale * torch.randn(4, 5, dtype=F64, generator=seeded(0))
    truth = torch.linalg.matrix_norm(right / scale, 2)
    maps = LinearMap.pointwise(right[None])
    assert bool(linalg.operator_norm(maps).converged)
    for entry in range(20):
        wrong = right.clone()
        wrong.view(-1)[entry] += 0.01 * scale
        lying = replace(maps, dense=lambda part, wrong=wrong: wrong[None][part])
        blocks = replace(
            LinearMap.pointwise(torch.stack([0.1 * right, right])[:, None]),
            dense=lambda part, wrong=wrong: torch.stack([0.1 * right, wrong])[part],
        )
        for found in (
            linalg.operator_norm(lying, strict=False),
            largest_block_norm(blocks, strict=False)[0],
        ):
            assert not bool(found.converged) and float(found.upper) == math.inf
            assert float(found.error) >= 0.002 / float(truth)
        with pytest.raises(ConvergenceError, match=r"\(to_dense\) and its products .* disagree"):
            linalg.operator_norm(lying)


def test_a_matrix_that_is_wrong_by_a_little_everywhere_is_not_that_of_the_map():
    """No entry of a product is off by rtol of the norm, which is off by ten times that."""
    right = torch.full((400, 400), 1 / 400, dtype=F64)
    maps = LinearMap.of(right[:, :1], lambda x: right @ x, lambda x: right @ x)
    for off, good in ((0.0, True), (0.001, False)):
        lying = replace(maps, dense=lambda part, off=off: (1 + off) * right[None])
        found = linalg.operator_norm(lying, solver=linalg.Dense(), strict=False)
        assert bool(found.converged) == good and (float(found.upper) < math.inf) == good


def test_a_map_that_is_zero_agrees_beside_one_whose_matrix_is_wrong():
    right = torch.stack([torch.zeros(3, 3, dtype=F64), torch.eye(3, dtype=F64)])
    lying = replace(LinearMap.pointwise(right[:, None]), dense=lambda part: (1.1 * right)[part])
    found = linalg.operator_norm(lying, strict=False)
    assert found.converged.tolist() == [True, False] and float(found.error[0]) == 0
    # What is wrong by less than rtol = 1e-4 of a norm beside it does no harm.
    pair = torch.stack([1e-10 * right] * 2)
    honest = LinearMap.pointwise(pair[:, :, None])
    for wrong, harmless in ((1e-13, True), (1e-6, True), (3e-4, False)):
        lying = replace(honest, dense=lambda part, w=wrong: (pair + w).flatten(0, 1)[part])
        found, _ = largest_block_norm(lying, strict=False, beside=torch.tensor([0, 1.0]).double())
        assert found.converged.tolist() == [False, harmless]


def test_a_fault_in_the_dense_form_of_attention_is_not_certified(monkeypatch):
    F = SelfAttention(AttentionParameters.random(4, n_heads=2, generator=seeded(0)), causal=True)
    mu = ParticleMeasure.from_sequence(torch.randn(12, 4, dtype=F64, generator=seeded(1)))
    dense = AttentionTangent._dense

    def faulty(self, *args):
        matrices = dense(self, *args)
        matrices[..., 5, 7] += 0.5
        return matrices

    assert bool(local_lipschitz(F, mu).converged)
    monkeypatch.setattr(AttentionTangent, "_dense", faulty)
    with pytest.raises(ConvergenceError, match="disagree by"):
        local_lipschitz(F, mu)
    found = local_lipschitz(F, mu, strict=False)
    assert not bool(found.converged) and float(found.upper) == math.inf
    assert float(constant_upper(F, mu)) == math.inf  # no bound comes from it either


class Second(NormSolver):
    """The second singular vector, and no upper end, whatever was asked for."""

    upper_rtol = math.inf

    def candidate(self, linear_map, rtol, upper_rtol):
        second = torch.linalg.svd(linear_map.to_dense())[2][..., 1, :]
        v = second.reshape(*linear_map.batch_shape, *linear_map.in_shape)
        unknown = torch.full(linear_map.batch_shape, math.inf, dtype=v.dtype)
        return Candidate(v, upper=unknown, miss=1.0)


def test_no_solver_decides_what_has_converged():
    F = SelfAttention(AttentionParameters.random(20, generator=seeded(1)))
    mu = ParticleMeasure(torch.randn(9, 20, dtype=F64, generator=seeded(2)))
    truth = local_lipschitz(F, mu)
    found = local_lipschitz(F, mu, solver=Second(), strict=False)
    assert float(found.value) < 0.9 * float(truth.value)
    assert float(found.residual) < 1e-12 and float(found.upper) == math.inf
    assert not bool(found.converged)
    with pytest.raises(ConvergenceError, match="upper/value - 1 = inf is above upper_rtol = 1.00"):
        local_lipschitz(F, mu, solver=Second())
    # Who asks for no upper end is told of a singular value, which it is.
    assert bool(local_lipschitz(F, mu, solver=Second(), upper_rtol=math.inf).converged)


def test_a_solver_without_candidates_says_so():
    with pytest.raises(NotImplementedError, match="NormSolver: expected a method `candidate`"):
        linalg.operator_norm(J, solver=NormSolver())


# ------------------------------------------------------------------ what the error promises


@pytest.mark.parametrize("gap", [1e-3, 1e-2, 0.1])
def test_the_stated_error_is_not_below_the_true_one(gap):
    """Over spectra with a gap below σ₁, as long as the iteration sees the second value."""
    values = torch.cat([torch.ones(1), torch.linspace(1 - gap, 0, 299)]).double()
    starts = LinearMap.diagonal(values[:, None].expand(10, -1, 1))
    below = total = 0
    for steps in (10, 20, 40, 60):
        generator = torch.Generator().manual_seed(steps)
        solver = Lanczos(max_steps=steps, generator=generator)
        found = linalg.operator_norm(
            starts, rtol=1e-12, upper_rtol=math.inf, solver=solver, strict=False
        )
        off = 1 - found.value
        counts = (found.residual < gap / 4) & (off > 1e-13)
        total += int(counts.sum())
        below += int((counts & (off > found.error * (1 + 1e-6))).sum())
    assert total >= 5 and below == 0
