"""Points, weights, plan and potentials as exact numbers: the file that `checker` proves."""

from __future__ import annotations

import decimal
import hashlib
import json
import math
import sys
from collections.abc import Iterable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import numpy as np

from meanfield.errors import CertificateError
from meanfield.results.atomic import check_replaceable, make_folder, whole, write_new
from meanfield.transport.certificate import Interval
from meanfield.transport.checker import HEAD, check
from meanfield.transport.problem import Problem

_BITS = 160  # of the lightest weight, and of a cost below the unit of the points
_CENTRE_BITS = 64
_RANGE = 10_000.0  # of log-weights
_DIGITS = decimal.Context(prec=80, Emin=-(10**9), Emax=10**9)


def write_proof(given: Problem, answer: Interval, path: Path, *, checked: bool) -> None:
    """Write the file of an answer to a problem in the caller's unit, and run the checker on it.

    Raises:
        CertificateError: plan and potentials do not prove the interval of the answer.
    """
    path = check_replaceable(path)
    content = _content(given, answer)
    make_folder(path.parent)
    with whole(path) as hidden:  # a proof that was there stays if this is none
        write_new(hidden, content)
        try:
            if checked:
                check(str(hidden))
        except ValueError as error:
            raise CertificateError(
                f"{path}: expected plan and potentials that prove the interval "
                f"[{float(answer.lower):.9g}, {float(answer.upper):.9g}] in exact arithmetic, "
                f"got: {error}"
            ) from None


def _present(given: Problem, answer: Interval) -> Interval:
    """The answer between the atoms that have mass, in the numbering of these."""
    rows, cols = given.atoms
    there = answer.log_mass > -math.inf
    return replace(
        answer,
        rows=np.searchsorted(rows, answer.rows[there]),
        cols=np.searchsorted(cols, answer.cols[there]),
        log_mass=answer.log_mass[there],
        f=answer.f[rows],
        g=answer.g[cols],
    )


def _content(given: Problem, answer: Interval) -> bytes:
    """The file: every number an integer, in a unit that is a power of two."""
    answer, order = _present(given, answer), int(answer.order)  # `save` refuses others
    lower, upper = float(answer.lower), float(answer.upper)
    rows, cols = given.atoms
    points = [given.x[rows].tolist(), given.y[cols].tolist()]
    problem = given.part(rows, cols, snap=True)
    # Finer than the points: the checker rounds the centre to whole units.
    unit = -_least_bit(t for cloud in points for point in cloud for t in point) - _CENTRE_BITS
    f, g = answer.f.tolist(), answer.g.tolist()
    finest = max(_least_bit(f + g) + order * unit, _least_bit((lower, upper)) + unit)
    shift = max(finest, 0) + _BITS
    x, y = ([[_scaled(t, -unit) for t in point] for point in cloud] for cloud in points)
    a, b = _weights(problem.log_a), _weights(problem.log_b)
    if len({*b}) == 1:  # so that the mass of an atom of ν is a whole number in the unit of a
        a = [t * len(b) for t in a]
    content = {
        "p": order, "e": unit, "s": shift, "x": x, "y": y, "a": a, "b": b,
        "rows": answer.rows.tolist(), "cols": answer.cols.tolist(),
        "mass": _masses(answer, problem, a, b),
        "f": [_scaled(t, shift - order * unit) for t in f],
        "g": [_scaled(t, shift - order * unit) for t in g],
        "lower": _scaled(lower, shift - unit), "upper": _scaled(upper, shift - unit),
    }  # fmt: skip
    try:
        body = json.dumps(content, separators=(",", ":")).encode()
    except ValueError:
        raise ValueError(
            f"save: expected integers of at most {sys.get_int_max_str_digits()} digits, as Python "
            f"reads them, got longer ones: an order of {order} and points and log-weights that "
            "reach too far; scale the points, or drop atoms that weigh next to nothing"
        ) from None
    return (HEAD + hashlib.sha256(body).hexdigest()).encode() + b"\n" + body


def _least_bit(numbers: Iterable[float]) -> int:
    """The least k ≥ 0 for which 2^k times each number is an integer."""
    return max((t.as_integer_ratio()[1].bit_length() - 1 for t in numbers), default=0)


def _scaled(number: float, exponent: int) -> int:
    """number · 2^exponent, where that is an integer."""
    top, bottom = number.as_integer_ratio()
    return (top << exponent) // bottom


def _weights(logs: np.ndarray) -> list[int]:
    """exp(l) in a unit in which the lightest has enough digits; equal logs are equal."""
    span = float(np.ptp(logs))
    if span > _RANGE:
        raise ValueError(f"expected log-weights within {_RANGE:g} of each other, got {span:g}")
    bits, top = _BITS + math.ceil(span / math.log(2)), Decimal(float(logs.max()))
    known = {t: _exp(Decimal(t) - top, 2**bits) for t in set(logs.tolist())}
    return [known[t] for t in logs.tolist()]


def _masses(answer: Interval, problem: Problem, a: list[int], b: list[int]) -> list[int]:
    """The plan in the unit of a; an entry that moves all of an atom moves just that."""
    (total, of_b), logs_a, logs_b = (sum(a), sum(b)), problem.logs_a, problem.logs_b
    masses = []
    entries = (answer.rows.tolist(), answer.cols.tolist(), answer.log_mass.tolist())
    for i, j, log in zip(*entries, strict=True):
        if log == logs_a[i]:
            masses.append(a[i])
        elif log == logs_b[j]:
            masses.append(b[j] * total // of_b)
        else:
            masses.append(_exp(Decimal(log), total))
    return masses


def _exp(exponent: Decimal, unit: int) -> int:
    """exp(exponent) · unit, rounded down."""
    return int(_DIGITS.multiply(_DIGITS.exp(exponent), Decimal(unit)))
