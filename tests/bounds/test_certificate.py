"""Two poles are extremal: the one step of the sharp bound that is proved by computer.

Claim: for every law P on the unit ball of R^d, unit vector e, and c ≥ 0,
    Φ = E[e^{−cζ}] E[e^{cζ} |e + c⟨e, y − Ey⟩u|²] ≤ D(c)²,   ζ = ⟨u, y⟩, |u| = 1.
By hand (page "Sharp constants" of the documentation): y may be taken on the unit circle of
span(u, e), y = (ζ, η), and with z = Eζ, r = Eη² = (1−z²)ρ, 0 ≤ ρ ≤ 1, C = cosh c, Σ = sinh c and
q = (Σ − ce^{−c})/2 one has Φ ≤ a eᵀGe for a = C − Σz − qr and a symmetric 2 × 2 matrix G with

    G₁₁ = (C+Σz)(1 + c² − 2cz + c²z²) + 2c(1−cz)(Cz + Σ(1−r)),
    G₂₂ ≤ V₂₂ = (C+Σz)(1+c²) + c² r Σ(1−z)(1−ρ),
    G₁₂² ≤ r V₁₂²,  V₁₂² = c²Σ²(1−cz)²(1−z²)(1−ρ) + c⁴(Cz + Σ(1−r))².

So Φ ≤ D² follows from Y := D² − aV₂₂ > 0 and X·Y ≥ a²rV₁₂², where X := D² − aG₁₁ = gap + r s with
s = qG₁₁(r=0) + 2cΣ(1−cz)a and gap = D² − (value at the two poles of mean z) ≥ 0 by the definition
of D. Three variables are left, c, z and ρ. Where the gap may vanish, s·Y > a²V₁₂² is shown,
elsewhere (gap + rs)Y > a²rV₁₂². Neither is close, a²rV₁₂² ≤ 0.51 XY, so that few boxes are
enough.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import numpy as np
import pytest

from meanfield import bounds
from tests.bounds.bounds_oracles import kernel_norm
from tests.bounds.intervals import Interval, exp, interval

SPLIT = 0.25  # c below: series at 0; above: 1/c, down to 0


class Enclosures(NamedTuple):
    """Of one box, divided by the powers of c and e^c that make them of order one."""

    a: Interval
    gap: Interval
    slope: Interval  # s
    room: Interval  # Y
    mixed: Interval  # V₁₂²
    r: Interval


def poles(z: Any, c: float) -> Any:
    """The product at two poles of mean z, over e^{2c}."""
    t, light = (1 + z) / 2, math.exp(-2 * c)
    return (t * light + 1 - t) * (
        t * (1 + 2 * (1 - t) * c) ** 2 + (1 - t) * light * (1 - 2 * t * c) ** 2
    )


def best_mean(c: float) -> float:
    grid = np.linspace(-1, 1, 4001)
    return float(grid[np.argmax(poles(grid, c))])


def far(x: Interval, z: Interval, rho: Interval, best: np.ndarray) -> Enclosures:
    """c = 1/x ≥ 1/4: everything over e^c, and G over c²."""
    with np.errstate(divide="ignore"):
        c_low, c_high = 1 / x.high * (1 - 1e-15), 1 / x.low * (1 + 1e-15)
    light = exp(Interval(-2 * c_high, -2 * c_low))
    light = Interval(np.where(np.isfinite(c_high), light.low, 0.0), light.high)
    # ce^{−2c} decreases beyond c = 1/2.
    finite = np.where(np.isfinite(c_high), c_high, 0.0)
    late, early = finite * np.exp(-2 * finite), c_low * np.exp(-2 * c_low)
    falling = c_low >= 0.5
    times = Interval(
        np.where(falling, late, c_low * light.low) * (1 - 1e-14),
        np.where(falling, early, finite * light.high) * (1 + 1e-14),
    )
    C, S = (1 + light) * 0.5, (1 - light) * 0.5
    q = (S - times) * 0.5

    def first(z: Interval) -> tuple[Interval, Interval]:
        return C - S * z, (C + S * z) * (1 + (x - z).square()) + 2 * (x - z) * (C * z + S)

    r = ((1 - z.square()) * rho).floored()
    at_poles, G = first(z)
    at_best, G_best = first(interval(best))
    largest = at_best * G_best  # D² is at least this
    a = at_poles - q * r
    V22 = (C + S * z) * (1 + x.square()) + r * S * (1 - z) * (1 - rho)
    return Enclosures(
        a=a,
        gap=(largest - at_poles * G).floored(),
        slope=q * G + 2 * S * (x - z) * a,
        room=largest - a * V22,
        mixed=(S * (x - z)).square() * (1 - z.square()) * (1 - rho)
        + (C * z + S * (1 - r)).square(),
        r=r,
    )


def near(c: Interval, z: Interval, rho: Interval, best: np.ndarray) -> Enclosures:
    """c ≤ 1/4: polynomials in c whose constant and linear terms cancel; over c²."""
    top = c.high**2
    S = Interval(1 + 0 * top, 1 + top / 6 * 1.05)  # sinh(c)/c
    C = Interval(0.5 + 0 * top, 0.5 + top / 24 * 1.05)  # (cosh(c) − 1)/c²
    # (Σ − ce^{−c})/2c² = (1 − c/3 + c²/6 − c³/30 + …)/2
    q = 0.5 * (1 - c * (1 / 3 + 1e-15) + Interval(0 * top, top / 6 * (1 + 1e-15)))

    def first(z: Interval) -> tuple[list[Interval], list[Interval]]:
        zz, one = z.square(), interval(1.0 + 0 * top)
        g2 = C - 2 * S * zz + 1 + zz + 2 * S - 2 * zz
        G = [one, S * z, g2, S * z * (1 + zz) - 2 * (S * z), C * (1 + zz) - 2 * (C * zz)]
        return [one, -(S * z), C], G

    r = ((1 - z.square()) * rho).floored()
    at_poles, G = first(z)
    largest = beyond(*first(interval(best)), c)
    a = [at_poles[0], at_poles[1], C - q * r]
    cubic = S * z + r * S * (1 - z) * (1 - rho)
    V22 = [at_poles[0], S * z, C + 1, cubic, C]
    whole = value(a, c)
    return Enclosures(
        a=whole,
        gap=(largest - beyond(at_poles, G, c)).floored(),
        slope=q * value(G, c) + 2 * S * (1 - c * z) * whole,
        room=largest - beyond(a, V22, c),
        mixed=(S * (1 - c * z)).square() * (1 - z.square()) * (1 - rho)
        + ((1 + c.square() * C) * z + c * S * (1 - r)).square(),
        r=r,
    )


def value(coefficients: list[Interval], c: Interval) -> Interval:
    total = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        total = total * c + coefficient
    return total


def beyond(one: list[Interval], other: list[Interval], c: Interval) -> Interval:
    """(one · other − 1)/c²: the terms of order 0 and 1 are 1 and 0 exactly."""
    product = [interval(0.0)] * (len(one) + len(other) - 1)
    for (i, left), (j, right) in itertools.product(enumerate(one), enumerate(other)):
        if i + j > 1:
            product[i + j] = product[i + j] + left * right
    return value(product[2:], c)


def proved(found: Enclosures) -> np.ndarray:
    cross = found.a.square() * found.mixed
    at_any_gap = found.slope * found.room - cross
    by_the_gap = (found.gap + found.r * found.slope) * found.room - found.r * cross
    return (found.room.low > 0) & ((at_any_gap.low > 0) | (by_the_gap.low > 0))


def leftover(enclose, cells, c_of, *, harder: float = 1.0, limit: int = 200_000) -> int:
    """Boxes (cell, z, ρ) that are not proved when `limit` have been looked at.

    `harder` multiplies V₁₂²: to see that the check can fail.
    """
    edges_z, edges_rho = np.linspace(-1, 1, 33), np.linspace(0, 1, 9)
    boxes = np.array(
        [
            (*cell, *z, *rho)
            for cell in cells
            for z in itertools.pairwise(edges_z)
            for rho in itertools.pairwise(edges_rho)
        ]
    )
    looked = 0
    widths = np.array([cells[0][1] - cells[0][0], edges_z[1] + 1, edges_rho[1]])
    while len(boxes) and looked < limit:
        looked += len(boxes)
        middles = boxes[:, 0] + boxes[:, 1]
        place = {m: best_mean(c_of(m / 2)) for m in np.unique(middles)}
        best = np.array([place[m] for m in middles])
        sides = [Interval(boxes[:, 2 * k], boxes[:, 2 * k + 1]) for k in range(3)]
        found = enclose(*sides, best)
        boxes = boxes[~proved(found._replace(mixed=found.mixed * harder))]
        if len(boxes):
            boxes = halved(boxes, widths)
    return len(boxes)


def halved(boxes: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Every box cut in two along its relatively longest side."""
    sides = (boxes[:, 1::2] - boxes[:, ::2]) / widths
    k = np.argmax(sides, axis=1)
    rows = np.arange(len(boxes))
    middle = 0.5 * (boxes[rows, 2 * k] + boxes[rows, 2 * k + 1])
    left, right = boxes.copy(), boxes.copy()
    left[rows, 2 * k + 1] = middle
    right[rows, 2 * k] = middle
    return np.concatenate([left, right])


def cells(low: float, high: float, count: int) -> list[tuple[float, float]]:
    return list(itertools.pairwise(np.linspace(low, high, count + 1)))


SMALL = (near, cells(0.0, SPLIT, 4), lambda c: c)
LARGE = (far, cells(0.0, 1 / SPLIT, 80), lambda x: 1 / x)


@pytest.mark.parametrize("part", [SMALL, LARGE], ids=["c below 1/4", "c above 1/4"])
def test_two_poles_are_extremal_for_every_c(part):
    assert leftover(*part) == 0


def test_the_check_fails_where_the_inequality_does():
    enclose, _, c_of = LARGE
    assert leftover(enclose, cells(0.0, 0.1, 2), c_of, harder=2.5, limit=20_000) > 0
    assert leftover(*SMALL, harder=8.0, limit=20_000) > 0


def direct(c: float, z: float, rho: float) -> dict[str, float]:
    """The quantities as the head of this file writes them, in extended precision."""
    c, z, rho = (np.longdouble(x) for x in (c, z, rho))
    C, S = np.cosh(c), np.sinh(c)
    q, r = (S - c * np.exp(-c)) / 2, (1 - z * z) * rho
    a, G0 = (
        C - S * z - q * r,
        (C + S * z) * (1 - 2 * c * z + c * c * (1 + z * z)) + 2 * c * (1 - c * z) * (C * z + S),
    )
    V22 = (C + S * z) * (1 + c * c) + c * c * r * S * (1 - z) * (1 - rho)
    V12 = (c * S * (1 - c * z)) ** 2 * (1 - z * z) * (1 - rho) + c**4 * (C * z + S * (1 - r)) ** 2
    best = np.linspace(-1, 1, 4001).astype(np.longdouble)
    D2 = ((C - S * best) * two_poles(c, best)).max()
    return {
        "a": a,
        "gap": D2 - (C - S * z) * G0,
        "slope": q * G0 + 2 * c * S * (1 - c * z) * a,
        "room": D2 - a * V22,
        "mixed": V12,
        "G11": G0 - 2 * c * (1 - c * z) * S * r,
        "V22": V22,
        "r": r,
    }


def two_poles(c, z):
    C, S = np.cosh(c), np.sinh(c)
    return (C + S * z) * (1 - 2 * c * z + c * c * (1 + z * z)) + 2 * c * (1 - c * z) * (C * z + S)


@pytest.mark.parametrize("c", [0.01, 0.1, 0.25, 0.3, 0.7, 2.0, 9.0])
def test_the_enclosures_hold_the_formulas(c):
    rng = np.random.default_rng(0)
    best = np.array([best_mean(c)])
    for z, rho in rng.uniform((-1, 0), (1, 1), size=(20, 2)):
        expected = direct(c, z, rho)
        box = [Interval(np.array([x]), np.array([x])) for x in (z, rho)]
        if c < SPLIT:
            found = near(Interval(np.array([c * 0.999]), np.array([c])), *box, best)
            scales = {"a": 1, "gap": c**2, "slope": c**2, "room": c**2, "mixed": c**4, "r": 1}
        else:
            found = far(Interval(np.array([1 / c]), np.array([1.0001 / c])), *box, best)
            e = math.exp(c)
            scales = {"a": e, "gap": e * e * c**2, "slope": e * e * c**2, "room": e * e * c**2}
            scales |= {"mixed": e * e * c**4, "r": 1}
        for name, scale in scales.items():
            held, true = getattr(found, name), float(expected[name] / scale)
            slack = 1e-6 * (1 + abs(true))  # D² is taken at a grid of z
            assert held.low[0] - slack <= true <= held.high[0] + slack, name


@pytest.mark.parametrize("c", [0.05, 1.0, 9.0])
def test_the_steps_by_hand_hold_for_random_laws(c):
    rng, worst, most = np.random.default_rng(1), 0.0, kernel_norm(c) ** 2
    for _ in range(150):
        k = rng.integers(2, 6)
        weight = rng.dirichlet(np.full(k, 0.5))
        y = rng.normal(size=(k, 2))
        lengths = np.linalg.norm(y, axis=1, keepdims=True)
        y = y / lengths * (rng.uniform(size=(k, 1)) if rng.random() < 0.3 else 1.0)
        angle = rng.uniform(0, 2 * math.pi)
        e = np.array([math.cos(angle), math.sin(angle)])
        s = (y - weight @ y) @ e
        turned = e + c * s[:, None] * np.array([1.0, 0.0])
        light = weight @ np.exp(-c * y[:, 0])
        phi = light * (weight @ (np.exp(c * y[:, 0]) * (turned**2).sum(1)))
        assert phi <= most * (1 + 1e-12)
        worst = max(worst, phi / most)
        # On the circle: the matrix of the claim.
        circle = y / np.linalg.norm(y, axis=1, keepdims=True)
        s = (circle - weight @ circle) @ e
        turned = e + c * s[:, None] * np.array([1.0, 0.0])
        zeta, eta = circle.T
        phi = (weight @ np.exp(-c * zeta)) * (weight @ (np.exp(c * zeta) * (turned**2).sum(1)))
        z, r = weight @ zeta, weight @ eta**2
        C, S = math.cosh(c), math.sinh(c)
        mean, both = weight @ eta, weight @ (zeta * eta)
        exact = direct(c, z, r / (1 - z * z))
        G12 = c * S * (1 - c * z) * (both - z * mean) - c * c * mean * (C * z + S * (1 - r))
        G22 = (C + S * z) * (1 + c * c) + c * c * mean * (mean * (S * z - C) - 2 * S * both)
        G = np.array([[float(exact["G11"]), G12], [G12, G22]])
        assert phi <= float(exact["a"]) * (e @ G @ e) * (1 + 1e-9)
        V22, V12 = float(exact["V22"]), float(exact["r"] * exact["mixed"])
        assert V22 * (1 + 1e-9) >= G22
        assert V12 * (1 + 1e-9) >= G12**2
    assert worst > 0.1


def test_the_maximum_over_two_poles_is_found():
    """D(c) stands in the bounds; the one-sided one is ½(D + √(1+c²)) + c."""
    means = np.linspace(-1, 1, 20_001)
    for c in [0.0, *np.logspace(-3, 2.4, 60)]:
        D = math.exp(c) * math.sqrt(poles(means, c).max())
        expected, found = (D + math.hypot(1, c)) / 2 + c, bounds.one_sided(c, 1.0, 1.0)
        assert expected <= found * (1 + 1e-12)
        assert found <= expected * (1 + 1e-7)
