"""The Golub–Kahan–Lanczos process for a batch of linear maps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meanfield.checks import to_host
from meanfield.linalg.basis import Basis, lengths_of
from meanfield.linalg.linear_map import LinearMap
from meanfield.linalg.vectors import finite


@dataclass(frozen=True, eq=False)
class Cycle:
    """The entries of B between two restarts: a diagonal, what is beside it, and spikes.

    With p triples kept from before, the first p columns of B are their values, column p + 1 has
    their spikes above its diagonal entry, and from there on B is upper bidiagonal.

    All of it lies on the host, in float64.

    Attributes:
        kept: σᵢ of those triples, (batch, p); p is 0 in the first cycle.
        spikes: ρᵢ with Aᵀuᵢ = σᵢvᵢ + ρᵢv_{p+1}, (batch, p).
        table: (4, batch, steps): α, the diagonal from column p + 1 on; β beside it, of which the
            last is the length of the remainder; and what they may be at most where rounding hides
            them (there they are 0).
    """

    kept: Tensor
    spikes: Tensor
    table: Tensor

    def matrix(self, part: slice = slice(None)) -> Tensor:
        """B (batch, k, k), without the remainder."""
        p = self.kept.shape[-1]
        alphas, betas = self.table[:2, part]
        matrix = torch.diag_embed(torch.cat([self.kept[part], alphas], -1))
        matrix[:, :p, p] = self.spikes[part]
        matrix[:, p:, p:] += torch.diag_embed(betas[:, :-1], offset=1)
        return matrix


class Bidiagonalisation:
    """The state of a batched Golub–Kahan–Lanczos process.

    A V = U B, Aᵀ U = V Bᵀ + β v eᵀ with V and U orthonormal, B upper bidiagonal but for what
    restarts leave, see `Cycle`. V and U stay on the device of A. The numbers of each step wait
    there, packed, until somebody looks: nothing else waits for a device.

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
        nothing = torch.zeros(self.batch, 0, dtype=torch.float64)
        self._cycles = [Cycle(nothing, nothing, torch.zeros(4, self.batch, 0))]

    @property
    def size(self) -> int:
        """Columns of B."""
        return self.left.count

    @property
    def cycles(self) -> list[Cycle]:
        """The entries of B so far.

        Raises:
            OverflowError: a product was not finite.
        """
        if self._waiting:
            told = torch.from_numpy(to_host(torch.stack(self._waiting, -1)))
            self._waiting.clear()
            last = self._cycles[-1]
            # What is not finite in a product is not finite in its length.
            told = finite(told).unflatten(-1, (-1, 6))
            alphas, alpha_limits = lengths_of(*told[..., :3].unbind(-1))
            betas, beta_limits = lengths_of(*told[..., 3:].unbind(-1))
            steps = torch.stack([alphas, betas, alpha_limits, beta_limits])
            table = torch.cat([last.table.double(), steps.double()], -1)
            self._cycles[-1] = replace(last, table=table)
        return self._cycles

    def advance(self) -> None:
        """One product with A and one with Aᵀ."""
        alpha = self.left.extend(image(self.map, self.right.newest()))
        beta = self.right.extend(image(self.map.T, self.left.newest()))
        self._waiting += [*alpha, *beta]
        self.products += 1

    def restart(self, keep: int) -> None:
        """Go on from the first triples and the remainder alone, in the memory there is.

        The next thing must be to `advance`.

        The thick restart of Baglama and Reichel (Augmented implicitly restarted Lanczos
        bidiagonalization methods, SIAM J. Sci. Comput. 27, 2005, 19–42).
        """
        left, values, right, _ = self.triples()
        rest = self.right.newest().clone()
        self.right.rotate(right[:, :keep].to(rest))
        self.right.append(rest)
        self.left.rotate(left[..., :keep].mT.to(rest))
        spikes = self.cycles[-1].table[1, :, -1:] * left[:, -1, :keep]
        self._cycles.append(Cycle(values[:, :keep].clone(), spikes, torch.zeros(4, self.batch, 0)))

    def triples(self, part: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Left vectors, values, right vectors (rows) of B, and relative residuals."""
        cycle = self.cycles[-1]
        left, values, right = torch.linalg.svd(cycle.matrix(part))
        share = cycle.table[1, part, -1:] / torch.where(values > 0, values, 1.0)
        return left, values, right, share * left[:, -1, :].abs()


def image(linear_map: LinearMap, vectors: Tensor) -> Tensor:
    """J of flat vectors (b, n·d), b the flattened batch; (b, m·e)."""
    shaped = vectors.reshape(*linear_map.batch_shape, *linear_map.in_shape)
    return linear_map.matvec(shaped).reshape(len(vectors), linear_map.rows)
