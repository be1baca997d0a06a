"""Layers and their composition: values computed by hand, and wrong arguments.

Their derivatives are held against dense automatic ones in `tests/maps/test_laws.py`.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, copies, secant_ratio
from meanfield.attention import kernels, normalizations
from meanfield.dynamics import flow
from meanfield.errors import NoDerivativeError
from meanfield.layers import (
    MLP,
    Chain,
    Clip,
    LayerNorm,
    Pointwise,
    Residual,
    RMSNorm,
    Sum,
    contractive,
)
from meanfield.lipschitz import ball_upper, local_lipschitz, one_sided
from meanfield.maps import Map, linearize
from meanfield.measures import pushforward
from tests.maps.small_maps import (
    MAPS,
    D,
    attention,
    cloud,
    draw,
    layer_norm,
    mlp,
    parallel,
    post_norm,
    pre_norm,
    rms_norm,
)


def test_values_of_the_norms_and_mlps_are_those_of_torch():
    x = draw(5, D, seed=3)
    mu = ParticleMeasure(x)
    norm, rms = layer_norm(), rms_norm()
    expected = torch.nn.functional.layer_norm(x, (D,), norm.weight, norm.bias, norm.eps)
    assert torch.allclose(norm(mu).points, expected, atol=1e-14)
    expected = torch.nn.functional.rms_norm(x, (D,), rms.weight, rms.eps)
    assert torch.allclose(rms(mu).points, expected, atol=1e-14)
    gated = mlp(True, "silu")
    gate = torch.nn.functional.silu(x @ gated.gate.T + gated.gate_bias)
    expected = (gate * (x @ gated.inner.T + gated.inner_bias)) @ gated.outer.T + gated.outer_bias
    assert torch.allclose(gated(mu).points, expected, atol=1e-13)


def test_the_bound_of_a_norm_is_attained_where_nothing_is_lost():
    # γ largest on a coordinate that is orthogonal to 1 and to x̂ up to little: d large.
    d = 400
    x = torch.zeros(d, dtype=torch.float64)
    x[:2] = torch.tensor([1.0, -1.0])
    gain = torch.ones(d, dtype=torch.float64)
    for norm in (LayerNorm(gain, None, 1e-6), RMSNorm(gain, 1e-6)):
        mu = ParticleMeasure(x[None])
        value, upper = float(local_lipschitz(norm, mu).value), float(norm.local_upper(mu))
        assert value <= upper <= value * (1 + 1e-8)
        at_zero = float(local_lipschitz(norm, ParticleMeasure(0 * x[None])).value)
        assert at_zero <= norm.global_upper <= at_zero * (1 + 1e-8)


@pytest.mark.parametrize("name", ["layer norm", "rms norm", "mlp", "gated", "pointwise"])
def test_bounds_do_not_see_an_absent_atom(name):
    F, x = MAPS[name](), draw(3, D)
    x[1] = 0.0 if "norm" in name else 50.0  # the bound there would be the largest
    mu = ParticleMeasure(x, [0.5, 0.0, 0.5])
    without = ParticleMeasure(x[[0, 2]])
    assert float(F.local_upper(mu)) == pytest.approx(float(F.local_upper(without)), rel=1e-12)


def test_composed_maps_are_bounded_as_one_and_no_worse_than_by_their_parts():
    mu = cloud()
    norm, F = layer_norm(), mlp()
    first, second = norm.local_upper(mu), F.local_upper(norm(mu))
    parts = {
        Chain([norm, F]): first * second,
        Residual(F, -0.5): 1 + 0.5 * F.local_upper(mu),
        Sum([norm, F]): first + F.local_upper(mu),
    }
    for G, bound in parts.items():
        assert local_lipschitz(G, mu).value <= G.local_upper(mu) * (1 + 1e-12)
        assert G.local_upper(mu) <= bound
    assert F.global_upper >= float(F.local_upper(mu))
    assert mlp(True).global_upper == math.inf
    assert LayerNorm([1.0], None, 0.0).global_upper == math.inf
    with pytest.raises(NotImplementedError, match="local_upper"):
        Chain([norm, lambda mu: pushforward(torch.tanh, mu)]).local_upper(mu)


class Declared(Map):
    """A map of somebody's own: without blocks, so that what it declares is all that is known."""

    def __call__(self, mu):
        return mu.replace(2 * mu.points.sin())

    def local_upper(self, mu):
        return torch.full(mu.batch_shape, 2.0, dtype=mu.dtype)


@pytest.mark.parametrize(
    ("G", "bound"),
    [
        (Residual(Declared(), -0.5), 1 + 0.5 * 2),
        (Residual(Declared(), 3.0), 1 + 3 * 2),
        (Sum([Declared(), Declared()]), 2 + 2),
        (Chain([Declared(), Declared(), Declared()]), 2**3),
    ],
)
def test_what_parts_without_blocks_declare_adds_up_and_multiplies(G, bound):
    assert float(G.local_upper(cloud())) == pytest.approx(bound)


def test_a_composed_map_knows_its_dimension():
    of_blocks = post_norm(), pre_norm(), parallel(), contractive(mlp(), 0.5, constant=1.0)
    assert {F.dim for F in of_blocks} == {D}
    free = Pointwise(torch.tanh)
    of_free = Chain([free]), Sum([free]), Residual(free), contractive(free, 0.5, constant=1.0)
    assert {F.dim for F in of_free} == {None}


def test_the_largest_logits_of_a_network_are_those_of_its_heads_in_order():
    mu, inner, outer = cloud(absent=True), attention(True), attention(False)
    norm = LayerNorm(torch.ones(mu.dim).double())
    block = Residual(Chain([norm, inner]))
    found = Chain([block, mlp(), outer]).largest_logits(mu)
    expected = inner.largest_logits(norm(mu)), outer.largest_logits(mlp()(block(mu)))
    torch.testing.assert_close(found, torch.cat(expected))
    assert len(mlp().largest_logits(mu)) == 0 and len(found) == 4


def test_the_dimension_of_a_chain_is_that_of_what_comes_in():
    wider = Pointwise(lambda x: torch.cat([x, x], -1))
    assert Chain([wider, LayerNorm(torch.ones(2 * D))]).dim is None
    assert Chain([mlp(), wider]).dim == D


def test_chains_among_the_maps_of_a_chain_are_unfolded():
    norm, F = layer_norm(), mlp()
    assert Chain([Chain([norm, F]), Chain([norm])]).maps == (norm, F, norm)


def test_the_text_form_of_a_block_has_sizes_and_no_numbers():
    ones = torch.ones(2, 4)
    block = Chain([LayerNorm(ones[0], ones[1]), MLP(ones, ones.mT, gate=ones), RMSNorm(ones[0])])
    assert repr(block) == (
        "Chain(maps=(LayerNorm(dim=4, eps=1e-05, bias), "
        "MLP(dim=4, width=2, out_dim=4, activation='gelu', gated), RMSNorm(dim=4, eps=1e-06)))"
    )


def test_maps_that_declare_nothing_are_differentiated_inside_a_chain():
    mu = cloud()
    told = Chain([layer_norm(), Pointwise(torch.tanh), attention()])
    bare = Chain([layer_norm(), lambda mu: pushforward(torch.tanh, mu), attention()])
    values = [local_lipschitz(F, mu).value for F in (told, bare)]
    assert float(values[0]) == pytest.approx(float(values[1]), rel=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Chain([]), "at least one"),
        (lambda: Chain([layer_norm(), 3]), r"maps\[1\]: expected a map"),
        (lambda: Residual(None), "got None"),
        (lambda: Residual(layer_norm(), math.inf), "finite"),
        (lambda: Pointwise(2.0), "function of points"),
        (lambda: LayerNorm(torch.ones(2, 2)), r"shape \(d,\)"),
        (lambda: LayerNorm([1.0, 1.0], [1.0]), r"bias: expected shape \(2,\)"),
        (lambda: RMSNorm([1.0], -1e-3), "≥ 0"),
        (lambda: RMSNorm([math.nan]), "finite"),
        (lambda: MLP([[1.0]], [[1.0]], activation="swoosh"), "one of 'gelu'"),
        (lambda: MLP([[1.0]], [[1.0, 2.0]]), r"outer: expected shape \(1, 1\)"),
        (lambda: MLP([[1.0]], [[1.0]], gate_bias=[1.0]), "without a gate"),
        (lambda: MLP([1.0], [[1.0]]), "inner: expected a matrix"),
    ],
)
def test_what_makes_no_layer_is_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


@pytest.mark.parametrize(
    ("F", "message"),
    [
        (Residual(MAPS["wider"]()), r"keep the shape \(5, 3\)"),
        (Sum([MAPS["wider"](), mlp()]), "one dimension"),
        (RMSNorm(torch.ones(3, dtype=torch.float32)), "dtype"),
    ],
)
def test_measures_that_a_layer_cannot_take_are_refused(F, message):
    with pytest.raises((ValueError, TypeError), match=message):
        F(cloud())


def test_a_pointwise_map_that_mixes_for_one_particle_in_the_middle_is_refused():
    def mixing(x: torch.Tensor) -> torch.Tensor:
        third = torch.arange(x.shape[-2])[:, None] == 2
        return torch.where(third, x - x.mean(-2, keepdim=True), x)

    with pytest.raises(ValueError, match="by itself"):
        linearize(Pointwise(mixing), ParticleMeasure(torch.randn(5, 3, dtype=torch.float64)))


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("axis", [-2, 0])
@pytest.mark.parametrize(
    "mixing",
    [
        lambda x, axis: x - x.mean(axis, keepdim=True),
        lambda x, axis: x.cumsum(axis),
        lambda x, axis: x.flip(axis).cumsum(axis).flip(axis),
        lambda x, axis: x + x.flip(axis),
    ],
)
def test_a_pointwise_map_that_mixes_particles_is_refused(mixing, axis, batch):
    """Along the first axis too, where a mean looks right if each particle has an axis more."""
    mu = ParticleMeasure(torch.randn(*batch, 5, 3, dtype=torch.float64))
    F = Pointwise(lambda x: mixing(x, axis))
    for what in (linearize, lambda F, mu: F.local_upper(mu)):
        with pytest.raises(ValueError, match="by itself"):
            what(F, mu)


def test_a_norm_without_eps_is_refused_where_it_is_undefined():
    mu = ParticleMeasure([[1.0, 2.0], [3.0, 3.0]])
    with pytest.raises(ValueError, match="spread 0"):
        LayerNorm([1.0, 1.0], None, 0.0)(mu)


@pytest.mark.parametrize("layer", [LayerNorm, RMSNorm])
def test_the_metric_of_a_norm_is_its_derivative_times_its_transpose(layer):
    norm = layer(draw(D).abs() + 0.5, eps=0.1)
    mu = cloud(4)
    metric = norm.metric(mu, 0)
    derivative = torch.autograd.functional.jacobian(
        lambda x: norm(mu.replace(x)).points.flatten(), mu.points
    ).reshape(mu.n_particles, D, mu.n_particles, D)
    for j in range(mu.n_particles):
        block, y = derivative[j, :, j], metric.along[j]
        found = metric.scale[j] * metric.base @ metric.base.mT - metric.less[j] * y.outer(y)
        torch.testing.assert_close(found, block @ block.mT)


@pytest.mark.parametrize(
    ("dtype", "power"), [("float32", 70), ("float64", -540), ("float64", 540)]
)
def test_normalisations_do_not_depend_on_the_unit_of_points_whatever_their_squares(dtype, power):
    dtype, unit = getattr(torch, dtype), 2.0**power
    x = torch.tensor([[1.0, -2.0, 4.0], [0.5, 3.0, 1.0]], dtype=dtype)
    gain = torch.tensor([1.0, -0.5, 2.0], dtype=dtype)
    mu, scaled = ParticleMeasure(x), ParticleMeasure(unit * x)
    for norm in (LayerNorm(gain, None, 0.0), RMSNorm(gain, 0.0)):
        assert torch.equal(norm(scaled).points, norm(mu).points)
        steep = unit * local_lipschitz(norm, scaled).value
        torch.testing.assert_close(steep, local_lipschitz(norm, mu).value)
        for part in ("upper", "change"):
            bound = getattr(norm.ball_bounds(mu, 0.125), part)
            assert unit * getattr(norm.ball_bounds(scaled, 0.125 * unit), part) == bound
    cut = Clip(2.0)(mu).points
    assert torch.equal(Clip(2.0 * unit)(scaled).points, unit * cut)
    steep = local_lipschitz(Clip(2.0 * unit), scaled).value
    torch.testing.assert_close(steep, local_lipschitz(Clip(2.0), mu).value)


def test_an_atom_without_mass_that_a_map_sends_nowhere_is_still_absent():
    x = torch.randn(3, 2, dtype=torch.float64)
    padded = ParticleMeasure(torch.cat([x, torch.zeros(1, 2)]), weights=[1 / 3] * 3 + [0.0])
    norm = Pointwise(lambda y: y / y.norm(dim=-1, keepdim=True))
    F = Chain([norm, SelfAttention(AttentionParameters.random(2, generator=0))])
    mu = ParticleMeasure(x)
    assert not norm(padded).points[3].any()  # no NaN for attention to spread
    torch.testing.assert_close(F(padded).points[:3], F(mu).points)
    for G in (F, norm, lambda nu: nu.replace(nu.points / nu.points.norm(dim=-1, keepdim=True))):
        found, alone = (float(local_lipschitz(G, nu)) for nu in (padded, mu))
        assert found == pytest.approx(alone, rel=1e-9)
        J, zeta = linearize(G, padded).atoms, torch.randn(4, 2, dtype=torch.float64)
        assert J.matvec(zeta).isfinite().all() and J.rmatvec(zeta).isfinite().all()
        assert not J.rmatvec(zeta)[3].any()
    assert float(norm.local_upper(padded)) == pytest.approx(float(norm.local_upper(mu)))
    at, alone = (nu if nu is mu else norm(nu) for nu in (padded, mu))
    assert float(F.maps[1].largest_logits(at)) == pytest.approx(
        float(F.maps[1].largest_logits(norm(mu)))
    )


def test_an_atom_without_mass_far_away_takes_no_derivative_from_others():
    padded = ParticleMeasure([[0.3], [1.0], [1e12]], weights=[0.5, 0.5, 0.0])
    mu = ParticleMeasure([[0.3], [1.0]])
    gelu = torch.nn.functional.gelu
    for F in (Pointwise(gelu), lambda nu: nu.replace(gelu(nu.points))):
        assert float(local_lipschitz(F, padded)) == pytest.approx(float(local_lipschitz(F, mu)))
    F = Pointwise(torch.exp)
    far = ParticleMeasure([[0.3], [1.0], [1e3]], weights=[0.5, 0.5, 0.0])
    assert float(F.local_upper(far)) == pytest.approx(math.e)


@pytest.mark.parametrize("size", [1e-170, 1.0, 1e170])
def test_norms_of_matrices_of_any_size_bound_the_derivative(size):
    F = MLP([[size]], [[1.0]], activation="tanh")
    mu = ParticleMeasure([[1.0 / size]])
    assert (
        0 < float(local_lipschitz(F, mu)) <= float(F.local_upper(mu)) <= F.global_upper < math.inf
    )


def test_bounds_in_single_precision_are_above_the_constant():
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        inner, outer = torch.randn(16, 4, generator=g), torch.randn(4, 16, generator=g)
        F = MLP(inner, outer, activation="relu")
        whole = torch.linalg.matrix_norm(outer.double(), 2) * torch.linalg.matrix_norm(
            inner.double(), 2
        )
        assert float(whole) <= F.global_upper <= float(whole) * (1 + 1e-4)


@pytest.mark.parametrize("dim", [3, 24, 80])
@pytest.mark.parametrize(
    ("make", "far"),
    [(LayerNorm, 0), (LayerNorm, 1e6), (RMSNorm, 0), (lambda gain: Pointwise(torch.sin), 0)],
)
def test_of_one_map_in_two_precisions_the_single_one_has_the_larger_bound(make, far, dim):
    for seed in range(10):
        g = torch.Generator().manual_seed(seed)
        gain, points = torch.rand(dim, generator=g) + 0.5, torch.randn(3, dim, generator=g) + far
        single, exact = (
            float(make(t[0]).local_upper(ParticleMeasure(t[1:])))
            for t in (
                torch.cat([gain[None], points]).to(kind) for kind in (torch.float32, torch.float64)
            )
        )
        assert exact / (1 + 1e-8) <= single <= exact * (1 + 1e-3)


def test_a_number_whose_gradient_would_be_lost_is_refused():
    learned = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    for make in (
        lambda: Residual(Clip(1.0), learned),
        lambda: kernels.cosine(learned),
        lambda: kernels.alibi(learned[None]),
    ):
        with pytest.raises(TypeError, match="expected a number without a gradient"):
            make()


@pytest.mark.parametrize(
    ("layer", "shapes"),
    [
        (lambda w: LayerNorm(w), [(2,)]),
        (lambda w, b: LayerNorm(w, b), [(2,), (2,)]),
        (lambda w: RMSNorm(w), [(2,)]),
        (lambda a, b, c: MLP(a, b, inner_bias=c), [(3, 2), (2, 3), (3,)]),
        (lambda q: attending(kernel=kernels.qk_norm(q, 1.0)), [(2,)]),
        (lambda s: attending(normalization=normalizations.sink(s)), [(1,)]),
    ],
)
def test_a_layer_does_not_change_with_the_tensors_that_it_was_made_of(layer, shapes):
    tensors = [torch.ones(*shape, dtype=torch.float64) for shape in shapes]
    G, mu = layer(*tensors), ParticleMeasure([[1.0, 3.0], [-1.0, 0.5]])
    before = G(mu).points.clone()
    recording = layer(*(tensor.clone().requires_grad_() for tensor in tensors))
    assert torch.equal(copy.deepcopy(recording)(mu).points, before)
    for tensor in tensors:
        tensor.mul_(3.0)
    assert torch.equal(G(mu).points, before)


def attending(**how):
    eye = torch.eye(2, dtype=torch.float64)
    return SelfAttention(AttentionParameters(eye, eye, eye), **how)


def stepped(name):
    """A parameter, and what is made of it once."""
    par, mu = AttentionParameters.random(3, generator=0), cloud()
    p = torch.nn.Parameter(draw(3, seed=1))
    made = {
        "mlp": lambda: MLP(torch.diag(p), draw(3, 3), p)(mu),
        "norm": lambda: Chain([LayerNorm(p, 2 * p), SelfAttention(par)])(mu),
        "rms": lambda: RMSNorm(p)(mu),
        "sink": lambda: SelfAttention(par, normalization=normalizations.sink(p.sum()))(mu),
        "qk norm": lambda: SelfAttention(par, kernel=kernels.qk_norm(p, 1.0))(mu),
        "matrices": lambda: SelfAttention(
            AttentionParameters.from_bilinear(torch.diag(p), torch.eye(3, dtype=p.dtype))
        )(mu),
        "measure": lambda: ParticleMeasure(torch.cat([p[None], draw(4, 3)])),
        "stacked": lambda: ParticleMeasure(torch.stack([p, p])),
    }
    return p, made[name]


@pytest.mark.parametrize(
    "name", ["mlp", "norm", "rms", "sink", "qk norm", "matrices", "measure", "stacked"]
)
def test_what_is_made_before_a_loop_of_training_refuses_its_second_step(name):
    p, make = stepped(name)
    image = make()
    image.points.square().sum().backward(retain_graph=True)
    assert bool(p.grad.any())
    image.points.square().sum().backward(retain_graph=True)  # nothing has changed
    with torch.no_grad():
        p.mul_(1.1)
    with pytest.raises(RuntimeError, match="changed since|modified by an inplace operation"):
        image.points.square().sum().backward()
    make().points.square().sum().backward()  # made anew


def test_a_graph_is_walked_to_the_copies_in_it_which_look_for_changes_themselves():
    first, second = (torch.eye(3, dtype=torch.float64).requires_grad_() for _ in range(2))
    points = ParticleMeasure((draw(4, 3) @ first).tanh()).points
    assert copies._leaves(points.sum()) == []
    assert copies._leaves(points @ second) == [second]
    image = ParticleMeasure(points @ second).points.sum()
    with torch.no_grad():
        first.mul_(1.1)
    with pytest.raises(RuntimeError, match="ParticleMeasure: .* some changed since"):
        image.backward()


@pytest.mark.parametrize("points", [[[1.0, 0.0]], [[0.6, 0.8]], [[0.0, 0.0], [0.0, -1.0]]])
def test_on_its_sphere_a_projection_has_no_derivative_and_bounds_that_hold(points):
    mu, outside = ParticleMeasure(points), ParticleMeasure(1.001 * torch.tensor(points).double())
    for F in (Clip(1.0), Residual(Clip(1.0), -1.0)):
        with pytest.raises(NoDerivativeError, match="off the sphere of this radius"):
            local_lipschitz(F, mu)
        reached = float(secant_ratio(F, mu, outside).lower)
        assert reached > 0.9 or not isinstance(F, Residual)
        for radius in (0.0, 0.01):
            assert float(ball_upper(F, mu, radius)) >= reached
        assert float(F.local_upper(mu)) >= reached
    absent = ParticleMeasure([[0.5, 0.0], [1.0, 0.0]], weights=[1.0, 0.0])
    assert float(local_lipschitz(Clip(1.0), absent).value) == 1


def test_a_projection_declares_its_constant():
    for points in ([[3.0, 0.0], [0.0, -2.0]], [[0.5, 0.1], [4.0, 0.0]]):
        mu = ParticleMeasure(points)
        found = float(local_lipschitz(Clip(1.0), mu).value)
        assert float(Clip(1.0).local_upper(mu)) == pytest.approx(found, rel=1e-12)


@pytest.mark.parametrize(
    "function",
    [lambda x: x * x.detach(), lambda x: x + (x.round() - x).detach(), lambda x: x.detach()],
    ids=["detached factor", "straight through", "detached"],
)
def test_a_function_whose_derivative_is_not_that_of_its_values_is_refused(function):
    mu = ParticleMeasure([[1.3, 0.2], [-0.7, 2.1]])
    with pytest.raises(ValueError, match="Pointwise: expected a map whose derivative is that of"):
        local_lipschitz(Pointwise(function), mu)
    with pytest.raises(ValueError, match="expected a map whose derivative is that of"):
        Pointwise(function).local_upper(mu)


@pytest.mark.parametrize("layer", [Residual, lambda F: Sum([F])], ids=["Residual", "Sum"])
def test_maps_that_move_weights_or_positions_are_not_added_to_atoms(layer):
    def flipped(mu):
        positions = None if mu.positions is None else mu.positions.flip(-1)
        return ParticleMeasure(
            mu.points.flip(-2), log_weights=mu.log_weights.flip(-1), positions=positions
        )

    for mu in (
        ParticleMeasure([[1.0], [2.0]], weights=[0.2, 0.8]),
        ParticleMeasure.from_sequence([[1.0], [2.0]]),
    ):
        with pytest.raises(ValueError, match="keeps the atoms, their weights and positions"):
            layer(flipped)(mu)


def test_a_map_that_writes_into_its_measure_is_refused():
    def written(mu):
        return mu.replace(mu.points.relu_())

    for call in (
        lambda mu: Residual(written)(mu),
        lambda mu: flow(written, mu, [0.0, 1.0]),
        lambda mu: local_lipschitz(written, mu),
        lambda mu: secant_ratio(written, mu, mu.replace(mu.points + 1)),
    ):
        with pytest.raises(RuntimeError, match="writes into its points"):
            call(ParticleMeasure([[-1.0], [2.0]]))


@pytest.mark.parametrize("geometry", ["wasserstein", "euclidean"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_constants_of_maps_of_atoms_are_those_of_their_largest_block(geometry, dtype):
    gain = torch.linspace(0.5, 2, 20, dtype=dtype)
    norm, mu = RMSNorm(gain), ParticleMeasure(draw(30, 20).to(dtype), weights=None)
    for F in (norm, Residual(norm, -0.5), Chain([norm, Pointwise(torch.tanh)])):
        found = local_lipschitz(F, mu, geometry=geometry)
        dense = linearize(F, mu, geometry=geometry).atoms.to_dense()
        expected = float(torch.linalg.matrix_norm(dense, 2))
        assert float(found.value) == pytest.approx(
            expected, rel=1e-5 if dtype != torch.float64 else 1e-12
        )
        image = torch.linalg.vector_norm(dense @ found.direction.flatten())
        assert float(image) == pytest.approx(expected, rel=1e-5) and found.miss == 0
        assert float(torch.linalg.vector_norm(found.direction)) == pytest.approx(1)
    omega = one_sided(Residual(norm, -0.5), mu) if dtype == torch.float64 else None
    if omega is not None:
        J = linearize(Residual(norm, -0.5), mu).atoms.to_dense()
        expected = float(torch.linalg.eigvalsh((J + J.mT) / 2)[-1])
        assert float(omega.value) == pytest.approx(expected, rel=1e-9)


def test_a_map_that_says_wrongly_that_it_moves_atoms_by_themselves_has_its_constant_all_the_same():
    class Mean(Map):
        particlewise = True

        def __call__(self, mu):
            return mu.replace(2 * mu.mean()[..., None, :] + 0 * mu.points)

    mu = ParticleMeasure(draw(5, 3))
    assert float(local_lipschitz(Mean(), mu).value) == pytest.approx(2)

    class MeanBeside(Mean):
        def __call__(self, mu):
            first = mu.points[..., :1]
            mean = 2 * mu.mean()[..., None, :1] + 0 * first
            return mu.replace(torch.cat([first, mean], -1))

    assert float(local_lipschitz(MeanBeside(), mu).value) == pytest.approx(5**0.5)


def test_the_gradient_of_a_constant_of_many_blocks_is_that_of_the_largest():
    gain = torch.linspace(0.5, 2, 6, dtype=torch.float64, requires_grad=True)
    mu = ParticleMeasure(draw(64, 6))
    for geometry in ("wasserstein", "euclidean"):
        (slope,) = torch.autograd.grad(
            local_lipschitz(RMSNorm(gain), mu, geometry=geometry).value, gain
        )
        step, along = 1e-6, draw(6)
        ends = [
            float(local_lipschitz(RMSNorm(gain.detach() + h * along), mu).value)
            for h in (step, -step)
        ]
        assert float(slope @ along) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-6)


@pytest.mark.parametrize(
    ("function", "points", "slope"),
    [
        (torch.log, [[1e-4], [1.0]], 1e4),  # a step of a share of the largest leaves the domain
        (torch.sqrt, [[1e-6], [1.0]], 500.0),
        (lambda x: x**3, [[0.0, 0.0]], 0.0),
        (lambda x: x * x.abs(), [[0.0, 0.0], [1.0, 2.0]], 4.0),
        (lambda x: x.relu() ** 2, [[0.0, 0.0]], 0.0),
        (torch.sigmoid, [[[0.0]], [[3000.0]]], 0.25),
        (torch.nn.functional.gelu, [[0.5, 0.2], [1e5, 2e5]], 1.0),
    ],
    ids=["log", "sqrt", "cube", "x|x|", "relu²", "batch", "far atom"],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_smooth_functions_are_no_kinks_and_have_their_derivatives(function, points, slope, dtype):
    mu = ParticleMeasure(torch.tensor(points, dtype=dtype))
    found = local_lipschitz(Pointwise(function), mu).value.amax()
    assert float(found) == pytest.approx(slope, rel=2e-3)


def test_one_measure_of_a_batch_does_not_hide_another():
    def detached(x):
        return torch.where(x.abs() > 1e3, x**2, (x**2).detach())

    mu = ParticleMeasure([[[1.0, 2.0]], [[1e6, 2e6]]])
    for F in (Pointwise(detached), lambda mu: mu.replace(detached(mu.points))):
        with pytest.raises(
            ValueError, match="whose derivative is that of its difference quotient"
        ):
            local_lipschitz(F, mu)


def test_atoms_are_on_a_sphere_up_to_rounding():
    points = draw(200, 16).to(torch.float32)
    points = points / torch.linalg.vector_norm(points, dim=-1, keepdim=True)
    for x in points:
        mu = ParticleMeasure(x[None])
        with pytest.raises(NoDerivativeError):
            local_lipschitz(Residual(Clip(1.0), -1.0), mu)
        assert float(Clip(1.0).ball_bounds(mu, 0.0).change) == 1
    inside, outside = ParticleMeasure([[0.5, 0.0]]), ParticleMeasure([[1.5, 0.0]])
    assert float(Clip(1.0).ball_bounds(inside, 0.4).change) == 0
    assert float(Clip(1.0).ball_bounds(inside, 0.6).change) == 1
    assert float(Clip(1.0).ball_bounds(outside, 0.0).change) == 0


def test_a_map_that_writes_into_weights_is_refused():
    def written(mu):
        mu.log_weights.mul_(0).sub_(math.log(2))
        return mu

    with pytest.raises(RuntimeError, match="writes into its points or weights"):
        Residual(written)(ParticleMeasure([[1.0], [2.0]], weights=[0.2, 0.8]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_weights_that_are_normalised_again_are_the_same(dtype):
    logs = (3 * draw(5000)).log_softmax(-1)
    mu = ParticleMeasure(draw(5000, 2).to(dtype), log_weights=logs.to(dtype).log_softmax(-1))

    def doubled(mu):
        return ParticleMeasure(2 * mu.points, mu.weights)

    torch.testing.assert_close(Residual(doubled)(mu).points, 3 * mu.points)


def test_an_atom_at_0_is_as_small_as_its_cloud():
    mu = ParticleMeasure([[0.0], [1e-50]])
    found = local_lipschitz(Pointwise(lambda x: torch.tanh(1e50 * x)), mu)
    assert float(found.value) == pytest.approx(1e50)


@pytest.mark.parametrize(
    ("function", "points"),
    [
        (lambda x: x.log() * x.log().detach(), [[1e-8], [1.0]]),  # NaN at the longest step
        (lambda x: x + 0.5 * x.detach() + 3e9 * (x - 1) ** 3, [[1.0]]),  # steep at the longest
    ],
    ids=["out of the domain", "steep"],
)
def test_what_long_steps_see_hides_no_wrong_derivative(function, points):
    with pytest.raises(ValueError, match="whose derivative is that of its difference"):
        local_lipschitz(Pointwise(function), ParticleMeasure(points))


def test_a_map_that_drops_positions_is_told_so():
    def dropped(mu):
        return ParticleMeasure(mu.points, log_weights=mu.log_weights)

    with pytest.raises(ValueError, match="got one without positions"):
        Residual(dropped)(ParticleMeasure.from_sequence([[1.0], [2.0]]))
