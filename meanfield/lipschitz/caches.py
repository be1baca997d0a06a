"""What a compressed or quantised cache of keys and values changes: certified round queries."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from meanfield.checks import (
    as_float_tensor,
    check_finite,
    check_same_kind,
    describe,
    number,
    without_autocast,
)
from meanfield.habits import with_hints
from meanfield.linalg.vectors import lengths, power_of_two
from meanfield.lipschitz.remainders import Side, bounded, bounded_by_steps
from meanfield.measures import log_sums
from meanfield.results.answers import Answer, labelled

# Units of rounding per token, and per coordinate of a key times the largest score.
_ROUNDINGS = 4.0
# Entries of the gradients of the scores that are held at once (float64: 128 MiB).
_ENTRIES = 2**24


class CacheError(Answer, noun="cache_error", title="Error of a smaller cache"):
    """What attention to another cache changes; ``(heads, m)``, or ``(m,)`` for queries ``(m, k)``.

    Attributes:
        value: |o(x) − ô(x)| is at most this for every x within ε of the query.
        gap: |o(q) − ô(q)| at the query itself: no bound can be smaller; NaN where the original
            cache is not there.
        slope: ‖Do(q) − Dô(q)‖ there: what the bound grows by for small ε; likewise.
        epsilon: ε.
    """

    value: Tensor = labelled("certified largest change of the output in the ball")
    gap: Tensor = labelled("change of the output at the query", beside=True)
    slope: Tensor = labelled("norm of the change of the derivative at the query", beside=True)
    epsilon: float = labelled("radius of the balls", attribute=True)


@with_hints
@without_autocast
@torch.no_grad()
def cache_error(
    queries: object,
    cache: object,
    smaller: object,
    *,
    log_weights: object = None,
    sink: object = None,
    scale: float | None = None,
    epsilon: float = 0.0,
    within: object = None,
) -> CacheError:
    """The certified largest change of attention's output where another cache stands for one.

    A head answers a query x by o(x) = Σⱼ softmaxⱼ(scale ⟨x, kⱼ⟩) vⱼ. For every head and query q
    this bounds |o(x) − ô(x)| over all x with |x − q| ≤ ε, of the cache (K, V) and of another one
    (K̂, V̂): quantised, evicted (fewer tokens), merged (log-weights say how many each stands for).
    First order in ε is exact and the rest is bounded, as `meanfield.lipschitz.remainders` says;
    the bound is also at most what the hulls of the values allow, whatever ε. Tokens that are equal
    in both count once. Rounding is counted. In O(m n k²) time a head; where m n v k² is below
    2²⁷, second order of the numerator is exact too.

    Without the original, as when a cache is quantised as it is filled, pass None for it and what
    is known of the quantiser in `within`: |k̂ⱼ − kⱼ| ≤ δⱼ and |v̂ⱼ − vⱼ| ≤ ηⱼ. That bounds the
    worst keys and values there can be, often tens of times the gap.

    Args:
        queries: q, ``(heads, m, k)``, or ``(m, k)`` of one head.
        cache: the pair (K, V), ``(groups, n, k)`` and ``(groups, n, v)``, arrays or tensors of any
            precision on one device; heads are a multiple of the groups, and heads in a row share
            one. Of one head ``(n, k)`` and ``(n, v)``. Or None.
        smaller: the pair (K̂, V̂), likewise, of any number of tokens.
        log_weights: of the tokens of the smaller cache, ``(n̂,)`` or ``(groups, n̂)``: log of how
            many tokens of the original each stands for; −∞ leaves one out. 0 if None.
        sink: β, a number or one per head: a key of score β and value 0 in both softmaxes.
        scale: of the scores; 1/√k if None.
        epsilon: ε ≥ 0, how far a query may be from its centre.
        within: the pair (δ, η), numbers or ``(n̂,)`` or ``(groups, n̂)``.

    Raises:
        ValueError: shapes that do not fit, no mass, both or neither of `cache` and `within`.

    Example:
        >>> keys, values = torch.tensor([[0.0], [0.1], [2.0]]), torch.tensor([[0.0], [0.1], [2.0]])
        >>> merged = torch.tensor([[0.05], [2.0]])
        >>> counts = torch.tensor([2.0, 1.0]).log()
        >>> error = cache_error(
        ...     [[0.5]], (keys, values), (merged, merged), log_weights=counts, epsilon=0.1
        ... )
        >>> round(float(error.gap), 5), round(float(error.value), 5)
        (0.00039, 0.00118)
    """
    epsilon = number(epsilon, "epsilon", least=0)
    if (cache is None) == (within is None):
        raise ValueError(
            "within: expected (δ, η) where cache is None, and nothing where it is given, got "
            f"cache {describe(cache)} and within {describe(within)}"
        )
    q = _array(queries, "queries", None)
    new = _cache(smaller, "smaller", q, log_weights)
    scale = q.shape[-1] ** -0.5 if scale is None else number(scale, "scale", above=0)
    sinks = None if sink is None else _spread(sink, "sink", (len(q),), q)
    if cache is None:
        shape = new.logs.shape
        steps = [
            _spread(step, f"{name} of within", shape, q)
            for step, name in zip(_pair(within, "within"), "δη", strict=True)
        ]
        if any(bool((step < 0).any()) for step in steps):
            raise ValueError("within: expected steps of at least 0, got a negative one")
        groups = list(zip(*new, new.logs, *steps, strict=True))
    else:
        groups = _joined(_cache(cache, "cache", q, None), new)
    found = []
    for h, queries_of_head in enumerate(q):
        atoms = list(groups[h * len(groups) // len(q)])
        if sinks is not None:
            atoms = [torch.cat([t, torch.zeros_like(t[:1])]) for t in atoms]
            atoms[2][-1] = atoms[3][-1] = sinks[h]
        size = max(1, _ENTRIES // atoms[0].numel())
        parts = [_of_head(part, atoms, scale, epsilon) for part in queries_of_head.split(size)]
        found.append([torch.cat(column) for column in zip(*parts, strict=True)])
    value, gap, slope = (torch.stack(column) for column in zip(*found, strict=True))
    if as_float_tensor(queries, "queries").ndim == 2:
        value, gap, slope = value[0], gap[0], slope[0]
    return CacheError(value=value, gap=gap, slope=slope, epsilon=epsilon)


def _of_head(
    queries: Tensor, atoms: list[Tensor], scale: float, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Bound, gap and slope, (m,), of keys, values, log-weights of both, and steps if known."""
    present = (atoms[2] > -math.inf) | (atoms[3] > -math.inf)
    keys, values, logs, other_logs, *steps = (t[present] for t in atoms)
    keys = scale * keys
    scores = queries @ keys.mT
    # In these units squares of keys and of values are in range.
    key_unit, unit = (power_of_two(t.abs().amax()) for t in (keys, values))
    short, values, radius = keys / key_unit, values / unit, epsilon * float(key_unit)
    log_z = (scores + logs).logsumexp(-1, keepdim=True)
    other_z = (scores + other_logs).logsumexp(-1, keepdim=True)
    if not bool(torch.isfinite(log_z).all() & torch.isfinite(other_z).all()):
        raise OverflowError(
            "cache_error: scores leave the range of float64; take smaller queries, keys or scale, "
            "and a finite sink"
        )
    side = Side.of(short, values, scores + logs - log_z)
    if steps:
        tau = (lengths(queries) + epsilon)[:, None] * (scale * steps[0])
        value, hull = bounded_by_steps(side, tau, steps[1] / unit, radius)
        same = not bool(torch.stack(steps).any())
        gap = slope = torch.full_like(value, math.nan)
    else:
        # w = e^{score} (a − a')/Z, a and a' the weights in the two caches.
        ratio = torch.where(logs == other_logs, 0.0, logs - other_logs)
        log_change = torch.maximum(logs, other_logs) + (-torch.expm1(-ratio.abs())).log()
        same = not bool(ratio.any())
        other = Side.of(short, values, scores + other_logs - other_z)
        value, hull, gap, slope = bounded(
            values, side, other, ratio.sign(), scores - log_z + log_change, radius
        )
    n, k = keys.shape
    largest = (lengths(queries) + epsilon) * lengths(keys).amax()
    counts = torch.cat([logs, other_logs])
    counts = torch.where(counts > -math.inf, counts.abs(), 0.0).amax()
    roundings = _ROUNDINGS * torch.finfo(values.dtype).eps
    farthest = lengths(values).amax()

    def above(bound: Tensor, terms: Tensor | int) -> Tensor:
        return (1 + roundings * terms) * bound + roundings * terms * farthest

    rounded = torch.fmin(above(value, n + k * largest + counts), above(hull, n))
    # Of the same tokens with the same weights the outputs are one function.
    value = torch.zeros_like(rounded) if same else rounded
    return unit * value, unit * gap, unit * key_unit * slope


# --- arguments ---


class _Cache(NamedTuple):
    """Keys ``(G, n, k)``, values ``(G, n, v)`` and log-weights ``(G, n)``, in float64."""

    keys: Tensor
    values: Tensor
    logs: Tensor


def _array(value: object, name: str, like: Tensor | None) -> Tensor:
    """Shape ``(·, ·, ·)`` in float64; with one axis in front if there are two."""
    found = as_float_tensor(value, name, like=like).detach()
    if found.ndim not in (2, 3) or not found.numel():
        raise ValueError(
            f"{name}: expected shape (heads, tokens, size) or (tokens, size) of one head, got "
            f"{tuple(found.shape)}"
        )
    check_finite(found, name)
    found = found.double()
    if like is not None:
        check_same_kind(like, "queries", found, name)
    return found if found.ndim == 3 else found[None]


def _pair(value: object, name: str) -> tuple[object, object]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"{name}: expected a pair, got {describe(value)}")
    return value[0], value[1]


def _cache(given: object, name: str, q: Tensor, log_weights: object) -> _Cache:
    keys, values = (
        _array(part, f"{which} of {name}", q)
        for part, which in zip(_pair(given, name), ("keys", "values"), strict=True)
    )
    groups, n, k = keys.shape
    if values.shape[:2] != (groups, n) or k != q.shape[-1] or len(q) % groups:
        raise ValueError(
            f"{name}: expected keys (groups, n, {q.shape[-1]}) and values (groups, n, v), the "
            f"{len(q)} heads a multiple of the groups, got {tuple(keys.shape)} and "
            f"{tuple(values.shape)}"
        )
    logs = q.new_zeros(groups, n)
    if log_weights is not None:
        logs = _spread(log_weights, "log_weights", (groups, n), q)
        if bool((logs.logsumexp(-1) == -math.inf).any()) or bool((logs == math.inf).any()):
            raise ValueError("log_weights: expected tokens of mass, all of finite mass")
    return _Cache(keys, values, logs)


def _spread(value: object, name: str, shape: tuple[int, ...], q: Tensor) -> Tensor:
    """A number, or numbers of this shape or of its last axis, in this shape."""
    found = as_float_tensor(value, name, like=q).detach().double()
    fits = found.ndim == 0 or tuple(found.shape) == shape[-found.ndim :]
    if not fits or bool(found.isnan().any()):
        raise ValueError(f"{name}: expected a number or shape {shape}, got {describe(value)}")
    check_same_kind(q, "queries", found.to(q.device) if found.ndim == 0 else found, name)
    return found.to(q.device).expand(shape)


def _joined(old: _Cache, new: _Cache) -> list[tuple[Tensor, ...]]:
    """The different tokens of both in each group: keys, values, and log-weights in either."""
    if len(old.keys) != len(new.keys) or old.values.shape[-1] != new.values.shape[-1]:
        raise ValueError(
            f"smaller: expected {len(old.keys)} groups and values of size "
            f"{old.values.shape[-1]}, as in cache, got {len(new.keys)} and {new.values.shape[-1]}"
        )
    found = []
    for group in range(len(old.keys)):
        each = [torch.cat([one.keys[group], one.values[group]], -1) for one in (old, new)]
        tokens, labels = torch.unique(torch.cat(each), dim=0, return_inverse=True)
        keys, values = tokens.tensor_split([old.keys.shape[-1]], -1)
        placed = zip((old, new), labels.split(list(map(len, each))), strict=True)
        logs = [log_sums(one.logs[group], of_one, len(tokens)) for one, of_one in placed]
        found.append((keys, values, *logs))
    return found
