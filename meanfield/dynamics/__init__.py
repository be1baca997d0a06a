"""Measures through depth, which is the time of a flow.

A map of measures F, whose image of the atom x is Γ_μ(x), is the velocity of the transport equation
∂μ + div(μ Γ_μ) = 0; a residual network is its Euler scheme. `flow` moves a measure and returns a
Dataset, `FlowMap` is the flow as a map of measures, and the rest measures what a flow does.
"""

# Files, each importing only those before it: `constraints`, `functionals`, `schemes`,
# `integrators`, `trajectories`, `flow`, `flow_map`, `stability`.

from meanfield.dynamics.flow import flow, measure_at
from meanfield.dynamics.flow_map import FlowMap
from meanfield.dynamics.functionals import cluster_count, log_energy
from meanfield.dynamics.integrators import Adaptive
from meanfield.dynamics.stability import stability
from meanfield.habits import hint_names

__all__ = [
    "Adaptive",
    "FlowMap",
    "cluster_count",
    "flow",
    "log_energy",
    "measure_at",
    "stability",
]
hint_names(__name__, __all__)
