"""Local Lipschitz constants against the dense oracle, the split measure and reference values."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from mpmath import mp

from meanfield import bounds, sampling
from meanfield.attention import AttentionParameters, SelfAttention, kernels, normalizations
from meanfield.bounds.diracs import two_dirac_entry
from meanfield.dynamics import flow, log_energy, stability
from meanfield.errors import ConvergenceError
from meanfield.layers import MLP, Chain, Pointwise, contractive, invert
from meanfield.linalg import Dense, Lanczos, LinearMap
from meanfield.lipschitz import (
    Readout,
    ball_upper,
    cache_error,
    certified_radius,
    local_lipschitz,
    local_order,
    localize,
    one_sided,
)
from meanfield.maps import Linearisation, Map, linearize
from meanfield.measures import ParticleMeasure
from tests import oracles
from tests.attention.test_self_attention import attention
from tests.strategies import Problem, light_atom_problem, problems

F64 = torch.float64


@pytest.mark.parametrize("shape", [(0, 4, 1), (3, 0, 4, 1)])
def test_an_empty_batch_has_an_empty_answer(shape):
    layer = AttentionParameters.from_bilinear([[-1.0]], [[1.0]])
    mu = ParticleMeasure(torch.zeros(shape, dtype=F64), positions=torch.arange(4, dtype=F64) / 4)
    for F in (
        SelfAttention(layer),
        SelfAttention(layer, causal=True),
        SelfAttention(layer, kernel=kernels.l2),
        SelfAttention(layer, normalization=normalizations.sinkhorn()),
        lambda nu: nu.replace(2 * nu.points),
    ):
        for geometry in ("wasserstein", "euclidean"):
            assert local_lipschitz(F, mu, geometry=geometry).value.shape == shape[:-2]
    image = SelfAttention(layer)(mu)
    assert image.points.shape == shape


@given(problems())
def test_both_components_and_the_euclidean_constant_agree_with_dense_algebra(problem: Problem):
    expected = oracles.local_constants(
        problem.points, problem.log_weights, problem.layer, **problem.mask
    )
    F, mu = attention(problem), problem.measure
    found = local_lipschitz(F, mu)
    scale = 1e-300 + expected.particle
    assert float(found.particle) == pytest.approx(expected.particle, rel=1e-10, abs=1e-300)
    assert float(found.splitting) == pytest.approx(expected.splitting, rel=1e-9, abs=1e-14 * scale)
    assert found.value == max(found.particle, found.splitting)
    plain = local_lipschitz(F, mu, geometry="euclidean")
    assert float(plain.value) == pytest.approx(expected.euclidean, rel=1e-10, abs=1e-300)
    assert plain.splitting is None


@pytest.mark.parametrize(
    ("radius", "best"),
    [(0.5, 1.00), (1.0, 3.07), (1.5, 18.2), (2.0, 166), (2.5, 2329), (3.0, 50898)],
)
def test_the_best_two_atom_constants_of_the_line_are_reached(radius, best):
    F = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]))
    predicted = bounds.two_dirac_best_log_ratio(1.0, radius)
    log_ratios = torch.linspace(-2 * radius**2 - 8, 0, 2001, dtype=F64)
    log_ratios[0] = predicted
    found = local_lipschitz(F, sampling.two_diracs(radius, log_ratios, [1.0]))
    # The references are printed to three digits, or five for the last.
    assert float(found.value.max()) == pytest.approx(best, rel=3e-3)
    assert float(found.value.max()) >= bounds.two_dirac_lower(1.0, radius) * (1 - 1e-12)
    assert float(found.value.max()) <= bounds.mean_field(1.0, 1.0, radius)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shape", [(2, 1), (2, 2), (3, 2), (3, 3)])
def test_weights_of_e_minus_900_are_right_to_ten_digits(seed, shape):
    problem = light_atom_problem(seed, *shape)
    F, mu = attention(problem), problem.measure
    with mp.workdps(50):
        matrix = oracles.jacobian(
            oracles.exact(problem.points),
            oracles.exact(problem.log_weights),
            oracles.exact_layer(problem.layer),
            weighted=True,
        )
        expected = float(oracles.largest_singular_value(matrix))
    found = local_lipschitz(F, mu)
    assert math.isfinite(expected)
    assert expected > 1e150
    assert float(found.particle) == pytest.approx(expected, rel=1e-10)
    steps = local_lipschitz(F, mu, solver=Lanczos(), rtol=1e-12)
    assert float(steps.particle) == pytest.approx(expected, rel=1e-10)


def test_two_diracs_agree_with_the_closed_form_in_high_precision():
    for radius, log_ratio in ((0.7, -1.0), (2.0, -9.0), (math.sqrt(450), -900.0), (3.0, -900.0)):
        F = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]))
        found = local_lipschitz(F, sampling.two_diracs(radius, log_ratio, [1.0]))
        log_light = log_ratio - math.log1p(math.exp(log_ratio))
        particle, splitting = oracles.two_dirac_constants(-1.0, radius, log_light)
        assert float(found.particle) == pytest.approx(float(particle), rel=1e-10)
        assert float(found.splitting) == pytest.approx(float(splitting), rel=1e-10, abs=1e-30)
        assert float(found.particle) >= two_dirac_entry(1.0, radius, log_ratio) * (1 - 1e-12)


def test_the_splitting_direction_attains_the_splitting_component():
    F = SelfAttention(AttentionParameters.random(4, std=1.0))
    mu = ParticleMeasure.from_sequence(torch.randn(3, 5, 4, dtype=F64))
    found = local_lipschitz(F, mu)
    jacobians = linearize(F, mu).field.to_dense()
    picked = jacobians[torch.arange(3), found.splitting_atom]
    image = (picked @ found.splitting_direction[..., None]).squeeze(-1)
    torch.testing.assert_close(torch.linalg.vector_norm(image, dim=-1), found.splitting)
    torch.testing.assert_close(
        torch.linalg.vector_norm(found.splitting_direction, dim=-1), torch.ones(3, dtype=F64)
    )


@pytest.mark.gpu
def test_constants_on_the_device_agree(device):
    par = AttentionParameters.random(8, n_heads=2, biases=True)
    mu = ParticleMeasure.from_sequence(torch.randn(4, 40, 8, dtype=F64))
    here = local_lipschitz(SelfAttention(par), mu)
    there = local_lipschitz(SelfAttention(par.to(device)), mu.to(device))
    torch.testing.assert_close(there.value.cpu(), here.value)
    torch.testing.assert_close(there.splitting.cpu(), here.splitting)


class TwoSpectra(Map):
    """The derivative of the atoms is one multiple of 1, that of the field has a spectrum."""

    def __init__(self, whole: float, apart: torch.Tensor) -> None:
        self.whole, self.apart = whole, apart

    def __call__(self, mu):
        own = self.apart * mu.points
        return mu.replace(own + (self.whole - self.apart) * mu.mean()[..., None, :])

    def linearisation(self, mu, *, geometry="euclidean"):
        """Of one atom."""
        every = torch.full(mu.points.shape, self.whole, dtype=F64)
        return Linearisation(
            LinearMap.diagonal(every), LinearMap.diagonal(self.apart.expand(1, 1, -1))
        )


@pytest.mark.parametrize("whole", [0.5, 3.0])
def test_a_constant_whose_field_alone_does_not_converge_is_flagged(whole):
    apart = torch.linspace(2, 0.1, 300, dtype=F64)
    mu = ParticleMeasure(torch.zeros(1, 300, dtype=F64))
    solver = Lanczos(max_steps=4)
    found = local_lipschitz(TwoSpectra(whole, apart), mu, solver=solver, strict=False)
    alone = local_lipschitz(
        TwoSpectra(whole, apart), mu, geometry="euclidean", solver=solver, strict=False
    )
    assert bool(alone.converged) and not bool(found.converged)
    assert float(found.error) > 1e-4 > float(alone.error)
    assert float(found.residual) > 1e-2 > float(alone.residual)
    with pytest.raises(ConvergenceError):
        local_lipschitz(TwoSpectra(whole, apart), mu, solver=solver)


def test_a_constant_of_atoms_together_that_does_not_converge_is_flagged():
    """The field, in two dimensions, is factored."""
    F = SelfAttention(AttentionParameters.random(2, generator=0))
    points = torch.randn(100, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    given = {"rtol": 1e-9, "solver": Lanczos(max_steps=2), "strict": False}
    found = local_lipschitz(F, ParticleMeasure(points), **given)
    alone = local_lipschitz(F, ParticleMeasure(points), geometry="euclidean", **given)
    assert not bool(alone.converged) and not bool(found.converged)
    assert float(found.error) == pytest.approx(float(alone.error)) and float(found.error) > 1e-6
    assert float(found.residual) == pytest.approx(float(alone.residual))
    assert float(found.residual) > 1e-6


@pytest.mark.parametrize("solver", [Dense(), Lanczos(), None], ids=lambda s: type(s).__name__)
def test_the_upper_end_covers_the_larger_component(solver):
    """By default the whole is factored, and the field iterated."""
    mu = ParticleMeasure(torch.zeros(1, 300, dtype=F64))
    apart = 0.9 ** torch.arange(300, dtype=F64)
    for whole, larger in ((0.5, 1.0), (2.0, 2.0)):
        found = local_lipschitz(TwoSpectra(whole, apart), mu, solver=solver)
        assert float(found.value) == pytest.approx(larger, rel=1e-4)
        assert larger * (1 - 1e-14) <= float(found.upper) <= 1.01 * larger
        assert found.miss == (0.0 if isinstance(solver, Dense) else 1e-9)


def test_the_matrices_of_a_part_of_a_batch_are_those_of_the_whole():
    """Differences of values are formed once for all of it."""
    generator = torch.Generator().manual_seed(0)
    mu = ParticleMeasure(torch.randn(5, 3, 4, generator=generator, dtype=torch.float64))
    J = SelfAttention(AttentionParameters.random(4, n_heads=2, generator=generator)).linearize(mu)
    assert J.dense is not None
    torch.testing.assert_close(J.dense(slice(1, 4)), J.to_dense()[1:4], rtol=0, atol=1e-14)


def test_a_splitting_component_that_is_rounding_does_no_harm():
    """Rows that see one token only: 1e-35 beside 0.4, where matrices and products differ."""
    generator = torch.Generator().manual_seed(1)
    points = sampling.ball(3, 1, radius=0.05, batch_shape=(40,), generator=generator)
    points[::2] /= points[::2].norm(dim=-1, keepdim=True) / 0.05
    logs = (3 * torch.randn(40, 3, dtype=F64, generator=generator)).log_softmax(-1)
    mu = ParticleMeasure(points, log_weights=logs, positions=torch.arange(1, 4, dtype=F64) / 3)
    for kernel in (kernels.dot_product, kernels.soft_cap(1.5), kernels.l2):
        F = SelfAttention(
            AttentionParameters.tied_l2([[1.7]], [[0.9]]), causal=True, kernel=kernel
        )
        found = local_lipschitz(F, mu)
        assert bool(found.converged.all()) and bool(found.upper.isfinite().all())
        assert bool(bounds.local_upper(F, mu).isfinite().all())


@pytest.mark.parametrize("seed", range(12))
def test_products_that_cancel_far_from_the_origin_are_not_refused(seed):
    """Under a sink all of the attention goes to one atom: 0, as a difference of numbers of 1e4."""
    F = SelfAttention(
        AttentionParameters.random(4, n_heads=2, generator=seed, std=1.0),
        normalization=normalizations.sink(0.0),
    )
    generator = torch.Generator().manual_seed(seed)
    far = 100 * torch.randn(4, dtype=F64, generator=generator)
    mu = ParticleMeasure(far + torch.randn(2, 4, dtype=F64, generator=generator))
    found = local_lipschitz(F, mu)
    dense = torch.autograd.functional.jacobian(lambda x: F(mu.replace(x)).points, mu.points)
    truth = torch.linalg.matrix_norm(dense.reshape(8, 8), 2)
    assert float(found.particle) == pytest.approx(float(truth), rel=1e-6)
    assert float(found.upper) >= float(truth) * (1 - 1e-9)


def test_autocast_changes_no_number():
    """What is said is about the numbers that come in, in their own precision."""
    F = SelfAttention(AttentionParameters.random(4, dtype=torch.float32))
    mu = ParticleMeasure(torch.randn(5, 4), positions=torch.arange(5) / 5)
    x, A = mu.points[None], F.parameters.A[0]
    balanced = SelfAttention(F.parameters, normalization=normalizations.sinkhorn())
    mlp = MLP(torch.randn(8, 4), torch.randn(4, 8))
    growing, J = contractive(F, 0.5, constant=100.0), linearize(F, mu)
    doors = (
        lambda: F(mu).points,
        lambda: linearize(F, mu).atoms.to_dense(),
        lambda: linearize(F, mu).atoms @ mu.points,
        lambda: J.atoms.matvec(mu.points),
        lambda: invert(growing, mu, rtol=1e-3).measure.points,
        lambda: AttentionParameters.tied_l2(A, A).value,
        lambda: Readout(torch.eye(4))(mu),
        lambda: local_lipschitz(F, mu).value,
        lambda: bounds.local_upper(F, mu),
        lambda: ball_upper(F, mu, 1e-3),
        lambda: cache_error(x, (x, x), (x, x + 1), epsilon=0.1).value,
        lambda: torch.as_tensor(flow(F, mu, [0.0, 0.1]).points.values),
        lambda: torch.as_tensor(stability(F, mu, [0.0, 0.1]).growth.values),
        lambda: F.field(mu)(mu.points),
        lambda: F.largest_logits(mu),
        lambda: balanced.plan(mu).weights,
        lambda: local_order(F, mu, p=1).lower,
        lambda: one_sided(F, mu).value,
        lambda: certified_radius(F, Readout(torch.eye(4)), mu).value,
        lambda: localize(local_lipschitz(F, mu), F, mu).heads,
        lambda: log_energy(mu, A),
        lambda: F.parameters.A,
        lambda: F.parameters.V,
        lambda: F.local_upper(mu),
        lambda: F.ball_bounds(mu, 1e-3).upper,
        lambda: F.linearisation(mu).atoms.to_dense(),
        lambda: mlp(mu).points,
        lambda: mlp.local_upper(mu),
        lambda: mlp.ball_bounds(mu, 1e-3).upper,
        lambda: torch.tensor(mlp.global_upper),
        lambda: Chain([mlp, F]).local_upper(mu),
    )
    plain = [door() for door in doors]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = [door() for door in doors]
    for found, expected in zip(inside, plain, strict=True):
        assert torch.equal(found, expected)
    kernel = kernels.qk_norm(torch.ones(4, dtype=F64), [1.0, 2.0, 0.5, 1.0])
    assert SelfAttention(F.parameters, kernel=kernel)(mu).dtype == torch.float32


def test_a_gradient_of_a_constant_is_taken_under_autocast_too():
    """Where torch itself takes products in half precision."""
    F = SelfAttention(AttentionParameters.random(3, dtype=torch.float32, generator=0))
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (wanted,) = torch.autograd.grad(local_lipschitz(F, ParticleMeasure(x)).value, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (found,) = torch.autograd.grad(local_lipschitz(F, ParticleMeasure(x)).value, x)
    assert float((found - wanted).norm()) <= 0.02 * float(wanted.norm())


def test_a_traced_measure_is_refused_with_what_to_do():
    F = SelfAttention(AttentionParameters.random(2))
    for transform in (torch.func.grad, torch.func.vmap):
        with pytest.raises(RuntimeError, match="by requires_grad and backward.*in place of vmap"):
            transform(lambda x: local_lipschitz(F, ParticleMeasure(x)).value)(
                torch.randn(3, 4, 2).double()
            )


@pytest.mark.parametrize("geometry", ["euclidean", "wasserstein"])
@pytest.mark.parametrize("radius", [1.0, 5.0])
def test_upper_ends_in_single_precision_cover_the_rounding_of_the_map(radius, geometry):
    """Of 32 clouds that are iterated on; the truth is that of the same numbers in double."""
    generator = torch.Generator().manual_seed(0)
    points = radius * torch.randn(32, 120, 2, generator=generator)
    mu = ParticleMeasure.from_sequence(points)
    layer = AttentionParameters.random(2, std=1.0, dtype=torch.float32, generator=generator)
    found = local_lipschitz(SelfAttention(layer, causal=True), mu, geometry=geometry)
    exact = SelfAttention(layer.to(F64), causal=True)
    truth = local_lipschitz(exact, mu.to(F64), geometry=geometry, solver=Dense()).value
    assert found.miss > 0
    assert bool((truth <= found.upper.double()).all())
    assert bool((found.value.double() >= (1 - 1e-4) * truth).all())


def _capped(cloud):
    return SelfAttention(
        AttentionParameters.random(3, generator=0),
        kernel=kernels.soft_cap(2.0),
        normalization=normalizations.sigmoid,
    )(cloud)


THREADED = {
    "mlp": MLP(torch.linspace(-1, 1, 36).double().view(12, 3), torch.eye(3, 12).double()),
    "pointwise": Pointwise(lambda x: x.tanh() * x.flip(-1)),
    "no declared map": lambda mu: mu.replace(mu.points.sin() @ mu.points.new_ones(3, 3)),
    "attention without a declaration": _capped,
    "soft cap": SelfAttention(
        AttentionParameters.random(3, generator=0), kernel=kernels.soft_cap(2.0)
    ),
    "sigmoid": SelfAttention(
        AttentionParameters.random(3, generator=0), normalization=normalizations.sigmoid
    ),
}


@pytest.mark.parametrize("kind", THREADED)
def test_constants_are_the_same_in_threads(kind):
    """torch has one level of forward derivatives, and one set of switches, for all threads."""
    F, generator = THREADED[kind], torch.Generator().manual_seed(0)
    clouds = [
        ParticleMeasure(torch.randn(6, 3, dtype=F64, generator=generator)) for _ in range(12)
    ]
    switches = (
        torch.backends.cuda.flash_sdp_enabled,
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.math_sdp_enabled,
    )
    before = [each() for each in switches]
    alone = [float(local_lipschitz(F, mu)) for mu in clouds]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda mu: float(local_lipschitz(F, mu)), 4 * clouds))
    assert found == pytest.approx(4 * alone, rel=1e-9)
    assert [each() for each in switches] == before
