"""The linearisation of attention stores no n × n matrix: peak memory of a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# One pair of products at n atoms of R^d, float32. A full matrix would be 4 n² bytes: 1 GB at
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
F = SelfAttention(AttentionParameters.random({d}, dtype=torch.float32, generator=generator))
X = torch.randn({n}, {d}, generator=generator)
logs = torch.randn({n}, generator=generator).log_softmax(-1)
F.linearize(ParticleMeasure(X[:64])).matvec(X[:64])
before = peak()
J = F.linearize(ParticleMeasure(X, log_weights=logs), geometry="wasserstein")
J.rmatvec(J.matvec(X))
print(peak() - before)
"""

# A whole local constant, both components.
CONSTANT = """
from meanfield.linalg import Lanczos
from meanfield.lipschitz import local_lipschitz

mu = ParticleMeasure(X[:, :16], log_weights=logs)
F = SelfAttention(AttentionParameters.random(16, dtype=torch.float32, generator=generator))
local_lipschitz(F, ParticleMeasure(X[:64, :16]))
before = peak()
assert local_lipschitz(F, mu, upper_rtol=0.1, solver=Lanczos()).converged
print(peak() - before)
"""

# A certain upper end: what is O(n²) are a few numbers for each pair and head.
CERTIFIED = """
from meanfield.linalg import Certified, operator_norm

def bounded(n):
    mu = ParticleMeasure(X[:n, :16].double(), log_weights=logs[:n].double().log_softmax(-1))
    F = SelfAttention(AttentionParameters.random(16, generator=generator))
    J = F.linearize(mu, geometry="wasserstein")
    return operator_norm(J, solver=Certified(rounds=1, max_steps=3), strict=False).upper

bounded(64)
before = peak()
assert bounded({n}) < float("inf")
print(peak() - before)
"""

SETTINGS = [
    {},
    {"MALLOC_TRIM_THRESHOLD_": "100000000", "MALLOC_MMAP_THRESHOLD_": "100000000"},
    {"MALLOC_ARENA_MAX": "1"},
    {"MALLOC_MMAP_THRESHOLD_": "4096"},
    {"MALLOC_TOP_PAD_": "67108864"},
]
IMPORTS = ["", "import scipy.optimize", "import xarray, matplotlib.pyplot", "import numpy", ""]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("n", "d", "megabytes", "number"),
    [
        # The matrix would be 400 MB, just above what is kept.
        (10_240, 16, 100, 0),
        *(
            pytest.param(16_384, 64, 200, number, marks=pytest.mark.slow)
            for number in range(len(SETTINGS))
        ),
        pytest.param(32_768, 64, 400, 0, marks=pytest.mark.slow),
    ],
)
def test_a_pair_of_products_takes_far_less_than_the_matrix(n, d, megabytes, number):
    script = IMPORTS[number] + PAIR.format(n=n, d=d)
    assert _printed(script, SETTINGS[number])[-1] < megabytes


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_local_constant_at_65536_atoms_takes_less_than_a_gigabyte():
    script = PAIR.format(n=65_536, d=64).split("F.linearize")[0] + CONSTANT
    assert _printed(script, SETTINGS[0])[-1] < 1000


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_certain_bound_at_2048_atoms_takes_a_few_numbers_for_each_pair():
    """34 MB each; vectors in R^16 for all pairs would be 540 MB."""
    script = PAIR.format(n=2048, d=16).split("F.linearize")[0] + CERTIFIED.format(n=2048)
    assert _printed(script, SETTINGS[0])[-1] < 1000


def _printed(script, settings):
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | settings,
    )
    return [float(line) for line in done.stdout.split()]
