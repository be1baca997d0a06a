"""The two-Dirac experiment: its numbers against the oracles, its edges, and its reference run."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from meanfield import bounds
from meanfield.errors import NoCases
from meanfield.experiments import EXPERIMENTS, get, two_dirac
from tests import oracles
from tests.experiments.test_figures import TINY, ds

__all__ = ["ds"]  # the fixture


def test_every_case_is_complete_and_converged(ds):
    assert (ds.status == 1).all()
    assert ds.value_converged.all()
    assert ds.euclidean_converged.all()
    assert ds.sizes["case"] == len(two_dirac.cases(TINY))
    assert all("long_name" in v.attrs for v in ds.variables.values())


def test_the_constants_are_those_of_the_closed_form(ds):
    for k in np.flatnonzero((ds.crowd == -1) & ~ds.causal):
        case = ds.isel(case=k)
        z = float(case.log_ratio)
        light = z - float(np.logaddexp(0, z))
        particle, splitting = oracles.two_dirac_constants(-1.0, float(case.radius), light)
        assert float(case.particle) == pytest.approx(float(particle), rel=1e-9)
        assert float(case.splitting) == pytest.approx(float(splitting), rel=1e-9, abs=1e-30)
        assert float(case.value) == max(float(case.particle), float(case.splitting))


def test_the_sequence_and_the_weighted_pair_agree_without_a_mask(ds):
    rows = ds.isel(case=np.flatnonzero((ds.n_tokens > 0) & ~ds.causal))
    np.testing.assert_allclose(rows.euclidean, rows.particle, rtol=1e-9)


def test_bounds_hold_on_both_sides(ds):
    assert (ds.value <= ds.mean_field_bound * (1 + 1e-12)).all()
    pairs = ds.isel(case=np.flatnonzero(ds.crowd == -1))
    assert (pairs.two_dirac_entry <= pairs.particle * (1 + 1e-12)).all()
    rows = ds.isel(case=np.flatnonzero(ds.n_tokens > 0))
    assert (rows.general_lower <= rows.euclidean * (1 + 1e-12)).all()
    bound = bounds.theorem_3_3(1.0, 1.0, rows.radius.values, rows.n_tokens.values)
    np.testing.assert_allclose(rows.general_bound, bound, rtol=1e-12)
    assert (rows.euclidean <= rows.general_bound).all()


def test_secants_meet_and_tend_to_the_local_constant(ds):
    rows = ds.isel(case=np.flatnonzero(ds.n_tokens == 5), step=-1)
    np.testing.assert_allclose(rows.wasserstein_secant, rows.euclidean_secant, rtol=1e-9)
    np.testing.assert_allclose(rows.euclidean_secant, rows.euclidean, rtol=1e-3)
    assert (rows.wasserstein_secant_lower <= rows.euclidean_secant * (1 + 1e-12)).all()
    assert (rows.wasserstein_secant_upper >= rows.euclidean_secant * (1 - 1e-12)).all()


def test_a_split_atom_attains_the_splitting_component(ds):
    rows = ds.isel(case=np.flatnonzero((ds.crowd == 0) & ~ds.causal), step=-1)
    np.testing.assert_allclose(rows.splitting_secant, rows.splitting, rtol=1e-3)
    far = rows.isel(case=np.flatnonzero(rows.radius == 4.0))
    assert (far.splitting / far.particle).item() > 3


def test_a_light_weight_of_e_minus_900_is_among_the_cases(ds):
    rows = ds.isel(case=np.flatnonzero(ds.log_ratio == -900.0))
    assert rows.sizes["case"] == 4
    # So little mass changes nothing at this radius: the heavy atom alone has the norm of V.
    np.testing.assert_allclose(rows.value, 1.0, rtol=1e-12)


def test_the_optimum_over_the_light_weight_is_where_the_formula_says():
    settings = two_dirac.Settings(
        radii=(2.0,),
        n_tokens=(),
        dims=(2,),
        offsets=tuple(np.linspace(-0.5, 0.5, 11)),
        log_ratios=(),
        split_radii=(),
        masks=(False,),
    )
    ds = two_dirac.EXPERIMENT.run(settings)
    best = ds.isel(case=int(np.argmax(ds.particle.values)))
    assert float(best.log_ratio) == pytest.approx(
        bounds.two_dirac_best_log_ratio(1.0, 2.0), abs=0.11
    )
    assert math.isclose(float(best.particle), 165.8455, rel_tol=1e-3)


def test_a_sequence_has_two_tokens_or_more_and_none_is_no_sequence():
    some, with_none = (replace(TINY, n_tokens=n) for n in ((5,), (0, 5)))
    assert two_dirac.cases(with_none) == two_dirac.cases(some)
    with pytest.raises(ValueError, match="n_tokens: expected 0, or 2 and more, got 1"):
        two_dirac.cases(replace(TINY, n_tokens=(2, 1)))
    with pytest.raises(ValueError, match="dims: expected whole numbers ≥ 1, got 0"):
        two_dirac.cases(replace(TINY, dims=(1, 0)))


def test_without_secants_there_is_no_figure_of_them(ds):
    none = ds.assign(euclidean_secant=math.nan * ds.euclidean_secant)
    with pytest.raises(NoCases, match="no sequence of the Dataset has secants"):
        two_dirac.EXPERIMENT.figures["lemma-3-2"](none)


def test_the_list_of_experiments_loads():
    for name in EXPERIMENTS:
        experiment = get(name)
        assert experiment.name == name
        assert experiment.figures and all(map(callable, experiment.figures.values()))
        assert type(experiment.quick) is type(experiment.settings)
        assert experiment.question.splitlines()[0].endswith((".", "?"))
    with pytest.raises(ValueError, match="experiment: expected one of .*, got 'three-dirac'"):
        get("three-dirac")


def test_a_run_ends_with_the_largest_constant_between_its_bounds():
    settings = two_dirac.Settings(
        radii=(1.0, 2.0),
        n_tokens=(2,),
        dims=(1,),
        offsets=(0.0,),
        log_ratios=(),
        split_radii=(1.0,),
        secant_tokens=(),
    )
    lines = two_dirac.answer(two_dirac.EXPERIMENT.run(settings, progress=False))
    # At R = 1 thirteen masked tokens are worse than two atoms, and interleaved atoms than both,
    # but not those at few positions.
    tokens = replace(settings, radii=(1.0,), n_tokens=(13,))
    last = two_dirac.answer(two_dirac.EXPERIMENT.run(tokens, progress=False))[-1]
    assert "masked, R = 1: largest constant found 5.3402" in last
    ds = two_dirac.EXPERIMENT.run(replace(tokens, n_tokens=(36,), scales=5), progress=False)
    assert float(ds.interleaved.max()) < 0.9 * float(ds.euclidean.max())
    assert f"found {float(ds.euclidean.max()):,.9g};" in two_dirac.answer(ds)[-1]
    plain, masked = ([float(x) for x in re.findall(r"[\d.]+(?:e\+\d+)?", s)] for s in lines)
    radius, found, bound = plain[:3]
    assert radius == 2.0
    assert found == pytest.approx(bounds.two_dirac_lower(1.0, 2.0), rel=1e-3)
    assert found <= bound == pytest.approx(bounds.mean_field(1.0, 1.0, 2.0), rel=1e-5)
    # What is called a bound is one, to its last digit.
    assert bound >= bounds.mean_field(1.0, 1.0, 2.0)
    assert plain[-1] >= bounds.theorem_3_5(1.0, 1.0, 2.0)
    assert plain[-1] == pytest.approx(bounds.theorem_3_5(1.0, 1.0, 2.0), rel=1e-2)
    assert masked[2] == pytest.approx(bounds.masked_mean_field(1.0, 1.0, 2.0), rel=1e-5)
    # Without the best ratio of the weights two Diracs are all that is found.
    other = replace(settings, offsets=(-1.0,), masks=(True,))
    ds = two_dirac.EXPERIMENT.run(other, progress=False)
    assert f"found {float(ds.value[ds.radius == 2.0].max()):,.9g};" in two_dirac.answer(ds)[0]
    drawn = two_dirac.growth_in_radius(causal=True)(ds).get_legend_handles_labels()[1]
    assert "found" in drawn and not any("scale" in x for x in drawn)
