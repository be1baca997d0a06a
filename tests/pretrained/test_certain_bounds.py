"""Certain bounds at an input and in a ball, for a block of every family of checkpoints."""

from __future__ import annotations

import pytest
import torch

from meanfield import bounds
from meanfield.lipschitz import ball_upper, local_lipschitz
from tests.pretrained import small_models as small

# One of each family, and the kernels that a configuration may ask for.
CASES = [*dict.fromkeys(name.split(",")[0] for name in small.CASES), "llama, biased"]
# Whose attention is bounded alone too: of each kernel one.
ALONE = ("bert", "gpt_neox", "llama", "gemma2", "qwen3", "olmo2")


@pytest.mark.parametrize("case", CASES)
def test_blocks_of_every_family_and_attention_of_every_kernel_have_bounds(case, monkeypatch):
    source, n = small.small(case), 4
    mu = source.block(0, length=n)(source.embeddings(torch.arange(1, n + 1)))
    monkeypatch.setattr("meanfield.maps.map._FACTORED", 0)  # as of larger models
    parts = [source.block(1, length=n)]
    if case in ALONE:
        parts.append(source.attention(1, length=n))
    for F in parts:
        constant = float(local_lipschitz(F, mu).value)
        assert constant <= float(bounds.local_upper(F, mu)) <= 2.5 * constant
        near = ball_upper(F, mu, torch.tensor([0.0, 1e-7], dtype=mu.dtype))
        assert bool((near >= constant * (1 - 1e-12)).all() and near.isfinite().all())
