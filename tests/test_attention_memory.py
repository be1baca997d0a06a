"""The linearisation of attention takes no n × n matrix: the peak of a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# One pair of products at n atoms, d = 64, float32. A full matrix would be 4 n² bytes: 1 GB at
# 16,384. The settings of the allocator are what made the peak jump when small tensors survived
# between large ones.
PAIR = """
import torch
from meanfield import AttentionParameters, ParticleMeasure, SelfAttention
torch.set_num_threads(1)

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

generator = torch.Generator().manual_seed(0)
F = SelfAttention(AttentionParameters.random(64, dtype=torch.float32, generator=generator))
X = torch.randn({n}, 64, generator=generator)
logs = torch.randn({n}, generator=generator).log_softmax(-1)
F.linearize(ParticleMeasure(X[:64])).matvec(X[:64])
before = peak()
J = F.linearize(ParticleMeasure(X, log_weights=logs), geometry="wasserstein")
J.rmatvec(J.matvec(X))
print(peak() - before)
"""

SETTINGS = [{}, {"MALLOC_TRIM_THRESHOLD_": "100000000", "MALLOC_MMAP_THRESHOLD_": "100000000"}]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("n", "megabytes", "settings"),
    [
        (12_288, 150, SETTINGS[0]),
        pytest.param(16_384, 200, SETTINGS[0], marks=pytest.mark.slow),
        pytest.param(16_384, 200, SETTINGS[1], marks=pytest.mark.slow),
        pytest.param(32_768, 400, SETTINGS[0], marks=pytest.mark.slow),
    ],
)
def test_a_pair_of_products_takes_far_less_than_the_matrix(n, megabytes, settings):
    done = subprocess.run(
        [sys.executable, "-c", PAIR.format(n=n)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | settings,
    )
    assert float(done.stdout) < megabytes
