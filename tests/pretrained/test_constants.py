"""The table of constants of a model: each number is that of a call of its own; certain bounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xarray as xr

from meanfield import bounds, figures
from meanfield.bounds import local_upper
from meanfield.errors import NoCases
from meanfield.lipschitz import ball_upper, local_lipschitz
from meanfield.pretrained import constants

pytest.importorskip("transformers")
from tests.pretrained import small_models
from tests.pretrained.small_models import small

IDS = torch.arange(3, 8)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_every_constant_is_that_of_its_map_at_what_enters_it(name):
    source = small(name)
    ds = source.constants(IDS, rtol=1e-4)
    mu = source.embeddings(IDS)
    clouds = source.attention_inputs(IDS)
    start = mu
    for layer in range(3):
        block, F = source.block(layer, length=5), source.attention(layer, length=5)
        for found, G, at in (("block", block, mu), ("attention", F, mu.replace(clouds[layer]))):
            constant = local_lipschitz(G, at)
            assert float(ds[found][layer]) == pytest.approx(float(constant), rel=1e-6)
            assert ds[f"{found}_converged"][layer]
            assert float(ds[f"{found}_upper"][layer]) >= float(constant)
            bound = float(ds[f"{found}_bound"][layer])
            assert bound == pytest.approx(float(local_upper(G, at)))
            assert bound >= float(constant) * (1 - 1e-6)
        mu = block(mu)
    whole = local_lipschitz(source.network(length=5), start)
    assert float(ds.network) == pytest.approx(float(whole), rel=1e-6)
    assert ds.attrs["length"] == 5
    assert ds.attrs["weights"] == source.fingerprint
    assert ds.attrs["training"] == 0
    source.model.train()
    assert source.constants(IDS, layers=[0], bounds=False).attrs["training"] == 1


def test_tokens_that_are_no_numbers_are_said_with_the_layer_that_they_enter():
    source = small("bert")
    with torch.no_grad():
        source.model.encoder.layer[1].output.dense.bias[0] = float("nan")
    assert torch.isfinite(source.attention_inputs(IDS, layers=[0])).all()
    with pytest.raises(ValueError, match=r"tokens that enter layer 2: expected finite numbers"):
        source.constants(IDS)


def test_chosen_layers_without_bounds_have_the_numbers_of_all(monkeypatch):
    source = small("llama")
    whole = source.constants(IDS)
    monkeypatch.setattr(constants, "constant_upper", None)
    some = source.constants(IDS, layers=[2.0, 0], bounds=False)
    assert not [name for name in some if name.startswith("network") or name.endswith("_bound")]
    xr.testing.assert_allclose(some, whole[list(some)].sel(layer=[2, 0]), rtol=1e-9)
    with pytest.raises(IndexError, match=r"0\.\.2"):
        source.constants(IDS, layers=[3])


def test_the_figure_of_constants_shows_value_probable_and_certain_end_of_every_layer():
    ds = small("bert").constants([IDS, IDS[:3]])
    ax = figures.plot_constants(ds, parts=["block"])
    lines = [line for line in ax.get_lines() if len(line.get_xdata())]
    for text in range(2):
        marks, dashes = lines[2 * text : 2 * text + 2]
        np.testing.assert_array_equal(marks.get_ydata(), ds.block[:, text])
        np.testing.assert_array_equal(dashes.get_ydata(), ds.block_bound[:, text])
        ends = np.array([bar[1, 1] for bar in ax.collections[text].get_segments()])
        np.testing.assert_array_equal(ends, ds.block_upper[:, text])
    bare = figures.plot_constants(ds.drop_vars("block_bound"), parts=["block"])
    assert "certain bound" not in {text.get_text() for text in bare.get_legend().get_texts()}
    with pytest.raises(ValueError, match="parts"):
        figures.plot_constants(ds, parts=["heads"])
    with pytest.raises(NoCases, match="no attribute 'model'"):
        figures.plot_constants(ds.drop_attrs())


def test_of_a_mixture_of_experts_the_figure_has_attention_alone():
    ds = small("mixtral").constants(IDS, bounds=False)
    assert "block" not in ds
    lines = [line for line in figures.plot_constants(ds).get_lines() if len(line.get_xdata())]
    assert len(lines) == 1
    np.testing.assert_array_equal(lines[0].get_ydata(), ds.attention)
    with pytest.raises(ValueError, match="parts: expected 'attention'"):
        figures.plot_constants(ds, parts=["block"])


def test_texts_of_several_lengths_have_the_constants_that_each_has_alone():
    source = small("llama")
    texts = [IDS, IDS[:3]]
    together = source.constants(texts)
    for row, ids in enumerate(texts):
        alone = source.constants(ids, length=5)
        for variable in ("attention", "block", "network"):
            found = together[variable].isel(text=row).values
            assert found == pytest.approx(alone[variable].values, rel=1e-3)
    assert together.block.dims == ("layer", "text")
    assert all(variable.attrs["long_name"] for variable in together.variables.values())


# One of each family, and the kernels that a configuration may ask for.
CASES = [*dict.fromkeys(name.split(",")[0] for name in small_models.CASES), "llama, biased"]
# Whose attention is bounded alone too: of each kernel one.
ALONE = ("bert", "gpt_neox", "llama", "gemma2", "qwen3", "olmo2")


@pytest.mark.parametrize("case", CASES)
def test_blocks_of_every_family_and_attention_of_every_kernel_have_bounds(case, monkeypatch):
    source, n = small(case), 4
    mu = source.block(0, length=n)(source.embeddings(torch.arange(1, n + 1)))
    monkeypatch.setattr("meanfield.maps.map._FACTORED", 0)  # as of larger models
    parts = [source.block(1, length=n)]
    if case in ALONE:
        parts.append(source.attention(1, length=n))
    for F in parts:
        constant = float(local_lipschitz(F, mu).value)
        assert constant <= float(bounds.local_upper(F, mu)) <= 2.5 * constant
        near = ball_upper(F, mu, torch.tensor([0.0, 1e-7], dtype=mu.dtype))
        assert bool((near >= constant * (1 - 1e-12)).all() and near.isfinite().all())
