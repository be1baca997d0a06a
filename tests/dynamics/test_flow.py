"""The flow of a map of measures: orders, laws, constraints, layers, batches."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
import xarray as xr
from scipy.integrate import solve_ivp

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, dynamics, sampling
from meanfield.attention.normalizations import RowWise, exponential, softmax
from meanfield.errors import ConvergenceError
from meanfield.measures import split, stack
from meanfield.results import Variable
from tests.dynamics import dynamics_oracles as oracles

TIMES = [0.0, 0.4, 1.0]
D = 3
PRECISE = dynamics.Adaptive("dop853", rtol=1e-11, atol=1e-13)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def case(seed: int = 0, n: int = 7, *, positioned: bool = False):
    """A and V without symmetry, points on the sphere, unequal weights."""
    g = generator(seed)
    A, V = torch.randn(2, D, D, generator=g, dtype=torch.float64)
    x = sampling.sphere(n, D, generator=g)
    logs = torch.randn(n, generator=g, dtype=torch.float64).log_softmax(0)
    positions = torch.randperm(n, generator=g).double() / n if positioned else None
    return A, V, ParticleMeasure(x, log_weights=logs, positions=positions)


def attention(A, V, **settings) -> SelfAttention:
    return SelfAttention(AttentionParameters.from_bilinear(A, V), **settings)


def shifted_exponential(shift: float) -> RowWise:
    """e^{s − shift}, not divided: another unit of time, in which large scores do not overflow."""
    return RowWise(lambda scores: scores - shift, divides=False)


def at_rest(mu):
    return mu.replace(torch.zeros_like(mu.points))


def size(mu) -> torch.Tensor:
    return mu.points.norm(dim=-1).amax(-1)


def moments(mu) -> torch.Tensor:
    return (mu.weights[..., None] * mu.points).mT @ mu.points


# --- against loops over pairs ---


@pytest.mark.parametrize(
    ("settings", "error"),
    [({"method": PRECISE}, 3e-9), ({"method": "rk4", "step": 1e-2}, 1e-6)],
    ids=["dop853", "rk4"],
)
@pytest.mark.parametrize("place", ["free", "sphere"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_flow_is_that_of_loops_over_pairs(settings, error, place, causal):
    A, V, mu = case(1, positioned=causal)
    constraint = "sphere" if place == "sphere" else None
    ds = dynamics.flow(
        attention(A, V, causal=causal), mu, TIMES, constraint=constraint, **settings
    )
    expected = by_loops(place, causal)
    np.testing.assert_allclose(ds.points, expected, rtol=0, atol=error * np.abs(expected).max())


@functools.cache
def by_loops(place, causal):
    A, V, mu = case(1, positioned=causal)
    positions = mu.positions.numpy() if causal else None
    return oracles.flow(
        mu.points.numpy(), mu.weights.numpy(), A.numpy(), V.numpy(), TIMES,
        positions=positions, place=place,
    )  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
def test_an_unnormalised_flow_is_that_of_loops_over_pairs_without_the_denominator(causal):
    A, V, mu = case(2, positioned=causal)
    F = attention(A, V, normalization=shifted_exponential(0.3), causal=causal)
    ds = dynamics.flow(F, mu, TIMES, method=PRECISE, constraint="sphere")
    expected = oracles.flow(
        mu.points.numpy(), mu.weights.numpy(), A.numpy(), math.exp(-0.3) * V.numpy(), TIMES,
        positions=mu.positions.numpy() if causal else None, normalised=False, place="sphere",
    )  # fmt: skip
    np.testing.assert_allclose(ds.points, expected, rtol=0, atol=1e-9)


# --- orders and exactness ---


@pytest.mark.parametrize(("method", "order"), [("euler", 1), ("rk4", 4)])
@pytest.mark.parametrize("constraint", [None, "sphere"])
def test_the_error_falls_with_the_order_of_the_method(method, order, constraint):
    A, V, mu = case(6)
    F = attention(A, V)
    exact = dynamics.flow(F, mu, [0, 1], method=PRECISE, constraint=constraint).points[-1]
    steps = (1 / 16, 1 / 32)
    errors = [
        np.abs(
            dynamics.flow(F, mu, [0, 1], method=method, step=h, constraint=constraint).points[-1]
            - exact
        ).max()
        for h in steps
    ]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.25)


def test_steps_that_fit_are_not_one_more_by_rounding():
    # 2.1/0.3 is 7.000000000000001, 1.1/0.1 is 11.000000000000002.
    for step, length, count in (
        (0.3, 2.1, 7),
        (0.1, 1.0, 10),
        (0.1, 1.1, 11),
        (0.1, 1.101, 12),
        (2.0, 1.0, 1),
    ):
        ds = dynamics.flow(at_rest, case()[2], [0, length], method="euler", step=step)
        assert ds.evaluations[-1] == count


@pytest.mark.parametrize(("method", "peer"), [("dopri5", "RK45"), ("dop853", "DOP853")])
def test_one_coordinate_takes_the_steps_that_scipy_takes(method, peer):
    def F(mu):
        return mu.replace((5 * mu.points).sin() + 0.3)

    ds = dynamics.flow(F, ParticleMeasure([[0.2]]), [0.0, 6.0], method=method)
    theirs = solve_ivp(
        lambda _, y: np.sin(5 * y) + 0.3, (0.0, 6.0), [0.2], method=peer, rtol=1e-6, atol=1e-9
    )
    assert ds.evaluations[-1] == theirs.nfev
    np.testing.assert_allclose(ds.points[-1, 0, 0], theirs.y[0, -1], rtol=1e-13)
    # An output time cuts one step short, and not those after it.
    often = dynamics.flow(F, ParticleMeasure([[0.2]]), [0.0, 1.0, 1.0 + 1e-6, 6.0], method=method)
    assert often.evaluations[-1] <= theirs.nfev + (40 if method == "dop853" else 20)


def test_copies_of_particles_and_other_cases_do_not_loosen_adaptive_steps():
    A, V, mu = case(25)
    still = ParticleMeasure(torch.zeros_like(mu.points), log_weights=mu.log_weights)
    alone = dynamics.flow(attention(A, V), mu, [0, 2.0])
    doubled = dynamics.flow(attention(A, V), split(mu), [0, 2.0])
    beside = dynamics.flow(attention(A, V), stack([mu, still]), [0, 2.0])
    assert alone.evaluations[-1] == doubled.evaluations[-1] == beside.evaluations[-1]
    np.testing.assert_allclose(doubled.points[-1, ::2], alone.points[-1], rtol=1e-12)
    np.testing.assert_allclose(beside.points[-1, 0], alone.points[-1], rtol=1e-12)


def test_the_error_of_adaptive_steps_does_not_depend_on_the_axes():
    """In coordinates that pass through 0 a relative error would be one of 1e-9."""
    A, V, mu = case(27)
    Q = torch.linalg.qr(torch.randn(D, D, generator=generator(9), dtype=torch.float64))[0]
    turned = mu.replace(mu.points @ Q.mT)
    ends = [
        dynamics.flow(attention(*matrices), start, [0, 2.0], constraint="sphere")
        for matrices, start in (((A, V), mu), ((Q @ A @ Q.mT, Q @ V @ Q.mT), turned))
    ]
    assert ends[0].evaluations[-1] == ends[1].evaluations[-1]
    expected = ends[0].points.values[-1] @ Q.mT.numpy()
    np.testing.assert_allclose(ends[1].points[-1], expected, rtol=0, atol=1e-10)


def test_adaptive_steps_are_refused_where_values_are_hidden():
    A, V, mu = case(26)

    def end(points):
        return dynamics.FlowMap(attention(A, V), 1.0)(mu.replace(points)).points

    with pytest.raises(ValueError, match="vmap hides"):
        torch.func.vmap(end)(mu.points[None])


def test_euler_with_step_one_is_the_residual_network():
    A, V, mu = case(8, positioned=True)
    F = attention(A, V, causal=True)
    ds = dynamics.flow(F, mu, [0, 1, 2, 3], method="euler", step=1.0)
    x = mu
    for k in range(3):
        x = x.replace(x.points + F(x).points)
        np.testing.assert_array_equal(ds.points[k + 1], x.points)


@pytest.mark.parametrize("method", ["rk4", "euler", "dopri5"])
def test_particles_stay_on_their_spheres_to_rounding(method):
    A, V, mu = case(10)
    radii = torch.linspace(0.5, 3.0, mu.n_particles, dtype=torch.float64)
    nu = mu.replace(mu.points * radii[:, None])
    step = None if method == "dopri5" else 0.05
    ds = dynamics.flow(
        attention(A, V), nu, np.linspace(0, 5, 6), method=method, step=step, constraint="sphere"
    )
    norms = np.linalg.norm(ds.points, axis=-1)
    np.testing.assert_allclose(norms, np.broadcast_to(radii, norms.shape), rtol=1e-14)


# --- laws ---


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("constraint", [None, "sphere"])
def test_permutation_splitting_and_absence_change_nothing(causal, constraint):
    A, V, mu = case(11, positioned=causal)
    F = attention(A, V, causal=causal)

    def end(measure):
        return dynamics.flow(
            F, measure, [0, 1.5], method="rk4", step=0.1, constraint=constraint
        ).points.values[-1]

    base = end(mu)
    tolerance = {"rtol": 0, "atol": 1e-12 * np.abs(base).max()}
    order = torch.randperm(mu.n_particles, generator=generator(1))
    where = None if mu.positions is None else mu.positions[order]
    shuffled = ParticleMeasure(
        mu.points[order], log_weights=mu.log_weights[order], positions=where
    )
    np.testing.assert_allclose(end(shuffled), base[order], **tolerance)
    np.testing.assert_allclose(end(split(mu, 3)), np.repeat(base, 3, axis=0), **tolerance)
    extra = 5 * sampling.sphere(2, D, generator=generator(2))
    # Last: an absent atom before all mass sees nothing and has no velocity.
    there = None if mu.positions is None else torch.cat([mu.positions, torch.ones(2).double()])
    absent = ParticleMeasure(
        torch.cat([mu.points, extra]),
        log_weights=torch.cat([mu.log_weights, torch.full((2,), -math.inf).double()]),
        positions=there,
    )
    np.testing.assert_allclose(end(absent)[:-2], base, **tolerance)


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("constraint", [None, "sphere"])
def test_the_energy_increases_along_its_gradient_flow(normalised, constraint):
    g = generator(4)
    B = torch.randn(D, D, generator=g, dtype=torch.float64)
    A = B + B.mT
    _, _, mu = case(13)
    F = attention(A, A, normalization=softmax if normalised else shifted_exponential(2.0))
    ds = dynamics.flow(
        F, mu, np.linspace(0, 0.05, 20), method="rk4", step=1e-3, constraint=constraint,
        observe={"energy": lambda m: dynamics.log_energy(m, A)},
    )  # fmt: skip
    assert (np.diff(ds.energy) > 0).all()
    # Not for values of another sign.
    F = attention(A, -A)
    ds = dynamics.flow(
        F, mu, [0, 0.01], method="rk4", step=1e-3, constraint=constraint,
        observe={"energy": lambda m: dynamics.log_energy(m, A)},
    )  # fmt: skip
    assert ds.energy[1] < ds.energy[0]


def test_a_batch_is_its_members():
    cases = [case(s) for s in (14, 15)]
    A, V = cases[0][:2]
    F = attention(A, V)
    batch = stack([c[2] for c in cases])
    ds = dynamics.flow(F, batch, TIMES, method="rk4", step=0.1, observe={"size": size})
    assert ds.points.dims == ("time", "case", "particle", "feature")
    for k, (_, _, mu) in enumerate(cases):
        one = dynamics.flow(F, mu, TIMES, method="rk4", step=0.1, observe={"size": size})
        np.testing.assert_allclose(ds.points[:, k], one.points, rtol=1e-12)
        np.testing.assert_allclose(ds["size"][:, k], one["size"], rtol=1e-12)
        np.testing.assert_array_equal(ds.log_weights[k], one.log_weights)


@pytest.mark.parametrize("settings", [{"method": "rk4", "step": 0.1}, {"method": "dopri5"}])
def test_the_flow_of_an_empty_batch_is_empty(settings):
    A, V, mu = case()
    ds = dynamics.flow(attention(A, V), stack([mu])[:0], TIMES, **settings)
    assert ds.sizes == {"time": len(TIMES), "case": 0, "particle": 7, "feature": D}


def test_the_flow_can_be_differentiated():
    A, V, mu = case(18)
    F = attention(A, V)

    def end(points):
        Phi = dynamics.FlowMap(F, 0.5, method="rk4", step=0.1, constraint="sphere")
        return Phi(mu.replace(points)).points

    direction = torch.randn(mu.n_particles, D, generator=generator(5), dtype=torch.float64)
    _, tangent = torch.func.jvp(end, (mu.points,), (direction,))
    h = 1e-6
    with torch.no_grad():
        difference = (end(mu.points + h * direction) - end(mu.points - h * direction)) / (2 * h)
    torch.testing.assert_close(tangent, difference, rtol=1e-6, atol=1e-8)


def test_flow_maps_compose_and_end_where_the_flow_does():
    A, V, mu = case(31)
    F = attention(A, V)
    whole = dynamics.FlowMap(F, 1.0, method="rk4", step=0.1, constraint="sphere")
    first = dynamics.FlowMap(F, 0.4, method="rk4", step=0.1, constraint="sphere")
    rest = dynamics.FlowMap(F, 0.6, method="rk4", step=0.1, constraint="sphere")
    torch.testing.assert_close(rest(first(mu)).points, whole(mu).points, rtol=0, atol=1e-12)
    ds = dynamics.flow(F, mu, [0, 1], method="rk4", step=0.1, constraint="sphere")
    np.testing.assert_array_equal(ds.points[-1], whole(mu).points)
    still = dynamics.FlowMap(F, 0.0)
    torch.testing.assert_close(still(mu).points, mu.points)
    with pytest.raises(ValueError, match="time: expected a number ≥"):
        dynamics.FlowMap(F, -1.0)


# --- coalescing ---


def test_coalesced_atoms_move_as_they_would_have():
    A = 5 * torch.eye(D, dtype=torch.float64)
    x = sampling.sphere(40, D, generator=generator(19))
    mu = ParticleMeasure(x, torch.linspace(1, 2, 40, dtype=torch.float64) / 60)
    F = attention(A, torch.eye(D, dtype=torch.float64))
    times = np.append(0, np.geomspace(0.1, 30.0, 30))
    method = dynamics.Adaptive("dopri5", 1e-8, 1e-10)
    runs = [
        dynamics.flow(F, mu, times, method=method, constraint="sphere", coalesce=c)
        for c in (0.0, 1e-6)
    ]
    np.testing.assert_allclose(runs[1].points, runs[0].points, atol=1e-4)
    met = [len(np.unique(run.points[-1], axis=0)) for run in runs]
    assert met[1] < 10 < met[0]


def test_a_chain_longer_than_the_distance_is_not_merged():
    """Single linkage would put 101 atoms 0.01 apart at one place, off by 0.5."""
    x = torch.arange(101, dtype=torch.float64)[:, None] * 0.01
    few = [[20.0], [20.01], [20.02]]  # most pairs of it are near, and not all
    x = torch.cat([x, torch.tensor([[7.0], [7.005], [7.01], [9.0], [0.5], *few]).double()])
    logs = torch.zeros(109, dtype=torch.float64)
    logs[104:106] = -math.inf  # absent: alone, and in the middle of the chain
    mu = ParticleMeasure(x, log_weights=logs.log_softmax(-1))
    F = attention([[0.0]], [[1.0]])  # a translation: gaps stay
    plain, merged = (
        dynamics.flow(F, mu, [0.0, 0.5, 1.0], coalesce=c).points.values[-1] for c in (0.0, 0.0101)
    )
    np.testing.assert_allclose(merged, plain, atol=0.00501)
    assert (merged[101:104] == merged[102]).all()
    np.testing.assert_allclose(np.delete(merged, [101, 102, 103], 0),
                               np.delete(plain, [101, 102, 103], 0), rtol=1e-6)  # fmt: skip


def test_atoms_that_meet_within_an_interval_do_not_hold_up_what_follows():
    # Inside a cluster distances contract at a rate of about 1, so that explicit steps are of
    # length 1; between the clusters nothing moves for e^20.
    angles = torch.tensor([0.0, 0.2, 0.3, 3.0, 3.2], dtype=torch.float64)
    mu = ParticleMeasure(torch.stack([angles.cos(), angles.sin()], -1))
    eye = torch.eye(2, dtype=torch.float64)
    ds = dynamics.flow(
        attention(20 * eye, eye), mu, [0.0, 1e5], method="dopri5", constraint="sphere",
        coalesce=1e-6,
    )  # fmt: skip
    end = ds.points.values[-1]
    assert len(np.unique(end, axis=0)) == 2
    assert (end[:3] == end[0]).all() and (end[3:] == end[3]).all()
    assert ds.evaluations[-1] < 2_000  # 6e5 otherwise
    before = dynamics.flow(
        attention(20 * eye, eye), mu, [0.0, 60.0], method="dopri5", constraint="sphere"
    )
    np.testing.assert_allclose(end, before.points.values[-1], atol=1e-4)


# --- the Dataset ---


def test_every_variable_says_what_it_is_and_where_it_comes_from():
    from meanfield.results import Variable, read_provenance

    A, V, mu = case(21, positioned=True)
    second = Variable("moments", "E xxᵀ", dims=("feature", "feature_2"))
    ds = dynamics.flow(
        attention(A, V), mu, TIMES, method="rk4", step=0.1, constraint="sphere",
        observe={second: moments, "size": size},
    )  # fmt: skip
    assert all("long_name" in v.attrs for v in ds.variables.values())
    spec = read_provenance(ds)["spec"]
    assert spec["map"] == "SelfAttention"
    assert "rk4" in spec["method"]
    np.testing.assert_array_equal(ds.positions, mu.positions)
    np.testing.assert_array_equal(ds.time, TIMES)
    np.testing.assert_array_equal(ds.evaluations, [0, 16, 40])
    for k, x in enumerate(torch.as_tensor(ds.points.values)):
        np.testing.assert_allclose(ds.moments[k], moments(mu.replace(x)), atol=1e-15)


def test_the_measure_at_a_time_is_that_of_the_flow():
    A, V, mu = case(30, positioned=True)
    F = attention(A, V, causal=True)
    ds = dynamics.flow(F, mu, [0, 0.3, 0.6], method="rk4", step=0.1)
    for k, index in ((0, 0), (2, -1)):
        found = dynamics.measure_at(ds, index)
        np.testing.assert_array_equal(found.points, ds.points[k])
        assert torch.equal(found.log_weights, mu.log_weights)
        assert torch.equal(found.positions, mu.positions)
    with pytest.raises(TypeError, match=r"got Dataset; dynamics\.measure_at\(ds, -1\)"):
        dynamics.cluster_count(ds, 0.1)
    with pytest.raises(IndexError, match="one of the 3 times"):
        dynamics.measure_at(ds, 3)
    with pytest.raises(ValueError, match="keep_points=True"):
        dynamics.measure_at(dynamics.flow(F, mu, [0, 0.1], keep_points=False), 0)


def test_functionals_alone_can_be_kept():
    A, V, mu = case(22)
    ds = dynamics.flow(attention(A, V), mu, TIMES, observe={"size": size}, keep_points=False)
    assert "points" not in ds
    assert ds["size"].dims == ("time",)


def test_single_precision_stays_single():
    A, V, mu = case(23)
    F = SelfAttention(AttentionParameters.from_bilinear(A.float(), V.float()))
    for method, step in (("rk4", 0.1), ("dopri5", None)):
        ds = dynamics.flow(F, mu.to(torch.float32), [0, 0.5], method=method, step=step)
        assert ds.points.dtype == np.float32
        double = dynamics.flow(attention(A, V), mu, [0, 0.5], method=PRECISE)
        np.testing.assert_allclose(ds.points[-1], double.points[-1], rtol=1e-4, atol=1e-4)


# --- wrong arguments ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "heun"}, "method: expected one of"),
        ({"method": "dopri5", "step": 0.1}, "step: expected None"),
        ({"method": "rk4", "step": 0.0}, "step: expected a number > 0"),
            ({"method": "rk4"}, "step: expected a number > 0 with method 'rk4', got None"),
            ({"method": "euler"}, "method 'euler' with step 1"),
            ({"step": 0.1}, "step: expected None with method 'dopri5'"),
        ({"constraint": "torus"}, "constraint: expected 'sphere', got 'torus'"),
        ({"times": [0.0, 0.0]}, "times: expected increasing"),
        ({"times": [0.0, math.nan]}, "times: expected finite"),
        ({"times": []}, "times: expected"),
        ({"coalesce": -1.0}, "coalesce: expected a number"),
        ({"observe": {"points": size}}, "is taken"),
        ({"observe": {"cov": moments}}, "name the dimensions"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_what_would(change, message):
    A, V, mu = case(24)
    arguments = {"F": attention(A, V), "mu": mu, "times": TIMES} | change
    with pytest.raises(ValueError, match=message):
        dynamics.flow(**arguments)


def test_a_map_to_another_dimension_is_no_velocity():
    A, V, mu = case(25)
    with pytest.raises(ValueError, match="velocity has the dimension of the space"):
        dynamics.flow(attention(A, V[:2]), mu, TIMES)


def test_a_map_that_does_not_fit_the_measure_is_refused():
    A, V, mu = case(25)
    with pytest.raises(ValueError, match="positions"):
        dynamics.flow(attention(A, V, causal=True), mu, [0, 2])
    with pytest.raises(ValueError, match="points of dimension 2, got dimension 3"):
        dynamics.flow(attention(A[:2, :2], V[:2, :2]), mu, [0, 2])


def test_a_particle_at_the_origin_is_on_no_sphere():
    A, V, mu = case(26)
    mu = mu.replace(mu.points.clone().index_fill_(0, torch.tensor([0]), 0.0))
    with pytest.raises(ValueError, match="off the origin"):
        dynamics.flow(attention(A, V), mu, TIMES, constraint="sphere")


def test_coalescing_refuses_what_sees_positions():
    A, V, mu = case(27, positioned=True)
    with pytest.raises(ValueError, match="coalesce: expected one measure"):
        dynamics.flow(attention(A, V, causal=True), mu, TIMES, coalesce=1e-6)


def test_particles_that_leave_the_range_of_floats_are_reported():
    _, _, mu = case(28)
    A = 50 * torch.eye(D, dtype=torch.float64)
    F = attention(A, A, normalization=exponential)
    with pytest.raises(OverflowError, match="leave the range"):
        dynamics.flow(F, mu, [0, 10], method="rk4", step=0.1)


def test_an_adaptive_method_that_does_not_get_on_says_so():
    A, V, mu = case(29)
    with pytest.raises(ConvergenceError, match="3 steps end at"):
        dynamics.flow(attention(A, V), mu, [0, 50], method=dynamics.Adaptive(max_steps=3))


def test_an_infinite_velocity_ends_the_flow():
    mu = ParticleMeasure([[1.0], [-2.0]])
    with pytest.raises((OverflowError, ConvergenceError)):
        dynamics.flow(lambda nu: nu.replace(1 / (nu.points - 1)), mu, [0.0, 1.0])


@pytest.mark.parametrize("settings", [{}, {"method": "rk4", "step": 0.1}], ids=["adaptive", "rk4"])
def test_an_atom_without_mass_neither_shortens_nor_stops_a_flow(settings):
    layer = attention(torch.tensor([[2.0]]).double(), torch.tensor([[1.0]]).double())
    for F, far in ((layer, 1e300), (lambda nu: nu.replace(3 * nu.points), 1e308)):
        ends = []
        for points, weights in (([[0.0], [1.0], [far]], [0.5, 0.5, 0.0]), ([[0.0], [1.0]], None)):
            mu = ParticleMeasure(points, weights=weights)
            ends.append(dynamics.flow(F, mu, [0.0, 1.0], **settings).points.values[-1, :2])
        np.testing.assert_allclose(*ends, rtol=1e-6)
    A = torch.eye(1, dtype=torch.float64)
    far = ParticleMeasure([[0.0], [1.0], [1e250]], weights=[0.5, 0.5, 0.0])
    near = ParticleMeasure([[0.0], [1.0]])
    torch.testing.assert_close(dynamics.log_energy(far, A), dynamics.log_energy(near, A))


def test_the_dataset_of_a_flow_has_memory_of_its_own():
    mu = ParticleMeasure(torch.eye(2).double(), [0.3, 0.7], positions=[0.2, 0.6])
    F = SelfAttention(AttentionParameters.random(2))
    ds = dynamics.flow(F, mu, [0.0, 0.1])
    held = mu.log_weights.clone(), mu.positions.clone()
    ds.log_weights.values[...] = -5.0
    ds.positions.values[...] = 0.9
    assert torch.equal(mu.log_weights, held[0]) and torch.equal(mu.positions, held[1])


def test_an_atom_without_mass_may_be_at_the_centre_of_the_sphere() -> None:
    F = SelfAttention(AttentionParameters.from_bilinear(np.eye(2), np.eye(2)))
    points = [[1.0, 0.0], [0.6, 0.8], [0.0, 0.0]]
    padded = ParticleMeasure(points, weights=[0.25, 0.75, 0.0])
    mu = ParticleMeasure(points[:2], weights=[0.25, 0.75])
    found, known = (dynamics.flow(F, m, [0.0, 1.0], constraint="sphere") for m in (padded, mu))
    np.testing.assert_allclose(found.points[1, :2], known.points[1], atol=1e-6)
    assert np.isfinite(found.points).all()
    one, other = (dynamics.stability(F, m, [0.0, 1.0], constraint="sphere") for m in (padded, mu))
    np.testing.assert_allclose(one.constant, other.constant, rtol=1e-4)
    with pytest.raises(ValueError, match="off the origin"):
        dynamics.flow(F, ParticleMeasure(points), [0.0, 1.0], constraint="sphere")


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float32, 1e-22),
        (torch.float32, 1e-30),
        (torch.float64, 1e-165),
        (torch.float64, 1e-300),
    ],
)
def test_an_atom_without_mass_may_be_where_squares_underflow(dtype, size) -> None:
    parameters = AttentionParameters.from_bilinear(np.eye(2), np.eye(2)).to(dtype)
    points = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.6 * size, 0.8 * size]], dtype=dtype)
    padded = ParticleMeasure(points, weights=torch.tensor([0.25, 0.75, 0.0], dtype=dtype))
    mu = ParticleMeasure(points[:2], weights=torch.tensor([0.25, 0.75], dtype=dtype))
    known, found = (
        dynamics.stability(SelfAttention(parameters), m, [0.0, 1.0], constraint="sphere")
        for m in (mu, padded)
    )
    np.testing.assert_allclose(found.constant, known.constant, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", ["dopri5", "dop853", "rk4"])
def test_particles_that_reach_the_end_of_the_number_range_end_the_flow_at_once(method, dtype):
    growing, seen = attention([[0.0]], [[1.0]]), []
    F = SelfAttention(growing.parameters.to(dtype))

    def counted(mu):
        seen.append(mu)
        assert len(seen) < 20_000
        return F(mu)

    step, mu = 0.5 if method == "rk4" else None, ParticleMeasure(torch.ones(1, 1, dtype=dtype))
    with pytest.raises(OverflowError, match="particles leave the range"):
        dynamics.flow(counted, mu, [0, 1e3], method=method, step=step)


@pytest.mark.parametrize("method", ["dopri5", "dop853", "rk4", "euler"])
@pytest.mark.parametrize("start", [-2.0, 0.25])
def test_a_velocity_that_is_no_number_is_told_from_particles_that_leave(method, start):
    def lost(nu):  # at once, or after a quarter
        return nu.replace(torch.where(nu.points > 0, -1.0, math.nan).double())

    mu = ParticleMeasure([[1.0], [start]])
    step = None if method.startswith("do") else 0.03
    with pytest.raises(ValueError, match=r"got NaN or ∞ near t = 0[.\d]*, where no coordinate"):
        dynamics.flow(lost, mu, [0.0, 1.0], method=method, step=step)


@pytest.mark.parametrize("times", [[0, 1100], np.arange(1101)])
def test_scores_that_overflow_far_out_are_particles_that_leave(times):
    eye = torch.eye(2, dtype=torch.float64)
    F, mu = attention(eye, eye), ParticleMeasure([[1.0, 0.3], [2.0, -1.0], [-1.0, 0.5]])
    with pytest.raises(OverflowError, match="leave the range"):
        dynamics.flow(F, mu, times, method="euler", step=1.0)


@pytest.mark.parametrize("radius", [1e-18, 1e18, 2e-153, 1e153])
def test_spheres_whose_squared_radii_are_in_the_number_range_are_kept(radius):
    dtype = torch.float32 if 1e-100 < radius < 1e100 else torch.float64
    mu = ParticleMeasure(radius * torch.eye(3, dtype=dtype))
    ds = dynamics.flow(lambda mu: mu, mu, [0.0, 1.0], constraint="sphere")
    np.testing.assert_allclose(ds.points.values[-1] / radius, np.eye(3), atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "radius"), [(torch.float32, 1e-22), (torch.float64, 1e-160), (torch.float64, 1e160)]
)
def test_spheres_whose_squared_radii_leave_the_number_range_are_refused(dtype, radius):
    mu = ParticleMeasure(radius * torch.eye(3, dtype=dtype))
    with pytest.raises(ValueError, match="squared norms are in the range"):
        dynamics.flow(lambda mu: mu, mu, [0.0, 1.0], constraint="sphere")


def test_atoms_that_are_merged_stay_on_their_sphere():
    A, V, _ = case()
    mu = ParticleMeasure(sampling.sphere(12, 3, generator=0))
    settings = {"constraint": "sphere", "coalesce": 0.3}
    ds = dynamics.flow(attention(4 * A, V), mu, np.linspace(0, 20, 81), **settings)
    assert len(np.unique(np.round(ds.points.values[-1], 6), axis=0)) < 12
    assert abs((ds.points**2).sum("feature") - 1).max() < 1e-12


def test_what_is_observed_is_kept_as_it_was_and_fits_its_type():
    mu, room = ParticleMeasure([[1.0], [3.0]]), torch.zeros((), dtype=torch.float64)
    F = attention([[0.0]], [[1.0]])

    def watched(key, function):
        return dynamics.flow(F, mu, [0.0, 1.0, 2.0], observe={key: function})["m"].values

    mean = watched("m", lambda m: m.points.mean())
    assert (mean == watched("m", lambda m: room.copy_(m.points.mean()))).all()
    array = np.zeros(())
    assert (mean == watched("m", lambda m: np.add(m.points.mean(), 0, out=array))).all()
    with pytest.raises(ValueError, match="m: expected int64, which does not hold 5.4"):
        watched(Variable("m", "mean", dtype="int64"), lambda m: m.points.mean())
    with pytest.raises(TypeError, match="m: expected bool, got float64"):
        watched(Variable("m", "mean", dtype="bool"), lambda m: m.points.mean())
    with pytest.raises(TypeError, match="m: expected float64, got complex128"):
        watched("m", lambda m: 1j)
    with pytest.raises(ValueError, match="m: expected values, got masked ones"):
        watched("m", lambda m: np.ma.masked_array(1.0, True))
    with pytest.raises(ValueError, match="'feature' is taken"):
        watched("feature", lambda m: 1.0)


def test_the_measure_at_a_time_goes_by_the_names_of_dimensions():
    F, starts = attention([[0.0]], [[1.0]]), [3.0, 5.0]
    flows = [dynamics.flow(F, ParticleMeasure([[1.0], [x]]), [0.0, 1.0]) for x in starts]
    for dim, front in (("run", True), ("run", False)):
        joined = xr.concat(flows, dim)
        joined = joined if front else joined.transpose("time", "feature", "particle", dim)
        for k in (0, -1):
            wanted = stack([dynamics.measure_at(ds, k) for ds in flows])
            assert (dynamics.measure_at(joined, k).points == wanted.points).all()
    joined["log_weights"] = joined.log_weights.isel(run=0)  # without the axis of the runs
    assert (dynamics.measure_at(joined, 0).log_weights == math.log(0.5)).all()
    beside = flows[0].set_coords("log_weights")
    assert (dynamics.measure_at(beside, 1).points == dynamics.measure_at(flows[0], 1).points).all()
    one = flows[0].transpose("feature", "particle", "time")
    assert (dynamics.measure_at(one, 1).points == dynamics.measure_at(flows[0], 1).points).all()
    with pytest.raises(ValueError, match="expected the Dataset of a flow"):
        dynamics.measure_at(flows[0].isel(time=0), 0)
