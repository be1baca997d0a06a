"""The linearisation of a flow is that of its scheme: against autodiff and difference quotients."""

from __future__ import annotations

import importlib
import math

import numpy as np
import pytest
import torch

from meanfield import (
    AttentionParameters,
    ParticleMeasure,
    SelfAttention,
    bounds,
    dynamics,
    sampling,
)
from meanfield.layers import Pointwise
from meanfield.linalg import Certified, Lanczos
from meanfield.lipschitz import local_lipschitz, one_sided
from meanfield.maps.autodiff import linearize_by_autodiff
from tests.maps.small_maps import is_map

D = 3


def case(seed: int = 0, n: int = 5, *, causal: bool = False, batch: tuple[int, ...] = ()):
    g = torch.Generator().manual_seed(seed)
    A, V = torch.randn(2, D, D, generator=g, dtype=torch.float64)
    F = SelfAttention(AttentionParameters.from_bilinear(A, V), causal=causal)
    x = sampling.sphere(n, D, batch_shape=batch, generator=g)
    logs = torch.randn(*batch, n, generator=g, dtype=torch.float64).log_softmax(-1)
    positions = torch.linspace(0.1, 1, n, dtype=torch.float64) if causal else None
    return F, ParticleMeasure(x, log_weights=logs, positions=positions)


def dense(linearisation):
    return linearisation.atoms.to_dense(), linearisation.field.to_dense()


@pytest.mark.parametrize(
    ("method", "constraint", "causal", "geometry"),
    [
        ("rk4", None, False, "wasserstein"),
        ("rk4", "sphere", False, "euclidean"),
        ("rk4", "sphere", True, "wasserstein"),
        ("euler", "sphere", True, "euclidean"),
        ("euler", None, True, "wasserstein"),
        ("euler", "sphere", False, "wasserstein"),
        (dynamics.Adaptive("dopri5", 1e-2, 1e-2), "sphere", True, "wasserstein"),
        (dynamics.Adaptive("dop853", 1e-2, 1e-2), None, False, "euclidean"),
    ],
)
def test_the_product_over_the_steps_is_the_derivative_of_the_flow(
    method, constraint, causal, geometry
):
    fixed = method in ("rk4", "euler")
    F, mu = case(1, n=4, causal=causal, batch=(2,) if fixed else ())
    step = 0.25 if fixed else None
    Phi = dynamics.FlowMap(F, 0.5, step=step, method=method, constraint=constraint)
    found = Phi.linearisation(mu, geometry=geometry)
    expected = linearize_by_autodiff(Phi, mu, geometry=geometry)
    is_map(found.atoms, expected.atoms.to_dense(), 1e-9)
    is_map(found.field, expected.field.to_dense(), 1e-9)


def test_light_atoms_do_not_underflow():
    """A pair with a light atom of weight e^{−900}: exact in log-weights, 0 in weights."""
    F = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]))
    mu = sampling.two_diracs(math.sqrt(450.0), -900.0, [1.0])
    h = 1e-3
    constant = local_lipschitz(F, mu)
    step = local_lipschitz(dynamics.FlowMap(F, h, method="euler", step=h), mu)
    # I + hJ: between h‖J‖ − 1 and h‖J‖ + 1.
    assert float(step.particle) == pytest.approx(h * float(constant.particle), rel=1e-9)


# --- along a flow ---


@pytest.mark.parametrize("constraint", [None, "sphere"])
def test_stability_along_a_flow_is_the_constant_of_each_span(constraint):
    F, mu = case(8)
    spans = [0.0, 0.25, 1.0]
    times = [3.0 + span for span in spans]
    ds = dynamics.stability(F, mu, times, method="rk4", step=0.25, constraint=constraint)
    assert ds.constant.values[0] == 1.0
    for k in (1, 2):
        Phi = dynamics.FlowMap(F, spans[k], method="rk4", step=0.25, constraint=constraint)
        found = local_lipschitz(Phi, mu)
        for name in ("particle", "splitting"):
            assert float(ds[f"constant_{name}"][k]) == pytest.approx(
                float(getattr(found, name)), rel=1e-6
            )
        assert float(ds.constant_upper[k]) >= float(ds.constant[k]) * (1 - 1e-12)
        top = math.log(float(ds.constant_particle[k])) / spans[k]
        assert float(ds.exponents[k, 0]) == pytest.approx(top, rel=1e-9)
    assert (ds.constant <= ds.growth * (1 + 1e-2)).all()
    assert ds.constant_converged.all() and ds.rate_converged.all()
    assert (ds.rate_upper >= ds.rate - 1e-12 * ds.constant).all()


def test_large_and_small_flows_take_different_roads_to_one_answer(monkeypatch):
    F, mu = case(9)
    small = dynamics.stability(F, mu, [0, 0.3, 0.6], method="rk4", step=0.1, constraint="sphere")
    module = importlib.import_module("meanfield.dynamics.stability")
    monkeypatch.setattr(module, "_DENSE", 0)
    large = dynamics.stability(F, mu, [0, 0.3, 0.6], method="rk4", step=0.1, constraint="sphere")
    assert "exponents" not in large
    for name in ("constant", "constant_splitting", "growth"):
        assert large[name].values == pytest.approx(small[name].values, rel=1e-3)


def test_growth_integrates_the_constants_on_the_way():
    F, mu = case(10)
    ds = dynamics.stability(F, mu, [0.0, 1.0, 2.0], method="rk4", step=0.25)
    flows = [dynamics.FlowMap(F, t, method="rk4", step=0.25) for t in ds.time.values]
    expected = [float(one_sided(F, Phi(mu)).value) for Phi in flows]
    assert ds.rate.values == pytest.approx(expected, rel=1e-6)
    integral = sum((a + b) / 2 for a, b in zip(expected[1:], expected[:-1], strict=True))
    assert float(ds.growth[-1]) == pytest.approx(math.exp(integral), rel=1e-6)


def test_exponents_in_single_precision_are_those_of_double_precision_or_none():
    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parameters = AttentionParameters.from_bilinear(np.eye(2), np.diag([1.0, -30.0]))
    times = [0.0, 0.3, 0.6, 0.9]
    double, single = (
        dynamics.stability(SelfAttention(parameters.to(kind)), ParticleMeasure(x.to(kind)), times)
        for kind in (torch.float64, torch.float32)
    )
    seen = np.isfinite(single.exponents.values)
    # Rounding, 1e-7 of the largest, would be an exponent of -18 at the end.
    found, known = (ds.exponents.values[seen] for ds in (single, double))
    np.testing.assert_allclose(found, known, atol=0.1)
    assert seen.sum(-1)[[0, 3]].tolist() == [0, 10]


def test_growth_beyond_the_number_range_is_infinite():
    F = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]))
    mu = sampling.two_diracs(3.0, bounds.two_dirac_best_log_ratio(1.0, 3.0), [1.0])
    ds = dynamics.stability(F, mu, [0.0, 0.04, 0.08], method="rk4", step=0.02)
    assert ds.growth.values.tolist() == [1.0, math.inf, math.inf]
    assert math.isfinite(ds.constant[-1])


@pytest.mark.parametrize("solver", [None, Lanczos(), Certified()])
def test_the_one_sided_constant_is_the_top_of_the_symmetric_parts(solver):
    g, certified = torch.Generator().manual_seed(5), isinstance(solver, Certified)
    for k in range(12):
        n, d = 2 + k % 5, 1 + k % 3
        A, V = torch.randn(2, d, d, dtype=torch.float64, generator=g)
        F = SelfAttention(AttentionParameters.from_bilinear(A, V), causal=bool(k % 2))
        logs = torch.randn(n, dtype=torch.float64, generator=g)
        points = torch.randn(n, d, dtype=torch.float64, generator=g)
        mu = ParticleMeasure(points, weights=logs.softmax(-1), positions=np.arange(1, n + 1) / n)
        parts = dense(F.linearisation(mu, geometry="wasserstein"))
        atoms, fields = (float(torch.linalg.eigvalsh(J + J.mT).max()) / 2 for J in parts)
        found = one_sided(F, mu, solver=solver, upper_rtol=1.0 if certified else 0.01)
        size = float(local_lipschitz(F, mu).value)
        assert float(found.particle) == pytest.approx(atoms, abs=1e-4 * size)
        assert float(found.splitting) == pytest.approx(fields, abs=1e-4 * size)
        assert float(found.value) == max(float(found.particle), float(found.splitting))
        assert -1e-12 * size <= float(found.upper) - max(atoms, fields)
        most = 1.8 if certified else 1.01
        assert float(found.upper) + 1.25 * size <= most * (max(atoms, fields) + 1.25 * size)
        assert (found.miss == 0) == (solver is None or certified)


def test_a_rate_below_0_proves_that_a_flow_contracts():
    """As no norm could: V = −I, and scores that grow towards the same side."""
    F = SelfAttention(AttentionParameters.from_bilinear([[1.0]], [[-1.0]]))
    mu = ParticleMeasure([[0.5], [-0.5], [0.1]])
    ds = dynamics.stability(F, mu, np.linspace(0, 1, 6), method="rk4", step=0.1)
    assert (ds.rate < -0.05).all()
    assert (ds.constant[1:] < 1).all() and (ds.constant <= ds.growth * (1 + 1e-4)).all()
    assert float(ds.growth[-1]) < 0.95
    # The derivative at an absent atom is 0, which is no rate.
    absent = ParticleMeasure([[0.5], [-0.5], [0.1], [3.0]], weights=[1 / 3, 1 / 3, 1 / 3, 0])
    assert float(one_sided(F, absent).value) == pytest.approx(float(ds.rate[0]), rel=1e-6)
    # All of J + τI was rounding where J = −τI, and was refused.
    alone = ParticleMeasure([[0.5]])
    assert float(one_sided(F, alone).particle) == pytest.approx(-1.0)
    assert float(one_sided(Pointwise(torch.neg), mu).value) == pytest.approx(-1.0, rel=1e-9)
    # Of a velocity that leaves the space there is no such thing.
    tall = SelfAttention(AttentionParameters([[1.0]], [[1.0]], [[1.0]], [[[1.0], [2.0]]]))
    with pytest.raises(ValueError, match=r"expected a velocity in R\^1.*got one in R\^2"):
        one_sided(tall, mu)


def test_no_flow_of_a_measure_in_the_ball_exceeds_the_bound_of_all():
    g = torch.Generator().manual_seed(6)
    for c in (0.3, 1.0, 3.0, 9.0):
        F = SelfAttention(AttentionParameters.from_bilinear([[-c]], [[1.0]]))
        points = 2 * torch.rand(20, 3, 1, dtype=torch.float64, generator=g) - 1
        logs = (2 * c * torch.randn(20, 3, dtype=torch.float64, generator=g)).log_softmax(-1)
        found = float(one_sided(F, ParticleMeasure(points, log_weights=logs)).value.max())
        pair = sampling.two_diracs(1.0, bounds.two_dirac_best_log_ratio(c, 1.0), [1.0])
        best = float(one_sided(F, pair).value)
        assert max(best, found) <= bounds.one_sided(c, 1.0, 1.0)
    assert best > 0.999 * bounds.one_sided(9.0, 1.0, 1.0)


def test_stability_is_about_one_measure():
    F, mu = case(14, batch=(2,))
    with pytest.raises(ValueError, match="expected one measure"):
        dynamics.stability(F, mu, [0, 1])
