"""Particle flows written as plainly as possible: loops over pairs, SciPy's solver."""

from __future__ import annotations

import math

import numpy as np
from scipy.integrate import solve_ivp


def velocity(x, a, A, V, *, positions=None, normalised=True, place="free"):
    """The velocity of each particle, by a double loop."""
    out = np.zeros_like(x)
    for i in range(len(x)):
        at = x[i] / np.linalg.norm(x[i]) if place == "sphere" else x[i]
        mass, mean = 0.0, np.zeros(x.shape[1])
        for j in range(len(x)):
            if positions is not None and positions[j] > positions[i]:
                continue
            other = x[j] / np.linalg.norm(x[j]) if place == "sphere" else x[j]
            weight = a[j] * math.exp(A @ at @ other)
            mass += weight
            mean += weight * (V @ other)
        out[i] = mean / mass if normalised else mean
        if place == "sphere":
            out[i] -= at * (at @ out[i])
    return out


def flow(x, a, A, V, times, **settings):
    """Positions of the particles at the times, (T, n, d), to about 1e-10."""
    found = solve_ivp(
        lambda t, y: velocity(y.reshape(x.shape), a, A, V, **settings).ravel(),
        (times[0], times[-1]),
        x.ravel(),
        method="DOP853",
        t_eval=times,
        rtol=1e-11,
        atol=1e-12,
    )
    return found.y.T.reshape(-1, *x.shape)
