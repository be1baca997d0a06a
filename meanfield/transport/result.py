"""What a caller gets: a distance with its interval, its coupling and its history."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from meanfield.checks import as_bool, as_path, as_tensor
from meanfield.errors import ConvergenceError
from meanfield.habits import with_hints
from meanfield.results import Variable
from meanfield.results.answers import Answer, labelled
from meanfield.results.labels import dataset
from meanfield.transport.certificate import Interval, joined_names, largest_of
from meanfield.transport.coupling import Coupling, alike
from meanfield.transport.pairs import Pair
from meanfield.transport.problem import Problem

if TYPE_CHECKING:
    import xarray as xr

_WIDE = 1e-3  # of the distance


_PLAN_VARIABLES = (
    Variable("potential_source", "potential f at the source", "length^order", ("source",)),
    Variable("potential_target", "potential g at the target", "length^order", ("target",)),
    Variable("row", "atom of the source", dims=("entry",), dtype="int64"),
    Variable("column", "atom of the target", dims=("entry",), dtype="int64"),
    Variable("log_mass", "log of the mass of the entry", dims=("entry",)),
)


class TransportResult(Answer, noun="distance", title="Wasserstein distance"):
    """W_p(μ, ν) with the evidence for it.

    Tensors, or NumPy arrays where both clouds came as such. None of them carries a gradient:
    `w2`, `w1` and `conditional_w2` do. ``float(result)`` is the value.

    Attributes:
        value: the distance, never its square; shape of the batch, () without one. The unit of the
            points.
        lower: certified lower bound, rounding included, of the weights as `solve_w2` reads them:
            masses that agree to a few units in their last place are taken as equal, unless
            ``exact_weights=True``.
        upper: certified upper bound, likewise.
        coupling: the plan that gives `upper`, or None where none exists (infinite distance).
        potentials: (f, g), shapes (..., n) and (..., m), with fᵢ + g_j ≤ ‖xᵢ − y_j‖^order up
            to rounding and ⟨a, f⟩ + ⟨b, g⟩ = value^order within the width. Where these powers
            leave the number range, or the distance is infinite, they are NaN; None if that is so
            of all pairs of a batch.
        method: what gave the answer; for a batch, the methods that occur, joined by " + ".
        converged: whether plan and potentials meet within `rtol`, shape of the batch, up to what
            rounding of the weights given leaves open: that is in the interval, and in `rounding`.
        seconds: wall-clock time spent.
        order: p; 2 for W₂.
        rounding: how much of upper − lower rounding explains: of weights that are known to a few
            units in their last place, and of sums. No solver makes the interval narrower than
            that; where clouds are collapsed it may be most of W₂ itself.
        found: the pair and its answer in double precision, of which coupling, potentials and
            what `save` writes are made when they are asked for.
        conditional: whether it is a conditional distance.
    """

    value: Any = labelled("Wasserstein distance", units="length")
    lower: Any = labelled("certified lower bound", units="length", beside=True)
    upper: Any = labelled("certified upper bound", units="length", beside=True)
    method: str = labelled("method", attribute=True)
    converged: Any = labelled("whether it has converged", dtype="bool", beside=True)
    seconds: float
    found: tuple[Pair, Interval]
    order: float = labelled("order p of Wₚ", attribute=True, default=2)
    rounding: Any = labelled(
        "width that rounding leaves open", units="length", beside=True, shown=False, default=None
    )
    conditional: bool = labelled(
        "whether it is a conditional distance", attribute=True, shown=False, default=False
    )

    @cached_property
    def coupling(self) -> Coupling | None:
        """The plan that gives `upper`."""
        pair, answer = self.found
        if not answer.rows.shape[-1]:
            return None
        points = (t if pair.as_numpy else t.detach() for t in pair[:2])
        plan = (_given(pair, t) for t in (answer.rows, answer.cols, answer.log_mass))
        return Coupling(*points, *plan)

    @cached_property
    def potentials(self) -> tuple[Any, Any] | None:
        """The potentials that give `lower`."""
        pair, answer = self.found
        both = double_potentials(answer)
        if both is None:
            return None
        f, g = both
        if pair.is_single:  # in which powers may leave the range where distances do not
            kind, size = np.finfo(np.float32), largest_of(f, g)
            lost = np.isfinite(size) & (size > kind.max) | (size > 0) & (size < kind.tiny)
            lost |= np.isnan(size)
            if lost.all():
                return None
            f, g = (np.where(lost[:, None], np.nan, t) for t in both)
        return _given(pair, f), _given(pair, g)

    @property
    def relative_width(self) -> Any:
        """(upper − lower) / upper; 0 where the upper bound is 0 or infinite."""
        lower, upper = (as_tensor(t) for t in (self.lower, self.upper))
        width = torch.where((upper > 0) & upper.isfinite(), (upper - lower) / upper, 0.0)
        return alike(self.value, width)

    @property
    def plan(self) -> Any:
        """The coupling as a matrix (..., n, m), as ``ot.solve(...).plan``; None where none is."""
        return None if self.coupling is None else self.coupling.dense()

    @with_hints
    def save(self, path: str | os.PathLike[str], *, check: bool = True) -> Path:
        """Write points, weights, plan and potentials as exact numbers, and prove the interval.

        ``python -m meanfield.transport.checker FILE`` proves the file in exact arithmetic; so
        does the script alone, without this library: 60 lines that import the standard library
        only. Atoms without mass are left out. Weights are written as `solve_w2` reads them
        without ``exact_weights``.

        Args:
            path: its suffix is ``.proof``; such a file is replaced.
            check: run the checker on the file, which takes n m steps of Python: seconds for
                1,000 points. The ends of a file that was not checked may not be proven by it.

        Returns:
            The path.

        Raises:
            ValueError: another suffix; a batch; a conditional distance; potentials beyond the
                number range; an order that is no whole number below 100; integers of more digits
                than Python reads.
            FileExistsError: something that this library has not written is there.
            CertificateError: plan and potentials do not prove the interval.

        Example:
            >>> import tempfile
            >>> from meanfield.transport import solve_w2
            >>> from meanfield.transport.checker import check
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = solve_w2([[0.0], [1.0]], [[3.0], [4.0]]).save(f"{folder}/w2.proof")
            ...     order, lower, upper = check(path)
            >>> order, float(lower), float(upper)
            (2, 3.0, 3.0)
        """
        from meanfield.transport.proof import write_proof  # or `python -m` has the checker twice

        path = as_path(path)
        if path.suffix != ".proof":
            raise ValueError(f"path: expected a name that ends in .proof, got {path.name!r}")
        if self.order not in range(1, 100):
            raise ValueError(f"save: expected a whole order below 100, got {self.order:g}")
        if self.conditional:
            raise ValueError(
                "save: expected a distance without conditions, which a proof cannot state, got a "
                "conditional one; solve the atoms of each condition by themselves"
            )
        if self.value.ndim:
            raise ValueError(
                "save: expected the answer for one pair of measures, got a batch of shape "
                f"{tuple(self.value.shape)}; solve each pair by itself"
            )
        pair, answer = self.found
        if np.isnan(answer.f).any():
            raise ValueError(
                "save: expected a plan and potentials in the number range, got powers of order "
                f"{self.order:g} of lengths beyond it; measure the points in another unit"
            )
        x, y, log_a, log_b = (t[0] for t in pair.flat)
        given = Problem(x, y, log_a, log_b, order=self.order)
        write_proof(given, answer[0], path, checked=as_bool(check, "check"))
        return path

    def to_dataset(self) -> xr.Dataset:
        """Distance, ends and potentials, and the coupling along `entry`; a batch along `case`."""
        plan = self.coupling
        values = (
            *(self.potentials or (None, None)),
            *((None, None, None) if plan is None else (plan.rows, plan.cols, plan.log_mass)),
        )
        named = {v.name: value for v, value in zip(_PLAN_VARIABLES, values, strict=True)}
        plans = dataset(_PLAN_VARIABLES, named, batch_shape=self.value.shape)
        return super().to_dataset().merge(plans)


def double_potentials(answer: Interval) -> tuple[np.ndarray, np.ndarray] | None:
    """(f, g) of a batch whatever the precision of its points; None if no pair has any."""
    if np.isnan(answer.f).any(-1).all():
        return None
    return answer.f, answer.g


def gathered(parts: Sequence[Interval]) -> Interval:
    """Batches as one, plans padded with −inf."""
    if len(parts) == 1 and (parts[0].log_mass > -np.inf).all():
        return parts[0]
    ends = np.cumsum([len(part.value) for part in parts])

    def joined(name: str) -> Any:
        each = [getattr(part, name) for part in parts]
        if len(each) == 1:
            return each[0]
        shape = (ends[-1], *max(t.shape[1:] for t in each))
        whole = np.full(shape, -np.inf if name == "log_mass" else 0, each[0].dtype)
        for end, t in zip(ends, each, strict=True):
            whole[(slice(end - len(t), end), *map(slice, t.shape[1:]))] = t
        return whole

    held = {name: joined(name) for name in Interval.arrays()}
    used = (held["log_mass"] > -np.inf).any(0)
    if not used.all():
        held |= {name: held[name][:, used] for name in ("rows", "cols", "log_mass")}
    return Interval(**held, method=joined_names(parts), order=parts[0].order)


def assemble(
    pair: Pair, answer: Interval, *, seconds: float, conditional: bool = False
) -> TransportResult:
    """Arrays of the caller's kind and batch shape, from a batch in the caller's unit."""
    lower, upper = (_given(pair, t, k) for t, k in ((answer.lower, -1), (answer.upper, 1)))
    return TransportResult(
        value=_given(pair, answer.value),  # to the nearest, which does not leave the interval
        lower=lower,
        upper=upper,
        method=answer.method,
        converged=_given(pair, answer.converged),
        seconds=seconds,
        order=answer.order,
        found=(pair, answer),
        rounding=_given(pair, answer.rounding, 1),
        conditional=conditional,
    )


def _given(pair: Pair, values: np.ndarray, direction: int = 0) -> Any:
    """In the batch shape, the kind and the dtype of the points; rounded outward if asked for."""
    batch = pair.batch_shape
    values = values.reshape(batch + values.shape[1:])
    if values.dtype == np.float64 and pair.is_single:
        values = _rounded(values, direction)
    return values[()] if pair.as_numpy else torch.as_tensor(values, device=pair.device)


def warn_of_rounding(result: TransportResult) -> None:
    """Tell who asks for a value alone that rounding leaves more than its last digits open."""
    wide = result.rounding > _WIDE * result.upper
    if not bool(wide.any()):
        return
    low, high, _ = _widest(result)
    solver = "solve_w2" if result.order == 2 else "solve_wp"
    solver = "solve_conditional_w2" if result.conditional else solver
    warnings.warn(
        f"W{result.order:g} lies in [{low:.4g}, {high:.4g}]: so much is left open by rounding, "
        f"as its power of order {result.order:g} is small beside that of the clouds' diameter; "
        f"{solver} gives the interval",
        stacklevel=5,  # whoever has called `w2`, not the library
    )


def _widest(result: TransportResult) -> tuple[float, ...]:
    """The ends and the relative width of the answer that is open most."""
    arrays = result.lower, result.upper, result.relative_width
    ends = torch.stack([as_tensor(t).reshape(-1) for t in arrays])
    return tuple(ends[:, ends[-1].argmax()].tolist())


def refuse_unconverged(result: TransportResult, rtol: float) -> TransportResult:
    """The result if all of it converged.

    Raises:
        ConvergenceError: otherwise, with the interval that was reached, and the flagged answer
            as its `result`.
    """
    if result.converged.all():
        return result
    low, high, width = _widest(result)
    raise ConvergenceError(
        f"W{result.order:g}: expected plan and potentials to meet within rtol={rtol:g}, got the "
        f"interval [{low:.12g}, {high:.12g}] of relative width {width:.3g} by "
        f"{result.method!r} in {result.seconds:.3g} s; take strict=False for the flagged interval "
        "(also in this error's .result), a larger rtol or time_limit, or another method",
        result=result,
    )


def _rounded(values: np.ndarray, direction: int) -> np.ndarray:
    """In single precision, outward in a direction."""
    with np.errstate(over="ignore"):
        short: np.ndarray = values.astype(np.float32)
    if direction:
        wrong = (short > values) if direction < 0 else (short < values)
        short = np.where(wrong, np.nextafter(short, np.float32(direction * np.inf)), short)
    return short
