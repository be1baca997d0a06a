"""Example measures: the configurations of the proofs, and random points."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meanfield import bounds, sampling, solve_w2
from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.lipschitz import local_lipschitz
from meanfield.measures import merge
from tests import oracles

F64 = torch.float64


@given(seed=st.integers(0, 10**6), n=st.integers(2, 6))
def test_adversarial_sequences_are_those_of_the_proof(seed, n):
    A = np.random.default_rng(seed).normal(size=(3, 3))
    for _gamma, points in oracles.adversarial_configurations(A, 2.0, n):
        light, heavy = points[0], points[1]
        # The oracle's eigenvectors have their own sign.
        branch = "negative" if float(light @ heavy) < 0 else "positive"
        ours = sampling.adversarial(A, 2.0, n, branch=branch).points.numpy()
        sign = np.sign(ours[0] @ light)
        np.testing.assert_allclose(sign * ours, points, atol=1e-9)


def test_merging_an_adversarial_sequence_gives_the_two_diracs():
    A = np.diag([0.5, -0.7, 0.2])
    tokens = sampling.adversarial(A, 2.0, 5)
    merged = merge(type(tokens)(tokens.points, log_weights=tokens.log_weights))
    atoms = sampling.two_diracs(2.0, -math.log(4), [0.0, 1.0, 0.0])
    torch.testing.assert_close(merged.points, atoms.points)
    torch.testing.assert_close(merged.log_weights, atoms.log_weights)


def test_the_light_weight_may_be_e_minus_900_or_dominate():
    mu = sampling.two_diracs(1.0, torch.tensor([-900.0, 0.0, 900.0], dtype=F64), [3.0, 0.0])
    expected = [[-900.0, 0.0], [math.log(0.5)] * 2, [0.0, -900.0]]
    torch.testing.assert_close(mu.log_weights, torch.tensor(expected, dtype=F64))
    assert mu.points[0].tolist() == [[1.0, 0.0], [-1.0, 0.0]]


def test_a_batch_of_radii_and_weights_broadcasts():
    radius = torch.tensor([[1.0], [2.0]], dtype=F64)
    mu = sampling.two_diracs(radius, torch.zeros(3, dtype=F64), [1.0], positioned=True)
    assert mu.batch_shape == (2, 3)
    assert mu.points[1, 0].flatten().tolist() == [2.0, -2.0]
    assert mu.positions[0, 0].tolist() == [0.5, 1.0]


def test_the_interleaved_family_climbs_towards_twice_the_plain_constant():
    limit = bounds.masked_two_dirac_lower(1.0, 3.0)
    log_ratio = bounds.two_dirac_best_log_ratio(1.0, 3.0)
    F = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]), causal=True)
    found = []
    for scales, growth in ((1, 2.0), (20, 2.0), (60, 1.5), (200, 1.3)):
        mu = sampling.interleaved_diracs(3.0, log_ratio, [1.0], scales=scales, growth=growth)
        found.append(float(local_lipschitz(F, mu, rtol=1e-6).value))
    assert found == sorted(found)
    assert found[0] == pytest.approx(limit / 2, rel=1e-4)  # all at one position: no mask
    assert found[1] == pytest.approx(82_619, abs=1)
    assert found[3] == pytest.approx(94_995, abs=1)
    assert found[3] < limit < bounds.masked_mean_field(1.0, 1.0, 3.0)


def test_in_a_small_ball_the_interleaved_family_climbs_above_the_bound_of_one_entry():
    log_ratio = bounds.two_dirac_best_log_ratio(1.0, 0.5)
    F = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]), causal=True)
    mu = sampling.interleaved_diracs(0.5, log_ratio, [1.0], scales=300, growth=1.1)
    found = float(local_lipschitz(F, mu).value)
    assert found == pytest.approx(1.81, abs=0.005)
    assert bounds.masked_two_dirac_lower(1.0, 0.5) == pytest.approx(1.64, abs=0.005)
    assert found < bounds.masked_mean_field(1.0, 1.0, 0.5)


def test_the_interleaved_family_is_two_diracs_at_every_position():
    ratios = torch.tensor([-900.0, 1.0], dtype=F64)
    mu = sampling.interleaved_diracs(2.0, ratios, [0.0, 3.0], scales=3, growth=4.0)
    assert mu.batch_shape == (2,)
    assert mu.positions[0].tolist() == pytest.approx([1 / 3, 1 / 3, 2 / 3, 2 / 3, 1, 1])
    assert mu.points[0, ::2].tolist() == [[0.0, 2.0]] * 3
    assert mu.points[1, 1::2].tolist() == [[0.0, -2.0]] * 3
    light, heavy = mu.log_weights[..., ::2], mu.log_weights[..., 1::2]
    torch.testing.assert_close(light - heavy, ratios[:, None].expand(2, 3))
    masses = torch.logaddexp(light, heavy).exp()
    torch.testing.assert_close(masses, torch.tensor([[1.0, 4.0, 16.0]] * 2, dtype=F64) / 21)


def test_a_rotation_has_no_critical_pair():
    rotation = [[0.0, -1.0], [1.0, 0.0]]
    with pytest.raises(ValueError, match="expected a non-zero real eigenvalue"):
        sampling.critical_pair(rotation)
    with pytest.raises(ValueError, match="expected a positive real eigenvalue"):
        sampling.critical_pair([[-1.0]], branch="positive")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sampling.critical_pair(np.ones((2, 2, 2))), "take one head"),
        (lambda: sampling.critical_pair([[1.0]], branch="middle"), "branch"),
        (lambda: sampling.adversarial([[-1.0]], 1.0, 1), "n: expected a whole number ≥ 2"),
        (lambda: sampling.two_diracs(1.0, 0.0, [0.0, 0.0]), "non-zero"),
        (lambda: sampling.two_diracs(-1.0, 0.0, [1.0]), "≥ 0"),
        (
            lambda: sampling.interleaved_diracs(1.0, 0.0, [1.0], scales=0),
            "scales: expected a whole number ≥ 1",
        ),
        (lambda: sampling.interleaved_diracs(1.0, 0.0, [1.0], growth=1.0), "> 1"),
    ],
)
def test_bad_arguments_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_random_clouds_have_the_moments_they_should():
    n, d, radius = 20_000, 3, 2.0
    ball = sampling.ball(n, d, radius=radius)
    sphere = sampling.sphere(n, d, radius=radius)
    assert float(ball.norm(dim=-1).max()) <= radius
    torch.testing.assert_close(sphere.norm(dim=-1), torch.full((n,), radius, dtype=F64))
    second = [float((x**2).sum(-1).mean()) for x in (ball, sphere)]
    expected = [radius**2 * d / (d + 2), radius**2]
    np.testing.assert_allclose(second, expected, rtol=0.03)


DRAWS = {
    "sphere": lambda g: sampling.sphere(8, 4, generator=g),
    "ball": lambda g: sampling.ball(8, 4, generator=g),
    "layer": lambda g: AttentionParameters.random(4, generator=g).query[0],
    "pairs": lambda g: solve_w2(torch.eye(8), torch.eye(8)).coupling.sample(8, generator=g)[0],
}


@pytest.mark.parametrize("name", DRAWS)
def test_randomness_is_torch_s_own_unless_a_seed_or_a_generator_is_given(name):
    draw = DRAWS[name]
    first, other = draw(None), draw(None)
    torch.manual_seed(3)
    again = draw(None)
    torch.manual_seed(3)
    assert torch.equal(draw(None), again) and not torch.equal(first, other)
    assert torch.equal(draw(3), again) and torch.equal(draw(np.int64(3)), again)
    assert torch.equal(draw(torch.Generator().manual_seed(3)), again)
    assert not torch.equal(draw(4), again)


def test_random_layers_and_random_points_are_not_the_same_numbers():
    q, x = AttentionParameters.random(8).query[0], sampling.sphere(8, 8)
    assert float(torch.cosine_similarity(x, q).abs().max()) < 0.99


@pytest.mark.parametrize("size", [1e-170, 1e-162, 1.0, 1e300])
def test_a_direction_of_any_length_is_a_direction(size):
    mu = sampling.two_diracs(1.0, 0.0, [3 * size, 4 * size])
    assert float(mu.points[0].norm()) == pytest.approx(1.0, rel=1e-15)
