"""Prove lower ≤ W_p(μ, ν) ≤ upper from a file of `TransportResult.save`: python checker.py FILE.

Potentials with fᵢ + g_j ≤ ‖xᵢ − y_j‖^p, lowered where they fail, give W_p^p ≥ ⟨a, f⟩ + ⟨b, g⟩. A
plan scaled down to its marginals, the rest at 2^{p−1}‖· − z‖^p, z a centre, or the largest cost,
costs no less. Integers of at most 2¹⁶ bits: points in units 2^e, ends 2^{e−s}, f and g 2^{pe−s}.
"""

import hashlib
import json
import math
import sys
from fractions import Fraction

HEAD = "meanfield transport proof 1 "


def check(path: str) -> tuple[int, Fraction, Fraction]:
    """(p, lower, upper) if the file proves them; anything else is an exception."""
    with open(path, "rb") as file:
        head, _, body = file.read().partition(b"\n")
    if head.decode("latin1") != HEAD + hashlib.sha256(body).hexdigest():
        raise ValueError("expected a file of TransportResult.save, got a damaged or another one")
    data = json.loads(body, parse_float=int, parse_constant=int)  # which refuses both
    names = ("p", "e", "s", "lower", "upper", "x", "y", "a", "b", "f", "g", "rows", "cols", "mass")
    p, e, s, lower, upper, x, y, a, b, f, g, rows, cols, mass = (data[name] for name in names)
    are_atoms = {*rows} <= {*range(len(x))} and {*cols} <= {*range(len(y))}
    fits = [len(a), len(b), len(f), len(g)] == [len(x), len(y)] * 2 and min(a + b + mass) >= 0
    bits = 2 * (s + p * max(8 + t.bit_length() for point in x + y for t in point))
    sane = 0 < p < 100 and abs(e) < 10_000 and 0 <= 2 * s <= bits < 2**16 and 0 <= lower <= upper
    if not (are_atoms and fits and sane):
        raise ValueError("expected sizes that fit, entries at atoms, masses ≥ 0, ends in order")

    def cost(point: list[int], other: list[int], up: int = 0) -> int:  # rounded down or up
        square = sum((t - u) ** 2 for t, u in zip(point, other, strict=True))
        return math.isqrt((square**p << 2 * s) - up) + up if square else 0

    (of_a, of_b), one = (sum(a), sum(b)), sum(a) * sum(b) << s  # in units of mass and cost
    a, mass, b = [t * of_b for t in a], [t * of_b for t in mass], [t * of_a for t in b]
    for i, point in enumerate(x):
        for j, other in enumerate(y):
            lighter, k = (f, i) if a[i] < b[j] else (g, j)
            lighter[k] -= max(f[i] + g[j] - cost(point, other), 0)
    gained, far = sum(map(int.__mul__, a + b, f + g)), max(cost(u, v, 1) for u in x for v in y)
    for index, full in ((rows, a), (cols, b)):
        held = [0] * len(full)
        for k, t in zip(index, mass, strict=True):
            held[k] += t
        mass = [t * full[k] // max(full[k], held[k], 1) for k, t in zip(index, mass, strict=True)]
    mid = [sum(map(int.__mul__, a, line)) // sum(a) for line in zip(*x, strict=True)]
    paid = sum(t * cost(x[i], y[j], 1) for i, j, t in zip(rows, cols, mass, strict=True))
    for i, j, t in zip(rows, cols, mass, strict=True):
        a[i], b[j] = a[i] - t, b[j] - t
    paid += sum(t * min(cost(z, mid, 1) << p - 1, far) for z, t in zip(x + y, a + b, strict=True))
    if lower**p * one > max(gained, 0) << p * s or upper**p * one < paid << p * s or not one:
        raise ValueError("plan and potentials do not prove the interval of the file")
    return p, lower * Fraction(2) ** (e - s), upper * Fraction(2) ** (e - s)


if __name__ == "__main__":
    sys.stdout.write("W{:g} in [{!r}, {!r}]\n".format(*(float(t) for t in check(sys.argv[1]))))
