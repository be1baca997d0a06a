"""Vision transformers against the modules of transformers, in values and in derivatives."""

from __future__ import annotations

import pytest
import torch

from meanfield import ParticleMeasure, pretrained
from meanfield.lipschitz import local_lipschitz
from meanfield.maps import linearize
from meanfield.pretrained.verification import InFloat64

pytest.importorskip("transformers")
from transformers import ViTForImageClassification

from tests.pretrained.small_models import drawn_again

_SIZES = {"hidden_size": 12, "intermediate_size": 20, "num_attention_heads": 3}
_SIZES |= {"num_hidden_layers": 2, "num_channels": 2, "image_size": [4, 6], "patch_size": 2}
CASES = {
    "usual": {},
    "no biases": {"qkv_bias": False, "hidden_act": "relu"},
    "square, one channel": {"image_size": 4, "num_channels": 1, "layer_norm_eps": 0.1},
    "uneven patches": {"patch_size": [2, 3], "hidden_act": "gelu_new"},
}


def small(case, seed=1):
    source = pretrained.load("random:vit", config=_SIZES | CASES[case])
    drawn_again(source.model, torch.Generator().manual_seed(seed), spread=0.4)
    return source


def images(source, *batch, seed=2):
    patches = source.model.embeddings.patch_embeddings
    generator = torch.Generator().manual_seed(seed)
    shape = (*batch, patches.num_channels, *patches.image_size)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def own(source, pixels):
    with torch.no_grad(), InFloat64():
        return source.model(pixel_values=pixels).last_hidden_state


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("seed", [1, 2])
def test_a_network_is_that_of_the_model(case, seed):
    source = small(case, seed)
    pixels = images(source, 3, seed=seed)
    mu, expected = source.embeddings(pixels), own(source, pixels)
    assert mu.n_particles == source.max_tokens == expected.shape[1]
    found = source.network()(mu).points
    assert float((found - expected).abs().max()) <= 1e-12 * float(expected.abs().max())
    alone = source.embeddings(pixels[1])
    assert torch.allclose(alone.points, mu.points[1], atol=1e-13)
    inputs = source.attention_inputs(pixels[1])
    assert inputs.shape == (2, source.max_tokens, 12)
    entering = source.block(0).maps[0].maps[0].maps[0](alone).points  # the norm before attention
    assert torch.allclose(inputs[0], entering, atol=1e-12)


def test_the_class_token_comes_first_and_patches_in_rows():
    source = small("usual")
    pixels = images(source)
    changed = pixels.clone()
    changed[:, :2, 2:4] += 1.0  # the second patch of the first row
    moved = source.embeddings(changed).points - source.embeddings(pixels).points
    assert moved.abs().amax(-1).gt(1e-9).tolist() == [i == 2 for i in range(7)]


def test_derivatives_are_those_of_the_model_by_automatic_differentiation():
    source = small("usual")
    mu = source.embeddings(images(source))

    def network(x):
        for layer in source.model.layers:
            x = layer(x[None], None)[0]
        return source.model.layernorm(x)

    with InFloat64():
        dense = torch.func.jacrev(network)(mu.points).reshape(7 * 12, -1)
    found = linearize(source.network(), mu).atoms.to_dense()
    assert float((found - dense).abs().max()) <= 1e-10 * float(dense.abs().max())
    constant = local_lipschitz(source.network(), mu, geometry="euclidean")
    assert float(constant) == pytest.approx(float(torch.linalg.matrix_norm(dense, 2)), rel=1e-6)


def test_a_saved_classifier_is_read_without_its_head(tmp_path):
    source = small("usual")
    model = ViTForImageClassification(source.model.config).double()
    model.vit.load_state_dict(source.model.state_dict())
    model.save_pretrained(tmp_path)
    pixels = images(source, 2)
    for again in (pretrained.load(tmp_path), pretrained.read(model.eval())):
        mu = again.embeddings({"pixel_values": pixels})
        assert torch.allclose(again.network()(mu).points, own(source, pixels), atol=1e-12)
        assert not again.causal


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:, :, 1:], r"\(2, 4, 6\)"),
        (lambda x: x.movedim(0, -1), "channels first"),
        (lambda x: x[0], "channels first"),
        (lambda x: x / 0.0, "NaN or infinite"),
        (lambda x: x.abs().byte(), "image processor scales them, got integers"),
        (lambda x: {"pixel_values": x, "input_ids": x}, "pixel_values alone"),
    ],
)
def test_what_is_no_image_of_the_model_is_refused(change, message):
    source = small("usual")
    with pytest.raises(ValueError, match=message):
        source.embeddings(change(images(source)))
    for question in (lambda: source.encode("text"), lambda: source.vocabulary):
        with pytest.raises(ValueError, match="a model of texts"):
            question()


def test_positions_of_patches_are_learned_and_play_no_role_in_the_layers():
    source = small("usual")
    mu = source.embeddings(images(source))
    bare = ParticleMeasure(mu.points)
    assert torch.equal(source.network()(bare).points, source.network()(mu).points)
