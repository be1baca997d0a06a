"""Laws that hold for every answer to every problem: problems × answers × laws.

A kind of problem that is new goes into `problems.py`, a solver into ANSWERS, a wrong solver into
`lies.py`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch

from meanfield.lipschitz import secant_ratio
from meanfield.measures import ParticleMeasure, stack
from meanfield.transport import (
    TransportResult,
    certificate,
    certify,
    solve,
    solve_conditional_w2,
    solve_w2,
    solve_wp,
    wp,
)
from meanfield.transport import problem as transport_problem
from meanfield.transport.pairs import as_pair
from meanfield.transport.plans import formulas
from meanfield.transport.result import assemble
from meanfield.transport.solve import in_numbering
from tests.transport.laws import (
    Told,
    check_grade,
    claim,
    contains,
    dressed,
    is_coupling,
    is_feasible,
    is_flagged_rightly,
    refusal,
    told,
)
from tests.transport.lies import LIES, tell
from tests.transport.problems import PROBLEMS, Problem, problem
from tests.transport.transport_oracles import exact_transport, priced_optimum


def seeds(few: int, many: int) -> pytest.MarkDecorator:
    """So many seeds by default, and so many others under the marker `slow`."""
    others = pytest.param(range(few, few + many), marks=pytest.mark.slow, id="many")
    return pytest.mark.parametrize("seeds", [pytest.param(range(few), id="few"), others])


# ------------------------------------------------------------------ answers


class Answer(NamedTuple):
    """One way to an interval of W_p."""

    solve: Callable[[Problem], TransportResult]
    order: int = 2
    meant: bool = False  # weights that agree to their last places are taken as equal
    applies: Callable[[Problem], bool] = lambda p: True
    place: Any = ()
    truth: Callable[[Problem], Fraction] | None = None  # of a distance that is no W_p of the two
    room: Fraction = Fraction(0)  # of it, as logarithms of weights were rounded again
    is_wp: bool = False  # it is one all the same: all laws hold


def by(order: int = 2, **settings: Any) -> Callable[[Problem], TransportResult]:
    settings = {"strict": False, "exact_weights": True} | settings
    if order == 2:
        return lambda p: solve_w2(p.mu, p.nu, **settings)
    return lambda p: solve_wp(p.mu, p.nu, order, **settings)


def by_partners(p: Problem) -> TransportResult:
    """Of nearest neighbours, wherever they are the partners or not."""
    whole = transport_problem.Problem(*p.arrays)
    own = whole.part(*whole.atoms, snap=False)
    with mock.patch.object(formulas, "_may_be_nearest", return_value=True):
        answer = formulas.solve_paired(own, rtol=1e-9, device="cpu")
    assert answer is not None
    answer = in_numbering(certificate.in_unit(answer, own.exponent), whole)
    return assemble(as_pair(p.mu, p.nu), answer[None], seconds=0.0)


def as_if_large(p: Problem) -> TransportResult:
    with mock.patch.object(solve, "_SMALL", 0):
        return by()(p)


def in_a_batch(p: Problem) -> TransportResult:
    """Beside its mirror image, whose plan has as many entries or fewer."""
    moved = p.mu.replace(p.mu.points * 0 + p.nu.points[:1].nan_to_num())
    return solve_w2(
        stack([p.mu, moved, p.mu]), stack([p.nu] * 3), exact_weights=True, strict=False
    )


def at_one_place(p: Problem) -> list[ParticleMeasure]:
    return [
        ParticleMeasure(t.points.nan_to_num(), log_weights=t.log_weights,
                        positions=torch.zeros_like(t.log_weights))
        for t in (p.mu, p.nu)
    ]  # fmt: skip


def at_one_position(p: Problem) -> TransportResult:
    return solve_conditional_w2(*at_one_place(p), exact_weights=True, strict=False)


def truth_at_one_position(p: Problem) -> Fraction:
    """Of weights that were normalised, and so rounded, once more."""
    logs = [t.log_weights.double().numpy() for t in at_one_place(p)]
    if all(np.array_equal(mine, own) for mine, own in zip(logs, p.arrays[2:], strict=True)):
        return p.truth(2)
    (x, y, _, _), (i, j) = p.arrays, (t > -math.inf for t in logs)
    return exact_transport(x[i], y[j], logs[0][i], logs[1][j], 2)


def at_no_price(p: Problem) -> TransportResult:
    conditions = tuple(np.arange(t.n_particles, dtype=float) for t in (p.mu, p.nu))
    settings = {"penalty": 0, "exact_weights": True, "strict": False}
    return solve_conditional_w2(p.mu, p.nu, conditions=conditions, **settings)


PRICE, STEP = 0.7, 0.5  # of a change of condition


def conditions(p: Problem) -> tuple[np.ndarray, np.ndarray]:
    """0, and for every third atom `STEP`, in units of the points."""
    x, y, _, _ = p.arrays
    unit = 2.0 ** np.round(np.log2(np.nanmax(np.abs(np.vstack([x, y]))) + 1e-290))
    return tuple(STEP * unit * (np.arange(len(t)) % 3 == 1) for t in (x, y))  # type: ignore[return-value]


def at_a_price(p: Problem) -> TransportResult:
    settings = {"penalty": PRICE, "exact_weights": True, "strict": False}
    return solve_conditional_w2(p.mu, p.nu, conditions=conditions(p), **settings)


def priced_truth(p: Problem) -> Fraction:
    (x, y, a, b), (s, t) = p.arrays, conditions(p)
    i, j = a > -math.inf, b > -math.inf
    return priced_optimum(x[i], y[j], s[i, None], t[j, None], a[i], b[j], penalty=PRICE)


def at_two_positions(p: Problem) -> TransportResult:
    """The measures at position 0 with a quarter of the mass, and swapped and moved at 1."""
    both = (
        ParticleMeasure(
            torch.cat([s.points, 2 * t.points]).nan_to_num(),
            log_weights=torch.cat([s.log_weights - math.log(4), t.log_weights + math.log(0.75)]),
            positions=torch.tensor([0.0] * s.n_particles + [1.0] * t.n_particles).to(s.dtype),
        )
        for s, t in ((p.mu, p.nu), (p.nu, p.mu))
    )
    return solve_conditional_w2(*both, strict=False)


def graded(p: Problem, *, order: int = 2) -> TransportResult:
    best = solve_wp(p.mu, p.nu, order, strict=False)
    return certify(p.mu, p.nu, plan=best.coupling, potentials=best.potentials, p=order)


ANSWERS = {
    "as weights are meant": Answer(by(exact_weights=False), meant=True),
    "as weights are stored": Answer(by()),
    "simplex": Answer(by(method="simplex")),
    "column generation": Answer(by(method="column generation")),
    "partners": Answer(by_partners, applies=lambda p: p.is_paired),
    "as if large": Answer(as_if_large),
    "order 1": Answer(by(1), 1),
    "order 3": Answer(by(3), 3),
    "order 4, as weights are meant": Answer(by(4, exact_weights=False), 4, meant=True),
    "in a batch": Answer(in_a_batch, place=2),
    "at one position": Answer(at_one_position, truth=truth_at_one_position, is_wp=True),
    "at no price": Answer(at_no_price),
    "at a price": Answer(at_a_price, truth=priced_truth),
    "at two positions": Answer(
        at_two_positions, meant=True, applies=lambda p: not p.is_single,
        truth=lambda p: Fraction(13, 4) * p.truth(2, meant=True), room=Fraction(1, 10**12)),
    "graded": Answer(graded, meant=True),
    "graded, order 1": Answer(functools.partial(graded, order=1), 1, meant=True),
    "nothing given": Answer(lambda p: certify(p.mu, p.nu), meant=True),
}  # fmt: skip


BY_CLUSTERS = ("a light atom beside a cluster",)  # masses of whole clusters are meant as equal


def obeys(found: Told, p: Problem, answer: Answer, *, is_lie: bool = False) -> None:
    """All laws."""
    is_flagged_rightly(found, p, answer.order)
    if answer.truth is not None:
        contains(found, answer.truth(p), answer.order, room=answer.room)
        if not answer.is_wp:
            return
    else:
        contains(found, p.truth(answer.order, meant=answer.meant), answer.order)
    if not is_lie:  # whose masses are put right in thought only
        is_coupling(found, p, answer.order)
    if found.f is not None:
        is_feasible(found, p, answer.order)


@seeds(2, 50)
@pytest.mark.parametrize("kind", PROBLEMS)
@pytest.mark.parametrize("name", ANSWERS)
def test_every_answer_obeys_the_laws(name: str, kind: str, seeds: range) -> None:
    answer = ANSWERS[name]
    for seed in seeds:
        p = problem(kind, seed)
        if answer.applies(p) and not (answer.meant and kind in BY_CLUSTERS):
            obeys(told(answer.solve(p), answer.place), p, answer)


# ------------------------------------------------------------------ lies

LIED_TO = (
    "simplex", "as weights are meant", "column generation", "as if large", "order 1", "order 3",
    "in a batch", "at one position", "at two positions", "at a price",
)  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_what_a_wrong_solver_says_is_bounded_and_flagged(
    monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    liar = tell(monkeypatch, LIES[lie])
    # Of clusters that exchange mass what little crosses costs more than all the rest.
    crossing = ("crossing", "as weights are meant")
    for kind, name in (*itertools.product(("weighted", "uniform"), LIED_TO), crossing):
        p, answer, heard = problem(kind), ANSWERS[name], liar.calls
        if answer.applies(p):
            with np.errstate(invalid="ignore"):  # ∞ − ∞
                found = told(answer.solve(p), answer.place)
            obeys(found, p, answer, is_lie=True)
            assert liar.calls > heard


@seeds(1, 30)
@pytest.mark.parametrize("lie", LIES)
def test_what_anybody_says_is_graded_or_refused(lie: str, seeds: range) -> None:
    for seed, (k, kind) in itertools.product(seeds, enumerate(PROBLEMS)):
        turn = k + seed + list(LIES).index(lie)
        if turn % 3 or kind in (*BY_CLUSTERS, "a huge unit"):
            continue
        p, order = problem(kind, seed), 1 + turn % 2
        plan, f, g = claim(p, lie, order)
        words = refusal(plan, f, g, p)
        said = {"plan": plan if words else dressed(plan, p, k), "potentials": (f, g), "p": order}
        if words:
            with pytest.raises(ValueError, match=words):
                certify(p.mu, p.nu, **said)
            continue
        found = certify(p.mu, p.nu, **said)
        check_grade(p, found, order)
        assert bool(found.converged) >= (lie == "the truth" and not p.is_single)


# ------------------------------------------------------------------ what changes nothing


def swapped(p: Problem) -> Problem:
    x, y, a, b = p.arrays
    return Problem(y, x, b, a)


def reordered(p: Problem) -> Problem:
    x, y, a, b = p.arrays
    rng = np.random.default_rng(0)
    i, j = rng.permutation(len(x)), rng.permutation(len(y))
    return Problem(x[i], y[j], a[i], b[j])


def padded(p: Problem) -> Problem:
    """With atoms of weight 0, one of them where another one is."""
    x, y, a, b = p.arrays
    return Problem(np.vstack([x[:1] + 7, x, x[:1]]), y, np.r_[-math.inf, a, -math.inf], b)


def split(p: Problem) -> Problem:
    """An atom of each in two."""
    x, y, a, b = p.arrays
    i, j = np.r_[0, : len(x)], np.r_[: len(y), len(y) - 1]
    shares_a, shares_b = np.zeros(len(i)), np.zeros(len(j))
    shares_a[:2], shares_b[-2:] = np.log([0.25, 0.75]), np.log([0.5, 0.5])
    return Problem(x[i], y[j], a[i] + shares_a, b[j] + shares_b)


def turned(p: Problem) -> Problem:
    """Coordinates in another order, one of them mirrored."""
    x, y, a, b = p.arrays
    sign = np.r_[-1.0, np.ones(x.shape[1] - 1)]
    return Problem((sign * x)[:, ::-1].copy(), (sign * y)[:, ::-1].copy(), a, b)


def in_more_dimensions(p: Problem) -> Problem:
    x, y, a, b = p.arrays
    return Problem(*(np.pad(t, ((0, 0), (1, 1)), constant_values=3.0) for t in (x, y)), a, b)


def in_unit(exponent: int) -> Callable[[Problem], Problem]:
    def change(p: Problem) -> Problem:
        x, y, a, b = p.arrays
        return Problem(np.ldexp(x, exponent), np.ldexp(y, exponent), a, b)

    return change


# What is done, by which power of 2 distances grow, and whether log-weights stay to the last bit.
CHANGES: dict[str, tuple[Callable[[Problem], Problem], int, bool]] = {
    "the arguments swapped": (swapped, 0, True),
    "the atoms in another order": (reordered, 0, True),
    "atoms of weight 0": (padded, 0, False),
    "an atom split": (split, 0, False),
    "the space turned": (turned, 0, True),
    "the space in a larger one": (in_more_dimensions, 0, True),
    "another unit": (in_unit(40), 40, True),
    "a tiny unit": (in_unit(-430), -430, True),
    "a huge unit": (in_unit(400), 400, True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_means_nothing_changes_nothing(change: str) -> None:
    make, exponent, is_exact = CHANGES[change]
    kinds = [
        t for t in PROBLEMS if "unit" not in t and t not in ("single precision", *BY_CLUSTERS)
    ]
    for k, kind in enumerate(kinds):
        p, order = problem(kind), 1 + k % 2
        q, settings = make(p), {"exact_weights": True, "strict": False}
        base, found = (told(solve_wp(t.mu, t.nu, order, **settings)) for t in (p, q))
        truth = p.truth(order) if is_exact else q.truth(order)
        contains(found, truth, order, Fraction(2) ** exponent)
        value = math.ldexp(found.value, -exponent)
        room = base.upper - base.lower + math.ldexp(found.upper - found.lower, -exponent)
        assert value == pytest.approx(
            base.value, rel=0, abs=room * 1.01 if is_exact else room + 1e-7
        )


def test_a_common_translation_changes_no_digit() -> None:
    """Multiples of 2^-20: adding 1e8 is exact, so the answer must be too."""
    rng = np.random.default_rng(5)
    x, y = rng.integers(-(2**20), 2**20, (2, 80, 2)) / 2**20
    for order in (1, 2, 3):
        here, there = (solve_wp(x + t, y + t, order) for t in (0.0, 1e8))
        assert here.value == there.value


@pytest.mark.parametrize("order", [1, 2, 2.5])
def test_it_is_a_metric(order: float) -> None:
    rng = np.random.default_rng(0)
    for _ in range(8):
        mu, nu, xi = (
            (rng.normal(size=(n, 2)), rng.dirichlet(np.ones(n))) for n in rng.integers(1, 7, 3)
        )
        assert wp(mu, mu, order) == 0.0
        assert wp(mu, nu, order) == pytest.approx(wp(nu, mu, order), rel=1e-12)
        assert wp(mu, xi, order) <= (wp(mu, nu, order) + wp(nu, xi, order)) * (1 + 1e-12)


def test_the_identity_stretches_nothing() -> None:
    for kind in PROBLEMS:
        p = problem(kind)
        if p.truth(2) > 0 and kind != "atoms without mass":
            assert float(secant_ratio(lambda t: t, p.mu, p.nu, strict=False).lower) <= 1
