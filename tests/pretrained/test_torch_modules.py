"""Modules of torch as maps: against their own forward and their dense Jacobians."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import prune

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, pretrained, pushforward
from meanfield.lipschitz import local_lipschitz
from meanfield.maps import linearize
from tests.maps.small_maps import draw

N, D = 5, 12


def randomised(module, dtype=torch.float64):
    """All of its parameters random: zero biases would hide mistakes."""
    module = module.to(dtype).eval()
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(0.4 * draw(*parameter.shape, seed=seed, dtype=dtype))
    return module


def causal_mask(n, dtype=torch.float64):
    return nn.Transformer.generate_square_subsequent_mask(n, dtype=dtype)


def dense_jacobian(function, x):
    with sdpa_kernel(SDPBackend.MATH):
        return torch.func.jacrev(function)(x).reshape(x.numel(), -1).detach()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "settings", [{}, {"bias": False}, {"batch_first": True}, {"kdim": D, "vdim": D}], ids=str
)
def test_multihead_attention_is_the_map_that_its_matrices_make(settings, masked, dtype):
    module = randomised(nn.MultiheadAttention(D, 3, **settings), dtype)
    F = SelfAttention(AttentionParameters.from_module(module), causal=masked)
    mu = ParticleMeasure.from_sequence(draw(N, D, seed=9, dtype=dtype))
    mask = causal_mask(N, dtype) if masked else None

    def own(x):
        return module(x, x, x, need_weights=False, attn_mask=mask)[0]

    room = 1e3 * torch.finfo(dtype).eps
    assert torch.allclose(F(mu).points, own(mu.points), rtol=room, atol=room)
    found = local_lipschitz(F, mu, geometry="euclidean").value
    norm = torch.linalg.matrix_norm(dense_jacobian(own, mu.points), 2)
    assert torch.allclose(found, norm, rtol=1e2 * room)


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (nn.MultiheadAttention(D, 3, kdim=4), ValueError, "kdim=4"),
        (nn.MultiheadAttention(D, 3, vdim=4), ValueError, "vdim=4"),
        (nn.MultiheadAttention(D, 3, add_bias_kv=True), ValueError, "add_bias_kv=True"),
        (nn.MultiheadAttention(D, 3, add_zero_attn=True), ValueError, "add_zero_attn=True"),
        (nn.Linear(D, D), TypeError, "got Linear"),
        (nn.TransformerEncoderLayer(D, 3), TypeError, "pretrained.read"),
        (
            type("Mine", (nn.MultiheadAttention,), {"forward": lambda s, x: x})(D, 3),
            TypeError,
            "Mine",
        ),
    ],
)
def test_attention_that_is_another_map_is_refused(module, error, message):
    with pytest.raises(error, match=message):
        AttentionParameters.from_module(module)


def test_a_module_with_hooks_is_refused_until_they_are_gone():
    module = randomised(nn.MultiheadAttention(D, 3))
    prune.l1_unstructured(module, "in_proj_weight", 0.5)
    with pytest.raises(ValueError, match="forward hooks"):
        AttentionParameters.from_module(module)
    prune.remove(module, "in_proj_weight")
    pruned = AttentionParameters.from_module(module)
    assert int((pruned.query == 0).sum() + (pruned.key == 0).sum()) > 0
    hook = module.register_forward_hook(lambda module, args, out: (2 * out[0], out[1]))
    with pytest.raises(ValueError, match="forward hooks"):
        AttentionParameters.from_module(module)
    hook.remove()
    assert AttentionParameters.from_module(module).query.equal(pruned.query)


@pytest.mark.parametrize("name", ["linear1", "norm2", "self_attn.out_proj"])
def test_a_weight_that_is_made_before_each_call_is_refused(name):
    layer = randomised(nn.TransformerEncoderLayer(D, 3, 16))
    part = layer.get_submodule(name)
    prune.l1_unstructured(part, "weight", 0.5)
    with pytest.raises(ValueError, match=r"made before each call|forward hooks"):
        pretrained.read(layer)
    prune.remove(part, "weight")
    X = draw(N, D)
    found = pretrained.read(layer).network()(ParticleMeasure.from_sequence(X)).points
    assert torch.allclose(found, layer(X), atol=1e-12)


def test_the_matrices_of_a_module_carry_its_gradients():
    module = randomised(nn.MultiheadAttention(D, 3))
    F = SelfAttention(AttentionParameters.from_module(module))
    F(ParticleMeasure(draw(N, D))).points.square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in (module.in_proj_weight,))


LAYERS = {
    "post-norm": {},
    "pre-norm": {"norm_first": True},
    "gelu": {"activation": "gelu", "batch_first": True},
    "gelu, tanh": {"activation": nn.GELU("tanh")},
    "a module": {"activation": nn.ReLU(), "norm_first": True, "batch_first": True},
    "no biases": {"bias": False, "activation": nn.functional.silu},
    "a wide eps": {"layer_norm_eps": 0.3},
}


def encoder(case, depth, dtype=torch.float64, last=True):
    layer = nn.TransformerEncoderLayer(D, 3, 20, **LAYERS[case])
    if not depth:
        return randomised(layer, dtype)
    norm = nn.LayerNorm(D) if last else None
    return randomised(nn.TransformerEncoder(layer, depth, norm, enable_nested_tensor=False), dtype)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("case", list(LAYERS))
def test_an_encoder_is_the_network_that_is_read(case, depth, masked):
    module = encoder(case, depth)
    source = pretrained.read(module, causal=masked)
    x = draw(N, D, seed=9)
    mu, F = source.embeddings(x), source.network()
    name = "mask" if depth else "src_mask"
    mask = {name: causal_mask(N)} if masked else {}
    with torch.no_grad():
        own = module(x, **mask)
    assert float((F(mu).points - own).abs().max()) <= 1e-12 * float(own.abs().max())
    assert (source.n_layers, source.n_heads, source.dim) == (max(depth, 1), 3, D)
    assert source.causal == masked
    if case in ("post-norm", "pre-norm"):
        dense = dense_jacobian(lambda y: module(y, **mask), x)
        found = linearize(F, mu).atoms.to_dense()
        assert torch.allclose(found, dense, rtol=0, atol=1e-10 * float(dense.abs().max()))


def test_a_batch_of_clouds_is_its_clouds_one_by_one_in_either_layout():
    for case in ("gelu", "gelu, tanh"):  # one of them with the batch first
        source = pretrained.read(encoder(case, 2))
        clouds = draw(3, N, D, seed=4)
        whole, inputs = source.embeddings(clouds), source.attention_inputs(clouds)
        assert inputs.shape == (2, 3, N, D)
        for cloud, mu, entering in zip(
            clouds, (whole[i] for i in range(3)), inputs[1], strict=True
        ):
            assert torch.equal(mu.points, cloud)
            first = source.block(0)(source.embeddings(cloud)).points
            assert torch.allclose(entering, first, atol=1e-12)  # post-norm: the block's output


def test_single_precision_is_kept():
    source = pretrained.read(encoder("post-norm", 2, torch.float32, last=False))
    image = source.network()(source.embeddings(draw(N, D)))
    assert image.dtype == torch.float32
    with torch.no_grad():
        own = source.model(draw(N, D, dtype=torch.float32))
    assert torch.allclose(image.points, own, atol=1e-4)


def replaced(**parts):
    module = encoder("post-norm", 0)
    for name, part in parts.items():
        setattr(module, name, part)
    return module


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (replaced(activation=torch.sin), ValueError, "activation.*sin"),
        (replaced(norm1=nn.Identity()), ValueError, "expected a LayerNorm, got Identity"),
        (replaced(linear1=nn.Bilinear(D, 2, 3).double()), ValueError, "got Bilinear"),
        (replaced(dropout1=nn.Tanh()), ValueError, "block 0"),
        (nn.TransformerDecoderLayer(D, 3), TypeError, "pushforward"),
        (nn.MultiheadAttention(D, 3), TypeError, "from_module"),
        (nn.Linear(D, D), TypeError, "pushforward"),
    ],
)
def test_what_is_no_such_encoder_is_refused_with_what_to_do(module, error, message):
    with pytest.raises(error, match=message):
        pretrained.read(module)


class Twice(nn.TransformerEncoderLayer):
    def forward(self, src, *arguments, **settings):
        return super().forward(super().forward(src, *arguments, **settings))


@pytest.mark.parametrize("later", [False, True])
def test_a_layer_whose_fused_path_has_another_activation_is_refused_until_it_is_left_out(later):
    # Two heads: torch fuses an even number of them alone.
    activation = nn.GELU("tanh")
    how = {} if later else {"activation": activation}
    module = randomised(nn.TransformerEncoderLayer(8, 2, 20, batch_first=True, **how))
    module.activation = activation
    clouds = draw(2, N, 8)
    with pytest.raises(ValueError, match="fused path has (relu|gelu); set .* = 0"):
        pretrained.read(module, verify=False)
    module.activation_relu_or_gelu = 0
    source = pretrained.read(module)
    with torch.no_grad():
        own = module(clouds)
    image = source.network()(source.embeddings(clouds)).points
    assert float((image - own).abs().max()) <= 1e-12 * float(own.abs().max())


def test_a_layer_with_a_forward_of_its_own_is_refused_unrun():
    with pytest.raises(ValueError, match="expected a TransformerEncoderLayer, got Twice"):
        pretrained.read(Twice(D, 3, 4, batch_first=True).double(), verify=False)


def test_points_of_another_dimension_are_refused():
    source = pretrained.read(encoder("post-norm", 0))
    for given in (draw(N, D + 1), draw(D), draw(0, D)):
        with pytest.raises(ValueError, match=rf"\(n, {D}\)"):
            source.embeddings(given)
    with pytest.raises(ValueError, match="a model of texts"):
        source.encode("text")


def test_any_other_module_is_differentiated_without_its_fused_attention():
    """Gradients are on, as they are in every module that one has."""
    module = encoder("gelu", 2)
    mu = ParticleMeasure.from_sequence(draw(N, D, seed=9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        found = local_lipschitz(lambda nu: pushforward(module, nu), mu, geometry="euclidean")
    dense = dense_jacobian(module, mu.points)
    assert torch.allclose(found.value, torch.linalg.matrix_norm(dense, 2), rtol=1e-6)
    expected = local_lipschitz(pretrained.read(module).network(), mu, geometry="euclidean")
    assert torch.allclose(found.value, expected.value, rtol=1e-6)


ODD = {
    "dropout": (lambda m, x: m.train()(x), r"call \.eval\(\)"),
    "fixed n": (
        lambda m, x: m(x.reshape(1, N, D))[0],
        'any number of atoms.*geometry="euclidean"',
    ),
    "a mask of n × n": (lambda m, x: m(x, causal_mask(N)), r"8 in place of 5.*attn_mask"),
    "no weights": (lambda m, x: m(x), "use mu.log_weights"),
}


@pytest.mark.parametrize("case", list(ODD))
def test_a_module_that_knows_no_measures_says_what_to_do(case):
    own, message = ODD[case]
    module = encoder("pre-norm", 0)
    mu = ParticleMeasure.from_sequence(draw(N, D, seed=9))
    with pytest.raises(ValueError, match=message):
        local_lipschitz(lambda nu: nu.replace(own(module, nu.points)), mu)
    if case != "dropout":
        found = local_lipschitz(
            lambda nu: nu.replace(own(module, nu.points)), mu, geometry="euclidean"
        )
        dense = dense_jacobian(lambda x: own(module, x), mu.points)
        assert torch.allclose(found.value, torch.linalg.matrix_norm(dense, 2), rtol=1e-6)


def test_a_norm_without_a_weight_is_refused_in_words():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).eval()
    layer.norm1 = nn.LayerNorm(8, elementwise_affine=False)
    with pytest.raises(ValueError, match="elementwise_affine=False; a weight of ones"):
        pretrained.read(layer)


def test_autocast_does_not_round_what_enters_the_layers():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    source = pretrained.read(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval())
    tokens = torch.randn(6, 16)
    known = source.attention_inputs(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(source.attention_inputs(tokens), known)


def test_the_fingerprint_of_an_encoder_is_that_of_its_settings_too():
    def fingerprint(change=lambda model: None, **settings):
        layer = randomised(nn.TransformerEncoderLayer(D, 3, 16, **settings))
        model = nn.TransformerEncoder(layer, 2, nn.LayerNorm(D).double(), False)
        change(model)
        return pretrained.read(model).fingerprint

    def heads(model):
        for layer in model.layers:
            layer.self_attn.num_heads, layer.self_attn.head_dim = 2, D // 2

    def eps(name):
        return lambda model: setattr(model.get_submodule(name), "eps", 0.5)

    others = [fingerprint(norm_first=True), fingerprint(activation="gelu"), fingerprint(heads)]
    others += [fingerprint(eps(name)) for name in ("layers.0.norm2", "layers.1.norm1", "norm")]
    assert len({fingerprint(), *others}) == 7 and fingerprint() == fingerprint(dropout=0.7)


@pytest.mark.parametrize("name", ["bias"])
def test_a_bias_that_is_made_before_each_call_is_refused(name):
    layer = randomised(nn.TransformerEncoderLayer(D, 3, 16))
    prune.random_unstructured(layer.linear1, name, 0.5)
    with pytest.raises(ValueError, match="whose bias is made before each call"):
        pretrained.read(layer, verify=False)
