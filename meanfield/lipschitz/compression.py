"""What a compressed cache changes: certified over balls round queries."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from meanfield.attention import SelfAttention
from meanfield.checks import (
    as_float_tensor,
    check_finite,
    check_same_kind,
    describe,
    number,
    without_autocast,
)
from meanfield.lipschitz.remainders import Heads, Side, bounded
from meanfield.measures import ParticleMeasure, check_single, log_sums, merge_labelled
from meanfield.results.answers import Answer, labelled

# Relative: what the bound is raised by, to stay above the rounding of norms and eigenvalues.
_ROUNDING = 1e-9


class CompressionError(Answer, noun="compression_error", title="Error of a compressed cache"):
    """What attention to ν in place of μ changes at each query; tensors of shape ``(m,)``.

    Attributes:
        value: |Γ_μ(x) − Γ_ν(x)| is at most this for every x within ε of the query.
        gap: |Γ_μ(q) − Γ_ν(q)| at the query itself: no bound can be smaller.
        slope: ‖DΓ_μ(q) − DΓ_ν(q)‖ there: what the bound grows by for small ε.
        epsilon: ε.
    """

    value: Tensor = labelled("certified largest change of the output in the ball")
    gap: Tensor = labelled("change of the output at the query", beside=True)
    slope: Tensor = labelled("norm of the change of the derivative at the query", beside=True)
    epsilon: float = labelled("radius of the balls", attribute=True)


@without_autocast
@torch.no_grad()
def compression_error(
    F: SelfAttention,
    mu: ParticleMeasure,
    nu: ParticleMeasure,
    queries: object,
    epsilon: float,
    *,
    positions: object = None,
) -> CompressionError:
    """The certified supremum over balls round queries of |Γ_μ(x) − Γ_ν(x)|.

    μ is a cache of tokens, and ν a smaller one whose weights stand for what was merged or
    dropped: a bias per key, as compressed caches keep it, is a log-weight. For one head pass
    ``F.heads[h]``. Atoms that coincide count once, so that tokens that were merged where they
    stood change nothing. First order in ε is exact and the rest is bounded, as it says in
    `meanfield.lipschitz.remainders`; the bound is also at most what the hulls of the values
    allow, whatever ε. Rounding of about n · eps times the size of the values is not accounted
    for. In dimension d and for m queries it takes O(m H (n v k² + d k²)) time, in float64.

    Args:
        F: attention under the softmax whose queries are affine in x: dot products, rotary
            positions, position biases, windows, masks.
        mu: the cache μ, without batch axes.
        nu: the smaller cache ν, on the same space.
        queries: the centres, ``(m, d)``, as they enter the layer.
        epsilon: ε ≥ 0, how far a query may be from its centre.
        positions: of the queries, a number or ``(m,)``, where the layer looks at positions.

    Raises:
        NotImplementedError: another normalisation, or queries that are not affine.
        ValueError: batches, shapes that do not fit, a query that sees no atom of μ or of ν.

    Example:
        >>> from meanfield.attention import AttentionParameters
        >>> F = SelfAttention(AttentionParameters.from_bilinear([[1.0]], [[1.0]]))
        >>> cache = ParticleMeasure([[0.0], [0.1], [2.0]])
        >>> merged = ParticleMeasure([[0.05], [2.0]], weights=[2 / 3, 1 / 3])
        >>> error = compression_error(F, cache, merged, [[0.5]], 0.1)
        >>> round(float(error.gap[0]), 5), round(float(error.value[0]), 5)
        (0.00039, 0.00118)
    """
    epsilon = number(epsilon, "epsilon", least=0)
    both, logs, other_logs = _joined(F, mu, nu)
    centres = _centres(queries, mu)
    F = replace(F, parameters=F.parameters.to(torch.float64))
    at = _positions(positions, centres, both, F)
    weights = F.weights(both)
    if weights.order is not None:
        logs, other_logs = logs[weights.order], other_logs[weights.order]
    heads = Heads.of(F, weights, centres, at)
    scores = weights.scores(heads.queries, at)  # (H, m, N)
    log_p, log_z = _attended(scores + logs, "mu")
    log_other, _ = _attended(scores + other_logs, "nu")
    # w = e^{score} (a − a')/Z_μ, a and a' the weights in μ and in ν.
    apart = logs - other_logs
    log_change = torch.maximum(logs, other_logs) + (-torch.expm1(-apart.abs())).log()
    log_sizes = scores - log_z[..., None] + log_change
    sides = Side.of(heads, log_p), Side.of(heads, log_other)
    value, gap, slope = bounded(F, heads, *sides, apart.sign(), log_sizes, epsilon)
    value = torch.maximum((1 + _ROUNDING) * value, gap)
    return CompressionError(value=value, gap=gap, slope=slope, epsilon=epsilon)


# --- the two caches as one set of atoms with two sets of weights ---


def _joined(
    F: SelfAttention, mu: ParticleMeasure, nu: ParticleMeasure
) -> tuple[ParticleMeasure, Tensor, Tensor]:
    """The atoms of both, each place once, and the log-weights of μ and ν there."""
    if not isinstance(F, SelfAttention):
        raise TypeError(f"F: expected SelfAttention, got {describe(F)}")
    if not F.normalization.is_softmax or F.kernel.activation is not None:
        raise NotImplementedError(
            f"compression_error: expected the softmax of ⟨q, k⟩, got {F}; its bound is not proved "
            "for others"
        )
    for name, cache in (("mu", mu), ("nu", nu)):
        check_single(cache, name)
    check_same_kind(mu.points, "mu", nu.points, "nu")
    if mu.dim != nu.dim or mu.is_positioned != nu.is_positioned:
        raise ValueError(
            f"nu: expected dimension {mu.dim} and positions where mu has them, got {nu!r}"
        )
    positions = None
    if mu.positions is not None and nu.positions is not None:
        positions = torch.cat([mu.positions, nu.positions])
    halves = torch.cat([mu.log_weights, nu.log_weights]) - math.log(2)
    whole = ParticleMeasure(
        torch.cat([mu.points, nu.points]), log_weights=halves, positions=positions
    )
    both, labels = merge_labelled(whole.to(torch.float64), 0.0)
    n = both.n_particles

    def placed(logs: Tensor, labels: Tensor) -> Tensor:
        alive = labels >= 0
        return log_sums(logs[alive].double(), labels[alive], n)

    cut = mu.n_particles
    return both, placed(mu.log_weights, labels[:cut]), placed(nu.log_weights, labels[cut:])


def _centres(queries: object, mu: ParticleMeasure) -> Tensor:
    centres = as_float_tensor(queries, "queries", like=mu.points)
    check_same_kind(mu.points, "mu", centres, "queries")
    if centres.ndim != 2 or centres.shape[-1] != mu.dim or not len(centres):
        raise ValueError(
            f"queries: expected shape (m, {mu.dim}) with m ≥ 1, got {tuple(centres.shape)}"
        )
    check_finite(centres, "queries")
    return centres.detach().double()


def _positions(
    positions: object, centres: Tensor, both: ParticleMeasure, F: SelfAttention
) -> Tensor | None:
    if not (F.causal or F.kernel.needs_positions):
        return None
    if positions is None:
        raise ValueError("positions: expected those of the queries, since F looks at them")
    at = as_float_tensor(positions, "positions", like=centres)
    if at.ndim > 1 or at.numel() not in (1, len(centres)):
        raise ValueError(
            f"positions: expected a number or shape ({len(centres)},), got {tuple(at.shape)}"
        )
    check_finite(at, "positions")
    return at.double().expand(len(centres))


def _attended(logits: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """log P ``(H, m, N)`` and log Z ``(H, m)``."""
    log_z = logits.logsumexp(-1)
    if bool((log_z == -math.inf).any()):
        raise ValueError(
            f"{name}: expected atoms that every query sees, got a query that sees none"
        )
    return logits - log_z[..., None], log_z
