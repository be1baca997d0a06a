"""What column generation has when it stops, in a file from which it goes on."""

from __future__ import annotations

import os
import pathlib
import warnings

import numpy as np

from meanfield.checks import as_path
from meanfield.results.arrays import digest_of, read_arrays, write_arrays
from meanfield.transport.problem import Problem


class Checkpoint:
    """Arcs and potentials of the finest level, in an ``.npz`` file that is replaced atomically.

    Args:
        path: of the file; its folder is there.
        problem: the file of another one is refused.

    Raises:
        ValueError: another suffix, or no such folder.
    """

    def __init__(self, path: str | os.PathLike[str], problem: Problem) -> None:
        self._path, self._problem = checkpoint_path(path), problem
        names = ("x", "y", "log_a", "log_b", "exponent", "order")
        arrays = {name: np.asarray(getattr(problem, name)) for name in names}
        self._of_problem = digest_of(arrays)

    def load(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Arcs i m + j and g, or None before the first round.

        Raises:
            ValueError: the file is damaged, foreign, or of another problem; it is named.
        """
        if not self._path.exists():
            return None
        try:
            stored = read_arrays(self._path)
        except ValueError as error:
            raise ValueError(f"checkpoint: {error}") from None
        if str(stored.get("problem")) != self._of_problem:
            self._refuse("the state of this problem", "that of another one")
        arcs, g = (stored.get(name, np.zeros(0)) for name in ("arcs", "g"))
        if arcs.dtype != np.int64 or arcs.ndim != 1 or not len(arcs):
            self._refuse("arcs", f"{arcs.dtype} of shape {arcs.shape}")
        if not 0 <= arcs.min() <= arcs.max() < self._problem.pairs:
            self._refuse(f"arcs from 0 to {self._problem.pairs - 1}", "others")
        if g.shape != (self._problem.m,) or g.dtype != np.float64 or not np.isfinite(g).all():
            self._refuse(f"{self._problem.m} finite potentials", f"{g.dtype} of shape {g.shape}")
        return arcs, g

    def save(self, arcs: np.ndarray, g: np.ndarray) -> None:
        """After a round. Where it cannot be written, a warning says so, and the solve goes on."""
        try:
            write_arrays(self._path, {"problem": np.array(self._of_problem), "arcs": arcs, "g": g})
        except OSError as error:
            warnings.warn(
                f"checkpoint: {self._path} cannot be written ({error}); the solve goes on "
                "without it",
                stacklevel=2,
            )

    def _refuse(self, expected: str, got: str) -> None:
        raise ValueError(
            f"checkpoint: expected {expected}, got {got} in {self._path}; give another path, or "
            "remove the file"
        )


def checkpoint_path(value: str | os.PathLike[str]) -> pathlib.Path:
    """The path of a checkpoint.

    Raises:
        ValueError: another suffix, or no such folder.
    """
    path = as_path(value, "checkpoint")
    if path.suffix != ".npz" or not path.parent.is_dir():
        raise ValueError(
            f"checkpoint: expected the name of an .npz file in a folder that exists, got {path}"
        )
    return path
