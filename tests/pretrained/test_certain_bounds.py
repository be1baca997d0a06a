"""Certain bounds at an input and in a ball, for a block of every family of checkpoints."""

from __future__ import annotations

import pytest
import torch

from meanfield import bounds, maps
from meanfield.lipschitz import ball_upper, local_lipschitz
from tests.pretrained import small_models as small

# One of each family, and the kernels that a configuration may ask for.
CASES = [*dict.fromkeys(name.split(",")[0] for name in small.CASES), "llama, biased"]


@pytest.mark.parametrize("case", CASES)
def test_every_family_has_bounds_of_attention_and_of_blocks(case, monkeypatch):
    source, n = small.small(case), 4
    mu = source.block(0, length=n)(source.embeddings(torch.arange(1, n + 1)))
    monkeypatch.setattr(maps, "_FACTORED", 0)  # as of larger models
    for F in (source.attention(1, length=n), source.block(1, length=n)):
        constant = float(local_lipschitz(F, mu).value)
        assert constant <= float(bounds.local_upper(F, mu)) <= 2.5 * constant
        near = ball_upper(F, mu, torch.tensor([0.0, 1e-7], dtype=mu.dtype))
        assert bool((near >= constant * (1 - 1e-12)).all() and near.isfinite().all())
