"""The seam for methods that find the norm of a linear map."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from meanfield.checks import describe
from meanfield.linalg.evidence import Candidate
from meanfield.linalg.linear_map import LinearMap


class NormSolver:
    """Base of norm solvers: values with their settings, given as ``solver=``.

    A subclass gives `candidate`. Whether its answer has converged is not its own to say:
    `meanfield.linalg.certify` makes two products with J and judges the vector. The upper end is
    the solver's word where it is none of `weights`: it is believed unless the value is above it.

    Attributes:
        assembles: whether it needs matrices: `operator_norm` then assembles small maps once, and
            gradients go through the value.

    Example:
        >>> import torch
        >>> class Power(NormSolver):
        ...     def candidate(self, linear_map, rtol, upper_rtol):
        ...         shape = (*linear_map.batch_shape, *linear_map.in_shape)
        ...         v = torch.ones(shape, dtype=linear_map.dtype)
        ...         for _ in range(100):
        ...             v = linear_map.rmatvec(linear_map.matvec(v))
        ...             v = v / torch.linalg.vector_norm(v, dim=(-2, -1), keepdim=True)
        ...         unknown = torch.tensor(torch.inf)  # it bounds nothing from above
        ...         return Candidate(v, upper=unknown, miss=1.0)
        >>> from meanfield.linalg import operator_norm
        >>> J = LinearMap.diagonal(torch.linspace(1, 3, 10, dtype=torch.float64)[:, None])
        >>> found = operator_norm(J, solver=Power(), strict=False)
        >>> float(found), bool(found.converged)  # without an upper end it may be the second
        (3.0, False)
    """

    assembles: ClassVar[bool] = False

    def candidate(self, linear_map: LinearMap, rtol: float, upper_rtol: float) -> Candidate:
        """A unit vector for each map of the batch, and what bounds the rest.

        Args:
            linear_map: J.
            rtol: how accurate the vectors should be.
            upper_rtol: how near to ‖J‖ the upper ends should be, relatively; `math.inf` if
                nobody asks for them.
        """
        raise NotImplementedError(f"{type(self).__name__}: expected a method `candidate`")

    def largest(
        self, linear_map: LinearMap, rtol: float, upper_rtol: float
    ) -> tuple[Candidate, Tensor | None]:
        """Of blocks along the last batch axis each, and None; or of one alone, and its index."""
        return self.candidate(linear_map, rtol, upper_rtol), None


def as_solver(value: object, default: NormSolver) -> NormSolver:
    """The solver given, or the default for None.

    Raises:
        TypeError: it is none.
    """
    if value is None:
        return default
    if not isinstance(value, NormSolver):
        raise TypeError(
            f"solver: expected None, or a NormSolver such as Dense() or Lanczos(max_steps=500), "
            f"got {describe(value)}"
        )
    return value
