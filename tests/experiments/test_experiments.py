"""The smaller experiments at a tiny size: the effect that each shows."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from meanfield import (
    AttentionParameters,
    ParticleMeasure,
    SelfAttention,
    bounds,
    figures,
    local_lipschitz,
)
from meanfield.experiments import (
    EXPERIMENTS,
    get,
    inversion,
    l2_tightness,
    lemma_3_2,
    masked_bound,
    sharpness,
)
from meanfield.figures.canvas import FORMULA


def labelled(ds) -> bool:
    return all("long_name" in v.attrs for v in ds.variables.values())


def test_lemma_3_2_secants_meet_and_splitting_is_its_own_component():
    tiny = lemma_3_2.Settings(
        n_tokens=(2, 6), radii=(2.0,), draws=1, steps=(1.0, 1e-3, 1e-6), dim=2
    )
    ds = lemma_3_2.EXPERIMENT.run(tiny)
    assert (ds.status == 1).all()
    assert labelled(ds)
    assert "over max ‖xᵢ‖" in ds.step.long_name  # random clouds do not reach the sphere
    small = ds.isel(step=-1)
    top = small.sel(perturbation="top")
    np.testing.assert_allclose(top.euclidean_secant, ds.euclidean, rtol=1e-4)
    np.testing.assert_allclose(top.wasserstein_secant, top.euclidean_secant, rtol=1e-8)
    split = small.sel(perturbation="splitting")
    np.testing.assert_allclose(split.wasserstein_secant, ds.splitting, rtol=1e-3, atol=1e-9)
    assert (ds.wasserstein_secant_lower <= ds.wasserstein_secant_upper).all()
    # Far from the limit the two differ for some cloud: the lemma is about small steps.
    large = ds.isel(step=0, case=np.flatnonzero(~ds.causal))
    gap = (large.euclidean_secant / large.wasserstein_secant - 1).sel(perturbation="top")
    assert float(np.abs(gap).max()) > 1e-3


def test_masked_attention_exceeds_the_unmasked_bound_and_not_the_hardy_bound():
    ds = masked_bound.EXPERIMENT.run(
        masked_bound.Settings(n_tokens=(4, 64), sizes=(0.0, 0.3), clouds=2)
    )
    assert (ds.status == 1).all()
    assert labelled(ds)
    zero = ds["size"] == 0.0
    assert (ds.largest > ds.unmasked_bound)[zero].all()
    assert (ds.unmasked_sharp <= ds.unmasked_bound * (1 + 1e-11)).all()
    assert (ds.largest <= ds.hardy_bound).all()
    assert (ds.largest < ds.unmasked_bound)[~zero].all()
    assert "where that is small" in str(masked_bound.HARDY.__doc__)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_page_shows_the_whole_caption_of_every_figure_and_none_twice(name):
    drawn = get(name).figures.values()
    captions = [str(one.__doc__) for one in drawn if not isinstance(one, functools.partial)]
    captions += [str(one.func.__doc__) for one in drawn if isinstance(one, functools.partial)][:1]
    assert not any("\n" in caption.strip() for caption in captions)
    assert len({*captions}) == len(captions)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_long_name_stands_alone(name):
    words = [one.long_name for one in get(name).variables]
    words += [one.metadata["meaning"] for one in dataclasses.fields(get(name).settings)]
    neighbour = re.compile(
        r"\b(the same|that answer|its component|the two agree|here|all if there are none)\b"
    )
    assert not [text for text in words if neighbour.search(text) or len(text) < 3]


def test_the_largest_of_several_has_converged_where_all_have(monkeypatch):
    """One that has not might have been the largest."""

    def but_one(*args, **kwargs):
        found = local_lipschitz(*args, **kwargs)
        return replace(found, converged=found.value > found.value.min())

    monkeypatch.setattr(masked_bound, "local_lipschitz", but_one)
    s, seed = masked_bound.Settings(clouds=2), torch.Generator().manual_seed(0)
    assert masked_bound.largest_masked(s, 4, 0.1, seed)["largest_converged"] is False


def test_the_masked_bound_that_is_drawn_holds_for_weighted_clouds():
    """Two weighted atoms exceed the bound for two uniform tokens."""
    F = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]), causal=True)
    mu = ParticleMeasure([[1.0], [-1.0]], weights=[0.05, 0.95], positions=[0.5, 1.0])
    weighted = float(local_lipschitz(F, mu).value)
    assert weighted > bounds.tokens(1.0, 1.0, 1.0, 2, causal=True)
    ds = masked_bound.EXPERIMENT.run(
        masked_bound.Settings(n_tokens=(2, 4), sizes=(1.0,), clouds=1)
    )
    lines = [one for one in masked_bound.HARDY(ds).get_lines() if one.get_gid() == FORMULA]
    (masked,) = [one for one in lines if one.get_linestyle() == "--"]
    assert min(masked.get_ydata()) > weighted


def test_the_bounds_lie_just_above_what_is_found():
    tiny = sharpness.Settings(
        radii=(1.0, 3.0), n_atoms=(3,), dims=(1,), starts=2, steps=10, scales=120, growth=1.4
    )
    ds = sharpness.EXPERIMENT.run(tiny)
    assert (ds.status == 1).all() and labelled(ds)
    ratio = ds.found / ds.upper
    assert (ratio <= 1 + 1e-9).all()
    far = ds.radius == 3.0
    assert (ratio[far & ~ds.causal] > 0.999).all()
    assert (ratio[far & ds.causal] > 0.5).all()
    assert (ds.upper < ds.theorem_3_5 / 30_000)[far & ~ds.causal].all()
    # Two Diracs are the worst that the search knows, up to the grid of their weights.
    plain = ds.extremality[~ds.causal]
    assert (plain <= 1 + 1e-5).all() and (plain > 0.999).all()
    assert (ds.tokens_found <= ds.tokens_upper * (1 + 1e-9)).all()
    assert (ds.tokens_upper < ds.theorem_3_3).all()
    assert (ds.order_found <= ds.order_upper * (1 + 1e-9))[~ds.causal].all()
    # W₁ is reached up to the additive c.
    first = ds.isel(case=np.flatnonzero(~ds.causal)).sel(order=1.0)
    assert (first.order_found >= (first.order_upper - first.radius**2) * (1 - 1e-6)).all()


def test_the_constant_of_order_infinity_is_reached_in_the_plane():
    eye = torch.eye(2, dtype=torch.float64)
    F = SelfAttention(AttentionParameters.from_bilinear(-eye, eye))
    for radius in (0.5, 1.0, 3.0):
        found = sharpness._order_found(F, radius, np.inf)
        upper = bounds.mean_field(1.0, 1.0, radius, p=np.inf)
        assert upper * (1 - 1e-5) <= found <= upper * (1 + 1e-9)


def test_the_infinity_norm_of_l2_attention_comes_near_its_bound():
    settings = l2_tightness.Settings(
        n_tokens=(2, 10, 51), shapes=((1, 1), (2, 2)), starts=6, steps=60
    )
    ds = l2_tightness.EXPERIMENT.run(settings)
    assert (ds.status == 1).all()
    assert labelled(ds)
    assert (ds.best <= ds.bound).all()
    # The norm at the tokens found is no less than the row that was climbed.
    near = np.isfinite(ds.best_norm)
    assert (ds.best_norm >= ds.best * (1 - 1e-9))[near].all()
    one = ds.isel(case=np.flatnonzero(ds.dim == 1))
    # Known values: 1.60 and 4.41 are the best of 12 starts elsewhere.
    np.testing.assert_allclose(one.best[:2], [1.60, 4.41], atol=0.02)
    # Two equal groups reach the closed form, which is less than two below the bound.
    np.testing.assert_allclose(one.constructed[2], one.closed_form[2], rtol=1e-12)
    assert (one.bound - one.closed_form < 2).all()
    assert float(one.constructed[2] / one.bound[2]) > 0.86


def test_l2_attention_is_inverted_and_dot_products_are_refuted_where_they_fail():
    ds = inversion.EXPERIMENT.run(inversion.EXPERIMENT.quick)
    assert (ds.status == 1).all()
    assert labelled(ds)
    assert ds.measured_converged.all()
    l2 = ds.isel(case=np.flatnonzero(ds.kernel == "l2"))
    assert (l2.true_error <= l2.certified).all()
    assert (l2.certified <= 1e-12 * 1.1).all()
    assert (l2.measured <= l2.constant).all()
    # Geometric, at least as fast as c predicts, and as the measured constant predicts.
    assert (l2.steps_taken <= l2.steps_bound + 1).all()
    assert (l2.steps_taken <= l2.steps_measured + 2).all()
    assert (l2.steps_bound >= 3 * l2.steps_measured).all()
    wide = (ds.kernel == "dot product") & (ds.spread == 30.0)
    lost = ds.isel(case=np.flatnonzero(wide))
    assert (lost.error[:, -1] > 1e-6).all()
    assert np.isinf(lost.certified).all()
    assert (lost.steepness > 1).all()


@pytest.mark.parametrize("kernel", ["l2", "dot product"])
def test_the_errors_of_one_kernel_are_drawn_without_the_other(kernel):
    settings = replace(inversion.EXPERIMENT.quick, kernels=(kernel,), factors=(0.5,))
    ax = inversion.ERRORS(inversion.EXPERIMENT.run(settings, progress=False))
    labels = ax.get_legend_handles_labels()[1]
    assert labels == [f"{kernel.replace('l2', 'L2')}, c = 0.5", "$c^k$"]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_quick_runs_are_complete_and_drawn(name, tmp_path):
    import matplotlib.pyplot as plt

    experiment = get(name)
    ds = experiment.run(experiment.quick)
    assert (ds.status == 1).all()
    assert labelled(ds)
    drawn = set()
    for draw in experiment.figures.values():
        with figures.style():
            ax = draw(ds)
            ax.figure.savefig(tmp_path / "figure.png")
            plt.close(ax.figure)
        drawn.add((tmp_path / "figure.png").read_bytes())
    assert len(drawn) == len(experiment.figures)  # no two show the same


def test_an_experiment_of_the_library_is_pickled_by_name_and_a_changed_one_is_not():
    one = masked_bound.EXPERIMENT
    assert pickle.loads(pickle.dumps(one)) is copy.deepcopy(one) is one
    changed = replace(one, batched=True)
    assert copy.deepcopy(changed).batched
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(changed)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("l2-tightness", {"shapes": ((1, 2),)}, "shapes: expected pairs"),
        ("l2-tightness", {"shapes": (4,)}, "shapes: expected pairs"),
        ("inversion", {"n_heads": 3}, "n_heads: expected a divisor of dim = 4, got 3"),
        ("inversion", {"n_tokens": 1}, "n_tokens: expected"),
        ("inversion", {"spreads": (1.0, 0.0)}, "spreads: expected"),
        ("inversion", {"factors": (0.5, 1.0)}, "factors: expected"),
        ("two-dirac", {"gamma": 0.0}, "gamma: expected"),
        ("two-dirac", {"split_radii": (0.0,)}, "split_radii: expected"),
    ],
)
def test_settings_that_no_case_can_have_are_refused_before_the_first(name, changes, words):
    experiment = get(name)
    with pytest.raises(ValueError, match=words):
        experiment.run(replace(experiment.quick, **changes), progress=False)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("clustering", {"spaces": ("Sphere", "sphere")}), ("inversion", {"kernels": ("L2", "l2")})],
)
def test_a_word_that_is_none_fails_its_case_and_says_which_there_are(name, changes):
    experiment = get(name)
    ds = experiment.run(replace(experiment.quick, **changes), progress=False)
    failed = ds.isel(case=ds.status.values == 3)
    assert 0 < failed.sizes["case"] < ds.sizes["case"]
    assert all("expected one of" in str(text) for text in failed.message.values)
