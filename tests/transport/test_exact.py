"""W₂ of small measures against oracles that share no code with it."""

from __future__ import annotations

import itertools
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from meanfield.errors import ConvergenceError
from meanfield.measures import ParticleMeasure
from meanfield.transport import solve_w2, solve_wp, w2
from meanfield.transport.plans import core, exact, formulas
from meanfield.transport.problem import Problem


def test_a_batch_is_its_entries() -> None:
    generator = torch.Generator().manual_seed(8)
    for n, m, d in [(2, 2, 3), (6, 6, 2), (5, 7, 2), (1, 4, 2), (4, 1, 2), (3, 3, 1)]:
        x = torch.randn(4, 1, n, d, dtype=torch.float64, generator=generator)
        y = torch.randn(3, m, d, dtype=torch.float64, generator=generator)
        logs = torch.randn(4, 1, n, dtype=torch.float64, generator=generator).log_softmax(-1)
        mu, nu = ParticleMeasure(x, log_weights=logs), ParticleMeasure(y)
        batch = solve_w2(mu, nu)
        assert batch.value.shape == (4, 3)
        assert batch.coupling is not None
        cost = batch.coupling.cost().sqrt()
        torch.testing.assert_close(cost, batch.value, rtol=1e-12, atol=0)
        for i, j in itertools.product(range(4), range(3)):
            one = solve_w2(mu[i, 0], nu[j])
            torch.testing.assert_close(batch.value[i, j], one.value, rtol=1e-12, atol=1e-14)
            assert float(batch.lower[i, j]) <= float(one.upper)
            assert float(batch.upper[i, j]) >= float(one.lower)


@pytest.mark.parametrize("p", [1, 1.5, 2, 3])
@pytest.mark.parametrize("n", [3, 8, 40])
def test_pairs_of_equal_and_of_other_weights_are_one_batch(p: float, n: int) -> None:
    import ot

    rng = np.random.default_rng(n)
    x, y = rng.normal(size=(2, 3, n, 2))
    y[2] = x[2] + 1e-3
    a, b = rng.dirichlet(np.ones(n), size=(2, 3))
    b[1:] = a[1:]
    found = solve_wp((x, a), (y, b), p)
    for k in range(3):
        costs = np.linalg.norm(x[k, :, None] - y[k], axis=-1) ** p
        truth = ot.emd2(a[k], b[k], costs) ** (1 / p)
        assert found.value[k] == pytest.approx(truth, rel=1e-9)
        np.testing.assert_allclose(found.plan[k].sum(0), b[k], rtol=1e-9, atol=1e-12)


def test_plans_of_several_lengths_in_a_batch_have_the_weights_of_each() -> None:
    rng = np.random.default_rng(2)
    xs, ys = ([rng.normal(size=(n, 2)) for n in sizes] for sizes in ((3, 7, 1), (5, 2, 4)))
    found = solve_w2(xs, ys)
    for k, (x, y) in enumerate(zip(xs, ys, strict=True)):
        known = solve_w2(x, y).plan
        plan = found.plan[k, : len(x), : len(y)]
        np.testing.assert_allclose(plan, known, rtol=1e-12)
        assert found.plan[k].sum() == pytest.approx(plan.sum(), rel=1e-12)


def test_weights_in_another_order_are_the_same_up_to_rounding() -> None:
    """They are normalised by another sum: a last place of mass would outweigh all moves."""
    rng, move = np.random.default_rng(0), 2.0**-30
    x, order = np.round(rng.normal(size=(200, 2)) * 2**20) / 2**20, rng.permutation(200)
    a = rng.dirichlet(np.ones(200))
    b = a[order] * (1 + 2.0**-52)
    mu, nu = ParticleMeasure(x, a), ParticleMeasure((x + np.array([move, 0.0]))[order], b)
    found = solve_w2(mu, nu)
    assert float(found.value) == pytest.approx(move, rel=1e-12)
    assert float(found.relative_width) < 1e-12
    stored = solve_w2(mu, nu, exact_weights=True, strict=False)
    assert float(stored.lower) <= move and float(stored.upper) > 1.01 * move


def test_batches_whose_squares_overflow_have_distances_and_no_potentials(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from meanfield.transport import solve

    monkeypatch.setattr(solve, "_BLOCK", 30)  # several blocks
    generator = torch.Generator().manual_seed(12)
    x, y = (torch.randn(5, 4, 2, dtype=torch.float64, generator=generator) for _ in range(2))
    small, large = solve_w2(x, y), solve_w2(x * 1e200, y * 1e200)
    torch.testing.assert_close(large.value / 1e200, small.value, rtol=1e-13, atol=0)
    assert small.potentials is not None
    assert large.potentials is None


def test_the_fallback_without_the_compiled_core_gives_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(20, 2, dtype=torch.float64, generator=generator)
    y = torch.randn(25, 2, dtype=torch.float64, generator=generator)
    assert exact.compiled_core() is not None  # with the POT of the tests
    with_core = solve_w2(x, y)
    monkeypatch.setattr(exact, "compiled_core", lambda: None)
    for method in ("auto", "column generation"):
        found = solve_w2(x, y, method=method)
        torch.testing.assert_close(found.value, with_core.value, rtol=1e-13, atol=0)


@pytest.mark.filterwarnings("ignore:numItermax reached")
@pytest.mark.parametrize("has_core", [True, False])
def test_a_simplex_that_stopped_early_is_refused(monkeypatch, has_core) -> None:
    p = Problem.of(*np.random.default_rng(0).normal(size=(2, 40, 2)), np.zeros(40), np.zeros(40))
    if not has_core:
        monkeypatch.setattr(exact, "compiled_core", lambda: None)
    monkeypatch.setattr(exact, "_PIVOTS", 3)
    arcs = (*np.divmod(np.arange(1600), 40), p.costs.ravel())
    with pytest.raises(ConvergenceError, match="POT's network simplex gave no optimal plan"):
        exact.simplexes(p.a[None], p.b[None], p.costs[None])
    with pytest.raises(ConvergenceError, match="POT's network simplex gave no optimal plan"):
        exact.sparse_simplex(p.a, p.b, arcs)


WIDE = {
    "normal": lambda rng: rng.normal(size=(2, 120, 16)),
    "shifted": lambda rng: rng.normal(size=(2, 120, 16)) + np.array([0.0, 5.0])[:, None, None],
    "many ties": lambda rng: rng.integers(0, 3, size=(2, 120, 8)).astype(float),
}


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("p", [1, 2, 3])
def test_uniform_clouds_in_many_dimensions_are_assigned(name: str, p: int) -> None:
    x, y = WIDE[name](np.random.default_rng(0))
    costs = np.linalg.norm(x[:, None] - y, axis=-1) ** p
    truth = costs[linear_sum_assignment(costs)].mean() ** (1 / p)
    found = solve_wp(x, y, p)
    assert found.method == "assignment"
    assert float(found.value) == pytest.approx(truth, rel=1e-12)
    assert float(found.relative_width) < 1e-11
    f, g = found.potentials
    assert (f[:, None] + g - costs).max() < 1e-12 * costs.max()
    assert (f + g).mean() == pytest.approx(truth**p, rel=1e-11)
    if p == 2:
        assert solve_w2(x, y, method="simplex").method == "simplex"
        assert solve_w2(np.stack([x, x]), np.stack([y, x])).method == "identity + assignment"


def test_a_chain_that_assignments_do_not_prove_goes_to_the_simplex() -> None:
    x = np.zeros((300, 8))
    x[:, 0] = 10 * np.arange(300)
    found = solve_w2(x, x + np.array([6.0, *np.zeros(7)]))
    assert found.method == "simplex"
    assert float(found.value) == pytest.approx(6, rel=1e-12)
    assert float(found.relative_width) < 1e-11
    moves = np.array([6.0, 1.0, 2.0])
    batch = solve_w2(x, x + moves[:, None, None] * np.eye(8)[0])
    assert batch.method == "assignment + identity + simplex"  # the last of the chain alone
    assert (batch.relative_width < 1e-11).all()
    np.testing.assert_allclose(batch.value, moves, rtol=1e-12)


@pytest.mark.parametrize("sizes", [[7, 12, 40, 80], [80]])
def test_potentials_of_permutations_reach_along_chains(sizes: list[int]) -> None:
    """A chain of s atoms moves along by one, and the others of 80 stay: s steps prove it."""
    places = 10.0 * np.arange(80)
    y = np.stack([np.where(places < 10 * s, places + 6, places) for s in sizes])
    costs = (places[:, None] - y[:, None, :]) ** 2
    sigma, g = exact.assignments(costs)
    f = (costs - g[:, None, :]).min(-1)
    np.testing.assert_array_equal(sigma, np.broadcast_to(np.arange(80), y.shape))
    matched = np.take_along_axis(costs, sigma[..., None], -1)[..., 0]
    np.testing.assert_allclose(f.sum(1) + g.sum(1), matched.sum(1), rtol=1e-12)


def _message(code: int) -> str:
    return "not optimal"


def _older(*args: object) -> tuple:
    raise TypeError("emd_c() takes exactly 5 positional arguments")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("emd_c", lambda plan, value, f, g, code: (plan, 2 * value, f, g, code)),
        ("emd_c", lambda plan, value, f, g, code: (plan, value, f, g / 2, code)),
        ("emd_c", lambda plan, value, f, g, code: (plan[::-1], value, f, g, code)),
        ("emd_c_sparse", lambda i, j, mass, cost, u, v, code: (i, j, mass / 2, cost, u, v, code)),
        ("emd_c_sparse", lambda i, j, mass, cost, u, v, code: (i, j, mass, cost, u, -v, code)),
        ("emd_c_sparse", _older),
        ("check_result", _message),
        ("", None),
    ],
)
def test_a_core_that_solves_a_known_problem_wrongly_is_none(monkeypatch, name, change) -> None:
    right = core.compiled_core()
    if right is None:
        pytest.skip("there is no compiled core")
    names = "emd_c", "emd_c_sparse", "check_result"
    fake = SimpleNamespace(**{t: getattr(right, t) for t in names})
    if name == "check_result":
        fake.check_result = change
    elif name:
        setattr(fake, name, lambda *args: change(*getattr(right, name)(*args)))
    monkeypatch.setitem(sys.modules, "ot.lp.emd_wrap", fake)
    assert core.compiled_core.__wrapped__() is (None if name else fake)


def test_the_core_is_loaded_without_the_package_and_leaves_nothing_behind() -> None:
    before = {name for name in sys.modules if "pot" in name or name.split(".")[0] == "ot"}
    alone = core._loaded_alone()
    after = {name for name in sys.modules if "pot" in name or name.split(".")[0] == "ot"}
    assert after == before - {"ot.lp.emd_wrap"}
    weights, costs = np.array([0.5, 0.5]), np.array([[2.0, 1.0], [1.0, 2.0]])
    assert alone.emd_c(weights, weights, costs, 1000, 1, None, None)[1] == 1.0


@pytest.mark.slow
def test_the_first_distance_of_a_process_does_not_import_pot_and_pot_can_be_imported_later() -> (
    None
):
    program = """
import sys, numpy as np
from meanfield.transport import w2
w2(np.eye(9), np.ones((9, 9)))
assert "ot" not in sys.modules
import ot
assert ot.lp.emd_wrap.emd_c is ot.lp._network_simplex.emd_c
assert abs(ot.emd2([0.5, 0.5], [0.5, 0.5], np.eye(2))) < 1e-12
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.gpu
def test_device_tensors_in_device_tensors_out(device: str) -> None:
    x = torch.randn(50, 3, dtype=torch.float64, device=device)
    y = torch.randn(60, 3, dtype=torch.float64, device=device)
    for method in ("auto", "column generation"):
        result = solve_w2(x, y, method=method, strict=False)
        assert result.value.device == x.device
        assert float(result.lower) <= float(w2(x.cpu(), y.cpu())) <= float(result.upper)


@pytest.mark.parametrize("d", [2, 30])
def test_one_atom_that_moves_past_others_is_not_taken_for_the_nearest(
    monkeypatch: pytest.MonkeyPatch, d: int
) -> None:
    """The others hardly move, and so do not tell how far the nearest point may be."""
    rng = np.random.default_rng(d)
    x = 1e-3 * rng.random((200, d))
    x[:, :2] = rng.random((200, 2))
    y = x + 1e-4 * rng.normal(size=x.shape)
    y[0, 0] += 0.3
    monkeypatch.setattr(formulas, "_may_be_nearest", lambda *_: True)
    p = Problem.of(x, y, np.zeros(200), np.zeros(200))
    found = formulas.solve_paired(p, rtol=1e-9, device="cpu")
    assert found is not None
    truth, unit = solve_w2(x, y, method="simplex"), 2.0 ** int(p.exponent)
    assert float(truth.upper) < 0.9 * float(found.upper) * unit
    assert float(found.lower) * unit <= float(truth.upper)
    assert not found.converged


@pytest.mark.parametrize("crossed", [False, True])
def test_two_atoms_each_are_solved_by_their_formula(crossed: bool) -> None:
    """A wrong one is healed by the simplex, at twenty times its price: the method tells."""
    x, y = np.array([[0.0, 0.0], [1.0, 0.2]]), np.array([[0.1, 0.0], [1.3, 0.1]])
    found = solve_w2(x, y[::-1] if crossed else y)
    assert found.method == "two atoms"
    assert float(found.value) ** 2 == pytest.approx((0.01 + 0.09 + 0.01) / 2, rel=1e-13)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("total", [1.0, 1.5])
def test_atoms_without_mass_and_other_totals_have_optimal_plans_and_potentials(
    sparse: bool, total: float
) -> None:
    rng = np.random.default_rng(0)
    costs, a, b = rng.random((6, 8)), rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(8))
    a[2] = b[0] = b[3] = 0
    a, b = a / a.sum(), b / b.sum()
    if sparse:
        arcs = *np.indices((6, 8)).reshape(2, -1), costs.ravel()
        found, f, g = exact.sparse_simplex(a, total * b, arcs)
        plan = np.zeros((6, 8))
        plan[found.rows, found.cols] = np.exp(found.log_mass)
        assert (costs - f[:, None] - g).min() > -1e-14
        assert np.abs(g).max() <= 1  # no offset: a difference of two costs at most
    else:
        (plan,), (g,) = exact.simplexes(a[None], total * b[None], costs[None])
        f = (costs - g).min(1)
    np.testing.assert_allclose(plan.sum(1), a, rtol=0, atol=1e-15)
    np.testing.assert_allclose(plan.sum(0), b, rtol=0, atol=1e-15)
    assert a @ f + b @ g == pytest.approx((plan * costs).sum(), abs=1e-14)


def test_one_uniform_cloud_and_one_of_other_weights_are_no_assignment() -> None:
    rng = np.random.default_rng(0)
    logs = np.zeros((16, 5)), np.log(rng.dirichlet(np.ones(5), 16))
    for ends in (logs, logs[::-1]):
        problems = Problem.of(*rng.normal(size=(2, 16, 5, 2)), *ends)
        assert exact.solve_dense(problems, rtol=1e-9).method == "simplex"


def test_potentials_of_a_warm_simplex_have_no_offset() -> None:
    """The core starts from a root of its own, here 166 away from costs of at most 1."""
    rng = np.random.default_rng(0)
    costs, a, b = rng.random((40, 43)), rng.dirichlet(np.ones(40)), rng.dirichlet(np.ones(43))
    is_arc = rng.random(costs.shape) < 0.3
    is_arc[-1] = is_arc[:, -1] = True
    arcs = *is_arc.nonzero(), costs[is_arc]
    plan, f, g = exact.sparse_simplex(a, b, arcs, is_warm=True)
    assert max(np.abs(f).max(), np.abs(g).max()) < 2
    assert (costs - f[:, None] - g)[is_arc].min() > -1e-12
    assert a @ f + b @ g == pytest.approx(np.exp(plan.log_mass) @ costs[plan.rows, plan.cols])
