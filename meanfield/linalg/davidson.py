"""Corrections of a Krylov space by a coarse model of the map."""

from __future__ import annotations

import torch
from torch import Tensor

from meanfield.linalg.bidiagonalisation import Bidiagonalisation, Cycle
from meanfield.linalg.coarse import CoarseModel
from meanfield.linalg.maps import LinearMap
from meanfield.linalg.vectors import lengths, normalised

__all__ = ["Davidson"]


class Davidson:
    """The generalised Davidson method for the top singular triple, begun with a Krylov space.

    Morgan and Scott (SIAM J. Sci. Stat. Comput. 7, 1986, 817–825), here by singular values:
    A V = U B, Aᵀ U = V Bᵀ + F with V and U orthonormal, VᵀF = 0, B upper triangular. As in
    Golub–Kahan–Lanczos, where F has one column, a step makes one product with A and one with Aᵀ,
    and residuals need none of their own. V grows by the correction of the top residual F p₁
    (`CoarseModel.corrected`) in place of that residual. Where singular values are crowded at the
    top and their vectors lie near the coarse space, a few steps do for many of Lanczos'.

    Args:
        process: the Krylov space, which this takes over.
        model: of the map.
    """

    # Residuals of different triples are not parallel, as those of a Krylov space are.
    parallel = False

    def __init__(self, process: Bidiagonalisation, model: CoarseModel) -> None:
        self.map: LinearMap = process.map
        self.batch, self.products = process.batch, process.products
        self.right, self.left = process.right, process.left
        self.cycles: list[Cycle] = process.cycles
        self._model, self._matrix = model, process.cycles[-1].matrix()
        # The columns of F that are not 0, those of the newest vectors in U.
        self._rests = [process.remainders[:, None] * process.right.pop()]
        self._found = self._decomposed()

    @property
    def size(self) -> int:
        """Columns of B."""
        return self.left.count

    def advance(self) -> None:
        """One product with A and one with Aᵀ."""
        left, values, right, _ = self._found
        dtype = self.map.dtype
        residual = self._rest(left[:, :, 0])
        v = self.right.combine(right[:, 0].to(dtype))
        self.right.extend(normalised(self._model.corrected(residual, v, values[:, 0]))[0])
        new = self.right.newest()
        column = torch.stack([(x * new).sum(-1) for x in self._rests], -1)
        for x, share in zip(self._rests, column.T[..., None], strict=True):
            x -= share * new
        alpha, _ = self.left.extend(self.map.image(new))
        self._matrix = torch.nn.functional.pad(self._matrix, (0, 1, 0, 1))
        self._matrix[:, -1 - len(self._rests) : -1, -1] = column.double()
        self._matrix[:, -1, -1] = alpha.double()
        self._rests.append(self.right.remainder(self.map.pull_back(self.left.newest()))[0])
        self._found = self._decomposed()
        self.products += 1

    def triples(self, part: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Left vectors, values, right vectors (rows) of B, and relative residuals; float64.

        The residuals of the third triple on are upper bounds only.
        """
        left, values, right, residuals = self._found
        return left[part], values[part], right[part], residuals[part]

    def _decomposed(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        left, values, right = torch.linalg.svd(self._matrix)
        sizes = torch.stack([lengths(x) for x in self._rests], 1).double()
        defects = (left[:, -len(self._rests) :].abs() * sizes[..., None]).sum(1)
        for i in range(min(2, self.size)):
            defects[:, i] = lengths(self._rest(left[:, :, i])).double()
        return left, values, right, defects / torch.where(values > 0, values, 1.0)

    def _rest(self, shares: Tensor) -> Tensor:
        """F p, the residual of the triple with the left vector U p; (b, n·d)."""
        out = torch.zeros_like(self._rests[0])
        newest = shares[:, -len(self._rests) :].to(out.dtype)
        for x, share in zip(self._rests, newest.T[..., None], strict=True):
            out += share * x
        return out
