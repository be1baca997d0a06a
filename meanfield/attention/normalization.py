"""From logits to transition probabilities."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["LogTransition", "softmax"]


class LogTransition(NamedTuple):
    """log P, shape (..., n, m), and the log-normaliser of each row, shape (..., n, 1)."""

    log_transition: Tensor
    log_normalizer: Tensor


def softmax(logits: Tensor) -> LogTransition:
    """log P_ij = logits_ij − log Σ_l exp(logits_il); the log-weights are part of the logits.

    A row that sees no mass has log P = −inf throughout and the log-normaliser −inf.

    Args:
        logits: scores + log aⱼ, shape (..., n, m); −inf where i does not see j.
    """
    log_normalizer = logits.logsumexp(-1, keepdim=True)
    blind = log_normalizer == -math.inf
    return LogTransition(logits - torch.where(blind, 0.0, log_normalizer), log_normalizer)
