"""Two Diracs are a strict first-order maximum, on the line and for A = −γI: proved by computer.

Lift a measure and a displacement of it to a law ρ of pairs (x, φ), |x| ≤ 1 (atoms may split), and
put Ψ(ρ) = ∫ (A_ρ(x) + S_ρ(x)φ)² dρ − λ ∫ φ² dρ with A_ρ(x) = E_P[(1 + u(y−m))φ], u = −cx and
S_ρ(x) = −c Var_P: the constant is at most √λ if and only if Ψ ≤ 0. Let ρ be two Diracs at ±1 with
the displacement and the weights that are best for them, λ their constant squared. Admixing ε of
an atom at (x₀, φ₀) changes Ψ by ε(q₂φ₀² + q₁φ₀ + q₀), with gᵢ = A(xᵢ) + S(xᵢ)φᵢ, wᵢ = e^{uᵢx₀}/Zᵢ,
bᵢ = 1 + uᵢ(x₀ − mᵢ) and

    q₂ = S(x₀)² − λ,   q₁ = 2A(x₀)S(x₀) + 2 Σ ρᵢgᵢwᵢbᵢ,
    q₀ = A(x₀)² + 2 Σ ρᵢgᵢwᵢ(−φ̄ᵢbᵢ − uᵢCovᵢ(y, φ) − cφᵢ((x₀ − mᵢ)² − Varᵢ)).

No admixture gains if q₂ < 0 and 𝒟 = q₀ − q₁²/(4q₂) ≤ 0 on [−1, 1]. At ±1 𝒟 = 0, since the atoms
are there already; inside it is shown to be negative: near the ends because 𝒟' < 0 at −1 and
𝒟' > 0 at 1, in the middle directly. All c of a box at once: t, the attention of the heavy atom to
the light one, is enclosed by a change of sign of 𝒟(1).

At larger c the layer at 1 is thinner than the cells here. Nothing is proved of measures far from
two Diracs, and cannot be by concavity: at c ≈ 0.35 there are two separate local maxima.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tests.bounds.intervals import Interval, exp, interval, root

CELLS = 128  # of [−1, 1]; the two outer ones on each side are shown by the derivative
OUTER = 2
PROVED = (0.5, 12.0)  # of c


@dataclass(frozen=True, eq=False)
class Slope:
    """A quantity and its derivative in x₀, or in c, enclosed."""

    value: Interval
    slope: Interval

    def __add__(self, other: Slope | Interval | float) -> Slope:
        o = slope(other)
        return Slope(self.value + o.value, self.slope + o.slope)

    def __neg__(self) -> Slope:
        return Slope(-self.value, -self.slope)

    def __sub__(self, other: Slope | Interval | float) -> Slope:
        return self + (-slope(other))

    def __rsub__(self, other: float) -> Slope:
        return -self + other

    def __mul__(self, other: Slope | Interval | float) -> Slope:
        o = slope(other)
        return Slope(self.value * o.value, self.value * o.slope + self.slope * o.value)

    def __truediv__(self, other: Slope) -> Slope:
        quotient = self.value / other.value
        return Slope(quotient, (self.slope - quotient * other.slope) / other.value)

    __radd__, __rmul__ = __add__, __mul__

    def square(self) -> Slope:
        return Slope(self.value.square(), 2 * self.value * self.slope)

    def exp(self) -> Slope:
        e = exp(self.value)
        return Slope(e, e * self.slope)

    def root(self) -> Slope:
        found = root(self.value)
        return Slope(found, self.slope / (2 * found))


def slope(of: Slope | Interval | float) -> Slope:
    return of if isinstance(of, Slope) else Slope(interval(of), interval(0.0))


@dataclass(frozen=True, eq=False)
class Pair:
    """The light atom at 1 with φ = 1, the heavy one at −1 with φ = η; λ = e^{2c}·Λ.

    Of light, heavy: attention P to the light atom, g.
    """

    c: Slope
    odds: Slope
    shares: tuple[Slope, Slope]
    g: tuple[Slope, Slope]
    eta: Slope
    top: Slope  # Λ


def pair(c: Slope, t: Slope) -> Pair:
    """In quantities that stay of order one as c grows; t is the heavy atom's attention."""
    odds = t / (1 - t)
    far = odds * (-4 * c).exp()
    own = far / (1 + far)
    light, steep = (-c).exp(), odds.root()
    # The light atom: u = −c; the heavy one: u = c.
    J00 = own * (1 - 2 * c * (1 - own)) - 4 * c * own * (1 - own)
    J01 = (1 - own) * (1 + 2 * c * own)
    J10 = t * (1 + 2 * c * (1 - t))
    J11 = (1 - t) * (1 - 2 * c * t) - 4 * c * t * (1 - t)
    g11 = (J00 * light).square() + J10.square() / odds
    g22 = odds * (J01 * light * light).square() + (J11 * light).square()
    g12 = steep * light * light * light * J00 * J01 + J10 * J11 * light / steep
    half = (g11 - g22) * 0.5
    spread = (half.square() + g12.square()).root()
    eta = g12 / (half + spread) * steep * light
    g = (J00 + J01 * eta, J10 + J11 * eta)
    return Pair(c, odds, (own, t), g, eta, (g11 + g22) * 0.5 + spread)


def criterion(two: Pair, x: Slope, *, slip: float = 1.0) -> tuple[Interval, Slope]:
    """q₂/λ and 𝒟/λ at x₀; `slip` multiplies q₁, to see that the check can fail."""
    c, odds, eta, top = two.c, two.odds, two.eta, two.top
    light = (-2 * c).exp()
    over = light / top  # 1/λ
    near = odds * (-2 * c * (x + 1)).exp()
    P, Q = near / (1 + near), slope(1.0) / (1 + near)
    u, variance = -c * x, 4 * P * Q
    A = P * (1 + 2 * u * Q) + Q * (1 - 2 * u * P) * eta
    S = -c * variance
    # 2ρgw/λ of the light atom and of the heavy one.
    gains = (
        (-c * (x + 1)).exp() * 2 * odds * light * two.g[0] / (1 + odds * light * light) * over,
        (c * (x - 1)).exp() * 2 * two.g[1] / ((1 + odds) * top),
    )
    q1, q0 = 2 * A * S * over, A.square() * over
    for gain, share, own_u, phi in zip(gains, two.shares, (-c, c), (slope(1.0), eta), strict=True):
        m, var = 2 * share - 1, 4 * share * (1 - share)
        away = x - m
        b = 1 + own_u * away
        mean = share + (1 - share) * two.eta
        cov = 2 * share * (1 - share) * (1 - two.eta)
        q1 = q1 + gain * b
        q0 = q0 - gain * (b * mean + own_u * cov + c * phi * (away.square() - var))
    q2 = S.square() * over - 1
    return q2.value, q0 - (slip * q1).square() / (4 * q2)


def at(value: float | np.ndarray, of: float = 0.0) -> Slope:
    """A number known exactly, with its derivative."""
    array = np.atleast_1d(np.asarray(value, float))
    return Slope(interval(array), interval(of + 0 * array))


def at_one(c: Slope, t: Slope) -> Slope:
    """𝒟(1)/λ: positive for t below the best attention, negative above."""
    return criterion(pair(c, t), at(1.0))[1]


def critical(c: np.ndarray) -> np.ndarray:
    """t where 𝒟(1) changes sign at the best two Diracs; found, not proved."""
    grid = np.linspace(0.01, 0.99, 99)
    most = 1 / (1 + np.exp(-2 * c))  # beyond, the light atom would be the heavy one
    tops = np.stack([pair(at(c), at(t * most)).top.value.low for t in grid])
    k = np.argmax(tops, axis=0)
    low, high = grid[k - 1] * most, grid[k + 1] * most
    for _ in range(50):
        middle = (low + high) / 2
        above = at_one(at(c), at(middle)).value.low > 0
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return (low + high) / 2


def tube(c_low: np.ndarray, c_high: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Attention t below and above the best for all c of each box, and whether that is proved."""
    ends = [critical(side) for side in (c_low, c_high)]
    width = 0.2 * np.abs(ends[1] - ends[0]) + 5 * (1 - c_low / c_high) ** 2 + 1e-7
    t_low, t_high = np.minimum(*ends) - width, np.maximum(*ends) + width
    box, middle = Interval(c_low, c_high), interval((c_low + c_high) / 2)
    one = interval(np.ones_like(c_low))
    found = []
    for t in (t_low, t_high):
        change = at_one(Slope(box, one), at(t)).slope * (box - middle)
        found.append(at_one(Slope(middle, one), at(t)).value + change)
    return t_low, t_high, (found[0].low > 0) & (found[1].high < 0)


def proved(c_low: np.ndarray, c_high: np.ndarray, *, slip: float = 1.0) -> np.ndarray:
    """Of each box of c, whether 𝒟 < 0 inside for all c in it."""
    t_low, t_high, enclosed = tube(c_low, c_high)
    c, t = (
        slope(Interval(low[:, None], high[:, None]))
        for low, high in ((c_low, c_high), (t_low, t_high))
    )
    edges = np.linspace(-1, 1, CELLS + 1)
    x, one = Interval(edges[None, :-1], edges[None, 1:]), interval(np.ones((1, CELLS)))
    two, middle = pair(c, t), interval((x.low + x.high) / 2)
    q2, D = criterion(two, Slope(x, one), slip=slip)
    centred = criterion(two, Slope(middle, one), slip=slip)[1].value + D.slope * (x - middle)
    inside = np.minimum(D.value.high, centred.high) < 0
    inside[:, :OUTER] = D.slope.high[:, :OUTER] < 0
    inside[:, -OUTER:] = D.slope.low[:, -OUTER:] > 0
    return enclosed & (q2.high < 0).all(1) & inside.all(1)


def tiles(low: float, high: float, ratio: float) -> tuple[np.ndarray, np.ndarray]:
    edges = np.geomspace(low, high, int(np.ceil(np.log(high / low) / ratio)) + 1)
    return edges[:-1], edges[1:]


def test_two_diracs_are_a_first_order_maximum():
    low = np.array([0.5, 1.0, 4.0, 12.0])
    assert proved(low, low * np.exp(5e-4)).all()


@pytest.mark.slow
def test_two_diracs_are_a_first_order_maximum_for_every_c_of_an_interval():
    low, high = tiles(*PROVED, 1e-3)
    for k in range(0, len(low), 100):
        assert proved(low[k : k + 100], high[k : k + 100]).all()


def test_the_check_of_extremality_fails_where_the_inequality_does():
    low = np.array([4.0])
    assert not proved(low, low * np.exp(5e-4), slip=1.2).any()


@pytest.mark.parametrize(
    "c", [2.0, *(pytest.param(c, marks=pytest.mark.slow) for c in (0.5, 6.0))]
)
def test_the_criterion_is_the_derivative_of_the_functional(c):
    """An atom of mass ε is admixed to the two Diracs, and Ψ computed as it is defined."""
    t = float(critical(np.array([c]))[0])
    two = pair(at(c), at(t))
    eta, top = float(two.eta.value.low[0]), float(two.top.value.low[0])
    size = np.exp(2 * c) * top
    light = t / (1 - t) * np.exp(-2 * c)

    def functional(places, moved, mass):
        attention = mass * np.exp(-c * np.outer(places, places))
        attention /= attention.sum(1, keepdims=True)
        u, mean = -c * places, attention @ places
        away = places - mean[:, None]
        answer = (attention * (1 + u[:, None] * away)) @ moved
        answer = answer - c * (attention * away**2).sum(1) * moved
        return (mass * answer**2).sum() - size * (mass * moved**2).sum()

    base = np.array([light, 1.0])
    assert abs(functional(np.array([1.0, -1.0]), np.array([1.0, eta]), base)) < 1e-9 * size * light
    for x in (-0.8, -0.1, 0.4, 0.9):
        q2, D = criterion(two, at(x, 1.0))
        places, h = np.array([1.0, -1.0, x]), 1e-6 * light
        # Ψ is a parabola in φ₀ to first order in the mass: its maximum from three values.
        phi = np.array([-1.0, 0.0, 1.0])
        change = [
            sum(
                s * functional(places, np.array([1.0, eta, one]), np.append(base, s * h))
                for s in (1, -1)
            )
            / (2 * h * size)
            for one in phi
        ]
        bent, tilt = (change[0] + change[2]) / 2 - change[1], (change[2] - change[0]) / 2
        assert bent == pytest.approx(float(q2.low[0]), rel=1e-4)
        expected = change[1] - tilt**2 / (4 * bent)
        assert float(D.value.low[0]) == pytest.approx(expected, rel=1e-3, abs=1e-7)
