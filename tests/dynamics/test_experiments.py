"""The experiments on flows at a tiny size: the effect that each shows, and its figures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meanfield import figures
from meanfield.experiments import clustering, mean_field_limit

TINY = {
    clustering: clustering.Settings(
        betas=(1.0, 9.0), n_particles=16, last=200.0, last_plane=6.0, n_times=16
    ),
    mean_field_limit: mean_field_limit.Settings(
        n_particles=(16, 128), n_many=512, repetitions=2, dims=(3,), times=(0.0, 0.5)
    ),
}
MODULES = [pytest.param(m, id=m.__name__.rsplit(".", 1)[-1]) for m in TINY]


@pytest.fixture(scope="module")
def made():
    done = {}

    def get(module):
        if module not in done:
            done[module] = module.EXPERIMENT.run(TINY[module], progress=False)
        return done[module]

    return get


@pytest.mark.parametrize("module", MODULES)
def test_every_case_is_done_labelled_and_drawn(module, made):
    ds = made(module)
    assert (ds.status == 1).all(), ds.message.values
    assert all("long_name" in v.attrs for v in ds.variables.values())
    for draw in module.EXPERIMENT.figures.values():
        with figures.style():
            ax = draw(ds)
            ax.figure.canvas.draw()
        assert ax.get_title()
        assert ax.get_xlabel()
        assert ax.get_ylabel()


def test_tokens_on_the_sphere_meet_and_the_energy_rises(made):
    ds = made(clustering)
    sphere = ds.isel(case=np.flatnonzero(ds.space.values == "sphere"))
    assert sphere.n_clusters.sel(step=15)[sphere.beta.values == 1.0] == 1
    assert (sphere.n_clusters.diff("step") <= 0).all()
    assert (sphere.log_energy.diff("step") > -1e-9).all()
    plane = ds.isel(case=np.flatnonzero(ds.space.values == "plane"))
    assert (plane.points[..., 2] == 0).all()
    assert np.abs(plane.points).max() < 20


def test_more_samples_are_closer_to_the_mean_field_at_any_depth(made):
    ds = made(mean_field_limit)
    mean = ds.groupby("n_particles").mean()
    assert (mean.w2.sel(n_particles=128) < 0.6 * mean.w2.sel(n_particles=16)).all()
    ax = mean_field_limit.slopes(ds)
    first = ax.get_lines()[0]
    # No law is fitted through fewer than five sizes.
    assert len(mean.n_particles) < 5
    assert not [text for text in ax.get_legend_handles_labels()[1] if "n^" in text]
    np.testing.assert_allclose(first.get_ydata(), mean.w2.isel(time=0), rtol=1e-12)
    assert (ds.w2_lower <= ds.w2).all()
    assert (ds.w2 <= ds.w2_upper).all()


def test_depths_are_counted_from_the_start_whichever_are_asked_for(made):
    ds, tiny = made(mean_field_limit), TINY[mean_field_limit]
    late = mean_field_limit.EXPERIMENT.run(replace(tiny, times=(0.5,)), progress=False)
    np.testing.assert_allclose(late.w2.sel(time=0.5), ds.w2.sel(time=0.5), rtol=1e-9)
    labels = mean_field_limit.slopes(late).get_legend_handles_labels()[1]
    assert labels == ["W₂, d = 3, t = 0.5", "means, d = 3, t = 0.5"]
    for times in ((), (-1.0, 0.0)):
        with pytest.raises(ValueError, match="times: expected increasing numbers from 0 on"):
            mean_field_limit.EXPERIMENT.run(replace(tiny, times=times), progress=False)
