"""Layers and their composition: values by hand, derivatives against dense automatic ones."""

from __future__ import annotations

import math

import pytest
import torch

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, split
from meanfield.layers import (
    MLP,
    Chain,
    LayerNorm,
    Pointwise,
    Residual,
    RMSNorm,
    Sum,
    contractive,
)
from meanfield.lipschitz import local_lipschitz
from meanfield.maps import linearize
from meanfield.measures import pushforward

D = 4


def draw(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed + 17 * sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def attention(causal=False, seed=3):
    generator = torch.Generator().manual_seed(seed)
    params = AttentionParameters.random(D, n_heads=2, biases=True, std=0.7, generator=generator)
    return SelfAttention(params, causal=causal)


def mlp(gated=False, activation="gelu"):
    gate = {"gate": draw(7, D, seed=5), "gate_bias": draw(7, seed=6)} if gated else {}
    return MLP(draw(7, D), draw(D, 7), draw(7), draw(D), activation=activation, **gate)


def layer_norm():
    return LayerNorm(1 + 0.3 * draw(D, seed=1), draw(D, seed=2), 1e-3)


def rms_norm():
    return RMSNorm(1 + 0.3 * draw(D, seed=4), 1e-3)


def post_norm(causal=False):
    return Chain([Residual(attention(causal)), layer_norm(), Residual(mlp()), layer_norm()])


def pre_norm(causal=False):
    return Chain(
        [
            Residual(Chain([rms_norm(), attention(causal)])),
            Residual(Chain([rms_norm(), mlp(True)]), 0.5),
        ]
    )


def parallel(causal=False):
    return Residual(Sum([Chain([layer_norm(), attention(causal)]), Chain([layer_norm(), mlp()])]))


MAPS = {
    "pointwise": lambda: Pointwise(lambda x: torch.stack([x.sin().sum(-1), x[..., 0] ** 2], -1)),
    "layer norm": layer_norm,
    "layer norm without bias": lambda: LayerNorm(draw(D, seed=1), None, 0.0),
    "rms norm": rms_norm,
    "mlp": mlp,
    "relu": lambda: mlp(activation="relu"),
    "gated": lambda: mlp(True, "silu"),
    "wider": lambda: MLP(draw(3, D), draw(6, 3), activation="tanh"),
    "post-norm": post_norm,
    "post-norm, causal": lambda: post_norm(True),
    "pre-norm": pre_norm,
    "pre-norm, causal": lambda: pre_norm(True),
    "parallel": parallel,
    "network": lambda: Chain([pre_norm(True), parallel(True), post_norm(True)]),
}


def measures():
    uneven = torch.tensor([0.1, 0.5, 0.15, 0.25], dtype=torch.float64)
    absent = torch.tensor([0.4, 0.0, 0.25, 0.35], dtype=torch.float64)
    order = [0.5, 0.25, 1.0, 0.25]
    return {
        "sequence": ParticleMeasure.from_sequence(draw(4, D)),
        "weighted, unsorted": ParticleMeasure(draw(4, D), uneven, positions=order),
        "an absent atom": ParticleMeasure(draw(4, D), absent, positions=order),
        "batch": ParticleMeasure(
            draw(2, 4, D), torch.stack([uneven, absent]), positions=[0.1, 0.2, 0.2, 1.0]
        ),
    }


def dense_derivative(F, mu):
    """∂ yᵢ/∂ xⱼ of one measure by reverse differentiation of the whole map, absent atoms cut."""
    jacobian = torch.func.jacrev(lambda x: F(mu.replace(x)).points)(mu.points)
    present = (mu.weights > 0).to(mu.dtype)
    return jacobian * present[:, None, None, None] * present[:, None]


def dense(F, mu, geometry):
    jacobian = dense_derivative(F, mu)
    if geometry == "wasserstein":
        root = torch.where(mu.weights > 0, mu.weights, 1.0).sqrt()
        jacobian = jacobian * root[:, None, None, None] / root[:, None]
    rows = jacobian.shape[0] * jacobian.shape[1]
    return jacobian.reshape(rows, -1)


def dense_field(F, mu):
    """∂ of the field: half the difference that two copies of an atom see when one moves."""
    doubled = split(mu)
    jacobian = dense_derivative(F, doubled)
    first = jacobian[::2, :, ::2] - jacobian[::2, :, 1::2]
    return torch.stack([first[i, :, i] for i in range(mu.n_particles)])


@pytest.mark.parametrize("geometry", ["euclidean", "wasserstein"])
@pytest.mark.parametrize("which", list(measures()))
@pytest.mark.parametrize("name", list(MAPS))
def test_both_components_are_those_of_dense_automatic_differentiation(name, which, geometry):
    F, mu = MAPS[name](), measures()[which]
    at = linearize(F, mu, geometry=geometry)
    atoms, field = at.atoms.to_dense(), at.field.to_dense()
    one_by_one = zip(mu, atoms, field, strict=True) if mu.batch_shape else [(mu, atoms, field)]
    for one, particle, splitting in one_by_one:
        size = float(dense(F, one, geometry).abs().max())
        assert torch.allclose(particle, dense(F, one, geometry), rtol=0, atol=1e-12 * size)
        assert torch.allclose(splitting, dense_field(F, one), rtol=0, atol=1e-12 * size)


@pytest.mark.parametrize("name", list(MAPS))
def test_products_and_transposed_products_are_those_of_the_matrices(name):
    F, mu = MAPS[name](), measures()["batch"]
    at = linearize(F, mu, geometry="wasserstein")
    for J in (at.atoms, at.field):
        matrix = J.to_dense()
        eps = draw(*J.batch_shape, *J.in_shape, seed=8)
        zeta = draw(*J.batch_shape, *J.out_shape, seed=9)
        there = (matrix @ eps.flatten(-2)[..., None])[..., 0]
        back = (matrix.mT @ zeta.flatten(-2)[..., None])[..., 0]
        assert torch.allclose(J.matvec(eps).flatten(-2), there, atol=1e-12 * float(matrix.norm()))
        assert torch.allclose(J.rmatvec(zeta).flatten(-2), back, atol=1e-12 * float(matrix.norm()))


@pytest.mark.parametrize("causal", [False, True])
def test_the_constant_is_the_norm_where_every_atom_is_stored_twice(causal):
    F, mu = post_norm(causal), measures()["weighted, unsorted"]
    twice = linearize(F, split(mu), geometry="wasserstein").atoms.to_dense()
    constant = local_lipschitz(F, mu)
    assert float(constant.value) == pytest.approx(float(torch.linalg.matrix_norm(twice, 2)))
    assert float(constant.splitting) < float(constant.particle)


@pytest.mark.parametrize("name", list(MAPS))
def test_an_absent_atom_changes_nothing(name):
    F, mu = MAPS[name](), measures()["an absent atom"]
    kept = mu.weights > 0
    without = ParticleMeasure(mu.points[kept], mu.weights[kept], positions=mu.positions[kept])
    for geometry in ("euclidean", "wasserstein"):
        first, second = (local_lipschitz(F, m, geometry=geometry).value for m in (mu, without))
        assert float(first) == pytest.approx(float(second), rel=1e-12)


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


@pytest.mark.parametrize("centred", [True, False])
def test_gain_and_shift_may_be_absorbed_into_the_attention_that_follows(centred):
    F, mu = attention(), measures()["weighted, unsorted"]
    par, gain = F.parameters, 1 + draw(D, seed=6)
    shift = draw(D, seed=7) if centred else torch.zeros(D, dtype=torch.float64)
    bare = LayerNorm(torch.ones(D), None, 1e-3) if centred else RMSNorm(torch.ones(D), 1e-3)
    bare = type(bare)(torch.ones_like(gain), eps=1e-3)
    norm = LayerNorm(gain, shift, 1e-3) if centred else RMSNorm(gain, 1e-3)
    absorbed = AttentionParameters(
        par.query * gain,
        par.key * gain,
        par.value * gain,
        par.output,
        query_bias=par.query_bias + par.query @ shift,
        value_bias=par.value_bias + par.value @ shift,
        output_bias=par.output_bias,
    )
    first, second = Chain([norm, F]), Chain([bare, SelfAttention(absorbed)])
    assert torch.allclose(first(mu).points, second(mu).points, atol=1e-13)
    values = [local_lipschitz(G, mu).value for G in (first, second)]
    assert float(values[0]) == pytest.approx(float(values[1]), rel=1e-12)


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


@pytest.mark.parametrize("name", [n for n in MAPS if "post" not in n and n != "network"])
@pytest.mark.parametrize("which", list(measures()))
def test_no_local_constant_is_above_the_bound_at_its_place(name, which):
    F, mu = MAPS[name](), measures()[which]
    constant, upper = local_lipschitz(F, mu), F.local_upper(mu)
    assert upper.shape == mu.batch_shape
    assert bool((constant.value <= upper).all())


@pytest.mark.parametrize("name", ["layer norm", "rms norm", "mlp", "gated", "pointwise"])
def test_bounds_do_not_see_an_absent_atom(name):
    F, x = MAPS[name](), draw(3, D)
    x[1] = 0.0 if "norm" in name else 50.0  # the bound there would be the largest
    mu = ParticleMeasure(x, [0.5, 0.0, 0.5])
    without = ParticleMeasure(x[[0, 2]])
    assert float(F.local_upper(mu)) == pytest.approx(float(F.local_upper(without)), rel=1e-12)


def test_the_bound_of_composed_maps_is_put_together_from_those_of_their_parts():
    mu = measures()["weighted, unsorted"]
    norm, F = layer_norm(), mlp()
    chain = Chain([norm, F])
    assert torch.equal(chain.local_upper(mu), norm.local_upper(mu) * F.local_upper(norm(mu)))
    assert torch.equal(Residual(F, -0.5).local_upper(mu), 1 + 0.5 * F.local_upper(mu))
    assert torch.equal(Sum([norm, F]).local_upper(mu), norm.local_upper(mu) + F.local_upper(mu))
    assert F.global_upper >= float(F.local_upper(mu))
    assert mlp(True).global_upper == math.inf
    assert LayerNorm([1.0], None, 0.0).global_upper == math.inf
    with pytest.raises(NotImplementedError, match="local_upper"):
        Chain([norm, lambda mu: pushforward(torch.tanh, mu)]).local_upper(mu)


def test_a_composed_map_is_masked_if_a_part_is_and_knows_its_dimension():
    assert not post_norm().causal
    assert post_norm(True).causal
    assert pre_norm(True).causal
    assert parallel(True).causal
    known = (
        post_norm(),
        pre_norm(),
        parallel(),
        layer_norm(),
        mlp(),
        contractive(mlp(), 0.5, constant=1.0),
    )
    assert {F.dim for F in known} == {D}
    free = Pointwise(torch.tanh)
    for F in (
        Chain([free]),
        Sum([free]),
        Residual(free),
        contractive(free, 0.5, constant=1.0).map,
    ):
        assert F.dim is None


def test_chains_among_the_maps_of_a_chain_are_unfolded():
    norm, F = layer_norm(), mlp()
    assert Chain([Chain([norm, F]), Chain([norm])]).maps == (norm, F, norm)


def test_maps_that_declare_nothing_are_differentiated_inside_a_chain():
    mu = measures()["weighted, unsorted"]
    told = Chain([layer_norm(), Pointwise(torch.tanh), attention()])
    bare = Chain([layer_norm(), lambda mu: pushforward(torch.tanh, mu), attention()])
    values = [local_lipschitz(F, mu).value for F in (told, bare)]
    assert float(values[0]) == pytest.approx(float(values[1]), rel=1e-12)


def test_float32_stays_float32():
    F = Chain([LayerNorm(torch.ones(D)), MLP(draw(3, D, dtype=torch.float32), torch.ones(D, 3))])
    mu = ParticleMeasure(draw(4, D, dtype=torch.float32))
    assert F(mu).dtype == torch.float32
    assert local_lipschitz(Residual(F), mu).value.dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Chain([]), "at least one"),
        (lambda: Chain([layer_norm(), 3]), "place 1: expected a map"),
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
        (Residual(MAPS["wider"]()), r"keep the shape \(4, 4\)"),
        (Sum([MAPS["wider"](), mlp()]), "one dimension"),
        (LayerNorm([1.0, 1.0]), r"R\^2, got one on R\^4"),
        (MLP([[1.0]], [[1.0]]), r"R\^1, got one on R\^4"),
        (RMSNorm(torch.ones(4, dtype=torch.float32)), "dtype"),
    ],
)
def test_measures_that_a_layer_cannot_take_are_refused(F, message):
    with pytest.raises((ValueError, TypeError), match=message):
        F(measures()["sequence"])


@pytest.mark.parametrize(
    "mixing", [lambda x: x - x.mean(-2, keepdim=True), lambda x: x.cumsum(-2)]
)
def test_a_pointwise_map_that_mixes_particles_is_refused(mixing):
    with pytest.raises(ValueError, match="by itself"):
        linearize(Pointwise(mixing), measures()["sequence"])


def test_a_norm_without_eps_is_refused_where_it_is_undefined():
    mu = ParticleMeasure([[1.0, 2.0], [3.0, 3.0]])
    with pytest.raises(ValueError, match="spread 0"):
        LayerNorm([1.0, 1.0], None, 0.0)(mu)
