"""The table of public functions that take a map, and what each has to answer.

A row hands its function one problem of `attentions` and asserts what double loops and complex
steps say.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import ot
import pytest
import torch

from meanfield import ParticleMeasure, dynamics, layers, linalg, lipschitz
from meanfield import bounds as theorems
from meanfield.maps import autodiff
from meanfield.maps import map as maps
from tests.attention import kernel_oracles as slow
from tests.attention.test_kernels import looks_at_positions
from tests.interface.attentions import Problem, above, near
from tests.maps.small_maps import by_products

ROWS: dict[str, Any] = {}


def row(function):
    """The row of the public function of this name."""
    ROWS[function.__name__.removesuffix("_")] = function
    return function


# ------------------------------------------------------------------ derivatives


def _is_derivative(p: Problem, at: Any, geometry: str) -> None:
    there = p.truth.alive.repeat(p.case.points.shape[1])
    wanted = p.truth.conjugated() if geometry == "wasserstein" else p.truth.whole
    wanted = np.array(wanted, dtype=float)[there][:, there]
    for found in (at.atoms.to_dense(), by_products(at.atoms), by_products(at.atoms.T).mT):
        near(found[there][:, there], wanted)
    near(at.field.to_dense(), p.truth.fields)


@row
def linearize(p):
    for geometry in ("euclidean", "wasserstein"):
        _is_derivative(p, maps.linearize(p.F, p.mu, geometry=geometry), geometry)


@row
def linearize_by_autodiff(p):
    for geometry in ("euclidean", "wasserstein"):
        at = autodiff.linearize_by_autodiff(p.F, p.mu, geometry=geometry)
        _is_derivative(p, at, geometry)


@row
def operator_norm(p):
    found = linalg.operator_norm(maps.linearize(p.F, p.mu, geometry="wasserstein").atoms)
    near(found.value, p.truth.parts()[0])
    above(found.upper, p.truth.parts()[0])


@row
def local_lipschitz(p):
    particle, splitting = p.truth.parts()
    found = lipschitz.local_lipschitz(p.F, p.mu)
    near([found.value, found.particle, found.splitting], [p.truth.constant, particle, splitting])
    above(found.upper, p.truth.constant)
    iterated = linalg.Lanczos(generator=torch.Generator().manual_seed(0))
    near(lipschitz.local_lipschitz(p.F, p.mu, solver=iterated).value, p.truth.constant, 2e-4)


@row
def one_sided(p):
    there = np.repeat(p.truth.alive, p.case.points.shape[1])
    atoms = p.truth.conjugated()[np.ix_(there, there)]
    fields = p.truth.fields[p.truth.alive]
    parts = [np.linalg.eigvalsh(J + np.swapaxes(J, -1, -2)).max() / 2 for J in (atoms, fields)]
    found, size = lipschitz.one_sided(p.F, p.mu), p.truth.constant
    near([found.particle + size, found.splitting + size], [parts[0] + size, parts[1] + size])
    above(found.upper + size, max(parts) + size)


@row
def infinity_norm(p):
    near(lipschitz.infinity_norm(p.F, p.mu).value, np.abs(p.truth.whole).sum(1).max())


@row
def local_order(p):
    near(lipschitz.local_order(p.F, p.mu, p=2).upper, p.truth.constant)
    n, d = p.case.points.shape
    J = np.array(p.truth.whole, dtype=float).reshape(n, d, n, d).transpose(0, 2, 1, 3)
    S = p.truth.fields
    T = J - np.eye(n)[:, :, None, None] * S[:, None]
    norm = lambda M, e: np.linalg.norm(M.swapaxes(-1, -2) @ e, axis=-1)  # noqa: E731
    found = lipschitz.local_order(p.F, p.mu, p=math.inf)
    for e in p.rng.normal(size=(20, d)):
        e /= np.linalg.norm(e)
        above(found.upper, (norm(T, e).sum(1) + norm(S, e)).max())
    blocks = np.linalg.norm(T, 2, axis=(2, 3)).sum(1) + np.linalg.norm(S, 2, axis=(1, 2))
    above(blocks.max(), found.lower)


@row
def localize(p):
    found = lipschitz.local_lipschitz(p.F, p.mu)
    where = lipschitz.localize(found, p.F, p.mu)
    v = found.direction.numpy().ravel()
    u = p.truth.conjugated() @ v / float(found.particle)
    d = p.case.points.shape[1]
    near(where.particles, (v.reshape(-1, d) ** 2).sum(1) / (v @ v))
    near(where.responses, (u.reshape(-1, d) ** 2).sum(1))
    output, shares = p.case.layer["output"], []
    for h in range(len(output)):
        one = output * (np.arange(len(output)) == h)[:, None, None]
        alone = p.case._replace(layer={**p.case.layer, "output": one})
        shares.append(u @ type(p.truth)(alone).conjugated() @ v / float(found.particle))
    near(where.heads, shares)


@row
def largest_logits(p):
    there = np.flatnonzero(p.truth.alive)
    where = p.case.positions if p.case.positions is not None else [None] * len(p.case.points)
    scores = [
        [
            abs(s)
            for i in there
            for s in slow._scores(p.case, h, p.case.points[i], where[i]).values()
        ]
        for h in range(len(p.case.layer["query"]))
    ]
    near(p.F.largest_logits(p.mu), [max(of_head) for of_head in scores])


# ------------------------------------------------------------------ bounds at a measure


@row
def constant_upper(p):
    near(maps.constant_upper(p.F, p.mu), p.truth.constant)


@row
def certain_norm(p):
    at = maps.linearize(p.F, p.mu, geometry="wasserstein")
    for most in (maps._FACTORED, 0):  # by a factorisation, and from the blocks
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(maps, "_FACTORED", most)
            bound = maps.certain_norm(at)
        if bound is not None:
            above(bound, p.truth.constant)


@row
def local_upper(p):
    above(theorems.local_upper(p.F, p.mu), p.truth.constant)


@row
def table(p):
    radius = float(np.linalg.norm(p.case.points, axis=1).max()) * (1 + 1e-12)
    there = ParticleMeasure(p.mu.points, weights=None, positions=p.mu.positions)
    for mu in (p.mu, there):
        truth = p.at(mu)
        found = theorems.table(p.F, radius, mu.n_particles, points=mu).applicable
        lower = [one.value for one in found if one.side == "lower" and one.of.startswith("W₂")]
        for one in found:
            if one.side == "upper" and one.of.startswith(("W₂", "d₂")):
                above(one.value, [truth.constant, *(lower if "all measures" in one.of else [])])
            elif one.side == "upper" and one.of.startswith("Euclidean") and mu is there:
                above(one.value, truth.parts()[0])


def _tied(p, bound, norm):
    lightest = float(p.mu.weights[p.mu.log_weights > -math.inf].min())
    n = math.ceil(1 / max(lightest, 1e-300))
    J = np.array(p.truth.whole, dtype=float)
    above(bound(p.F, n), norm(J))


def _spectral(J):
    return np.linalg.norm(J, 2)


@row
def l2_attention_2(p):
    _tied(p, theorems.l2_attention_2, _spectral)
    _tied(p, theorems.l2_attention_2, lambda J: p.truth.parts()[0])


@row
def l2_theorem_3_2(p):
    _tied(p, theorems.l2_theorem_3_2, _spectral)


@row
def l2_attention_inf(p):
    _tied(p, theorems.l2_attention_inf, lambda J: np.abs(J).sum(1).max())


@row
def l2_attention_max(p):
    n, d = p.case.points.shape
    moves = p.rng.normal(size=(50, n, d))
    moves /= np.linalg.norm(moves, axis=-1, keepdims=True)
    reach = lambda J: np.linalg.norm((J @ moves.reshape(50, -1).T).T.reshape(50, n, d), axis=-1)  # noqa: E731
    _tied(p, theorems.l2_attention_max, lambda J: reach(J).max())


# ------------------------------------------------------------------ bounds in a ball


@row
def ball_upper(p):
    for radius in (0.0, 0.02, 0.3):
        above(lipschitz.ball_upper(p.F, p.mu, radius), p.at(p.moved(radius)).constant)


@row
def ball_bounds(p):
    for radius in (0.02, 0.3):
        found, moved = maps.ball_bounds(p.F, p.mu, radius), p.at(p.moved(radius))
        above(found.constant, p.truth.constant)
        above(found.upper, moved.constant)
        change = np.linalg.norm(moved.conjugated() - p.truth.conjugated(), 2)
        fields = np.linalg.norm(moved.fields - p.truth.fields, 2, axis=(1, 2)).max()
        above(found.change, max(change, fields))
        moves = np.linalg.norm(moved.images - p.truth.images, axis=1)
        above(np.where(p.truth.alive, found.displacement, math.inf), moves)


@row
def certified_radius(p):
    classes = int(p.rng.integers(2, 4))
    weight, bias = p.rng.normal(size=(classes, p.mu.dim)), p.rng.normal(size=classes)
    token = 0 if p.rng.random() < 0.5 else None
    found = lipschitz.certified_radius(p.F, lipschitz.Readout(weight, bias, token), p.mu)

    def scores(truth):
        shares = np.exp(truth.case.log_weights)
        return weight @ (shares @ truth.images if token is None else truth.images[token]) + bias

    assert int(found.label) == scores(p.truth).argmax()
    for step in p.rng.normal(size=(20, *p.mu.points.shape)):
        step *= min(float(found.value), 10.0) / np.linalg.norm(step)
        near_x = p.at(p.mu.replace(p.mu.points + torch.as_tensor(step)))
        assert scores(near_x).argmax() == int(found.label)


# ------------------------------------------------------------------ distances and searches


def _w2(x: Any, a: Any, y: Any, b: Any, places: Any = None) -> float:
    """W₂, position by position where there are places, by POT's simplex; squared costs."""
    total = 0.0
    for s in [None] if places is None else np.unique(places[0]):
        i = slice(None) if s is None else places[0] == s
        j = slice(None) if s is None else places[1] == s
        cost = ((x[i][:, None] - y[j]) ** 2).sum(-1)
        if a[i].sum() > 1e-100:
            share = a[i].sum()
            total += share * ot.emd2(a[i] / share, b[j] / b[j].sum(), cost)
    return math.sqrt(max(total, 0.0))


def _secant(p: Problem, mu: ParticleMeasure, nu: ParticleMeasure, conditional: bool) -> float:
    truths = p.at(mu), p.at(nu)
    a, b = (np.exp(truth.case.log_weights) for truth in truths)
    places = tuple(truth.case.positions for truth in truths) if conditional else None
    images = _w2(truths[0].images, a, truths[1].images, b, places)
    return images / _w2(truths[0].case.points, a, truths[1].case.points, b, places)


@row
def secant_ratio(p):
    nu = p.moved(0.3)
    found = lipschitz.secant_ratio(p.F, p.mu, nu)
    assert found.conditional == p.mu.is_positioned
    near(found.value, _secant(p, p.mu, nu, p.mu.is_positioned))


@row
def compare_lemma_3_2(p):
    found = lipschitz.compare_lemma_3_2(p.F, p.mu.points, steps=(1e-4,))
    sees = p.case.causal or looks_at_positions(p.case.kernel)
    X = p.mu.points
    truth = p.at(ParticleMeasure.from_sequence(X) if sees else ParticleMeasure(X))
    particle, splitting = truth.parts()
    near([found.euclidean, found.particle, found.splitting], [particle, particle, splitting])
    near(found.wasserstein, truth.constant)
    near(found.euclidean_secant.sel(perturbation="top"), [particle], 5e-2)
    split = float(found.wasserstein_secant.sel(perturbation="splitting")[0])
    assert abs(split - splitting) <= 5e-2 * splitting + 1e-3


@row
def worst_case(p):
    mu, found = lipschitz.worst_case(p.F, 1.2, positioned=p.mu.is_positioned, starts=2, steps=2)
    assert float(mu.points.norm(dim=-1).max()) <= 1.2 * (1 + 1e-12)
    near(found.value, p.at(mu).constant)


# ------------------------------------------------------------------ blocks


@row
def Chain(p):
    G, after = layers.Chain([p.F, p.F]), p.at(p.mu.replace(torch.as_tensor(p.truth.images)))
    near(G(p.mu).points[p.truth.alive], after.images[p.truth.alive])
    at = maps.linearize(G, p.mu, geometry="wasserstein")
    near(at.atoms.to_dense(), after.conjugated() @ p.truth.conjugated())
    near(at.field.to_dense(), after.fields @ p.truth.fields)
    composed = max(
        np.linalg.norm(after.conjugated() @ p.truth.conjugated(), 2),
        np.linalg.norm(after.fields @ p.truth.fields, 2, axis=(1, 2)).max(),
    )
    with contextlib.suppress(NotImplementedError):
        above(theorems.local_upper(G, p.mu), composed)
        above(lipschitz.ball_upper(G, p.mu, 0.0), composed)


@row
def invert(p):
    constant = 4 * p.truth.constant
    nu = p.mu.replace(torch.as_tensor(p.case.points + 0.5 * p.truth.images / constant))
    found = layers.invert(layers.contractive(p.F, 0.5, constant=constant), nu).measure
    back = p.at(found)
    there = p.truth.alive
    near((back.case.points + 0.5 * back.images / constant)[there], nu.points[there], 1e-7)


# ------------------------------------------------------------------ flows


def _runge_kutta(p: Problem, end: float, steps: int) -> np.ndarray:
    x, h = p.case.points, end / steps
    speed = lambda y: p.at(p.mu.replace(torch.as_tensor(y))).images  # noqa: E731
    for _ in range(steps):
        k1 = speed(x)
        k2 = speed(x + h / 2 * k1)
        k3 = speed(x + h / 2 * k2)
        x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + speed(x + h * k3))
    return x


@row
def flow(p):
    ds = dynamics.flow(p.F, p.mu, [0.0, 0.2], keep_points=True)
    end, there = dynamics.measure_at(ds, -1), p.truth.alive
    near(end.points[there], _runge_kutta(p, 0.2, 16)[there], 1e-4)


@row
def stability(p):
    found = dynamics.stability(p.F, p.mu, [0.0, 0.1], method="euler", step=0.1).isel(time=-1)
    particle, splitting = p.truth.parts(1.0, 0.1)
    near([found.constant_particle, found.constant_splitting], [particle, splitting])
    near(found.constant, max(particle, splitting))
