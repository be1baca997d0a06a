"""What a user's function is checked for before its derivative is believed."""

from __future__ import annotations

import pytest
import torch

from meanfield import ParticleMeasure, linearize, local_lipschitz
from meanfield.attention import kernels
from meanfield.attention.parameters import AttentionParameters
from meanfield.attention.self_attention import SelfAttention
from meanfield.bounds import local_upper
from meanfield.errors import NoDerivativeError
from meanfield.layers import MLP, Chain, Pointwise
from meanfield.lipschitz import ball_upper
from meanfield.maps.derivative_checks import kinked, quotients
from tests.maps import small_maps as small

F64 = torch.float64
W = torch.tensor([[2.0, -1.0], [0.5, 1.0]], dtype=F64)


def measure(n: int = 5, *, batch: tuple[int, ...] = (), positioned: bool = False):
    g = torch.Generator().manual_seed(n)
    points = torch.randn(*batch, n, 2, generator=g, dtype=F64)
    logs = torch.randn(*batch, n, generator=g, dtype=F64).log_softmax(-1)
    positions = torch.linspace(0, 1, n, dtype=F64) if positioned else None
    return ParticleMeasure(points, log_weights=logs, positions=positions)


def moving(T):
    return lambda mu: mu.replace(T(mu.points))


# --- the derivative is that of the values ---


@pytest.mark.parametrize("share", [0.3, 0.009, 0.001])
def test_a_small_part_without_a_path_for_gradients_is_noticed(share):
    with pytest.raises(ValueError, match="that of its difference quotient"):
        linearize(moving(lambda x: x @ W + share * (x @ W).detach()), measure())


def test_products_of_a_pointwise_map_are_compared_as_they_are_taken():
    """At the points of the measure, and not on an axis of each atom's own."""
    T = Pointwise(lambda x: x + 2 * (x.detach() if x.ndim == 2 else x))
    with pytest.raises(ValueError, match="that of its difference quotient"):
        linearize(T, measure())


def test_a_part_below_what_quotients_resolve_is_not():
    linearize(moving(lambda x: x @ W + 1e-6 * (x @ W).detach()), measure())


@pytest.mark.parametrize("batch", [(), (2,)])
def test_noise_is_noticed_whatever_its_size(batch):
    with pytest.raises(ValueError, match=r"expected the same image .*call \.eval\(\)"):
        linearize(moving(lambda x: x @ W + 1e-5 * torch.randn_like(x)), measure(batch=batch))
    dropout = torch.nn.Dropout(0.1)
    with pytest.raises(ValueError, match=r"call \.eval\(\)"):
        linearize(moving(dropout), measure(400))
    dropout.eval()
    linearize(moving(dropout), measure(40))


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-300])
def test_a_derivative_that_is_nothing_but_rounding_is_not_refused(scale):
    # The softmax of constant scores, in which gradients cancel up to rounding.
    def F(mu):
        scores = scale * (mu.points @ mu.points.mT) + mu.log_weights[..., None, :]
        return mu.replace(scores.softmax(-1).sum(-1, keepdim=True) * (1 + scale * mu.points))

    for seed in range(3, 8):
        size = float(linearize(F, measure(seed), geometry="wasserstein").atoms.to_dense().norm())
        assert size <= max(3 * scale * seed, 1e-14)


def test_derivatives_that_cancel_agree_forwards_and_backwards_up_to_rounding():
    def F(mu):  # 1 for all points, since a softmax sums to it
        scores = mu.points @ W @ mu.points.mT + mu.log_weights[..., None, :]
        return mu.replace(scores.softmax(-1).sum(-1, keepdim=True))

    for seed in range(3, 12):
        assert float(linearize(F, measure(seed)).atoms.to_dense().norm()) < 1e-13


def test_where_the_quotients_disagree_the_derivative_may_be_off_by_as_much():
    # Rounding spoils the quotients of small steps, and curvature those of large ones.
    def T(x):
        return (100 * ((x + 1e8) - 1e8)).sin()

    linearize(moving(T), measure(40))
    with pytest.raises(ValueError, match="that of its difference quotient"):
        linearize(moving(lambda x: T(x) + 0.03 * T(x).detach()), measure(40))


# --- kinks ---


@pytest.mark.parametrize("T", [torch.abs, torch.relu, lambda x: x.norm(dim=-1, keepdim=True)])
@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_a_kink_at_an_atom_is_refused_by_name(T, dtype):
    mu = measure().to(dtype)
    linearize(moving(T), mu)
    kinked = mu.replace(mu.points.index_fill(0, torch.tensor([3]), 0.0))
    for F in (moving(T), Pointwise(T)):
        with pytest.raises(NoDerivativeError, match="move (the|that) atom a little"):
            local_lipschitz(F, kinked)
    with pytest.raises(NoDerivativeError, match="atom 3"):
        linearize(moving(T), kinked)
    absent = kinked.log_weights.index_fill(0, torch.tensor([3]), -torch.inf).log_softmax(0)
    for F in (moving(T), Pointwise(T)):
        linearize(F, ParticleMeasure(kinked.points, log_weights=absent))


def largest(mu):
    return mu.replace(mu.points + mu.points.amax(-2, keepdim=True))


def by_distance(mu):
    apart = (mu.points[..., :, None, :] - mu.points[..., None, :, :]).norm(dim=-1)
    return mu.replace((mu.log_weights[..., None, :] - apart).softmax(-1) @ mu.points)


@pytest.mark.parametrize("F", [largest, by_distance])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_a_kink_where_an_atom_splits_is_refused(F, batch):
    """Of `largest` the constant in W₂ is infinite: a small part of an atom moves all images."""
    mu = measure(batch=batch)
    with pytest.raises(NoDerivativeError, match="where atoms split, and relu very near 0"):
        local_lipschitz(F, mu)
    assert bool(local_lipschitz(F, mu, geometry="euclidean").converged.all())


def test_the_atom_whose_halves_have_a_kink_is_named_by_its_own_number():
    def far_ones_by_distance(mu):
        apart = (mu.points - mu.points.mT).abs() @ mu.weights[:, None]
        return mu.replace(mu.points + torch.where(mu.points > 5, apart, 0.0))

    with pytest.raises(NoDerivativeError, match="image of atom 2 changes"):
        local_lipschitz(far_ones_by_distance, ParticleMeasure([[0.0], [1.0], [10.0]]))


def test_distances_that_are_rounded_off_near_zero_have_a_derivative_where_atoms_split():
    def F(mu):
        moves = mu.points[..., :, None, :] - mu.points[..., None, :, :]
        apart = (moves.square().sum(-1) + 1e-12).sqrt()
        return mu.replace((mu.log_weights[..., None, :] - apart).softmax(-1) @ mu.points)

    assert bool(local_lipschitz(F, measure()).converged)


@pytest.mark.parametrize(
    "T",
    [
        torch.sqrt,
        lambda x: x * x.abs().sqrt(),
        lambda x: x / x.square().sum(-1, keepdim=True).sqrt().clamp_min(0.1),
        lambda x: torch.where(x > 1, x.log(), x),
    ],
)
def test_a_derivative_that_is_not_finite_at_an_atom_is_refused_by_name(T):
    mu = measure()
    mu = mu.replace(mu.points.abs().index_fill(0, torch.tensor([3]), 0.0))
    with pytest.raises(NoDerivativeError, match="finite derivative .* at atom 3"):
        linearize(moving(T), mu)


def test_curvature_and_kinks_nearby_are_no_kinks():
    mu = ParticleMeasure([[1e-3], [-2e-6], [1.0]])
    for T in (torch.abs, torch.relu, lambda x: (300 * x).sin(), lambda x: x * x.abs()):
        linearize(moving(T), mu)
    linearize(moving(lambda x: x * x.abs()), ParticleMeasure([[0.0], [1.0]]))
    # Curvature shows at the large step, rounding of 1e9 at the small ones.
    linearize(moving(lambda x: 1e9 + (300 * x).sin()), measure())


@pytest.mark.parametrize("wrap", [moving, Pointwise])
@pytest.mark.parametrize("away", [5e-6, -1e-5, 2e-5, -4e-5, 1e-4])
def test_an_atom_beside_a_kink_has_a_derivative_in_single_precision(wrap, away):
    """Of 500 atoms before 32 relu one has a kink within the smallest step, 3e-5."""
    mu = ParticleMeasure(torch.tensor([[1 + away], [2.0], [-0.5]]))
    J = linearize(wrap(lambda x: x + 0.5 * (x - 1).abs()), mu).atoms.to_dense()
    torch.testing.assert_close(J, torch.diag(torch.tensor([1.5 if away > 0 else 0.5, 1.5, 0.5])))


@pytest.mark.parametrize("wrap", [moving, Pointwise])
def test_a_kink_is_excused_only_where_torch_knows_both_slopes(wrap):
    at, beside = (ParticleMeasure(torch.tensor([[2.0], [x]])) for x in (1.0, 1.00001))
    alone = ParticleMeasure(beside.points[1:])
    for F, mu in (
        (lambda x: x + ((x - 1).relu() + 1 - x).detach(), at),  # straight through
        (lambda x: x + (x - 1).detach().abs(), at),
        (lambda x: x + (x - 1).detach().abs(), beside),
        (lambda x: x + 0.5 * (x - 1).abs() + 0.3 * x.detach(), alone),
    ):
        with pytest.raises((NoDerivativeError, ValueError), match="derivative"):
            linearize(wrap(F), mu)


@pytest.mark.parametrize("wrap", [moving, Pointwise])
@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_equal_coordinates_are_a_kink_of_sorting_wherever_they_are(wrap, dtype):
    for x in (1.0, 1.3, 1.7, 1e-3, 70.0, 1e4):
        mu = ParticleMeasure(torch.tensor([[1.0, 2.0], [x, x], [0.3, -1.0]], dtype=dtype))
        with pytest.raises(NoDerivativeError, match="on one side|to one side"):
            linearize(wrap(lambda x: x.sort(-1)[0] * torch.tensor([1.0, 2.0], dtype=dtype)), mu)


@pytest.mark.parametrize("wrap", [moving, Pointwise])
@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_a_kink_at_0_behind_a_constant_is_not_beside_the_atom(wrap, dtype):
    """Beside 1 a rounding of a coordinate 0 is nothing, a step of the quotients is not."""
    mu = ParticleMeasure(torch.tensor([[0.0, 1.0], [2.0, -0.7]], dtype=dtype))
    for F in (
        lambda x: (1 - (x - 1).abs()).relu(),
        lambda x: (x - 0.5).clamp(-0.5, 0.5),
        lambda x: x + ((x + 2) - 2).relu(),
    ):
        with pytest.raises(NoDerivativeError, match="on one side|to one side"):
            linearize(wrap(F), mu)


def test_of_ten_thousand_atoms_none_at_a_kink_is_taken_for_one_beside():
    """As one of 5000 was, of which every place that was drawn left the coordinate as it is."""
    x = torch.zeros(10_000, 1, dtype=F64)
    along = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=F64)
    found = quotients(torch.relu, x, along, x)
    at, beside = kinked(found, x, x, along, lambda x: (x > 0) * along)
    assert at.all() and not beside.any()


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_others_are_moved_by_an_atom_beside_a_kink(dtype):
    """Its part of the transposed product counts, which is Σ_j over all atoms j."""
    near = 3e-10 if dtype == F64 else 1e-5
    mu = ParticleMeasure(torch.tensor([[1 + near], [2.0], [-0.5]], dtype=dtype))

    def F(mu):
        mean = (mu.weights[:, None] * mu.points).sum(0)
        return mu.replace(mu.points + 0.5 * (mu.points - 1).abs() + 3 * mean)

    J = linearize(F, mu).atoms.to_dense()
    expected = torch.diag(torch.tensor([1.5, 1.5, 0.5], dtype=dtype)) + 1
    torch.testing.assert_close(J, expected)


def test_bounds_of_relu_at_exactly_zero_take_both_slopes():
    one = torch.eye(1, dtype=F64)
    zero = ParticleMeasure([[0.0], [-1.0]])
    relu = MLP(one, 3 * one, activation="relu")
    gated = MLP(one, one, gate=one, gate_bias=[1.0], inner_bias=[2.0], activation="relu")
    for F, mu, slope in ((relu, zero, 3.0), (gated, ParticleMeasure([[-1.0]]), 1.0)):
        with pytest.raises(NoDerivativeError, match="no unit at exactly 0"):
            local_lipschitz(F, mu)
        h = 1e-6
        secant = (F(mu.replace(mu.points + h)).points - F(mu).points).abs().max() / h
        assert float(secant) == pytest.approx(slope, rel=1e-5)
        assert slope <= float(local_upper(F, mu)) <= 1.0001 * slope
        assert float(ball_upper(F, mu, 0.0)) >= slope
        assert float(ball_upper(Chain([F, relu]), mu, 0.0)) >= 3 * slope
        assert float(F.ball_bounds(mu, 0.0).change) >= slope  # of one slope from the other
    # Units at 0 that nothing reaches, or that reach nothing, have a derivative.
    padded = MLP([[1.0], [0.0], [2.0]], [[1.0, 5.0, 0.0]], [1.0, 0.0, 0.0], activation="relu")
    assert float(local_lipschitz(padded, ParticleMeasure([[0.0]])).value) == pytest.approx(1.0)
    gone = MLP(one, one, gate=one, activation="relu")  # relu(x) x has slope 0 at 0
    assert float(local_lipschitz(gone, ParticleMeasure([[0.0]])).value) == 0.0


def test_bounds_of_a_function_with_a_kink_are_its_constant():
    zero, beside = ParticleMeasure([[0.0], [1.0]]), ParticleMeasure([[0.5], [1.0]])
    known, unknown = Pointwise(torch.abs, lipschitz=1.0), Pointwise(torch.abs)
    assert float(known.local_upper(zero)) == 1.0
    assert float(unknown.local_upper(zero)) == torch.inf
    assert float(unknown.local_upper(beside)) == pytest.approx(1.0)
    assert float(ball_upper(known, zero, 0.0)) == 1.0
    assert float(known.ball_bounds(zero, 0.0).change) >= 2.0


@pytest.mark.parametrize("inner", [kernels.dot_product, kernels.rotary(length=3.0)])
def test_the_direction_of_a_query_that_is_zero_has_no_derivative(inner):
    eye = torch.eye(2, dtype=F64)
    points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=F64)
    at_zero = ParticleMeasure(points, positions=[0.1, 0.2, 0.3])
    absent = ParticleMeasure(points, weights=[0.0, 0.5, 0.5], positions=[0.1, 0.2, 0.3])
    sharp = SelfAttention(
        AttentionParameters(eye, eye, eye), kernel=kernels.cosine(4.0, inner=inner)
    )
    smooth = SelfAttention(
        AttentionParameters(eye, eye, eye), kernel=kernels.cosine(4.0, eps=1e-2, inner=inner)
    )
    with pytest.raises(NoDerivativeError, match="eps > 0"):
        local_lipschitz(sharp, at_zero)
    assert bool(local_lipschitz(sharp, absent).converged)
    assert bool(local_lipschitz(smooth, at_zero).converged)
    capped = SelfAttention(sharp.parameters, kernel=kernels.soft_cap(2.0, inner=sharp.kernel))
    with pytest.raises(NoDerivativeError, match="eps > 0"):
        linearize(capped, at_zero)


def beside_a_large_one(lie):
    """A map that is right of the large measure of two, and at the small one has a lie."""
    near = torch.tensor([1.0, 0.0], dtype=F64)[:, None, None]
    return lambda mu: mu.replace(mu.points**2 + near * lie(mu.points))


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (lambda x: 1e-2 * torch.randn_like(x), "the same image of the same measure"),
        (lambda x: 1e-2 * x.mean(-2, keepdim=True), "depends on the measure alone"),
        (small.Turned.apply, "forward and reverse derivatives disagree"),
    ],
)
def test_each_measure_of_a_batch_is_looked_at_whatever_is_beside_it(lie, words):
    near = measure().points
    mu = ParticleMeasure(torch.stack([near, 1e9 * near]))
    with pytest.raises(ValueError, match=words):
        local_lipschitz(beside_a_large_one(lie), mu)


def test_rounding_at_a_large_measure_says_nothing_of_a_small_one_beside_it():
    near = measure().points
    mu = ParticleMeasure(torch.stack([near, 1e14 * near]))
    found = local_lipschitz(lambda mu: mu.replace(mu.points**2), mu)
    torch.testing.assert_close(found.value, 2 * mu.points.abs().amax((-2, -1)))


def test_an_image_that_is_the_rounding_of_its_points_is_not_refused():
    """Equal atoms less their mean, which is another number where they are stored in parts."""
    for n in range(2, 12):
        mu = ParticleMeasure(torch.tensor([[0.1, 0.3]], dtype=F64).expand(n, 2))
        found = local_lipschitz(lambda mu: mu.replace(mu.points - mu.mean()), mu)
        torch.testing.assert_close(found.value, torch.tensor(1.0, dtype=F64))


# --- weights ---


def softmax_attention(mu, *, blind: bool):
    scores = mu.points @ W @ mu.points.mT
    scores = scores if blind else scores + mu.log_weights[..., None, :]
    return mu.replace(scores.softmax(-1) @ mu.points)


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("positioned", [False, True])
def test_a_map_blind_to_weights_is_refused(batch, positioned):
    mu = measure(batch=batch, positioned=positioned)
    assert bool(local_lipschitz(lambda m: softmax_attention(m, blind=False), mu).converged.all())
    for m in (mu, ParticleMeasure(mu.points)):
        with pytest.raises(ValueError, match=r"use mu\.log_weights"):
            local_lipschitz(lambda m: softmax_attention(m, blind=True), m)
    # As a map of sequences it has a constant.
    local_lipschitz(lambda m: softmax_attention(m, blind=True), mu, geometry="euclidean")


def test_means_without_weights_and_powers_of_weights_are_refused():
    def powers(m):
        return m.replace(m.points - (m.weights[..., None] ** 2 * m.points).sum(-2, True))

    def means(m):
        return m.replace(m.points - m.points.mean(-2, keepdim=True))

    for F in (powers, means, moving(lambda x: x.cumsum(-2))):
        with pytest.raises(ValueError, match=r"off by .* when atoms are stored in two parts"):
            local_lipschitz(F, measure())


def test_an_image_in_another_dtype_is_refused():
    mu = ParticleMeasure([[1.0], [2.0]])
    with pytest.raises(TypeError, match="image in the dtype of the measure, torch.float64, got"):
        linearize(lambda mu: mu.to(torch.float32), mu)
