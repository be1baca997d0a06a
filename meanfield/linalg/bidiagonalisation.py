"""The Golub–Kahan–Lanczos process for a batch of linear maps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meanfield.checks import to_host
from meanfield.linalg.basis import Basis, lengths_of
from meanfield.linalg.linear_map import LinearMap
from meanfield.linalg.vectors import finite


class Steps(NamedTuple):
    """The entries of the upper bidiagonal B, (batch, steps) each, on the host in float64.

    Attributes:
        alphas: the diagonal.
        betas: beside it; the last is the length of the remainder.
        alpha_limits: what the first may be at most where rounding hides them (there they are 0).
        beta_limits: likewise.
    """

    alphas: Tensor
    betas: Tensor
    alpha_limits: Tensor
    beta_limits: Tensor


class Bidiagonalisation:
    """The state of a batched Golub–Kahan–Lanczos process.

    A V = U B, Aᵀ U = V Bᵀ + β v eᵀ with V and U orthonormal, B upper bidiagonal. V and U stay on
    the device of A. The numbers of each step wait there, packed, until `steps` are read: nothing
    else waits for a device.

    Args:
        linear_map: A.
        start: unit vectors (batch, n·d), the first column of V.
    """

    def __init__(self, linear_map: LinearMap, start: Tensor) -> None:
        self.map, self.batch = linear_map, start.shape[0]
        self.right, self.left = Basis(self.batch, start), Basis(self.batch, start)
        self.right.append(start)
        self.products = 0  # with A so far; as many with Aᵀ
        self._waiting: list[Tensor] = []
        self._steps = Steps(*torch.zeros(4, self.batch, 0, dtype=torch.float64))

    @property
    def steps(self) -> Steps:
        """The entries of B so far.

        Raises:
            OverflowError: a product was not finite.
        """
        if self._waiting:
            numbers = torch.from_numpy(to_host(torch.stack(self._waiting, -1)))
            self._waiting.clear()
            # What is not finite in a product is not finite in its length.
            numbers = finite(numbers).unflatten(-1, (-1, 6))
            alphas, alpha_limits = lengths_of(*numbers[..., :3].unbind(-1))
            betas, beta_limits = lengths_of(*numbers[..., 3:].unbind(-1))
            new = (alphas, betas, alpha_limits, beta_limits)
            both = zip(self._steps, new, strict=True)
            self._steps = Steps(*(torch.cat([old, more.double()], -1) for old, more in both))
        return self._steps

    def advance(self) -> None:
        """One product with A and one with Aᵀ."""
        alpha = self.left.extend(image(self.map, self.right.newest()))
        beta = self.right.extend(image(self.map.T, self.left.newest()))
        self._waiting += [*alpha, *beta]
        self.products += 1

    def triples(self, part: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Left vectors, values, right vectors (rows) of B, and relative residuals."""
        alphas, betas = self.steps.alphas[part], self.steps.betas[part]
        B = torch.diag_embed(alphas) + torch.diag_embed(betas[:, :-1], offset=1)
        left, values, right = torch.linalg.svd(B)
        share = betas[:, -1:] / torch.where(values > 0, values, 1.0)
        return left, values, right, share * left[:, -1, :].abs()


def image(linear_map: LinearMap, vectors: Tensor) -> Tensor:
    """J of flat vectors (b, n·d), b the flattened batch; (b, m·e)."""
    shaped = vectors.reshape(*linear_map.batch_shape, *linear_map.in_shape)
    return linear_map.matvec(shaped).reshape(len(vectors), linear_map.rows)
