"""Plans and potentials of other solvers, whatever they come as."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from meanfield.checks import describe, to_host
from meanfield.transport.coupling import Coupling
from meanfield.transport.problem import log_masses

_SAID = (
    "an assignment (n,) of whole numbers, a matrix (n, m), a sparse matrix, a tuple (rows, cols) "
    "or (rows, cols, mass), or a Coupling"
)


class Entries(NamedTuple):
    """A plan by its entries; `log_mass` is None where each moves all of its row's atom."""

    rows: np.ndarray
    cols: np.ndarray
    log_mass: np.ndarray | None


def entries_of(plan: Any, n: int, m: int) -> Entries:
    """The entries of a plan between n and m atoms; of None there are none.

    Raises:
        TypeError: a plan of another kind.
        ValueError: another shape, entries outside it, masses that are negative or not finite.
    """
    from scipy.sparse import issparse

    if plan is None:
        plan = np.zeros(0, int), np.zeros(0, int)
    if isinstance(plan, Coupling):
        rows, cols, logs = (_array(t, "plan") for t in (plan.rows, plan.cols, plan.log_mass))
        _refuse_shape((*rows.shape[:-1], *plan.shape), n, m)
        return _checked(rows, cols, logs.astype(float), n, m)
    if isinstance(plan, torch.Tensor) and plan.layout != torch.strided:
        sparse = plan.detach().to_sparse_coo().coalesce()
        _refuse_shape(tuple(sparse.shape), n, m)
        rows, cols = to_host(sparse.indices())
        return _massive(rows, cols, to_host(sparse.values().double()), n, m)
    if issparse(plan):
        sparse = plan.tocoo()
        _refuse_shape(sparse.shape, n, m)
        return _massive(sparse.row, sparse.col, sparse.data, n, m)
    if isinstance(plan, tuple) and len(plan) in (2, 3):
        rows, cols, *masses = (_array(t, "plan") for t in plan)
        if not masses:
            found = _checked(rows, cols, None, n, m)
            if len(np.unique(found.rows)) < len(found.rows):
                raise ValueError(
                    "plan: expected each row once where no masses are given, since an entry then "
                    "moves all of its row; give masses as well"
                )
            return found
        return _massive(rows, cols, masses[0], n, m)
    array = _array(plan, "plan")
    if array.ndim == 1 and array.dtype.kind in "iu":
        if array.shape != (n,):
            raise ValueError(f"plan: expected {n} columns, one for each atom, got {len(array)}")
        return _checked(np.arange(n), array, None, n, m)
    _refuse_shape(array.shape, n, m)
    rows, cols = np.nonzero(array)
    return _massive(rows, cols, array[rows, cols], n, m)


def potentials_of(potentials: Any, n: int, m: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    """f (n,) and g (m,) in double precision; None for a side that is not given.

    Raises:
        TypeError: no pair.
        ValueError: other shapes, or potentials that are not finite.
    """
    if potentials is None:
        return None, None
    if not isinstance(potentials, (tuple, list)) or len(potentials) != 2:
        raise TypeError(
            "potentials: expected a pair (f, g), in which one may be None, got "
            f"{describe(potentials)}; write (f, None) or (None, g)"
        )
    found: list[np.ndarray | None] = []
    for name, side, size in (("f", potentials[0], n), ("g", potentials[1], m)):
        if side is None:
            found.append(None)
            continue
        array = _array(side, f"potential {name}")
        if array.shape != (size,):
            raise ValueError(
                f"potential {name}: expected {size} numbers, one for each atom, got "
                f"{array.dtype} of shape {array.shape}"
            )
        found.append(array.astype(float))
    return found[0], found[1]


def _array(value: Any, name: str) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        return to_host(value.double() if value.is_floating_point() else value)
    try:
        array = np.asarray(value)
    except (ValueError, TypeError):
        array = np.asarray(None)
    if array.dtype.kind not in "iuf":
        expected = _SAID if name == "plan" else "an array of numbers"
        got = f"{array.dtype} of shape {array.shape}" if array.dtype.kind in "bc" else ""
        raise TypeError(f"{name}: expected {expected}, got {got or describe(value)}")
    return array


def _refuse_shape(shape: tuple[int, ...], n: int, m: int) -> None:
    if tuple(shape) == (n, m):
        return
    hint = "; is it transposed?" if tuple(shape) == (m, n) else ""
    raise ValueError(f"plan: expected shape ({n}, {m}), got {tuple(shape)}{hint}")


def _massive(rows: np.ndarray, cols: np.ndarray, mass: np.ndarray, n: int, m: int) -> Entries:
    """Entries with their masses; negative ones within rounding of single precision are nothing."""
    rows, cols, mass = np.asarray(rows), np.asarray(cols), np.asarray(mass, float)
    if rows.shape != mass.shape or cols.shape != mass.shape:
        raise ValueError(
            "plan: expected a row, a column and a mass for each entry, got arrays of shapes "
            f"{rows.shape}, {cols.shape} and {mass.shape}"
        )
    if not np.isfinite(mass).all():
        raise ValueError("plan: expected finite masses, got NaN or inf")
    if -mass.min(initial=0) > 1e-6 * mass.max(initial=0):
        raise ValueError(f"plan: expected masses ≥ 0, got {mass.min():.3g}")
    total = float(mass.sum())
    if not 0.5 <= total <= 1.5:
        raise ValueError(
            f"plan: expected masses that sum to 1, got {total:.6g}; divide them by their sum"
        )
    kept = mass > 0
    return _checked(rows[kept], cols[kept], log_masses(mass[kept]), n, m)


def _checked(
    rows: np.ndarray, cols: np.ndarray, logs: np.ndarray | None, n: int, m: int
) -> Entries:
    for name, index, size in (("rows", rows, n), ("columns", cols, m)):
        whole = index.ndim == 1 and index.dtype.kind in "iu" and index.shape == rows.shape
        if not whole or (len(index) and not 0 <= index.min() <= index.max() < size):
            raise ValueError(
                f"plan: expected {name} from 0 to {size - 1}, one for each entry, got "
                f"{index.dtype} of shape {index.shape}"
                + (f" from {index.min()} to {index.max()}" if index.size else "")
            )
    if logs is not None and (logs.shape != rows.shape or not (logs < 1).all()):
        raise ValueError(f"plan: expected a mass for each of {len(rows)} entries, got others")
    return Entries(rows.astype(np.int64), cols.astype(np.int64), logs)
