"""The smaller experiments: what each is there to show, at a tiny size."""

from __future__ import annotations

import numpy as np
import pytest

from meanfield import figures
from meanfield.experiments import EXPERIMENTS, lemma_3_2, load, masked_bound, regimes


def labelled(ds) -> bool:
    return all("long_name" in v.attrs and "units" in v.attrs for v in ds.variables.values())


def test_lemma_3_2_secants_meet_and_splitting_is_its_own_component():
    tiny = lemma_3_2.Settings(
        n_tokens=(2, 6), radii=(2.0,), draws=1, steps=(1.0, 1e-3, 1e-6), dim=2
    )
    ds = lemma_3_2.run(tiny)
    assert (ds.status == 1).all()
    assert labelled(ds)
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


def test_regimes_stay_below_every_upper_bound_and_reach_the_lower_one():
    ds = regimes.run(regimes.Settings(n_tokens=(2, 20), radii=(0.5, 1.5, 5.0), clouds=3))
    assert (ds.status == 1).all()
    assert labelled(ds)
    upper = np.minimum(ds.general_bound, ds.theorem_3_5)
    assert (ds.worst <= ds.tokens_bound * (1 + 1e-9)).all()
    assert (ds.tokens_bound <= upper).all()
    assert (ds.tokens_bound <= ds.mean_field_bound).all()
    assert (ds.general_lower <= ds.adversarial * (1 + 1e-9)).all()
    small, large = ds.radius == 0.5, ds.radius == 5.0
    # Small balls: the mean-field bound, which has no n, is the smaller one for long sequences.
    long = ds.n_tokens == 20
    assert (ds.theorem_3_5 < ds.general_bound)[small & long].all()
    assert (ds.theorem_3_5 > ds.general_bound)[large].all()


def test_masked_attention_exceeds_the_unmasked_bound_and_not_the_hardy_bound():
    ds = masked_bound.run(masked_bound.Settings(n_tokens=(4, 64), sizes=(0.0, 0.3), clouds=2))
    assert (ds.status == 1).all()
    assert labelled(ds)
    zero = ds["size"] == 0.0
    assert (ds.largest > ds.unmasked_bound)[zero].all()
    assert (ds.unmasked_sharp <= ds.unmasked_bound).all()
    assert (ds.largest <= ds.hardy_bound).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_quick_runs_are_complete_and_drawn(name, tmp_path):
    import matplotlib.pyplot as plt

    module = load(name)
    ds = module.run(module.QUICK)
    assert (ds.status == 1).all()
    assert labelled(ds)
    for function, arguments in module.FIGURES.values():
        with figures.style():
            ax = getattr(figures, function)(ds, **arguments)
            ax.figure.savefig(tmp_path / f"{function}.png")
            plt.close(ax.figure)
