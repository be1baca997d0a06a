"""Calls as people type them, as text: wrong ones, and odd ones that mean something.

``python -m tests.interface.whole_calls`` prints what each says, to be read by eye. In `bad_calls`
one argument at a time is replaced; here are swapped arguments, habits from other libraries, and
mistakes that only the whole call shows.
"""

# The calls are evaluated among these names.
# ruff: noqa: F401

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import meanfield
from meanfield import (
    AttentionParameters,
    ParticleMeasure,
    SelfAttention,
    bounds,
    dynamics,
    experiments,
    figures,
    layers,
    linalg,
    lipschitz,
    pretrained,
    results,
    sampling,
    sweeps,
    transport,
)
from meanfield.attention import CrossAttention, kernels, normalizations
from meanfield.report import write_report
from tests.interface import first_calls
from tests.interface.bad_calls import of_error

MEASURES = """
ParticleMeasure(x, np.full(5, 0.2))
ParticleMeasure(x, a[:, None])
ParticleMeasure(x, [1, 1, 1])
ParticleMeasure(x, [0.5, 0.6, -0.1])
ParticleMeasure(x, [0.5, np.nan, 0.5])
ParticleMeasure(a, x)
ParticleMeasure(x[:, 0])
ParticleMeasure(x[:, 0], a)
ParticleMeasure([[1.0, 2.0], [3.0]])
ParticleMeasure([x, x[:2]])
ParticleMeasure(x, weights=a, log_weights=np.log(a))
ParticleMeasure(x, log_weights=a)
ParticleMeasure(x, positions=[1, 2, 3])
ParticleMeasure(x, positions=[0.1, 0.5])
ParticleMeasure(x, positions=True)
ParticleMeasure(x.astype(complex))
ParticleMeasure(x.astype(str))
ParticleMeasure(None)
ParticleMeasure(mu)
ParticleMeasure({"points": x})
ParticleMeasure(iter(x))
ParticleMeasure("points.npy")
ParticleMeasure(torch.tensor(x), torch.tensor(a, dtype=torch.float32))
ParticleMeasure(frame, shuffled)
ParticleMeasure(frame, positions=shuffled)
ParticleMeasure.from_sequence(x[0])
ParticleMeasure.from_sequence(mu)
ParticleMeasure.of((x[:, 0], a))
ParticleMeasure.of((x, a, a))
np.asarray(mu)
list(mu)
mu[0]
mu.to("float32")
mu.to("gpu")
mu.to("cuda:99")
mu.to(torch.float16)
mu.to(torch.int64)
mu.to(dtype=torch.complex128)
mu.replace(x)
mu.replace(torch.ones(2, 2, dtype=torch.float64))
mu.replace(mu.points.float())
pushforward(mu, torch.tanh)
pushforward(lambda p: p[:2], mu)
pushforward(lambda p: p.numpy() ** 2, mu)
pushforward(lambda p, s: p, mu, use_positions=True)
split(mu, 0)
split(mu, 2.5)
merge(x)
merge(mu, -1)
stack(mu)
stack([])
stack([mu, x])
stack([mu, ParticleMeasure(np.ones((2, 5)))])
disintegrate(mu)
"""

TRANSPORT = """
w2(x)
w2(x, x.T)
w2(x, None)
w2(x[:, 0], y[:, 0])
w2((x[:, 0], a), (y[:, 0], a))
w2((a, x), (a, y))
w2(a, a, np.ones((3, 3)))
w2(x, y, a, a)
w2(x, y, weights=a)
w2(x, y, weights=(a, [0.5, 0.5]))
w2(x, y, weights=(10 * a, 10 * a))
w2((x, a), (y, a), weights=(a, a))
w2(mu, y, weights=(a, a))
w2((x, 2 * a), y)
w2((x, -a), y)
w2(x, np.full((3, 2), np.nan))
w2(x, np.full((3, 2), np.inf))
w2(x, y.astype(complex))
w2(x, torch.tensor(y, dtype=torch.float32))
w2(x, np.empty((0, 2)))
w2([x, y], [x, y, x])
w2([x, y[:, :1]], [x, y])
w2([], [])
w2((mu, nu), (mu, nu))
w2(x, y, p=1)
w2(x, y, reg=0.1)
w2(x, y, method="emd")
w2(x, y, method="sinkhorn")
w2(x, y, method=None)
w2(x, y, rtol=0)
w2(x, y, rtol="1e-3")
w2(frame, (frame, shuffled))
w2(frame.astype(str), frame)
w2(F, mu)
w2("mu", "nu")
w1(x, y, 1)
w1(x[:, 0], y[:, 0])
wp(x, y, 0.5)
wp(x, y, "2")
wp(x, y, np.inf)
wp(x, y)
solve_w2(x, y, time_limit=0)
solve_w2(x, y, strict="no")
solve_w2(x, y, checkpoint=3)
solve_w2(x, y, checkpoint="/nowhere/at/all/w2")
solve_w2(x, y, exact_weights=1)
transport.certify(x, y, plan=np.ones((2, 2)))
transport.certify(x, y, plan=np.ones((3, 3)))
transport.certify(x, y, plan=-np.eye(3) / 3)
transport.certify(x, y, plan=np.full((3, 3), np.nan))
transport.certify(x, y, potentials=np.ones(3))
transport.certify(x, y, potentials=(np.ones(3), np.ones(5)))
transport.certify(x, y, potentials=(np.ones(3), np.ones(3), np.ones(3)))
transport.certify(x, y, plan="simplex")
transport.conditional_w2(mu, nu)
transport.conditional_w2(x, y)
transport.conditional_w2(seq, nu)
transport.conditional_w2(seq, seq, penalty=-1)
transport.conditional_w2(x, y, conditions=a)
transport.solve_conditional_w2(seq, seq, method="lp")
transport.sinkhorn_divergence(x, y, blur=0)
transport.sinkhorn_divergence(x, y, scaling=1.5)
transport.sinkhorn_divergence(x, y, p=1)
"""

ATTENTION = """
AttentionParameters(A)
AttentionParameters(A, V)
AttentionParameters(A, V, np.ones((2, 3)))
AttentionParameters(np.ones((4, 2)), np.ones((4, 2)), np.ones((4, 3)))
AttentionParameters(np.ones((2, 4)), np.ones((2, 3)), np.ones((2, 4)))
AttentionParameters(np.ones((2, 2, 4)), np.ones((2, 2, 4)), np.ones((2, 2, 4)))
AttentionParameters(np.ones((3, 2, 4)), np.ones((2, 2, 4)), np.ones((2, 2, 4)))
AttentionParameters(A, V, V, scale=[1.0, 2.0])
AttentionParameters(A, V, V, query_bias=[1.0, 2.0, 3.0])
AttentionParameters(A, V, V.astype(np.float32))
AttentionParameters(A * np.nan, V, V)
AttentionParameters("A", "V", "W")
AttentionParameters.from_bilinear(np.ones((2, 3)), V)
AttentionParameters.from_bilinear(A, np.ones((2, 3)))
AttentionParameters.from_bilinear(A, V[0])
AttentionParameters.from_bilinear(A)
AttentionParameters.tied_l2(np.ones((4, 2)), np.ones((4, 3)))
AttentionParameters.tied_l2(np.ones((2, 4)), np.ones((2, 3, 4)))
AttentionParameters.random(5, n_heads=2)
AttentionParameters.random(4, generator=0)
AttentionParameters.random(4.5)
AttentionParameters.random((4, 4))
AttentionParameters.random(4, dtype="float32")
AttentionParameters.random(4, dtype=torch.float16)
AttentionParameters.from_module(torch.nn.Linear(2, 2))
AttentionParameters.from_module(torch.nn.MultiheadAttention(4, 2, kdim=3))
AttentionParameters.from_module(torch.nn.TransformerEncoderLayer(4, 2))
F.parameters.to("gpu")
F.parameters.to(torch.int64)
F.parameters.head(3)
F.parameters.after(F)
SelfAttention(A)
SelfAttention((A, V))
SelfAttention(AttentionParameters)
SelfAttention(F.parameters, "causal")
SelfAttention(F.parameters, kernel="l2")
SelfAttention(F.parameters, kernel=kernels.cosine)
SelfAttention(F.parameters, kernel=kernels)
SelfAttention(F.parameters, normalization="softmax")
SelfAttention(F.parameters, normalization=torch.softmax)
SelfAttention(F.parameters, normalization=normalizations.sinkhorn)
SelfAttention(F.parameters, True, normalization=normalizations.sinkhorn())
SelfAttention(F.parameters, kernel=kernels.alibi([0.5, 0.25]))(seq)
SelfAttention(F.parameters, kernel=kernels.rotary())(mu)
SelfAttention(F.parameters, kernel=kernels.rotary(dim=3))(seq)
F(x)
F(mu, nu)
F(ParticleMeasure(x.T))
F(ParticleMeasure(np.ones((3, 5))))
F(mu.to(torch.float32))
SelfAttention(F.parameters, causal=True)(mu)
F.field(x)
F.field(mu)(x[0, 0])
F.field(mu)(x[:, :1])
SelfAttention(F.parameters, causal=True).field(seq)(x)
CrossAttention(F.parameters)
CrossAttention(F)(mu)
kernels.soft_cap(0)
kernels.window(-1)
kernels.cosine()
kernels.alibi(0.5)
kernels.rotary(dim=0)
kernels.soft_cap(2.0, inner="l2")
kernels.qk_norm([-1.0], eps=-1)
normalizations.sink("0")
normalizations.custom(F)
normalizations.custom("softmax")
normalizations.RowWise("exp")
"""

LAYERS = """
layers.Chain(F)
layers.Chain([])
layers.Chain([F, F.parameters])
layers.Chain([F, torch.tanh])(mu)
layers.Residual([F])
layers.Residual(F, "1")
layers.Residual(SelfAttention(AttentionParameters.from_bilinear(A, np.ones((3, 2)))))(mu)
layers.Sum([F, 1])
layers.LayerNorm(2)
layers.LayerNorm([1.0, 1.0, 1.0])(mu)
layers.LayerNorm([1.0, 1.0], [0.0])
layers.RMSNorm([1.0, np.nan])
layers.MLP(np.ones((3, 2)), np.ones((3, 2)))
layers.MLP(np.ones((3, 2)), np.ones((2, 3)), activation="swish")
layers.MLP(np.ones((3, 2)), np.ones((2, 3)), activation=torch.relu)
layers.Pointwise(F)(mu)
layers.Pointwise("sin")
layers.Pointwise(torch.sin, lipschitz=-1)
layers.Clip(-1.0)
layers.Bounded(F, -1.0)
layers.contractive(F, 1.0, constant=2.0)
layers.contractive(F, 0.5)
layers.contractive(F, 0.5, constant=lipschitz.local_lipschitz)
layers.invert(F, mu)
layers.invert(layers.Residual(F), mu)
layers.invert(layers.contractive(layers.Clip(1.0), 0.5, constant=1.0), x)
"""

CONSTANTS = """
local_lipschitz(mu, F)
local_lipschitz(F, x)
local_lipschitz(F.parameters, mu)
local_lipschitz(SelfAttention, mu)
local_lipschitz(torch.tanh, mu)
local_lipschitz(torch.nn.Linear(2, 2), mu)
local_lipschitz(lambda p: p, x)
local_lipschitz(lambda m: m.points, mu)
local_lipschitz(lambda m: None, mu)
local_lipschitz(lambda m: m.replace(m.points.detach() * 2), mu)
local_lipschitz(lambda m: m.replace(torch.randn_like(m.points)), mu)
local_lipschitz(lambda m: m.replace(m.points.mean(-2, keepdim=True) + m.points), light)
local_lipschitz(lambda m: ParticleMeasure(m.points[:1]), mu)
local_lipschitz(lambda m: m.replace(m.points.reshape(3, 2) * 2), mu)
local_lipschitz(lambda m: m.replace(torch.relu(m.points)), ParticleMeasure(np.zeros((2, 2))))
local_lipschitz(F, mu, geometry="w2")
local_lipschitz(F, mu, norm=2)
local_lipschitz(F, mu, rtol=2.0)
local_lipschitz(F, mu, solver="lanczos")
local_lipschitz(F, mu, solver=linalg.Lanczos)
local_lipschitz(F, mu.replace(mu.points * 1e400))
local_lipschitz(F, mu.to(torch.float32))
local_lipschitz(SelfAttention(F.parameters, causal=True), mu)
local_lipschitz([F, F], mu)
linearize(F, mu, geometry=2)
linearize(F, x)
linalg.operator_norm(np.eye(2))
linalg.operator_norm(linearize(F, mu))
linalg.operator_norm(F)
linalg.operator_norm(linearize(F, mu).atoms, rtol=-1)
linalg.Lanczos(max_steps=0)
linalg.Lanczos(generator=0)
linalg.Certified(rounds=0)
secant_ratio(F, mu)
secant_ratio(F, mu, mu)
secant_ratio(F, mu, x)
secant_ratio(F, mu, seq, conditional=True)
secant_ratio(F, mu, nu, method="emd")
lipschitz.ball_upper(F, mu, -0.1)
lipschitz.ball_upper(F, 0.1, mu)
lipschitz.ball_upper(F, mu, np.nan)
lipschitz.ball_upper(lambda m: m, mu, 0.1)
lipschitz.ball_upper(F, mu, [[0.1, 0.2], [0.3]])
lipschitz.worst_case(F, -1.0)
lipschitz.worst_case(lambda m: m, 1.0)
lipschitz.worst_case(F, 1.0, dim=3)
lipschitz.worst_case(F, 1.0, n_atoms=0)
lipschitz.worst_case(F, 1.0, candidates=[x])
lipschitz.local_order(F, mu, p=0.5)
lipschitz.local_order(F, mu)
lipschitz.infinity_norm(F, x)
lipschitz.localize(F, mu, local_lipschitz(F, mu))
lipschitz.localize(local_lipschitz(F, mu), F, ParticleMeasure(np.ones((2, 2))))
lipschitz.compare_lemma_3_2(F, mu)
lipschitz.compare_lemma_3_2(F, x, steps=[-0.1])
lipschitz.compression_error(F, mu, nu, x, -1.0)
lipschitz.compression_error(F, mu, nu, mu, 0.1)
lipschitz.certified_radius(F, A, mu)
lipschitz.certified_radius(F, lipschitz.Readout(np.ones((2, 5))), mu)
lipschitz.certified_radius(F, lipschitz.Readout(np.ones((2, 2)), token=9), mu)
lipschitz.Readout(np.ones((1, 2)))
lipschitz.cross_lipschitz(F, mu, nu)
lipschitz.monitor(F, mu)
lipschitz.monitor(lambda: [F], x)
lipschitz.monitor(lambda: [F], mu, every=0)
"""

BOUNDS = """
bounds.capped_mean_field(1, 1, 1, 2, causal="no")
bounds.l2_mean_field(1, 1, 1, 2, causal="no")
bounds.mean_field(A, V, 3.0)
bounds.mean_field(1.0, 1.0)
bounds.mean_field(1.0, 1.0, -1.0)
bounds.mean_field(1.0, 1.0, "3")
bounds.mean_field(F, 3.0, 1.0)
bounds.mean_field(1.0, 1.0, np.nan)
bounds.mean_field(1.0, 1.0, 3.0, p=0.5)
bounds.mean_field(1.0, 1.0, 3.0, causal=True)
bounds.masked_mean_field(1.0, 1.0, 3.0, dim=0)
bounds.masked_mean_field(1.0, 1.0, 3.0, dim=1.5)
bounds.tokens(1.0, 1.0, 10, 3.5)
bounds.tokens(1.0, 1.0, 3.5, 0)
bounds.tokens(1.0, 1.0, 3.5, 10, causal="yes")
bounds.tokens_lower(1.0, 1.0, -2)
bounds.theorem_3_3(1.0, 1.0, 3.0, 2.5)
bounds.theorem_3_5(A, V, 1.0)
bounds.theorem_3_5(1.0, 1.0, 1.0, 16)
bounds.proposition_3_4(np.inf, 1.0, 5)
bounds.scaling_factor(np.ones((2, 3)))
bounds.scaling_factor([1.0, 2.0])
bounds.scaling_factor(F.parameters.A)
bounds.two_dirac_lower(-1.0, 3.0)
bounds.two_dirac_best_log_ratio(1.0, -3.0)
bounds.l2_attention_2(F, 3)
bounds.l2_attention_2(3, F)
bounds.l2_attention_2(tied, 0)
bounds.l2_attention_inf(SelfAttention(tied), 3)
bounds.l2_attention_max(A, 3)
bounds.local_upper(F, 3.0)
bounds.table(F, 1.0, causal=True)
bounds.table(F, mu)
bounds.table(F, 0.0, 2)
bounds.table(F, 1.0, n=2.5)
bounds.table(A, 1.0)
bounds.table((A, V, V), 1.0)
bounds.table(layers.Chain([F, F]), 1.0)
bounds.table(F, 1.0).row("theorem")
"""

DYNAMICS = """
dynamics.flow(F, [0.0, 1.0], mu)
dynamics.flow(F, mu, 5.0)
dynamics.flow(F, mu, [1.0, 0.0])
dynamics.flow(F, mu, [0.0, np.nan])
dynamics.flow(F, mu, [[0.0, 1.0]])
dynamics.flow(F, mu, [0.0, 1.0], method="rk4")
dynamics.flow(F, mu, [0.0, 1.0], method="RK45")
dynamics.flow(F, mu, [0.0, 1.0], step=0.1)
dynamics.flow(F, mu, [0.0, 1.0], method="euler", step=-0.1)
dynamics.flow(F, mu, [0.0, 1.0], constraint="ball")
dynamics.flow(F, mu, [0.0, 1.0], constraint=True)
dynamics.flow(F, mu, [0.0, 1.0], noise=0.1)
dynamics.flow(F, mu, [0.0, 1.0], method="euler", step=0.1, noise=0.1)
dynamics.flow(F, mu, [0.0, 1.0], coalesce=-1)
dynamics.flow(F, x, [0.0, 1.0])
dynamics.flow(F.parameters, mu, [0.0, 1.0])
dynamics.flow([], mu, [0.0, 1.0])
dynamics.flow(lambda p: -p, mu, [0.0, 1.0])
dynamics.flow(SelfAttention(F.parameters, causal=True), mu, [0.0, 1.0])
dynamics.FlowMap(F, -1.0)
dynamics.FlowMap(F, "5")
dynamics.FlowMap(F, 5.0, method="rk4")
dynamics.Noise(-1.0, torch.Generator())
dynamics.Noise(0.1, 0)
dynamics.Adaptive("rk4")
dynamics.Adaptive(rtol=-1)
dynamics.stability(F, mu, [0.0, 1.0], method="euler")
dynamics.stability(F, x, [0.0, 1.0])
dynamics.measure_at(flown, 5)
dynamics.measure_at(ds, 0)
dynamics.clusters(mu, -0.1)
dynamics.clusters(x, 0.1)
dynamics.cluster_count(flown, 0.1)
dynamics.covariance(x)
dynamics.diameter(x)
dynamics.log_energy(mu, np.ones((3, 3)))
dynamics.log_clock(1.0, 0.1, 5)
dynamics.log_clock(0.1, 10.0, 1)
dynamics.displacements(flown, "end")
dynamics.displacements(ds)
dynamics.path_lengths(ds)
dynamics.placed(F, mu, "middle")
dynamics.placed(F, mu, "pre", norm="batch")
sampling.two_diracs(-1.0, 0.0, [1.0])
sampling.two_diracs(1.0, 0.0, [0.0, 0.0])
sampling.two_diracs(1.0, 0.0, 1.0)
sampling.two_diracs(1.0, 0.5, [1.0], heavy_at=True)
sampling.adversarial(np.ones((2, 3)), 1.0, 4)
sampling.adversarial(A, 1.0, 0)
sampling.ball(3.5, 2)
sampling.ball(3, 2, generator=np.random.default_rng(0))
sampling.ball(3, 2, dtype="float32")
sampling.sphere(3, 0)
sampling.sphere((3, 2))
"""

BOOKKEEPING = """
sweep(f, {})
sweep(f, [1.0, 2.0])
sweep(f, {"radius": 1.0})
sweep(f, {"radius": "123"})
sweep(f, {"wrong": [1.0, 2.0]})
sweep(f, {"radius": []})
sweep(f(1.0), {"radius": [1.0]})
sweep({"radius": [1.0]}, f)
sweep(f, {"radius": [1.0]}, fixed={"radius": 2.0})
sweep(f, {"radius": [1.0]}, seed=1.5)
sweep(f, {"radius": [1.0]}, executor=0)
sweep(f, {"radius": [1.0]}, executor="dask")
sweep(lambda radius: {"y": radius}, {"radius": [1.0]}, executor=2)
sweep(f, {"radius": [1.0]}, store=3)
sweep(f, {"radius": [1.0]}, store=__file__)
sweep(f, {"radius": [1.0]}, shard=(0, 2))
sweep(f, {"radius": [1.0]}, shard="0/2", store=tmp / "s")
sweep(f, {"radius": [1.0]}, case_timeout=1.0)
sweeps.status("/nowhere/at/all.sweep")
sweeps.status(__file__)
results.read_dataset("/nowhere/at/all.nc")
results.read_dataset(__file__)
results.read_dataset(3)
results.read_dataset(tmp)
results.write_dataset(ds, tmp / "a.csv")
results.write_dataset(ds, __file__)
results.write_dataset(mu, tmp / "mu.nc")
results.read_provenance(mu)
results.to_cube(mu)
results.to_cube(flown)
results.to_cube(ds, parameters=["radiuss"])
results.fit_power([1.0, 2.0], [1.0, 2.0, 3.0])
results.fit_power([1.0], [1.0])
results.fit_power([1.0, -2.0, 3.0], [1.0, 2.0, 3.0])
results.fit_power([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], level=95)
experiments.get("two_dirac")
experiments.get("two-diracs")
experiments.get(2)
figures.plot_particle_paths(ds)
figures.plot_particle_paths(mu)
figures.plot_growth(ds)
figures.plot_growth(ds, x="radius", y="nothing")
figures.animate_particles(ds)
write_report(ds, tmp / "page.pdf")
write_report(mu, tmp / "page.html")
experiments.get("two-dirac").figures["growth-in-n"](flown)
pretrained.load("/nowhere/at/all")
pretrained.load("random:bert-large-uncased-xyz")
pretrained.load("random:gpt5")
pretrained.load(3)
pretrained.read(torch.nn.Linear(2, 2))
pretrained.read(F)
pretrained.read("bert-base-uncased")
encoder().attention(5)
encoder().attention(-1)
encoder().attention(0.5)
encoder().block("0")
encoder().network(first=1, last=0)
encoder().embeddings("a text")
encoder().attention(0)(mu)
"""

# What may be typed for what, and means it.
EQUAL = """
w2(frame, y) | w2(x, y)
w2(x.tolist(), torch.tensor(y)) | w2(x, y)
w2(x.astype(">f8"), y[:, ::-1][:, ::-1]) | w2(x, y)
w2((x, a.tolist()), ParticleMeasure(y)) | w2((x, a), y)
w2(x, y, weights=(a, None)) | w2((x, a), y)
w2([x, y[:2]], [x]) | [0.0, w2(y[:2], x)]
w2(np.int8([[100, 0]]), [[-100, 0]]) | 200.0
ParticleMeasure(frame, pd.Series(a)).weights | a
mu.to("cpu", torch.float64).points | x
mu.to(dtype=torch.float32).to(torch.float64).points | x.astype(np.float32)
transport.sinkhorn_divergence(x[:1], x[:1]) | 0.0
transport.conditional_sinkhorn_divergence(seq, seq) | 0.0
transport.conditional_w2(seq, ParticleMeasure.from_sequence(x[:2])) | np.inf
AttentionParameters(A.tolist(), torch.tensor(V), V).A[0] | A / np.sqrt(2)
AttentionParameters.tied_l2(A, V).value[0] | V @ A.T @ A / np.sqrt(2)
bounds.mean_field(np.float32(1), True + 0, [3.0])[0] | bounds.mean_field(1.0, 1.0, 3.0)
split(mu, np.int64(2)).points | np.repeat(x, 2, 0)
dynamics.FlowMap(F, 0)(mu).points | x
lipschitz.compare_lemma_3_2(F, x, steps=0.1).step | [0.1]
sampling.sphere(2, 3, dtype=torch.float32).norm(dim=-1) | [1.0, 1.0]
"""

GROUPS = {
    "measures": MEASURES,
    "transport": TRANSPORT,
    "attention": ATTENTION,
    "layers": LAYERS,
    "constants": CONSTANTS,
    "bounds": BOUNDS,
    "dynamics": DYNAMICS,
    "bookkeeping": BOOKKEEPING,
    "first hour": first_calls.CALLS,
}
PAIRS = [tuple(line.split(" | ")) for line in EQUAL.strip().splitlines()]
CALLS = [line for text in GROUPS.values() for line in text.strip().splitlines()]


def f(radius: float) -> dict[str, float]:
    """A function for sweeps."""
    return {"y": radius}


@functools.cache
def encoder() -> pretrained.Transformer:
    """A small encoder of torch."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).double().eval()
    return pretrained.read(torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


@functools.cache
def names() -> dict[str, Any]:
    """What the calls may speak of: well-formed arguments, and the library."""
    x = np.array([[1.0, 0.5], [-0.5, 1.0], [0.2, -1.0]])
    y, a = x[::-1] + 0.25, np.array([0.2, 0.3, 0.5])
    A, V = np.array([[-1.0, 0.2], [0.0, 0.5]]), np.eye(2)
    F, mu = SelfAttention(AttentionParameters.from_bilinear(A, V)), ParticleMeasure(x)
    library = {name: getattr(meanfield, name) for name in meanfield.__all__}
    return library | globals() | {
        **{"x": x, "y": y, "a": a, "A": A, "V": V, "F": F, "mu": mu},
        "w1": transport.w1,
        "wp": transport.wp,
        "nu": ParticleMeasure(y),
        "light": ParticleMeasure(x, a),
        "seq": ParticleMeasure.from_sequence(x),
        "tied": AttentionParameters.tied_l2(V, V),
        "frame": pd.DataFrame(x),
        "shuffled": pd.Series(a, index=[2, 1, 0]),
        "flown": dynamics.flow(F, mu, [0.0, 1.0]),
        "ds": sweeps.sweep(f, {"radius": [1.0, 2.0]}, progress=False),
        "sweep": functools.partial(sweeps.sweep, progress=False),
    }  # fmt: skip


def ending(call: str, folder: Path) -> tuple[str, str]:
    """How a call ends, and what it said or gave."""
    try:
        return "silent", repr(eval(call, {**names(), "tmp": folder}))[:200]
    except Exception as error:
        if re.match(r"[\w.]+\(\) (missing|got an unexpected|takes) ", str(error)):
            return "signature", str(error)  # Python's own sentence names function and argument
        return of_error(error)


def values(calls: tuple[str, ...], folder: Path) -> list[np.ndarray]:
    """What calls give, as arrays."""
    return [np.asarray(eval(call, {**names(), "tmp": folder}), dtype=float) for call in calls]


if __name__ == "__main__":
    import tempfile
    import warnings

    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as name:
        for call in CALLS:
            verdict, said = ending(call, Path(name))
            sys.stdout.write(
                f"{'' if verdict == 'clear' else verdict.upper() + ' '}{call}\n    {said}\n"
            )
