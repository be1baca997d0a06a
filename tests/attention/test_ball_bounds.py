"""The bound over a ball around an input equals the oracle's, and no search exceeds it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, sampling
from meanfield.attention import input_bounds, kernels, normalizations
from meanfield.attention.ball_bounds import ball_bound, norm_from_above
from meanfield.attention.input_bounds import Frames
from meanfield.attention.kernels.kernel import At, ModifiedKernel, Motion
from meanfield.attention.sigmoid_ball import _Rows as sigmoid_rows
from meanfield.attention.weights import Block
from meanfield.lipschitz import local_lipschitz
from meanfield.maps import linearize
from meanfield.maps.map import ball_bounds
from tests.attention import input_bounds_oracles as oracle
from tests.attention.input_bounds_oracles import case

F64 = torch.float64


@given(
    seed=st.integers(0, 2**31),
    eps=st.sampled_from([0.0, 1e-6, 1e-3, 0.05, 0.7]),
    splitting=st.booleans(),
)
@settings(max_examples=30)
def test_it_is_the_bound_of_the_oracle(seed, eps, splitting):
    F, mu = case(seed)
    constant = float(local_lipschitz(F, mu).value)
    by_change, by_columns, moves = oracle.ball_bounds(
        oracle.heads(F, mu), mu.weights.numpy(), eps, constant, splitting=splitting
    )
    weights = F.weights(mu)
    found = ball_bound(weights, eps, splitting=splitting).at_most(
        torch.tensor(constant, dtype=F64)
    )
    displacement = weights.unsort(found.displacement[..., None])[..., 0]
    np.testing.assert_allclose(displacement.numpy(), moves, rtol=1e-8, atol=1e-300)
    # Blocks ‖V + δuᵀ‖ and ‖N‖ are bounded from above, the latter tightly.
    assert float(found.upper) >= min(by_change, by_columns) * (1 - 1e-9)
    assert float(found.upper) <= by_columns * (1 + 1e-9)
    if F.parameters.dim == 1:  # where blocks are numbers, by_change is exact too
        gap = float(found.upper) - min(by_change, by_columns)
        assert gap <= 0.15 * (by_change - constant) + 1e-9 * constant


def climbed(F, mu, eps, g, *, copies=1, rounds=8, width=24) -> float:
    """The largest local constant that a random climb inside the ball finds."""
    n, d = mu.n_particles * copies, mu.dim
    centre = mu.points.repeat_interleave(copies, -2)
    share = torch.rand(mu.n_particles, copies, dtype=F64, generator=g).log().mul(2)
    logs = (mu.log_weights[:, None] + share.log_softmax(-1)).flatten()
    s = None if mu.positions is None else mu.positions.repeat_interleave(copies, -1)
    best, place, size = 0.0, torch.zeros(n, d, dtype=F64), 1.0
    for _ in range(rounds):
        step = size * eps * torch.randn(width, n, d, dtype=F64, generator=g) / math.sqrt(d)
        moved = place + step
        moved = moved * (eps / moved.norm(dim=-1, keepdim=True).clamp_min(eps))
        batch = ParticleMeasure(
            centre + moved,
            log_weights=logs.expand(width, -1),
            positions=None if s is None else s.expand(width, -1),
        )
        values = local_lipschitz(F, batch).value
        k = int(values.argmax())
        if float(values[k]) > best:
            best, place = float(values[k]), moved[k]
        else:
            size /= 2
    return best


@pytest.mark.parametrize("copies", [1, 3])
@given(seed=st.integers(0, 2**31), eps=st.sampled_from([1e-3, 1e-2, 0.1, 1.0]))
@settings(max_examples=10)
def test_no_constant_in_the_ball_exceeds_it_whether_atoms_split_or_not(copies, seed, eps):
    F, mu = case(seed)
    g = torch.Generator().manual_seed(seed)
    constant = local_lipschitz(F, mu).value
    found = ball_bound(F.weights(mu), eps, splitting=copies > 1).at_most(constant)
    assert climbed(F, mu, eps, g, copies=copies) <= float(found.upper) * (1 + 1e-9)


KERNELS = {
    "rotary": lambda w: kernels.rotary(20.0, length=6, dim=2 * (w // 2)),
    "partial rotary": lambda w: kernels.rotary(20.0, length=6, dim=2),
    "QK-norm": lambda w: kernels.qk_norm(1.5, 0.7, eps=1e-2),
    "cosine": lambda w: kernels.cosine(3.0, eps=0.1),
    "QK-norm, then rotary": lambda w: kernels.rotary(length=6, dim=2, inner=kernels.qk_norm()),
    "soft cap": lambda w: kernels.soft_cap(1.0),
    "soft cap of rotary": lambda w: kernels.soft_cap(2.0, inner=kernels.rotary(length=6, dim=2)),
    "window": lambda w: kernels.window(0.5),
    "ALiBi": lambda w: kernels.alibi([2.0]),
    "L2": lambda w: kernels.l2,
    "L2 in a window": lambda w: kernels.window(0.5, inner=kernels.l2),
    "soft cap of L2": lambda w: kernels.soft_cap(8.0, inner=kernels.l2),
}
# Of the dot product or the kernel named before them.
NORMALIZED = {
    "sink": normalizations.sink([0.5, 3.0]),
    "ALiBi, sink": normalizations.sink(-1.0),
    "rotary, sink": normalizations.sink(1.0),
    "QK-norm, sink": normalizations.sink(1.0),
    "soft cap, sink": normalizations.sink(1.0),
    "L2, sink": normalizations.sink(-2.0),
    "sigmoid": normalizations.sigmoid,
    "rotary, sigmoid": normalizations.sigmoid,
    "QK-norm, sigmoid": normalizations.sigmoid,
    "L2, sigmoid": normalizations.sigmoid,
    "window, sigmoid": normalizations.sigmoid,
}


def with_kernel(name: str, seed: int) -> tuple[SelfAttention, ParticleMeasure]:
    """A layer with grouped heads and biases of the keys, light atoms, positions."""
    g = torch.Generator().manual_seed(seed)
    par = AttentionParameters.random(3, n_heads=2, head_dim=3, biases=True, generator=g)
    shared = AttentionParameters(
        par.query, par.key[:1], par.value[:1], par.output, par.query_bias, None, None, None,
        torch.randn(1, 3, dtype=F64, generator=g),
    )  # fmt: skip
    own = name.split(", si")[0]
    kernel = KERNELS[own](3) if own in KERNELS else kernels.dot_product
    rows = NORMALIZED.get(name, normalizations.softmax)
    F = SelfAttention(shared, causal=bool(seed % 2), kernel=kernel, normalization=rows)
    logs = (2 * torch.randn(6, dtype=F64, generator=g)).log_softmax(-1)
    points = 1.5 * torch.randn(6, 3, dtype=F64, generator=g)
    return F, ParticleMeasure(
        points, log_weights=logs, positions=torch.arange(1, 7, dtype=F64) / 6
    )


@pytest.mark.parametrize("name", ["dot product", *KERNELS, *NORMALIZED])
def test_the_bounds_of_every_kernel_hold_in_the_ball(name):
    for seed, eps in enumerate([1e-3, 0.3]):
        F, mu = with_kernel(name, seed)
        g = torch.Generator().manual_seed(seed)
        for copies in (1, 2):
            near = F.ball_bounds(mu, eps, splitting=copies > 1)
            found = climbed(F, mu, eps, g, copies=copies, rounds=3, width=12)
            assert found <= float(near.upper) * (1 + 1e-9)
        step = torch.randn(40, *mu.points.shape, dtype=F64, generator=g)
        moved = mu.points + eps * step / step.norm(dim=-1, keepdim=True)
        logs, s = (t.expand(40, -1) for t in (mu.log_weights, mu.positions))
        batch = ParticleMeasure(moved, log_weights=logs, positions=s)
        length = (F(batch).points - F(mu).points).norm(dim=-1).amax(0)
        assert (length <= near.displacement * (1 + 1e-9)).all()
        change = (
            F.linearize(batch, geometry="wasserstein").to_dense()
            - F.linearize(mu, geometry="wasserstein").to_dense()
        )
        assert float(torch.linalg.matrix_norm(change, 2).max()) <= float(near.change) * (1 + 1e-9)


@pytest.mark.parametrize("inner", [kernels.dot_product, kernels.cosine(0.5, eps=0.1)])
def test_queries_that_follow_the_scale_move_as_it_does_whatever_they_are_normalised_of(inner):
    """Inside another normalisation they come without the scale, which must not be taken again."""
    kernel = kernels.qk_norm(eps=0.1, inner=inner)
    points, one = case(5)[1].points, torch.tensor(0.3, dtype=F64)
    d = points.shape[-1]
    eye, found = torch.eye(d, dtype=F64), []
    for scale in (0.5, 3.0, -0.5):
        par = AttentionParameters(eye, eye, eye, scale=scale)
        queries, _ = kernel.motion(At(par, points, None), one)
        found.append([*queries, kernel.feature_sizes(par, 2.0).query_slope])
    for small, large, negative in zip(*found, strict=True):
        torch.testing.assert_close(large, 6 * small)
        torch.testing.assert_close(negative, small)


@pytest.mark.parametrize(
    ("kernel", "rows", "scale", "points", "eps"),
    [
        (kernels.qk_norm(), normalizations.sink(0.0), -3.0, [[1.0]], 0.1),
        (kernels.qk_norm(), normalizations.softmax, -1.0, [[1.0], [0.5]], 0.4),
        (kernels.cosine(1.0), normalizations.sink(0.0), -1.0, [[1.0]], 0.1),
        (kernels.cosine(1.0, eps=0.01), normalizations.softmax, -1.0, [[1.0], [-1.0]], 0.95),
    ],
)
@pytest.mark.parametrize("splitting", [True, False])
def test_the_bounds_hold_under_a_negative_scale(kernel, rows, scale, points, eps, splitting):
    one = [[1.0]]
    parameters = AttentionParameters(one, one, one, scale=scale)
    F = SelfAttention(parameters, kernel=kernel, normalization=rows)
    mu = ParticleMeasure(points)
    near = F.ball_bounds(mu, eps, splitting=splitting)
    shift = torch.linspace(-eps, eps, 41, dtype=F64)
    moved = ParticleMeasure(mu.points + shift[:, None, None])
    constant = local_lipschitz(F, moved, strict=False)
    found = constant.value if splitting else constant.particle
    assert float(found.max()) <= float(near.upper) * (1 + 1e-9)
    length = (F(moved).points - F(mu).points).norm(dim=-1).amax(0)
    assert (length <= near.displacement * (1 + 1e-9)).all()


@pytest.mark.parametrize("name", ["dot product", *KERNELS])
def test_queries_and_keys_move_turn_and_bend_no_more_than_a_kernel_says(name):
    """Alone: in the bound of a layer another term may hide one that is too small."""
    F, mu = with_kernel(name, 2)
    par, kernel, s = F.parameters, F.kernel, mu.positions
    # Points near 0 too, where normalised queries bend most.
    points = mu.points * torch.logspace(-2, 0, 6, dtype=F64)[:, None]
    g, width = torch.Generator().manual_seed(7), par.query.shape[-2]  # squares come behind
    for eps in (1e-3, 0.1, 0.8):
        told = kernel.motion(At(par, points, s), torch.tensor(eps, dtype=F64))
        steps = torch.randn(400, *points.shape, dtype=F64, generator=g)
        moved = points + eps * steps / steps.norm(dim=-1, keepdim=True)

        def both(x):
            f = kernel.features(par, x[None], s[:1]).whole()  # one point, as if at one position
            return f.q[:, 0, :width], f.k[:, 0, :width]

        slopes_of = torch.func.vmap(torch.func.vmap(torch.func.jacrev(both)))
        images_of = torch.func.vmap(torch.func.vmap(both))
        at = points.expand_as(moved)
        for side in range(2):
            most = Motion(*(t.expand(par.n_heads, len(points)).mT for t in told[side]))
            away = (images_of(moved)[side] - images_of(at)[side]).norm(dim=-1)
            slopes, before = slopes_of(moved)[side], slopes_of(at)[side]
            bent = torch.linalg.matrix_norm(slopes - before, 2)
            found = away, torch.linalg.matrix_norm(slopes, 2), bent
            for name_of_part, part, bound in zip(Motion._fields, found, most, strict=True):
                assert (part <= bound * (1 + 1e-9) + 1e-13).all(), name_of_part


def test_scores_bend_as_the_kernel_of_squares_says():
    F, mu = with_kernel("L2", 0)

    def scores(x, y):
        f = F.kernel.features(F.parameters, torch.stack([x, y]), None).whole().folded(1.0)
        return (f.q[:, 0] * f.k[:, 1]).sum(-1)

    for side, told in enumerate(F.kernel.bends(F.parameters)):
        found = torch.func.hessian(scores, side)(mu.points[0], mu.points[1])
        torch.testing.assert_close(torch.linalg.matrix_norm(found, 2), told)


EVERY = Block(slice(0, 2), slice(0, 2))


def told_of(F, mu, eps, away=0.0) -> tuple[torch.Tensor, ...]:
    """log P of two atoms, and what a ball does to scores and to their slopes."""
    frames = Frames.of(F.weights(mu))
    log_p, gain = frames.log_p_and_gain(EVERY)
    if F.normalization is normalizations.sigmoid:
        gain = torch.ones_like(log_p)
    vectors, seen = frames.rows(EVERY, log_p.exp(), gain), log_p > -math.inf
    size = torch.tensor(eps, dtype=F64)
    motion, pulled_away = frames.motion(size), torch.full_like(log_p, away)
    return log_p, *frames.changes(EVERY, motion, vectors, size[None, None], seen, pulled_away)


@pytest.mark.parametrize(
    ("query", "key", "rows"),
    [
        (0.1, 2.0, normalizations.softmax),
        (2.0, 0.1, normalizations.sink(0.0)),
        (2.0, 0.1, normalizations.sigmoid),
    ],
)
def test_scores_without_a_slope_move_by_their_squares(query, key, rows):
    par = AttentionParameters([[query]], [[key]], [[1.0]], scale=1.0)
    F = SelfAttention(par, kernel=kernels.l2, normalization=rows)
    mu = ParticleMeasure([[0.0], [0.0]])
    own, u_change, y_change = (part.flatten() for part in told_of(F, mu, 1.0)[1:])
    if rows.sink is not None:  # a null key does not move, but the mean of the row does
        assert (told_of(F, mu, 1.0, away=1.0)[1][..., -1] == 1).all()
    steps = torch.cartesian_prod(*[torch.linspace(-1, 1, 9, dtype=F64)] * 2)
    apart = query * steps[:, :1] - key * steps
    moved = torch.nn.functional.pad(-apart.square(), (0, own.shape[-1] // 2 - 2))
    shifts = rows is normalizations.softmax
    low, high = (
        (moved - own[: moved.shape[-1]]).amax(-1),
        (moved + own[: moved.shape[-1]]).amin(-1),
    )
    # Rows of the softmax move together by any number; a null key, in the last column, by none.
    assert (
        (low <= high).all() if shifts or rows.sink is not None else (low.maximum(-high) <= 0).all()
    )
    assert float(u_change.max()) == pytest.approx(float((2 * key * apart).abs().max()))
    pulled = 2 * query * (key * steps if shifts else apart)
    assert float(y_change.max()) == pytest.approx(float(pulled.abs().max()))


@pytest.mark.parametrize(
    "points", [[[1.0, 1.0], [1.0, 1.0]], [[30.0, 0.03], [0.03, 30.0]], [[0.0, 0.0], [30.0, 0.0]]]
)
def test_blocks_under_sigmoids_change_by_no_more_than_each_is_said_to(points):
    """Far out the second derivative of the sigmoid is all that counts."""
    par = AttentionParameters.from_bilinear(0.2 * np.eye(2), np.eye(2))
    F = SelfAttention(par, normalization=normalizations.sigmoid)
    mu = ParticleMeasure(points)
    g, start = torch.Generator().manual_seed(2), F.linearize(mu).to_dense()
    frames = Frames.of(F.weights(mu))
    for eps in (1e-4, 0.01, 3.0):
        step = torch.randn(400, 2, 2, dtype=F64, generator=g)
        step[::2, :, 1], step[1::2, :, 0] = 0.0, 0.0
        batch = mu.expand(400).replace(mu.points + eps * step / step.norm(dim=-1, keepdim=True))
        size = torch.tensor(eps, dtype=F64)
        rows = sigmoid_rows(frames, EVERY, frames.motion(size), size)
        there = F.linearize(batch).to_dense()
        for matrices, most in ((there - start, rows.change), (there, rows.upper)):
            off = torch.stack([matrices[:, :2, 2:], matrices[:, 2:, :2]], 1)
            share = 2 * torch.linalg.matrix_norm(off, 2) / (frames.unit * most[0, [0, 1], [1, 0]])
            assert (0.2 if eps < 1 else 0) < float(share.max()) <= 1 + 1e-9
        fields, own = linearize(F, batch).field.to_dense(), linearize(F, mu).field.to_dense()
        for matrices, most in ((fields - own, rows.turning_change), (fields, rows.turning)):
            share = torch.linalg.matrix_norm(matrices, 2) / (frames.unit * most[0])
            assert float(share.max()) <= 1 + 1e-9
        near = F.ball_bounds(mu, eps)
        assert float(torch.linalg.matrix_norm(there - start, 2).max()) <= float(near.change)
        far_moved = (F(batch).points - F(mu).points).norm(dim=-1).amax(0) / near.displacement
        assert (0.3 if eps < 1 else 0) < float(far_moved.max()) <= 1 + 1e-9


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_an_output_moves_as_a_sigmoid_rises_from_below_and_falls_from_above(sign):
    """The farther way of a small sigmoid is up, and of a large one down."""
    par = AttentionParameters.from_bilinear([[0.04 * sign]], [[1.0]])
    F = SelfAttention(par, normalization=normalizations.sigmoid)
    x = 10 + torch.linspace(-1, 1, 41, dtype=F64)[:, None, None]
    images = F(ParticleMeasure(x)).points - F(ParticleMeasure([[10.0]])).points
    most = float(F.ball_bounds(ParticleMeasure([[10.0]]), 1.0).displacement)
    assert 0.5 * most < float(images.abs().max()) <= most


@pytest.mark.parametrize("rows", [normalizations.softmax, normalizations.sink(-30.0)])
def test_scores_under_a_cap_move_apart_though_their_keys_are_near(rows):
    """Both dot products rise by 10 ε: one score of 0 by as much, one at the cap by little."""
    eye = torch.eye(5, dtype=F64)
    key = eye[[2, 3]] * torch.tensor([[1e-3], [1.0]], dtype=F64)
    heads = (each[None] for each in (eye[:2], key, eye[4:], eye[:, 4:]))
    F = SelfAttention(
        AttentionParameters(*heads, scale=1.0), kernel=kernels.soft_cap(2.0), normalization=rows
    )
    mu = ParticleMeasure([[100.0, 0.0, 0.0, 10.0, 1.0], [100.0, 0.0, 50.0, 10.0, -1.0]])
    for eps in (1e-4, 0.02):
        near = F.ball_bounds(mu, eps)
        moved = (F(mu.replace(mu.points + eps * eye[1])).points - F(mu).points).norm(dim=-1)
        assert (moved <= near.displacement).all() and (0.2 * near.displacement < moved).all()


@pytest.mark.parametrize("turns", ["query", "key"])
@pytest.mark.parametrize(
    "kernel", [*(kernels.cosine(c, eps=1e-6) for c in (3.0, 100.0)), kernels.qk_norm(eps=1e-6)]
)
def test_scores_without_a_slope_move_as_normalised_vectors_turn(kernel, turns):
    """One side turns, of length 1 and along the other's line, which is so long that it stays."""
    near, far = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    query, key = (near, far) if turns == "query" else (far, near)
    F = SelfAttention(AttentionParameters(query, key, np.eye(3)), kernel=kernel)
    apart = [1.0, -100.0] if turns == "query" else [-1.0, 100.0]
    mu = ParticleMeasure([[1.0, 0.0, 100.0], [apart[0], 0.0, apart[1]]])
    log_p, own, *_ = told_of(F, mu, 0.5)
    moved = mu.points + torch.tensor([0.0, 0.5, 0.0], dtype=F64)
    change = F.weights(mu.replace(moved)).log_p(EVERY) - log_p
    assert ((change - own).amax(-1) <= (change + own).amin(-1)).all()


def test_slopes_of_capped_scores_change_as_the_cap_bends():
    """A key moves, seen by a query of length 10, where the cap bends most."""
    par = AttentionParameters([[1.0, 0.0]], [[0.0, 1.0]], np.eye(2), scale=1.0)
    F = SelfAttention(par, kernel=kernels.soft_cap(1.0))
    *_, turned, _ = told_of(F, ParticleMeasure([[10.0, 0.0], [0.0, 0.0658]]), 1e-4)
    there, here = (1 - math.tanh(10 * key) ** 2 for key in (0.0659, 0.0658))
    assert 10 * abs(there - here) <= float(turned.max())
    nested, s = kernels.soft_cap(2.0, inner=F.kernel), torch.linspace(-5, 5, 2001, dtype=F64)
    slopes = torch.func.jvp(nested.activation, (s,), (torch.ones_like(s),))[1]
    assert float(slopes.diff().abs().max()) <= nested.curvature * float(s[1] - s[0])


def test_slopes_of_sigmoids_change_as_the_second_derivative_says():
    """A key moves, seen by a query of length 100, where the slope changes fastest."""
    par = AttentionParameters([[1.0, 0, 0]], [[0.0, 1, 0]], [[0.0, 0, 1]], scale=1.0)
    F = SelfAttention(par, normalization=normalizations.sigmoid)
    mu, eps = ParticleMeasure([[100.0, 0.0, 0.0], [0.0, 0.01317, 1.0]]), 1e-5
    frames, size = Frames.of(F.weights(mu)), torch.tensor(eps, dtype=F64)
    rows = sigmoid_rows(frames, EVERY, frames.motion(size), size)
    moved = mu.replace(mu.points + eps * torch.tensor([[0.0, 0, 0], [0, 1, 0]]))
    off = 2 * (F.linearize(moved).to_dense() - F.linearize(mu).to_dense())[0, 3:]
    assert float(off.norm()) <= float(frames.unit * rows.change[0, 0, 1])


def test_an_atom_that_stays_is_moved_by_the_others():
    F, mu = with_kernel("L2", 0)
    radii = torch.tensor([0.0, 0.1, 0.1, 0.1, 0.1, 0.1], dtype=F64)
    moved = F(mu.replace(mu.points + radii[:, None] / 3)).points - F(mu).points
    assert 0 < float(moved[0].norm()) <= float(ball_bounds(F, mu, radii).displacement[0])


def test_an_output_moves_as_far_as_keys_with_slopes_of_their_own_move_it():
    """Slopes that agree with vⱼ − mᵢ add to ‖V‖; slopes that all keys share add in squares."""
    eye, kernel = np.eye(2), kernels.rotary(frequencies=[math.pi])
    F = SelfAttention(AttentionParameters(eye, eye, eye, scale=1.0), kernel=kernel)
    mu = ParticleMeasure([[1.0, 0.0], [-1.0, 0.0]], positions=[0.0, 1.0])
    J = F.linearize(mu).to_dense()[0].reshape(2, 2)  # of the first coordinate, by both keys
    assert 1e-4 * float(J.norm(dim=-1).sum()) <= 1.001 * float(
        F.ball_bounds(mu, 1e-4).displacement[0]
    )


@pytest.mark.parametrize("name", [*KERNELS, *NORMALIZED])
def test_the_bounds_of_other_kernels_are_continuous_in_the_radius(name):
    F, mu = with_kernel(name, 1)
    radii = torch.tensor([0.0, 1e-9, 1e-4, 1e-2, 1.0], dtype=F64)
    found = ball_bounds(F, mu, radii[:, None])
    constant = float(local_lipschitz(F, mu).value)
    assert float(found.upper[0]) == pytest.approx(constant, rel=1e-9)
    assert float(found.upper[1]) == pytest.approx(constant, rel=1e-5)
    assert float(found.upper[3]) <= 3 * constant
    assert (found.upper.diff() >= 0).all() and (found.displacement.diff(dim=0) >= 0).all()


def test_rotations_by_nothing_give_the_bound_of_the_dot_product():
    F, mu = with_kernel("rotary", 1)
    still = SelfAttention(
        F.parameters, causal=True, kernel=kernels.rotary(frequencies=[0.0], length=6)
    )
    plain = SelfAttention(F.parameters, causal=True)
    for name in ("constant", "change", "upper", "displacement"):
        one, other = (getattr(G.ball_bounds(mu, 0.1), name) for G in (still, plain))
        torch.testing.assert_close(one, other, rtol=1e-9, atol=0)


@pytest.mark.parametrize("log_ratio", [-5.0, -18.0, -22.0])
def test_a_light_part_of_an_atom_has_more_attention_than_its_share(log_ratio):
    # One atom that splits into two Diracs: no bound may rest on P' ≤ 1 then.
    F = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]))
    mu = ParticleMeasure([[10.0]])
    parts = torch.tensor([log_ratio, 0.0], dtype=F64).log_softmax(-1)
    split = ParticleMeasure([[9.0], [11.0]], log_weights=parts)
    constant, seen = local_lipschitz(F, mu).value, F.weights(mu)
    assert float(local_lipschitz(F, split).value) <= float(
        ball_bound(seen, 1.0).at_most(constant).upper
    )
    tokens = ball_bound(seen, 1.0, splitting=False).at_most(constant).upper
    assert float(tokens) < float(local_lipschitz(F, split).value)


def test_batches_of_measures_and_radii_and_blocks_change_nothing(monkeypatch):
    F = SelfAttention(AttentionParameters.random(4, n_heads=2, biases=True), causal=True)
    mu = ParticleMeasure.from_sequence(torch.randn(3, 6, 4, dtype=F64))
    eps = torch.tensor([0.0, 0.01, 0.5], dtype=F64)
    constant = local_lipschitz(F, mu).value
    together = ball_bound(F.weights(mu), eps).at_most(constant)
    monkeypatch.setattr(input_bounds, "_CHUNK_ENTRIES", 1)
    for k in range(3):
        one = ball_bound(F.weights(mu[k]), eps[k]).at_most(constant[k])
        torch.testing.assert_close(together.upper[k], one.upper)
        torch.testing.assert_close(together.displacement[k], one.displacement)


def test_light_and_absent_atoms_and_large_radii_give_numbers():
    F = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]))
    light = sampling.two_diracs(radius=450**0.5, log_ratio=-900.0, direction=[1.0])
    constant = local_lipschitz(F, light).value
    found = ball_bound(F.weights(light), 1e-6).at_most(constant).upper
    assert float(constant) <= float(found) < 1.1 * float(constant)
    absent = ParticleMeasure([[5.0], [1.0], [-1.0]], weights=[0.0, 0.5, 0.5])
    present = ParticleMeasure([[1.0], [-1.0]])
    rows = [{"normalization": each} for each in (normalizations.sink(0.0), normalizations.sigmoid)]
    for G in (F, *(replace(F, **each) for each in ({"kernel": kernels.l2}, *rows))):
        without, beside = (G.ball_bounds(mu, 0.1) for mu in (present, absent))
        torch.testing.assert_close(beside.upper, without.upper)
        torch.testing.assert_close(beside.change, without.change)
        torch.testing.assert_close(beside.displacement[1:], without.displacement)
    huge = ball_bound(F.weights(present), 1e6)
    assert not torch.isnan(huge.upper) and float(huge.upper) > 1e6
    for G in (F, replace(F, normalization=normalizations.sigmoid)):
        for wrong in (-1.0, math.nan):
            with pytest.raises(ValueError, match="radii: expected numbers ≥ 0"):
                G.ball_bounds(present, wrong)


@pytest.mark.parametrize(("dtype", "bias", "size"), [
    (torch.float32, 110.0, 1e12), (torch.float64, 800.0, 1e45), (torch.float64, 740.0, 1e45),
])  # fmt: skip
def test_sigmoids_that_underflow_at_the_input_are_not_absent_from_the_ball(dtype, bias, size):
    """The bound was 0 where the constant is 5,858 and 1.9e5: scores rise to a tenth of −bias."""
    one = torch.ones(1, 1, dtype=dtype)
    layer = AttentionParameters(
        0 * one, one, size * one, one[None], query_bias=bias * one, scale=1.0
    )
    F = SelfAttention(layer, normalization=normalizations.sigmoid)
    for end in (-1.0, 1.0):
        mu = ParticleMeasure(end * one)
        for eps in (0.05, 0.1, 0.3, 0.5, 0.8, 0.88, 1.0, 1.9):
            bound = float(F.ball_bounds(mu, eps).at_most(local_lipschitz(F, mu).value).upper)
            for step in (0.5 * eps, eps):
                moved = mu.replace(mu.points - end * step)
                assert float(local_lipschitz(F, moved).value) <= bound


@pytest.mark.parametrize(("dtype", "power"), [(torch.float32, 80), (torch.float64, 520)])
@pytest.mark.parametrize("eps", [0.0, 0.05])
def test_covariances_beyond_the_number_range_lower_no_bound(dtype, power, eps):
    # Cosines do not change with the unit of points, so neither do derivatives.
    parameters = AttentionParameters.random(2, n_heads=1, dtype=dtype)
    F = SelfAttention(parameters, kernel=kernels.cosine(3.0))
    mu = ParticleMeasure(torch.tensor([[1.0, 2.0], [-0.5, 1.0], [2.0, -1.0]], dtype=dtype))
    unit = 2.0**power
    near, far = F.ball_bounds(mu, eps), F.ball_bounds(mu.replace(unit * mu.points), unit * eps)
    assert far.upper >= 0.999 * near.upper
    assert far.change >= 0.999 * near.change
    assert (far.displacement >= 0.999 * unit * near.displacement).all()


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *itertools.product(["dot product", *KERNELS, "sink", "sigmoid"], [1e-300, 1e300]),
        *itertools.product(["dot product", "sink", "sigmoid"], [1e-165, 1e165]),
    ],
)
def test_bounds_are_linear_in_the_values_whatever_their_size(name, size):
    """Squares of values of 1e-165 are 0: the bound was, too."""
    F, mu = with_kernel(name, 1)
    par = F.parameters
    others = {"query_bias": par.query_bias, "key_bias": par.key_bias, "scale": par.scale}
    larger = AttentionParameters(par.query, par.key, size * par.value, par.output, **others)
    scaled = replace(F, parameters=larger)
    for eps in (0.0, 1e-3, 0.3):
        found, one = (G.ball_bounds(mu, eps) for G in (scaled, F))
        for part in ("change", "upper", "displacement"):
            ours, theirs = getattr(found, part), size * getattr(one, part)
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-14 * size)


@pytest.mark.parametrize("unit", [2.0**530, 2.0**-530])
def test_points_whose_squares_leave_the_number_range_have_the_bounds_of_another_unit(unit):
    """An eigenvalue solver raised."""
    eye = torch.eye(3, dtype=F64)
    points = torch.randn(5, 3, dtype=F64, generator=torch.Generator().manual_seed(1))
    F = SelfAttention(AttentionParameters(eye, eye, eye), kernel=kernels.qk_norm(eps=0.0))
    near, far = (F.ball_bounds(ParticleMeasure(u * points), 0.1 * u) for u in (1.0, unit))
    torch.testing.assert_close(far.change, near.change)
    torch.testing.assert_close(far.upper, near.upper)
    torch.testing.assert_close(far.displacement, unit * near.displacement)


@pytest.mark.parametrize("unit", [1.0, 2.0**-450])
@pytest.mark.parametrize("kernel", [kernels.dot_product, kernels.l2])
@pytest.mark.parametrize("splitting", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_weight_that_underflows_may_be_all_of_the_attention_in_the_ball(
    dtype, splitting, kernel, unit
):
    """The first token sees one of two alone, and beyond a place nearby the other alone."""
    unit = unit if dtype == F64 else unit ** (1 / 9)
    kind = torch.finfo(dtype)
    gap = -1.05 * math.log(kind.smallest_normal * kind.eps)
    if kernel is kernels.l2:  # −size²(x + y)²
        turn, points, size, place = -1.0, [[1.0], [-3.03]], (gap / 0.12) ** 0.5, 1.01
    else:
        turn, points, size, place = 1.0, [[0.01], [-1.0]], (gap / 0.01) ** 0.5, 0.0
    one, eps = torch.ones(1, 1, dtype=dtype), 0.0102
    par = AttentionParameters(size / unit * one, turn * size / unit * one, one, scale=1.0)
    F = SelfAttention(par, kernel=kernel)
    mu = ParticleMeasure(unit * torch.tensor(points, dtype=dtype))
    assert 0 in F.weights(mu).log_p(EVERY)[0, 0].exp()
    found = F.ball_bounds(mu, eps * unit, splitting=splitting)
    moved = mu.points.repeat(81, 1, 1)
    moved[:, 0, 0] = unit * (place + torch.linspace(-1e-4, 1e-4, 81, dtype=dtype))
    assert float((moved - mu.points).abs().max()) <= eps * unit
    batch = ParticleMeasure(moved)
    constants = local_lipschitz(F, batch, strict=False)
    largest = float((constants.value if splitting else constants.particle).max())
    assert 0.1 * size**2 < largest <= float(found.upper)
    length = (F(batch).points - F(mu).points)[..., 0].abs().amax(0)
    assert (length <= found.displacement * (1 + 1e-5)).all()
    if not splitting:
        assert float(found.upper) < 100 * largest


@pytest.mark.parametrize("kernel", [kernels.cosine(3.0), kernels.qk_norm(eps=0.0)])
@pytest.mark.parametrize("away", [0.0, 1e-12])
def test_round_a_query_of_0_whose_direction_jumps_there_is_no_bound(kernel, away):
    eye = torch.eye(2, dtype=F64)
    F = SelfAttention(AttentionParameters(eye, eye, eye), kernel=kernel)
    mu = ParticleMeasure([[away, 0.0], [1.0, 0.0], [0.0, 1.0], [-1.0, 0.5]])
    found = F.ball_bounds(mu, 1e-3)
    assert float(found.upper) == float(found.change) == math.inf
    moved = mu.points.clone()
    moved[0] = torch.tensor([0.0, 1e-6])
    assert float((F(mu.replace(moved)).points[0] - F(mu).points[0]).norm()) > 0.1
    assert float(found.displacement[0]) > 0.5


class Squashed(ModifiedKernel):
    """Another activation, and nothing said of its curvature."""

    inner = kernels.dot_product

    @property
    def activation(self):
        return lambda s: 0.01 * torch.tanh(s / 0.01)


def test_a_kernel_of_another_activation_has_not_the_curvature_of_the_inner_one():
    mu = ParticleMeasure(torch.randn(3, 2, dtype=F64))
    assert Squashed().curvature == math.inf
    par = AttentionParameters.random(2, generator=0)
    squashed, known = (SelfAttention(par, kernel=k) for k in (Squashed(), kernels.soft_cap(0.01)))
    assert squashed.ball_bounds(mu, 1e-3).change >= known.ball_bounds(mu, 1e-3).change


def test_a_norm_of_entries_of_which_nothing_is_known_has_no_bound():
    log_N = torch.zeros(2, 2, dtype=F64)
    assert float(norm_from_above(log_N)) == pytest.approx(2)
    log_N[0, 0] = math.nan
    assert float(norm_from_above(log_N)) == math.inf
