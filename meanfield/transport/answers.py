"""What a caller gets: a distance with its interval, its coupling and its history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from meanfield.checks import one_number
from meanfield.errors import ConvergenceError
from meanfield.html import span, table
from meanfield.results import Variable, batched
from meanfield.transport.certificate import Answer
from meanfield.transport.coupling import Coupling, alike
from meanfield.transport.pairs import Pair

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["TransportResult", "assemble", "refuse_unconverged", "stacked"]


_VARIABLES = (
    Variable("distance", "Wasserstein distance", "length"),
    Variable("distance_lower", "certified lower bound of the distance", "length"),
    Variable("distance_upper", "certified upper bound of the distance", "length"),
    Variable("potential_source", "potential f at the source", "length^order", ("source",)),
    Variable("potential_target", "potential g at the target", "length^order", ("target",)),
    Variable("row", "atom of the source", dims=("entry",), dtype="int64"),
    Variable("column", "atom of the target", dims=("entry",), dtype="int64"),
    Variable("log_mass", "log of the mass that goes", dims=("entry",)),
)


@dataclass(frozen=True, eq=False, repr=False)
class TransportResult:
    """W₂(μ, ν), or W₁(μ, ν), with the evidence for it.

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
            to rounding and ⟨a, f⟩ + ⟨b, g⟩ = value^order within the width: optimal ones, or None.
        method: what gave the answer; for a batch, the methods that occur, joined by " + ".
        converged: whether plan and potentials meet within `rtol`, for every entry of the batch, up
            to what rounding of the weights given leaves open: that is in the interval alone.
        seconds: wall-clock time spent.
        order: 2 for W₂, 1 for W₁.
    """

    value: Any
    lower: Any
    upper: Any
    coupling: Coupling | None
    potentials: tuple[Any, Any] | None
    method: str
    converged: bool
    seconds: float
    order: int = 2

    @property
    def relative_width(self) -> Any:
        """(upper − lower) / upper; 0 where the upper bound is 0 or infinite."""
        lower, upper = (torch.as_tensor(t) for t in (self.lower, self.upper))
        width = torch.where((upper > 0) & upper.isfinite(), (upper - lower) / upper, 0.0)
        return alike(self.value, width)

    def __float__(self) -> float:
        return one_number(self.value, "a distance")

    def to_dataset(self) -> xr.Dataset:
        """Distance, ends and potentials; the coupling of a single pair along `entry`."""
        f, g = self.potentials or (None, None)
        values: dict[str, Any] = {
            **{"distance": self.value, "distance_lower": self.lower, "distance_upper": self.upper},
            **{"potential_source": f, "potential_target": g},
            **dict.fromkeys(("row", "column", "log_mass")),
        }
        if self.coupling is not None:
            entries = (self.coupling.rows, self.coupling.cols, self.coupling.log_mass)
            values |= dict(zip(("row", "column", "log_mass"), entries, strict=True))
        found = batched(_VARIABLES, values, self.value.shape)
        attrs = {"method": self.method, "converged": int(self.converged), "order": self.order}
        return found.assign_attrs(attrs)

    def __repr__(self) -> str:
        tail = f"method={self.method!r}, converged={self.converged}, seconds={self.seconds:.3g}"
        if self.value.ndim:
            return f"TransportResult(batch_shape={tuple(self.value.shape)}, {tail})"
        low, high = float(self.lower), float(self.upper)
        return (
            f"TransportResult(value={float(self.value):.10g} in [{low:.10g}, {high:.10g}], {tail})"
        )

    def _repr_html_(self) -> str:
        value, lower, upper, width = (
            span(torch.as_tensor(t))
            for t in (self.value, self.lower, self.upper, self.relative_width)
        )
        rows = [
            ("value", value),
            ("certified lower bound", lower),
            ("certified upper bound", upper),
            ("relative width", width),
            ("method", self.method),
            ("converged", self.converged),
            ("seconds", self.seconds),
        ]
        return table(f"Wasserstein distance {'W₁' if self.order == 1 else 'W₂'}", rows)


def stacked(answers: Sequence[Answer]) -> Answer:
    """Single answers as one batch, plans padded with −inf; potentials of all or none."""
    kept = [s.log_mass > -np.inf for s in answers]
    size, count = max(int(t.sum()) for t in kept), len(answers)
    rows, cols = np.zeros((count, size), np.int64), np.zeros((count, size), np.int64)
    logs = np.full((count, size), -np.inf)
    for k, (s, there) in enumerate(zip(answers, kept, strict=True)):
        used = int(there.sum())
        rows[k, :used], cols[k, :used] = s.rows[there], s.cols[there]
        logs[k, :used] = s.log_mass[there]
    f, g = [s.f for s in answers if s.f is not None], [s.g for s in answers if s.g is not None]
    is_whole = len(f) == len(g) == count
    return Answer(
        value=np.array([s.value for s in answers]),
        lower=np.array([s.lower for s in answers]),
        upper=np.array([s.upper for s in answers]),
        rows=rows,
        cols=cols,
        log_mass=logs,
        f=np.stack(f) if is_whole else None,
        g=np.stack(g) if is_whole else None,
        method=" + ".join(sorted({name for s in answers for name in s.method.split(" + ")})),
        converged=np.array([s.converged for s in answers]),
    )


def assemble(
    pair: Pair, answer: Answer | None, *, order: int = 2, seconds: float
) -> TransportResult:
    """Arrays of the caller's kind and batch shape, from a batch in the caller's unit."""
    batch, like = pair.mu.batch_shape, pair.mu.points
    if answer is None:
        none = like.new_zeros(batch)
        return TransportResult(none, none, none, None, None, "empty batch", True, seconds, order)

    def given(values: np.ndarray) -> Any:
        made = torch.as_tensor(values, device=like.device).reshape(*batch, values.shape[-1])
        made = made.to(like.dtype) if made.is_floating_point() else made
        return made.numpy() if pair.as_numpy else made

    def end(values: Tensor) -> Any:
        return values.reshape(batch).numpy()[()] if pair.as_numpy else values.reshape(batch)

    lower, upper = _rounded(answer.lower, like, -1), _rounded(answer.upper, like, 1)
    coupling = potentials = None
    if answer.rows.shape[-1]:
        points = (t.points.detach() for t in pair[:2])
        source, target = (t.numpy() if pair.as_numpy else t for t in points)
        plan = (given(t) for t in (answer.rows, answer.cols, answer.log_mass))
        coupling = Coupling(source, target, *plan)
    converged = bool(answer.converged.all())
    if converged and answer.f is not None and answer.g is not None:
        potentials = given(answer.f), given(answer.g)
    return TransportResult(
        value=end(_rounded(answer.value, like, 0).clamp(lower, upper)),
        lower=end(lower),
        upper=end(upper),
        coupling=coupling,
        potentials=potentials,
        method=answer.method,
        converged=converged,
        seconds=seconds,
        order=order,
    )


def refuse_unconverged(result: TransportResult, rtol: float) -> TransportResult:
    """The result if it converged.

    Raises:
        ConvergenceError: otherwise, with the interval that was reached, and the flagged answer
            as its `result`.
    """
    if result.converged:
        return result
    low, high, width = (
        torch.as_tensor(t).reshape(-1) for t in (result.lower, result.upper, result.relative_width)
    )
    worst = int(width.argmax())
    raise ConvergenceError(
        f"W{result.order}: expected plan and potentials to meet within rtol={rtol:g}, got the "
        f"interval [{float(low[worst]):.12g}, {float(high[worst]):.12g}] of relative width "
        f"{float(width[worst]):.3g} by {result.method!r}; take strict=False for the flagged "
        "interval (also in this error's .result), a larger rtol, or another method",
        result=result,
    )


def _rounded(values: np.ndarray, like: Tensor, direction: int) -> Tensor:
    """In the dtype of `like`, rounded outward where that dtype is shorter."""
    if like.dtype == torch.float64:
        return torch.as_tensor(values, device=like.device)
    with np.errstate(over="ignore"):
        short = np.atleast_1d(values).astype(np.float32)
    if direction:
        wrong = (short > values) if direction < 0 else (short < values)
        short[wrong] = np.nextafter(short[wrong], np.float32(direction * np.inf))
    return torch.as_tensor(short, device=like.device)
