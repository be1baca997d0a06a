"""Attention weights P: from products ⟨qᵢ, kⱼ⟩, masses and positions, a block of rows at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from meanfield.attention.kernels import Features, Kernel
from meanfield.attention.kernels.kernel import At
from meanfield.attention.parameters import AttentionParameters
from meanfield.attention.rows import RowWise, softmax
from meanfield.checks import at_once, called, describe, is_host, is_recorded, is_traced
from meanfield.errors import NoDerivativeError
from meanfield.habits import NoNumber
from meanfield.linalg.vectors import beside, pushed_forward
from meanfield.measures import ParticleMeasure

# Entries of one block of P, so that it and what is computed from it stay in the cache.
_BLOCK_ENTRIES = 2**18
# With fewer rows than this a matrix product is slow, and a larger block is faster.
_GOOD_ROWS = 64
# Entries that such a larger block may have.
_LARGE_BLOCK_ENTRIES = 2**22

Bias = Callable[[Tensor, Tensor], Tensor | None]


class Block(NamedTuple):
    """A block of rows and the columns that any of them may see."""

    rows: slice
    columns: slice

    @property
    def n_rows(self) -> int:
        """How many rows."""
        return self.rows.stop - self.rows.start

    @property
    def n_columns(self) -> int:
        """How many columns."""
        return self.columns.stop - self.columns.start


class Places(NamedTuple):
    """Positions of rows and columns, with an axis of length 1 in place of the heads.

    Attributes:
        rows: positions, ``(*batch, 1, m)``, or None where nothing depends on them.
        columns: positions, ``(*batch, 1, n)``, or None.
    """

    rows: Tensor | None
    columns: Tensor | None

    def block(self, block: Block) -> Places:
        """Of a block."""
        rows, columns = self
        return Places(
            None if rows is None else rows[..., block.rows],
            None if columns is None else columns[..., block.columns],
        )


@dataclass(frozen=True, eq=False)
class Scoring:
    """From products ⟨qᵢ, kⱼ⟩ to attention weights: Pᵢⱼ ∝ aⱼ ψ(activation⟨qᵢ, kⱼ⟩ + bias).

    Attributes:
        normalization: ψ, and whether rows are divided by their sum.
        activation: applied to the products, entry by entry; None is the identity.
        position_bias: added to the scores, a function of the positions of rows ``(*batch, m)`` and
            of columns ``(*batch, n)``; −∞ hides a column. None is no bias.
        causal: whether a row sees only the columns whose position is at most its own.
        reach: a row sees only the columns less than this far away in position.
    """

    normalization: RowWise = softmax
    activation: Callable[[Tensor], Tensor] | None = None
    position_bias: Bias | None = None
    causal: bool = False
    reach: float = math.inf

    @property
    def has_gain(self) -> bool:
        """Whether the derivative of log aⱼψ in the products may differ from 1."""
        return self.activation is not None or self.normalization.log_psi is not None

    @property
    def sees_all(self) -> bool:
        """Whether a row sees all columns."""
        return not self.causal and self.reach == math.inf

    @property
    def is_tilted(self) -> bool:
        """Whether P is the softmax of the products plus numbers that do not depend on them."""
        return self.normalization.is_softmax and not self.has_gain

    @property
    def is_plain(self) -> bool:
        """Whether these numbers are the log-weights alone, and −∞ behind a causal mask."""
        return self.is_tilted and self.position_bias is None and self.reach == math.inf

    def logits(self, products: Tensor, log_columns: Tensor, places: Places) -> Tensor:
        """log aⱼψ(sᵢⱼ), −∞ where i does not see j; overwrites the products.

        Args:
            products: ⟨qᵢ, kⱼ⟩, ``(*batch, H, m, n)``.
            log_columns: log aⱼ, ``(*batch, H or 1, 1, n)``.
            places: of these rows and columns.
        """
        bias, hidden = self._bias_and_hidden(places)
        if self.has_gain:
            psi = self._log_psi(products, bias)
            return _masked(psi + beside(log_columns, psi), hidden)
        logits = products.add_(beside(log_columns, products))
        return _masked(logits if bias is None else logits.add_(bias), hidden)

    def logits_and_gain(
        self, products: Tensor, log_columns: Tensor, places: Places
    ) -> tuple[Tensor, Tensor | None]:
        """`logits`, and their derivatives in the products; None stands for 1."""
        if not self.has_gain:
            return self.logits(products, log_columns, places), None
        bias, hidden = self._bias_and_hidden(places)
        # Where log ψ is −∞, as of relu, the forward slope is NaN, which is refused below, and
        # the backward one of `slopes_of` is 0.
        ones = torch.ones_like(products)
        logits, gain = pushed_forward(lambda x: self._log_psi(x, bias), products, ones)
        if self.normalization.log_psi is not None and not is_recorded(gain):
            _refuse_slopes(gain, self.normalization.name)
        return _masked(logits + log_columns, hidden), gain

    def blocks(
        self,
        entries_per_row: int,
        n_rows: int,
        n_columns: int,
        places: Places,
        device: torch.device,
        size: int | None = None,
    ) -> list[Block]:
        """Blocks of rows whose entries of P are at most some number, with what they may see.

        Args:
            entries_per_row: of P, over batch and heads.
            n_rows: m; even for 0 rows there is one block.
            n_columns: n.
            places: of the rows in any order, but for sorted rows more columns are skipped; of the
                columns in increasing order, unless rows see all of them.
            device: where P is.
            size: rows in a block; from the memory of a block if None.
        """
        if size is None:
            large = min(_GOOD_ROWS, _LARGE_BLOCK_ENTRIES // max(entries_per_row, 1))
            size = max(1, large, at_once(_BLOCK_ENTRIES, device) // max(entries_per_row, 1))
            # Rows that are further apart than they see have few columns in common.
            size = min(size, max(_GOOD_ROWS, math.ceil(min(self.reach, 1.0) * n_columns)))
        starts = range(0, max(n_rows, 1), size)
        rows = [slice(start, min(start + size, n_rows)) for start in starts]
        seen = [(0, n_columns)] * len(rows)
        if len(rows) > 1 and not self.sees_all:
            seen = self._seen(rows, places, n_columns)
        return [Block(i, slice(*j)) for i, j in zip(rows, seen, strict=True)]

    def _seen(self, rows: list[slice], places: Places, n: int) -> list[tuple[int, int]]:
        """The first column that some row of each block sees, and the one after the last."""
        at, columns = places.rows, places.columns
        if at is None or columns is None or is_recorded(columns) or is_recorded(at):
            return [(0, n)] * len(rows)
        ends = [torch.stack(at[..., i].aminmax(dim=-1), -1) for i in rows]
        first, last = torch.stack(ends, -2).unbind(-1)
        # Include columns exactly at the reach, whatever the rounding of positions.
        away = self.reach + 4 * torch.finfo(columns.dtype).eps
        last = last if self.causal else last + away
        shape = torch.broadcast_tensors(first[..., 0], columns[..., 0])[0].shape
        columns, first, last = (
            t.expand(*shape, t.shape[-1]).contiguous() for t in (columns, first - away, last)
        )
        begins = torch.searchsorted(columns, first)
        stops = torch.searchsorted(columns, last, right=True)
        # At least one column: no empty tensors.
        begin = begins.reshape(-1, len(rows)).amin(0).clamp_max(n - 1)
        stop = stops.reshape(-1, len(rows)).amax(0).maximum(begin + 1)
        return list(zip(begin.tolist(), stop.tolist(), strict=True))

    def log_p(self, products: Tensor, log_columns: Tensor, places: Places) -> Tensor:
        """log P; −∞ in rows that see no mass."""
        logits = self.logits(products, log_columns, places)
        return self.normalization.log_p(logits, self._blind(logits, log_columns, places))

    def p(self, products: Tensor, log_columns: Tensor, places: Places) -> Tensor:
        """P; 0 in rows that see no mass."""
        logits = self.logits(products, log_columns, places)
        return self.normalization.p(logits, self._blind(logits, log_columns, places))

    def hidden(self, places: Places) -> Tensor | None:
        """Which columns a row does not see, ``(*batch, H or 1, m, n)``; None: it sees all."""
        return self._bias_and_hidden(places)[1]

    def _log_psi(self, products: Tensor, bias: Tensor | None) -> Tensor:
        scores = products if self.activation is None else self.activation(products)
        scores = scores if bias is None else scores + bias
        log_psi = self.normalization.log_psi
        if log_psi is None:
            return scores
        found = called(log_psi, (scores,), "log_psi: expected a function of scores")
        own, wanted = ((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in (found, scores))
        if own != wanted:
            kind = f" and {found.dtype}" if isinstance(found, Tensor) else ""
            raise TypeError(
                f"log_psi of {self.normalization.name}: expected a number for each score, of "
                f"shape {tuple(scores.shape)} and {scores.dtype}, got {describe(found)}{kind}"
            )
        checked: Tensor = found
        return checked

    def _bias_and_hidden(self, places: Places) -> tuple[Tensor | None, Tensor | None]:
        """A finite bias, and which columns a row does not see."""
        rows, columns = places.rows, places.columns
        if rows is None or columns is None:
            return None, None
        hidden = None
        if self.causal or self.reach < math.inf:
            ahead = columns[..., None, :] - rows[..., :, None]
            hidden = ahead > 0 if self.causal else ahead.abs() >= self.reach
            if self.causal and self.reach < math.inf:
                hidden = hidden | (ahead <= -self.reach)
        if self.position_bias is None:
            return None, hidden
        bias = self.position_bias(rows.squeeze(-2), columns.squeeze(-2))
        if bias is None:
            return None, hidden
        # Scores stay finite: the derivative of ψ at −∞ may be NaN.
        outside = bias == -math.inf
        hidden = outside if hidden is None else hidden | outside
        return bias.masked_fill(outside, 0.0), hidden

    def _blind(self, logits: Tensor, log_columns: Tensor, places: Places) -> Tensor | None:
        """Rows that see no mass, (..., m, 1), or None where there are none."""
        rows = self.normalization
        hides = places.rows is not None and not (self.sees_all and self.position_bias is None)
        if not rows.divides or not (hides or rows.log_psi is not None):
            return None
        blind = logits.detach().amax(-1, keepdim=True) == -math.inf
        if is_recorded(blind):
            return blind
        # On a device to look takes longer than to mask.
        if is_host(blind.device) and not bool(blind.any()):
            return None
        if rows.log_psi is not None:
            self._refuse_no_mass(blind, log_columns > -math.inf, places)
        return blind

    def _refuse_no_mass(self, blind: Tensor, alive: Tensor, places: Places) -> None:
        hidden = self.hidden(places)
        seen = alive if hidden is None else alive & ~hidden
        if self.normalization.sink is None and bool((blind & seen.any(-1, keepdim=True)).any()):
            raise ValueError(
                f"{self.normalization.name}: expected ψ > 0, got a row in which ψ is 0 for every "
                "atom that it sees; log ψ is −∞ there, as of relu, or where a form loses all "
                "digits, as log(elu + 1) below −36"
            )


def _refuse_slopes(gain: Tensor, name: str) -> None:
    if not bool(torch.isfinite(gain).all()):
        raise NoDerivativeError(
            f"{name}: expected ψ > 0, with a finite slope of log ψ at every score, got a slope of "
            f"{float(gain[~torch.isfinite(gain)][0])}; log ψ is −∞ where ψ = 0, as of relu"
        )


def _masked(logits: Tensor, hidden: Tensor | None) -> Tensor:
    if hidden is None:
        return logits
    if is_traced(hidden):  # `vmap` over positions alone gives it an axis that logits lack
        return logits.masked_fill(hidden, -math.inf)
    return logits.masked_fill_(hidden, -math.inf)


@dataclass(frozen=True, eq=False)
class Weights(NoNumber):
    """The attention weights of a layer between the atoms of a measure.

    Atoms are sorted by position when rows do not see all columns.

    Attributes:
        parameters: of the layer.
        kernel: of the layer.
        scoring: from products to attention weights, as this layer does it.
        points: less the origin, ``(*batch, n, d)``.
        origin: ``(*batch, 1, d)``, or None where points are measured from 0.
        features: of the atoms; score biases are one more coordinate of queries and keys.
        log_weights: ``(*batch, n)``.
        positions: ``(*batch, n)``, or None where nothing depends on them.
        order: the permutation ``(*batch, n)`` that sorted the atoms; None: they were sorted.
        potentials: added to the log-weights of the columns, per head ``(*batch, H, n)``, or None.
    """

    _instead = (
        "log P is .log_p(block) for each of .blocks(); of a Sinkhorn layer P is F.plan(mu).weights"
    )
    parameters: AttentionParameters
    kernel: Kernel
    scoring: Scoring
    points: Tensor
    origin: Tensor | None
    features: Features
    log_weights: Tensor
    positions: Tensor | None
    order: Tensor | None
    potentials: Tensor | None = None

    @classmethod
    def of(
        cls,
        parameters: AttentionParameters,
        kernel: Kernel,
        normalization: RowWise,
        mu: ParticleMeasure,
        *,
        causal: bool,
    ) -> Weights:
        """The attention weights between the atoms of μ."""
        points, logs, positions, order = mu.points, mu.log_weights, mu.positions, None
        if (causal or kernel.reach < math.inf) and not _is_sorted(positions):
            assert positions is not None
            positions, order = positions.sort(dim=-1, stable=True)
            points = points.take_along_dim(order[..., None], -2)
            logs = logs.gather(-1, order)
        elif not (causal or kernel.needs_positions):
            positions = None
        origin = None
        if kernel.is_shift_invariant(parameters):
            # Measured from the mean of μ, points far from the origin keep the digits of their
            # scores. Atoms without mass have no part in it: they may be anywhere.
            mass = logs.detach().exp()[..., None]
            origin = (mass * points.detach()).sum(-2, keepdim=True)
            points = points - origin
        features = kernel.features(parameters, points, positions)
        _check(features, kernel, parameters, points)
        if origin is not None:
            v_centre = parameters.project(origin)[2]
            if features.v_centre is not None:
                v_centre = v_centre + features.v_centre
            features = features._replace(v_centre=v_centre)
        # A mean of values commutes with a shift of them, and a shift of all keys shifts each row
        # of scores by a number. So centres may stay out under the softmax: another ψ or a sink
        # sees shifts of its rows, and so does what a kernel applies to the scores.
        if not normalization.is_softmax:
            features = features.whole()
        elif kernel.activation is not None:
            features = features.whole_keys()
        features, bias = features.folded(1.0), None
        if positions is not None:
            first = positions[..., :1]
            if kernel.position_bias(parameters, first, first) is not None:
                bias = partial(kernel.position_bias, parameters)
        scoring = Scoring(normalization, kernel.activation, bias, causal, kernel.reach)
        return cls(parameters, kernel, scoring, points, origin, features, logs, positions, order)

    @property
    def n(self) -> int:
        """Number of atoms."""
        return self.points.shape[-2]

    @property
    def at(self) -> At:
        """Where the kernel is looked at."""
        return At(self.parameters, self.points, self.positions)

    @property
    def head_logs(self) -> Tensor:
        """Log-weights and potentials of the columns, ``(*batch, H or 1, n)``."""
        logs = self.log_weights[..., None, :]
        return logs if self.potentials is None else logs + self.potentials

    @cached_property
    def alive(self) -> Tensor:
        """Which atoms have mass, ``(*batch, n)``."""
        return self.log_weights > -math.inf

    @property
    def rows(self) -> RowWise:
        """How rows are normalised."""
        return self.scoring.normalization

    def places(self, rows: Tensor | None) -> Places:
        """Of rows at these positions ``(*batch, m)``, or None, and of the atoms."""
        if self.positions is None or rows is None:
            return Places(None, None)
        columns = self.positions[..., None, :]
        return Places(columns if rows is self.positions else rows[..., None, :], columns)

    # --- P of the atoms ---

    def blocks(self, size: int | None = None) -> list[Block]:
        """Blocks of rows and the columns that they may see."""
        entries = math.prod(self.features.k.shape[:-2]) * self.n
        return self.scoring.blocks(
            entries, self.n, self.n, self._own_places, self.points.device, size
        )

    @cached_property
    def _own_places(self) -> Places:
        return self.places(self.positions)

    def products(self, block: Block) -> Tensor:
        """⟨qᵢ, kⱼ⟩ of a block, ``(*batch, H, rows, columns)``."""
        q, k = self.features.q[..., block.rows, :], self.features.k[..., block.columns, :]
        return q @ k.mT

    def logits_and_gain(self, block: Block, products: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `Scoring.logits_and_gain`; overwrites the products."""
        columns = self.head_logs[..., None, block.columns]
        places = self._own_places.block(block)
        return self.scoring.logits_and_gain(products, columns, places)

    def log_p(self, block: Block) -> Tensor:
        """log Pᵢⱼ, ``(*batch, H, rows, columns)``; −∞ in rows that are absent or see no mass."""
        columns = self.head_logs[..., None, block.columns]
        log_p = self.scoring.log_p(self.products(block), columns, self._own_places.block(block))
        return torch.where(self.alive[..., None, block.rows, None], log_p, -math.inf)

    def log_p_of_sink(self, block: Block) -> Tensor:
        """log of the attention to the sink, ``(*batch, H, rows, 1)``; −∞ in absent rows."""
        logits = self.logits_and_gain(block, self.products(block))[0]
        log_p = self.rows.log_p_and_sink(logits)[..., -1:]
        return torch.where(self.alive[..., None, block.rows, None], log_p, -math.inf)

    def score_sizes(self) -> Iterator[Tensor]:
        """|sᵢⱼ| of every block, ``(*batch, H, rows, columns)``; 0 where i does not see j."""
        columns = torch.where(self.alive, 0.0, -math.inf)[..., None, None, :]
        for block in self.blocks():
            places, seen = self._own_places.block(block), columns[..., block.columns]
            scores = self.scoring.logits(self.products(block), seen, places)
            kept = self.alive[..., None, block.rows, None] & ~(scores == -math.inf)
            yield torch.where(kept, scores.abs(), 0.0)

    # --- queries at other points ---

    def queries(self, points: Tensor, positions: Tensor | None) -> Tensor:
        """Queries of other points at this measure, ``(*batch, H, m, k)``."""
        if self.origin is not None:
            points = points - self.origin
        features = self.kernel.features(self.parameters, points, positions)
        return features.folded(1.0).q

    def seeing(self, positions: Tensor) -> Tensor:
        """Which rows at positions ``(*batch, m)`` see any mass, ``(*batch, H or 1, m)``."""
        places, m = self.places(positions), positions.shape[-1]
        parts = []
        entries = self.parameters.n_heads * self.log_weights.numel()
        for block in self.scoring.blocks(entries, m, self.n, places, self.points.device):
            hidden = self.scoring.hidden(places.block(block))
            seen = self.alive[..., None, None, block.columns]
            seen = seen if hidden is None else seen & ~hidden
            parts.append(seen.any(-1).expand(*seen.shape[:-2], block.n_rows))
        return torch.cat(parts, -1)

    # --- the tangent of the features ---

    def push(self, displacement: Tensor) -> Features:
        """q̇, k̇, v̇ of displacements ``(*batch, n, d)`` in the order here."""
        return self.kernel.push(self.at, displacement).folded(0.0)

    def pull(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The transpose of `push`."""
        cotangents = Features(q, k, v)
        if self.features.b is not None:
            cotangents = Features(q[..., :-1], k[..., :-1], v, k[..., -1])
        return self.kernel.pull(self.at, cotangents)

    # --- the order of the measure and that of the positions ---

    def sort(self, per_particle: Tensor) -> Tensor:
        """Rows ``(*batch, n, d)`` put in the order of the atoms here."""
        if self.order is None:
            return per_particle
        return per_particle.take_along_dim(self.order[..., None], -2)

    def unsort(self, per_particle: Tensor) -> Tensor:
        """Rows ``(*batch, n, d)`` back in the order of the measure."""
        if self.order is None:
            return per_particle
        index = self.order[..., None].expand(per_particle.shape)
        return torch.empty_like(per_particle).scatter(-2, index, per_particle)

    def part(self, part: slice) -> Weights:
        """A slice of the flattened batch, in the order of the measure."""
        place = None if self.order is None else self.order.reshape(-1, self.n)[part].argsort(-1)

        def pick(tensor: Tensor | None, event: int, atoms: int | None) -> Tensor | None:
            """With so many axes behind the batch, one of them of the atoms."""
            if tensor is None:
                return None
            picked = tensor.reshape(-1, *tensor.shape[-event:])[part]
            if place is None or atoms is None:
                return picked
            shape = [1] * picked.ndim
            shape[0], shape[atoms] = place.shape
            return picked.take_along_dim(place.reshape(shape), atoms)

        f = self.features
        q, k, v = (pick(t, 3, -2) for t in (f.q, f.k, f.v))
        points, logs = pick(self.points, 2, -2), pick(self.log_weights, 1, -1)
        assert q is not None and k is not None and v is not None
        assert points is not None and logs is not None
        return replace(
            self,
            points=points,
            origin=pick(self.origin, 2, None),
            features=Features(q, k, v, pick(f.b, 2, -1), None, pick(f.v_centre, 3, None)),
            log_weights=logs,
            positions=pick(self.positions, 1, -1),
            order=None,
            potentials=pick(self.potentials, 2, -1),
        )


def flat(per_head: Tensor) -> Tensor:
    """``(*batch, H, n, ·)`` with one axis for batch and heads."""
    return per_head.flatten(0, -3)


def _is_sorted(positions: Tensor | None) -> bool:
    if positions is None or is_recorded(positions):
        return False
    return bool((positions[..., 1:] >= positions[..., :-1]).all())


def _check(features: Features, kernel: Kernel, parameters: AttentionParameters, x: Tensor) -> None:
    """Check shapes and dtypes of the features of points x, which may come from a user's kernel."""
    name, heads = f"{type(kernel).__name__}.features", parameters.n_heads
    if not isinstance(features, Features):
        raise TypeError(f"{name}: expected kernels.Features(q, k, v), got {describe(features)}")
    lead = (*x.shape[:-2], heads, x.shape[-2])
    widths = {"k": features.q.shape[-1:], "v": parameters.value.shape[-2:-1], "b": ()}
    for letter in "qkv" if features.b is None else "qkvb":
        found: Tensor = getattr(features, letter)
        if tuple(found.shape) != (*lead, *widths.get(letter, found.shape[-1:])):
            wide = "" if letter == "b" else ", width"
            per_head = "; numbers per head need a method head(index)" * (heads == 1)
            raise ValueError(
                f"{name}: expected {letter} of shape (*batch, heads, {x.shape[-2]}{wide}) with "
                f"heads = {heads}, one width of q and k and that of the values for v, got "
                f"{tuple(found.shape)}{per_head}"
            )
        if found.dtype != x.dtype:
            raise TypeError(f"{name}: expected {letter} of {x.dtype}, got {found.dtype}")
