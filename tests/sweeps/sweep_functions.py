"""Small functions to sweep, importable by worker processes."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
import xarray as xr

from meanfield.results import Variable
from meanfield.sweeps import Task


def square(x, offset=0.0):
    return {"y": x**2 + offset}


def noise(n, repetition, seed):
    rng = np.random.default_rng(seed)
    return {"mean": rng.standard_normal(n).mean(), "profile": rng.standard_normal(3)}


def drawn(x):
    """Of the generators that everybody shares."""
    return {"torch": torch.rand(()), "numpy": np.random.rand(), "python": random.random()}  # noqa: NPY002


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


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def poison(x, how, at=3):
    """Twice x; at one x, the worst that can happen."""
    if x != at:
        return {"y": 2.0 * x}
    if how == "exit":
        sys.exit(5)
    if how == "sleep":
        time.sleep(3600)
    if how == "os._exit":
        os._exit(7)
    if how == "unspeakable":
        raise Unspeakable
    if how == "escape":
        raise ValueError("\x1b[2Jforged\nline \ud800")
    return os.kill(os.getpid(), getattr(signal, how))


POISON = Task(poison, [Variable("y", "twice x")])


def poison_batched(x, how):
    if 3 in x:
        os.kill(os.getpid(), getattr(signal, how))
    return {"y": 2.0 * x}


POISON_BATCHED = Task(poison_batched, [Variable("y", "twice x")], batched=True)


def growing(i, seconds):
    """The first cases are the cheapest, as in most grids; a file says that they are done."""
    if i == 40:
        Path("reached").touch()
    time.sleep(0.001 if i < 40 else seconds)
    return {"y": 2.0 * i}


GROWING = Task(growing, [Variable("y", "twice i")])


def threads(x):
    import torch

    return {"n_threads": torch.get_num_threads()}


THREADS = Task(threads, [Variable("n_threads", "torch threads", dtype="int64")])


def moody_noise(n, repetition, seed, seconds, cure):
    """Every third repetition fails until there is a cure."""
    if repetition % 3 == 0 and not Path(cure).exists():
        raise ArithmeticError("no cure")
    return slow_noise(n, repetition, seed, seconds)


MOODY_NOISE = Task(moody_noise, NOISE.variables, NOISE.parameters, NOISE.coords)


def heads(x):
    """An array with names for its axes."""
    return xr.DataArray(
        x * np.arange(3.0),
        {"head": ["p", "q", "r"]},
        name="gain",
        attrs={"long_name": "gain of a head", "units": "m"},
    )


def table(x):
    """Arrays in an order of axes that depends on the case, one of them a coordinate."""
    u = xr.DataArray(x * np.arange(4.0).reshape(2, 2), {"t": [0.0, 0.5]}, ("t", "k"))
    return xr.Dataset({"u": u if x < 2 else u.T}, {"word": ("t", ["a", "b"])})


def lengthening(x):
    """An array whose axis is longer in each case."""
    return {"y": xr.DataArray(np.ones(int(x)), dims="t")}
