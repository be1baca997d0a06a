"""Attention and its derivatives store no n × n matrix: peak memory of a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

# In float32, where a full matrix is 4 n² bytes: 1 GB at 16,384 atoms.
PRELUDE = """
import torch
from meanfield import AttentionParameters, ParticleMeasure, SelfAttention
torch.set_num_threads(1)

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

generator = torch.Generator().manual_seed(0)
X = torch.randn({n}, {d}, generator=generator)
logs = torch.randn({n}, generator=generator).log_softmax(-1)
"""

# One pair of products. The settings of the allocator are what made the peak jump when small
# tensors survived between large ones.
PAIR = """
from meanfield.attention.tangent import AttentionTangent

F = SelfAttention(AttentionParameters.random({d}, dtype=torch.float32, generator=generator))
F.linearize(ParticleMeasure(X[:64])).matvec(X[:64])
before = peak()
weights = F.weights(ParticleMeasure(X, log_weights=logs))
J = AttentionTangent(weights, "wasserstein", memory={memory}).as_linear_map()
J.rmatvec(J.matvec(X))
print(peak() - before)
"""

# A whole local constant, both components.
CONSTANT = """
from meanfield.linalg import Lanczos
from meanfield.lipschitz import local_lipschitz

mu = ParticleMeasure(X, log_weights=logs)
F = SelfAttention(AttentionParameters.random({d}, dtype=torch.float32, generator=generator))
local_lipschitz(F, ParticleMeasure(X[:64]))
before = peak()
assert local_lipschitz(F, mu, upper_rtol=0.1, solver=Lanczos()).converged
print(peak() - before)
"""

# A certain upper end: what is O(n²) are a few numbers for each pair and head.
CERTIFIED = """
from meanfield.linalg import Certified, operator_norm

def bounded(n):
    mu = ParticleMeasure(X[:n].double(), log_weights=logs[:n].double().log_softmax(-1))
    F = SelfAttention(AttentionParameters.random({d}, generator=generator))
    J = F.linearize(mu, geometry="wasserstein")
    return operator_norm(J, solver=Certified(rounds=1, max_steps=3), strict=False).upper

bounded(64)
before = peak()
assert bounded({n}) < float("inf")
print(peak() - before)
"""

# Streamed derivatives of both orders, and then one matrix, which the first peak would have shown.
STREAMED = """
from meanfield.attention import weights

# Smaller blocks: their memory does not grow with n, and would cover the law at this size.
weights._BLOCK_ENTRIES = weights._LARGE_BLOCK_ENTRIES = 2**18
par = AttentionParameters.random({d}, dtype=torch.float32)
F = SelfAttention(par, causal=True)

def run(points):
    n = len(points)
    mu = ParticleMeasure(points, positions=(torch.arange(n) // 2) / n)  # ties: no fused kernel
    move = lambda x: F(mu.replace(x)).points
    torch.func.jvp(move, (points,), (points,))
    x = points.requires_grad_()
    torch.autograd.grad(move(x).sum(), x)
    torch.func.jvp(torch.func.grad(lambda x: move(x).square().sum()), (points,), (points,))
    SelfAttention(par)(mu)

run(X[:64].clone())
before = peak()
run(X)
print(peak() - before)
torch.randn({n}, {n}).mul_(1.0)
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


@pytest.mark.parametrize(
    ("n", "d", "memory", "megabytes", "number"),
    [
        # The matrix would be 100 MB, and is just above what may be kept.
        (5120, 16, 2**27, 80, 0),
        *(
            pytest.param(16_384, 64, 2**29, 200, number, marks=pytest.mark.slow)
            for number in range(len(SETTINGS))
        ),
        pytest.param(32_768, 64, 2**29, 400, 0, marks=pytest.mark.slow),
    ],
)
def test_a_pair_of_products_takes_far_less_than_the_matrix(n, d, memory, megabytes, number):
    found = peaks(PAIR, n=n, d=d, memory=memory, first=IMPORTS[number], **SETTINGS[number])
    assert found[-1] < megabytes


@pytest.mark.slow
def test_a_local_constant_takes_far_less_than_the_matrix():
    assert peaks(CONSTANT, n=16_384, d=16)[-1] < 500  # of 1,024 MB


@pytest.mark.slow
def test_a_certain_bound_at_2048_atoms_takes_a_few_numbers_for_each_pair():
    """34 MB each; vectors in R^16 for all pairs would be 540 MB."""
    assert peaks(CERTIFIED, n=2048, d=16)[-1] < 1000


@pytest.mark.slow
def test_derivatives_take_far_less_memory_than_the_matrix():
    streamed, matrix = peaks(STREAMED, n=6144, d=4)
    assert streamed < 0.35 * matrix


def peaks(script, first="", *, n, d, memory=0, **settings):
    """Megabytes that a script prints, run in a process of its own."""
    script = first + (PRELUDE + script).format(n=n, d=d, memory=memory)
    found = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | settings,
    )
    return [float(line) for line in found.stdout.split()]
