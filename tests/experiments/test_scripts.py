"""Every numbered script runs; those that sweep: what each shows, at a tiny size."""

from __future__ import annotations

import itertools
import math
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.collections import QuadMesh
from scipy.special import iv

from meanfield import AttentionParameters, SelfAttention, bounds, sampling
from meanfield.attention.normalizations import exponential
from meanfield.figures.canvas import FORMULA

EXAMPLES = Path(__file__).parents[2] / "examples"
NUMBERED = sorted(EXAMPLES.glob("[0-9]*.py"))


def test_every_example_has_a_number_of_its_own():
    numbers = [int(path.name[:2]) for path in NUMBERED]
    assert numbers == sorted(set(numbers))


def test_slurm_finds_an_array_of_all_shares_at_the_head_of_its_script():
    lines = (EXAMPLES / "23_cluster.py").read_text(encoding="utf-8").splitlines()
    head = list(itertools.takewhile(lambda line: line.startswith("#"), lines))
    assert f"#SBATCH --array=0-{script('23_cluster')['SHARES'] - 1}" in head


@pytest.mark.parametrize("path", NUMBERED, ids=lambda path: path.stem)
def test_an_example_writes_where_nothing_is_committed_from(path):
    """Without --out: to results/, which git ignores, and a folder of its own in it."""
    assert f'default=Path("results/{path.stem}")' in path.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("path", NUMBERED[:5], ids=lambda path: path.stem)
def test_the_examples_run_quickly_and_draw(path, tmp_path):
    command = [sys.executable, str(path), "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert list(tmp_path.glob("*.png"))


def script(name: str) -> dict:
    """What a script defines, without running it."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="imported")


def swept(names: dict, grid: dict, **fixed):
    ds = names["run"](grid, fixed, progress=False)
    assert (ds.status == 1).all(), ds.message.values
    return ds


def test_depth_amplifies_less_than_layers_allow_and_more_than_nothing():
    names = script("27_two_dirac_depth")
    grid = {"radius": [1.7], "offset": [-2.0, 0.0]}
    ds = swept(names, grid, last=0.4, n_times=3, step=0.04)
    assert (ds.constant <= ds.grown * (1 + 1e-6)).all()
    assert (ds.constant[:, 1:] > 1.5).all()
    assert (ds.constant_upper >= ds.constant * (1 - 1e-9)).all()
    assert (ds.layer[:, 0] <= ds.one_layer_bound).all()


def test_masked_tokens_go_to_the_first_which_stays():
    names = script("28_causal_flow")
    grid = {"beta": [1.0, 36.0], "repetition": [0]}
    ds = swept(names, grid, n_tokens=16, last=100.0, n_times=16)
    assert float(ds.moved.max()) < 1e-12
    small, large = (ds.isel(case=np.flatnonzero(ds.beta.values == b)[0]) for b in (1.0, 36.0))
    assert float(small.distance[-1].max()) < 1e-3
    assert float(large.n_clusters[-1]) > 1


def test_every_placement_follows_its_reduced_equation():
    names = script("30_placement")
    grid = {"placement": ["post", "pre", "peri", "ngpt"], "beta": [1.0]}
    ds = swept(names, grid, n_tokens=8, dim=200, last=50.0, n_times=20)
    np.testing.assert_allclose(ds.gap, ds.gap_reduced, rtol=1e-3, atol=1e-9)
    np.testing.assert_allclose(ds.radius, ds.radius_reduced, rtol=1e-6)
    # A random start of dimension 200 is orthonormal up to 1/√200.
    early = ds.isel(time=slice(0, 12))
    np.testing.assert_allclose(early.gap_random, early.gap_reduced, rtol=0.3)
    last = {str(n): float(g) for n, g in zip(ds.placement.values, ds.gap[:, -1], strict=True)}
    assert last["post"] < 1e-10
    assert last["pre"] > 1e-4


def test_the_first_stage_has_as_many_clusters_as_the_fastest_mode():
    names = script("33_metastability")
    fixed = {"n_particles": 48, "noise": 1e-3, "last": 1e5, "n_times": 31}
    ds = swept(names, {"beta": [4.0], "repetition": [0]}, **fixed)
    assert abs(float(ds.found_mode[0]) - float(ds.first_mode[0])) <= 1
    assert float(ds.n_clusters[0, 0]) == 48
    assert (ds.n_clusters.diff("time") <= 0).all()
    for beta in (1.0, 9.0, 81.0):
        rates = [k**2 * iv(k, beta) for k in range(1, 60)]
        assert names["first_mode"](beta) == 1 + int(np.argmax(rates))
    phi = 2 * np.pi * np.arange(24) / 24
    combed = np.round(phi / (2 * np.pi / 4)) * (2 * np.pi / 4)
    path = np.stack([np.stack([np.cos(p), np.sin(p)], -1) for p in (phi, combed)])
    assert names["dominant_mode"](path) == 4
    assert np.isnan(names["dominant_mode"](path[:1]))


def test_samples_of_a_gaussian_follow_the_equation_better_the_more_there_are():
    names = script("34_gaussian_flow")
    fixed = {"std": 0.5, "last": 1.0, "n_times": 3, "step": 0.1, "n_shown": 2}
    grid = {"kernel": ["softmax", "l2"], "n_particles": [50, 400], "repetition": range(3)}
    ds = swept(names, grid, **fixed)
    for kernel in ("softmax", "l2"):
        rows = ds.isel(case=np.flatnonzero(ds.kernel.values == kernel))
        few, many = (
            float(rows.error.isel(time=-1)[rows.n_particles.values == n].mean()) for n in (50, 400)
        )
        assert many < 0.15
        assert many < 0.6 * few


@pytest.fixture(scope="module")
def regimes() -> tuple:
    names = script("35_regimes")
    return names, swept(names, {"n_tokens": [2, 20], "radius": [0.5, 1.5, 5.0]}, clouds=3)


def test_regimes_stay_below_every_upper_bound_and_reach_the_lower_one(regimes):
    ds = regimes[1]
    upper = np.minimum(ds.general_bound, ds.theorem_3_5)
    assert (ds.worst <= ds.tokens_bound * (1 + 1e-9)).all()
    assert (ds.tokens_bound <= upper).all()
    assert (ds.tokens_bound <= ds.mean_field_bound).all()
    assert (ds.general_lower <= ds.adversarial * (1 + 1e-9)).all()
    small, large = ds.radius == 0.5, ds.radius == 5.0
    # Small balls: the mean-field bound, which has no n, is the smaller one for long sequences.
    assert (ds.theorem_3_5 < ds.general_bound)[small & (ds.n_tokens == 20)].all()
    assert (ds.theorem_3_5 > ds.general_bound)[large].all()


def test_the_map_of_regimes_is_what_was_found_with_the_borders_of_the_bounds(regimes):
    names, ds = regimes
    ax = names["regime_map"](ds)
    (mesh,) = [found for found in ax.collections if isinstance(found, QuadMesh)]
    expected = np.log10(ds.worst / np.sqrt(ds.n_tokens)).values
    np.testing.assert_allclose(np.sort(mesh.get_array().ravel()), np.sort(expected), rtol=1e-12)
    lines = [one for one in ax.get_lines() if one.get_gid() == FORMULA]
    for n, radius in np.array(lines[0].get_data()).T[::60]:
        assert n == pytest.approx(math.exp(2 * radius**2))
    for n, radius in np.array(lines[1].get_data()).T[::60]:
        # Theorem 3.3 with ‖A‖ = ‖V‖ = 1, for n between whole numbers too.
        general = math.sqrt(3 * (radius**4 * (4 * n + 1) + n))
        assert bounds.theorem_3_5(1.0, 1.0, radius) == pytest.approx(general, rel=1e-6)


# --- noise ---


@pytest.fixture(scope="module")
def noise() -> dict:
    return script("29_noise_threshold")


def test_order_is_where_the_stationary_measure_has_it(noise):
    grid = {"dim": [2], "beta": [0.5], "ratio": [0.5, 2.0]}
    fixed = {"n_particles": 300, "last": 15.0, "step": 0.05, "most_dim": 2}
    ds = swept(noise, grid, **fixed)
    assert float(ds.order[0]) < 0.25
    assert float(ds.order[1]) == pytest.approx(float(ds.expected[1]), abs=0.05)


def growth_with_noise(coupling: float, beta: float, temperature: float) -> float:
    """Growth rate of the first mode of the circle's density, by differences on a grid."""
    n, h = 512, 1e-4
    phi = 2 * math.pi * np.arange(n) / n
    density = 1 + 1e-7 * np.cos(phi)
    kernel = np.exp(beta * np.cos(phi[:, None] - phi)) * np.sin(phi - phi[:, None])
    speed = coupling * kernel @ density / n
    wave = np.fft.fftfreq(n, 1 / n)
    flux = np.fft.ifft(1j * wave * np.fft.fft(density * speed)).real
    heat = temperature * np.fft.ifft(-(wave**2) * np.fft.fft(density)).real
    change = h * (heat - flux)
    return float(change @ np.cos(phi) / ((density - 1) @ np.cos(phi)) / h)


@pytest.mark.parametrize("beta", [0.5, 2.0, 6.0])
@pytest.mark.parametrize("temperature", [0.5, 0.1])
def test_the_critical_coupling_is_where_the_circle_gets_unstable(noise, beta, temperature):
    """The convention of the published formula: temperature ½, drift K ∫ e^{β⟨x,y⟩} P_x y dμ."""
    critical = noise["critical_coupling"](2, beta, temperature=temperature)
    assert growth_with_noise(critical, beta, temperature) == pytest.approx(0, abs=1e-6)
    assert growth_with_noise(1.01 * critical, beta, temperature) > 1e-4
    published = (beta / 2) / (math.gamma(1.0) * iv(1, beta))
    assert noise["critical_coupling"](2, beta) == pytest.approx(published, rel=1e-12)


@pytest.mark.parametrize("d", [3, 5])
def test_the_critical_coupling_is_the_first_funk_hecke_coefficient(noise, d):
    from scipy.integrate import quad

    beta = 2.5

    def weight(u):
        return (1 - u * u) ** ((d - 3) / 2)

    mass = quad(weight, -1, 1)[0]
    first = quad(lambda u: u * math.exp(beta * u) * weight(u), -1, 1)[0] / mass
    # The mode grows at (d − 1)(K first/β − τ).
    assert noise["critical_coupling"](d, beta) == pytest.approx(0.5 * beta / first, rel=1e-9)


def test_order_appears_with_a_jump_exactly_above_the_published_beta(noise):
    """Continuous iff β ≤ β_*, where I_{d/2+1}(β_*)/I_{d/2}(β_*) = 1/d."""
    from scipy.optimize import brentq

    for d in (2, 3, 4):
        star = brentq(lambda b, d=d: iv(d / 2 + 1, b) / iv(d / 2, b) - 1 / d, 0.1, 20)
        for factor, jumps in ((0.8, False), (1.3, True)):
            beta = factor * star
            below = 0.995 * noise["critical_coupling"](d, beta)
            assert (noise["aligned_order"](d, beta, below) > 0.1) == jumps


@pytest.mark.parametrize("temperature", [0.5, 0.2])
def test_the_aligned_measure_is_where_noisy_tokens_end(noise, temperature):
    d, beta, n = 3, 1.0, 600
    g = torch.Generator().manual_seed(2)
    K = 2.0 * noise["critical_coupling"](d, beta, temperature=temperature)
    eye = torch.eye(d, dtype=torch.float64)
    F = SelfAttention(
        AttentionParameters.from_bilinear(beta * eye, K * eye), normalization=exponential
    )
    start = torch.nn.functional.normalize(sampling.sphere(n, d, generator=g) + 2 * eye[0], dim=-1)
    how = {"step": 0.02 / temperature, "temperature": temperature, "generator": g}
    path = noise["noisy_flow"](F, start, np.linspace(0, 12, 25), **how)
    expected = noise["aligned_order"](d, beta, K, temperature=temperature)
    # The standard error at one time is below 1/√n; a step of 0.02/τ biases by about 1e-2.
    assert float(path.mean(-2).norm(dim=-1)[10:].mean()) == pytest.approx(expected, abs=0.05)


def test_brownian_motion_on_the_sphere_forgets_its_start_at_the_known_rate(noise):
    d, tau, t, n = 3, 0.3, 0.8, 20_000
    start = torch.eye(d, dtype=torch.float64)[:1].expand(n, -1).clone()
    how = {"step": 0.01, "temperature": tau, "generator": torch.Generator().manual_seed(6)}
    path = noise["noisy_flow"](lambda mu: mu.replace(0 * mu.points), start, [0.0, t], **how)
    # The Laplacian's first eigenvalue is d − 1; the standard error is below 1/√n.
    expected = math.exp(-(d - 1) * tau * t)
    assert float(path[-1, :, 0].mean()) == pytest.approx(expected, abs=4 / math.sqrt(n))
