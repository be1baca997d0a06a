"""Small functions to sweep, importable by worker processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np

from meanfield.results import Variable
from meanfield.sweeps import Task


def square(x, offset=0.0):
    return {"y": x**2 + offset}


def noise(n, repetition, seed):
    rng = np.random.default_rng(seed)
    return {"mean": rng.standard_normal(n).mean(), "profile": rng.standard_normal(3)}


NOISE = Task(
    noise,
    [
        Variable("mean", "mean of the sample"),
        Variable("profile", "three draws", units="m", dims=("place",)),
    ],
    parameters=[Variable("n", "sample size"), Variable("place", "place of the draw")],
    coords={"place": [1, 2, 3]},
)


def slow_noise(n, repetition, seed, seconds):
    time.sleep(seconds)
    return noise(n, repetition, seed)


SLOW_NOISE = Task(slow_noise, NOISE.variables, NOISE.parameters, NOISE.coords)


def picky(x):
    if x == 3:
        raise ArithmeticError("three is refused")
    return {"y": 2.0 * x, "y_residual": 1e-9, "y_converged": x != 5}


PICKY_VARIABLES = [
    Variable("y", "twice x"),
    Variable("y_residual", "residual of y"),
    Variable("y_converged", "whether y converged", dtype="bool"),
]
PICKY = Task(picky, PICKY_VARIABLES)


def picky_batched(x):
    if np.any(x == 3):
        raise ArithmeticError("three is refused")
    return {"y": 2.0 * x, "y_residual": np.full(len(x), 1e-9), "y_converged": x != 5}


PICKY_BATCHED = Task(picky_batched, PICKY_VARIABLES, batched=True)


def deadly(x, trap):
    """Kills its own process at x = 3, once: the trap is a file that it removes first."""
    if x == 3 and Path(trap).exists():
        Path(trap).unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.02)
    return {"y": 2.0 * x}


DEADLY = Task(deadly, [Variable("y", "twice x")])


def always_deadly(x):
    if x == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"y": 2.0 * x}


ALWAYS_DEADLY = Task(always_deadly, [Variable("y", "twice x")])


def threads(x):
    import torch

    return {"n_threads": torch.get_num_threads()}


THREADS = Task(threads, [Variable("n_threads", "torch threads", dtype="int64")])
