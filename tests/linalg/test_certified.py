"""Certain upper ends: blocks against dense matrices, weights on purpose wrong, many layers."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, bounds, sampling
from meanfield.attention import kernels, normalizations
from meanfield.attention.averaging import AttentionCore
from meanfield.errors import ConvergenceError
from meanfield.layers import MLP, Chain, LayerNorm, Residual, RMSNorm, Sum
from meanfield.linalg import Candidate, Certified, Dense, LinearMap, certify, operator_norm
from meanfield.linalg.blocks import Core, TokenBlocks
from meanfield.linalg.certain import row_bound, top_eigenvalues
from meanfield.linalg.evidence import proved
from meanfield.linalg.norms import largest_block_norm
from meanfield.lipschitz import local_lipschitz
from meanfield.maps import Map, linearize
from meanfield.maps.map import certain_norm

F64 = torch.float64
DIM, N = 8, 7
KERNELS = {
    "dot product": kernels.dot_product,
    "rotary": kernels.rotary(100.0, length=7),
    "partial rotary": kernels.rotary(100.0, length=7, dim=2),
    "QK-norm": kernels.qk_norm(),
    "QK-norm, then rotary": kernels.rotary(100.0, length=7, inner=kernels.qk_norm()),
    "soft cap": kernels.soft_cap(2.0),
    "saturated soft cap": kernels.soft_cap(1e-3),
    "soft cap of rotary": kernels.soft_cap(2.0, inner=kernels.rotary(length=7)),
    "L2": kernels.l2,
    "window": kernels.window(0.5),
    "ALiBi": kernels.alibi([1.0]),
}

MASKED = ("dot product", "rotary", "QK-norm", "soft cap of rotary", "ALiBi")


def drawn(seed: int, n: int = N, d: int = DIM, spread: float = 2.0) -> ParticleMeasure:
    g = torch.Generator().manual_seed(seed)
    logs = (spread * torch.randn(n, dtype=F64, generator=g)).log_softmax(-1)
    points, s = torch.randn(n, d, dtype=F64, generator=g), torch.rand(n, dtype=F64, generator=g)
    return ParticleMeasure(points, log_weights=logs, positions=s)


def parameters(seed: int = 0, d: int = DIM) -> AttentionParameters:
    g = torch.Generator().manual_seed(seed)
    par = AttentionParameters.random(d, n_heads=4, head_dim=4, biases=True, generator=g)
    keys, values = par.key[:2], par.value[:2]  # grouped, and with key biases
    key_bias = torch.randn(2, 4, dtype=F64, generator=g)
    return AttentionParameters(
        par.query, keys, values, par.output, par.query_bias, None, par.output_bias, None, key_bias
    )


def layered() -> dict[str, Map]:
    """Attention among maps of tokens that can be bounded as one map."""
    g = torch.Generator().manual_seed(3)
    F = SelfAttention(parameters(), causal=True, kernel=KERNELS["soft cap of rotary"])
    norm = LayerNorm(torch.rand(DIM, dtype=F64, generator=g) + 0.5, eps=0.1)
    rms = RMSNorm(torch.rand(DIM, dtype=F64, generator=g) + 0.5, eps=0.1)
    mlp = MLP(*torch.randn(2, DIM, DIM, dtype=F64, generator=g))
    return {
        "residual": Residual(F),
        "pre-norm": Residual(Chain([norm, F]), -0.7),
        "pre-norm, dot product": Residual(Chain([norm, SelfAttention(parameters())])),
        "RMS": Residual(Chain([rms, F])),
        "post-norm": Chain([Residual(F), norm]),
        "peri-norm": Residual(Chain([norm, F, rms])),
        "block": Chain([Residual(Chain([norm, F])), Residual(Chain([rms, mlp]))]),
        "parallel": Residual(Sum([Chain([norm, F]), Chain([rms, mlp])])),
    }


MAPS: dict[str, Map] = (
    {
        f"{name}{', masked' * causal}": SelfAttention(parameters(), causal=causal, kernel=kernel)
        for name, kernel in KERNELS.items()
        for causal in (False, True)
        if not causal or name in MASKED
    }
    | {"sigmoid": SelfAttention(parameters(), normalization=normalizations.sigmoid)}
    | layered()
)


def blocks_and_dense(F: Map, mu: ParticleMeasure):
    return of_map(linearize(F, mu, geometry="wasserstein").atoms)


def of_map(atoms: LinearMap):
    matrix, n = atoms.to_dense(), atoms.in_shape[0]
    dense = matrix.reshape(n, -1, n, matrix.shape[-1] // n).transpose(1, 2)  # (n, n, e, d)
    assert atoms.blocks is not None
    return atoms.blocks(0), dense


def norm(dense: torch.Tensor) -> float:
    return float(torch.linalg.matrix_norm(dense.transpose(1, 2).flatten(2).flatten(0, 1), 2))


@pytest.mark.parametrize("name", MAPS)
def test_sums_over_blocks_are_those_of_the_dense_derivative(name):
    blocks, dense = blocks_and_dense(MAPS[name], drawn(1))
    g = torch.Generator().manual_seed(2)
    for rows in (slice(0, 2), slice(2, N)):
        J = dense[rows]
        x = torch.randn(len(J), J.shape[-2], dtype=F64, generator=g)
        s = 10 ** (3 * torch.rand(len(J), N, dtype=F64, generator=g))
        back = torch.einsum("ijed,ie->ijd", J, x)
        forth = torch.einsum("ijed,ijd,ij->ie", J, back, s)
        squares, moved = blocks.step(x, s, rows)
        torch.testing.assert_close(squares, back.square().sum(-1), rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(moved, forth, rtol=1e-9, atol=1e-9 * float(forth.abs().max()))
        wanted = torch.einsum("ij,ijad,ijbd->iab", s, J, J)
        found, slack = blocks.gram(s, rows)
        off = torch.linalg.matrix_norm(found - wanted, 2)
        top = torch.linalg.matrix_norm(wanted, 2)
        assert bool((off <= slack + 4e-15 * top).all())
        assert bool((slack <= 1e-8 * top).all())
        assert not bool(((J.abs().amax((-2, -1)) > 0) & ~blocks.seen(rows)).any())


@pytest.mark.parametrize("name", ["difference", "values", "outputs", "behind a norm"])
def test_the_bound_of_what_is_exactly_zero_is_zero(name):
    """As of a branch whose output is not trained yet. What is small is not 0."""
    for size in (0.0, 1e-200):
        par = parameters()
        heads = par.query, par.key, par.value, par.output
        small = SelfAttention(AttentionParameters(*heads[:2], size * par.value, par.output))
        F = {
            "difference": None,
            "values": small,
            "outputs": SelfAttention(AttentionParameters(*heads[:3], size * par.output)),
            "behind a norm": Chain([LayerNorm(torch.ones(DIM, dtype=F64)), small]),
        }[name]
        J = size * LinearMap.identity((N, DIM), dtype=F64)
        if F is not None:
            J = linearize(F, drawn(1), geometry="wasserstein").atoms
        found = operator_norm(J, solver=Certified(), upper_rtol=1.0, strict=False)
        truth = float(operator_norm(J, solver=Dense()).value)
        assert (truth > 0) == (size > 0)
        assert truth <= float(found.upper) and (float(found.upper) == 0) == (size == 0)
        assert bool(found.converged) or size > 0


def test_what_is_not_zero_is_seen_where_parts_of_it_are():
    """Values of tokens at one place, measured from it, are 0; their derivative is not."""
    par, mu = parameters(), drawn(1)
    together = mu.replace(mu.points[:1].expand(N, -1).clone())
    none = AttentionParameters(par.query, par.key, 0.0 * par.value, par.output)
    for F, at in ((SelfAttention(par), together), (Residual(SelfAttention(none)), mu)):
        blocks, dense = blocks_and_dense(F, at)
        sizes = dense.abs().amax((-2, -1))
        assert float(sizes.max()) > 0.1
        assert torch.equal(blocks.seen(slice(0, N)), sizes > 0)
        found = operator_norm(
            linearize(F, at, geometry="wasserstein").atoms, solver=Certified(), upper_rtol=1.0
        )
        assert norm(dense) <= float(found.upper)


def test_squares_of_what_cancels_are_not_negative():
    """Three heads whose outputs cancel: blocks are 0 but for rounding."""
    one = torch.randn(4, 1, DIM, DIM, dtype=F64, generator=torch.Generator().manual_seed(0))
    query, key, value, output = one.expand(-1, 3, -1, -1)
    shares = torch.tensor([0.3, 0.6, -0.9], dtype=F64)[:, None, None]
    F = SelfAttention(AttentionParameters(query, key, value, shares * output))
    blocks, _ = blocks_and_dense(F, drawn(1))
    x = torch.randn(N, DIM, dtype=F64, generator=torch.Generator().manual_seed(1))
    squares, _ = blocks.step(x, torch.ones(N, N, dtype=F64), slice(0, N))
    assert bool((squares >= 0).all()) and float(squares.max()) < 1e-12


def test_blocks_of_an_algebra_of_maps_are_those_of_its_matrix_or_none():
    """What is known of BBᵀ of a norm's derivative B is not known of its sums and products."""
    norms = (LayerNorm(torch.ones(DIM, dtype=F64)), RMSNorm(torch.ones(DIM, dtype=F64)))
    F, B, C = (linearize(f, drawn(1)).atoms for f in (SelfAttention(parameters()), *norms))
    maps = (2 * (F @ B + C), F @ (B + C), F @ (-3 * B), F @ B @ C, F @ (B @ C), B @ (C @ F), F @ F)
    found = [of_map(J) for J in maps]
    assert found[0][0] is not None
    assert B.T.blocks is None  # nor are those of a map its transpose's
    for blocks, dense in found:
        if blocks is not None:
            wanted = torch.einsum("ijad,ijbd->iab", dense, dense)
            gram, _ = blocks.gram(torch.ones(N, N, dtype=F64), slice(0, N))
            torch.testing.assert_close(gram, wanted, rtol=1e-10, atol=1e-11)


def test_a_bound_is_not_rounded_down_to_single_precision():
    """Of one row of two numbers it is their length, which single precision does not hold."""
    pairs = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
    J = LinearMap.pointwise(pairs[:, None, None, :])
    found = proved(J, [torch.ones(1, 1)] * len(pairs))
    truth = torch.linalg.vector_norm(pairs.double(), dim=-1)
    assert bool((truth <= found).all()) and bool((found <= truth * (1 + 1e-6)).all())


@pytest.mark.parametrize("name", MAPS)
def test_the_bound_is_certain_and_near(name):
    mu = drawn(4)
    sigma = norm(blocks_and_dense(MAPS[name], mu)[1])
    found = operator_norm(
        linearize(MAPS[name], mu, geometry="wasserstein").atoms, solver=Certified(), upper_rtol=1.0
    )
    assert float(found.value) == pytest.approx(sigma, rel=1e-4)
    assert sigma <= float(found.upper) <= 1.8 * sigma
    assert found.miss == 0


def loops(dense: torch.Tensor, w: torch.Tensor) -> float:
    """The bound by its definition, one row and one block at a time."""
    total = torch.zeros(len(dense), dtype=F64)
    for J, weights in zip(dense, w, strict=True):
        summed = sum(block @ block.mT / at for block, at in zip(J, weights, strict=True))
        total += float(torch.linalg.matrix_norm(summed, 2)) * weights
    return math.sqrt(float(total.max()))


@pytest.mark.parametrize("seed", range(4))
def test_every_choice_of_weights_is_valid_and_gives_its_own_bound(seed):
    g = torch.Generator().manual_seed(seed)
    blocks, dense = blocks_and_dense(list(MAPS.values())[3 * seed], drawn(seed))
    sigma = norm(dense)
    for power in (0.0, 1.0, 10.0, 60.0):
        w = 10 ** (power * torch.randn(N, N, dtype=F64, generator=g).clamp(-2, 2))
        found = float(row_bound(blocks, w))
        assert sigma <= found
        if power <= 10:
            assert found == pytest.approx(loops(dense, w), rel=1e-6)


@pytest.mark.parametrize("power", [-900, 900])
def test_weights_at_the_ends_of_the_number_range_bound_or_say_nothing(power):
    blocks, dense = blocks_and_dense(MAPS["dot product"], drawn(0))
    w = torch.ones(N, N, dtype=F64)
    w[:, 2] = math.exp(max(power, -740) if power < 0 else min(power, 700))
    assert float(row_bound(blocks, w)) >= norm(dense)
    w[:, 2] = 0.0
    assert float(row_bound(blocks, w)) == math.inf


@pytest.mark.parametrize("row", [1, N - 1])
def test_masked_columns_may_have_weight_zero_and_others_not(row, monkeypatch):
    monkeypatch.setattr("meanfield.linalg.blocks._PAIR_ENTRIES", 1)  # one row at a time
    mu = ParticleMeasure.from_sequence(drawn(5).points)
    blocks, dense = blocks_and_dense(MAPS["dot product, masked"], mu)
    w = torch.ones(N, N, dtype=F64).tril()
    assert norm(dense) <= float(row_bound(blocks, w)) < math.inf
    w[row, 0] = 0.0
    assert float(row_bound(blocks, w)) == math.inf


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (torch.ones(N, N + 1, dtype=F64), r"weights: expected shape \(7, 7\)"),
        (-torch.ones(N, N, dtype=F64), "weights: expected finite numbers"),
        (torch.full((N, N), math.nan, dtype=F64), "weights: expected finite numbers"),
    ],
)
def test_what_are_no_weights_is_refused(weights, words):
    J = linearize(MAPS["dot product"], drawn(0), geometry="wasserstein").atoms
    v = torch.zeros(N, DIM, dtype=F64)
    v[0, 0] = 1.0
    unknown = torch.tensor(math.inf, dtype=F64)
    with pytest.raises(ValueError, match=words):
        certify(J, Candidate(v, unknown, 0.0, weights=[weights]))
    with pytest.raises(ValueError, match="weights: expected those of 1 maps, got 2"):
        certify(J, Candidate(v, unknown, 0.0, weights=[weights] * 2))


class KeysUnknown(kernels.Kernel):
    """A dot product that does not say how keys move."""

    def features(self, parameters, points, positions):
        return kernels.Features(*parameters.project(points))


def test_maps_without_blocks_are_refused_and_weights_for_them_prove_nothing():
    J = LinearMap(lambda x: x, lambda y: y, (3, 1), (3, 1))
    with pytest.raises(NotImplementedError, match="Certified: expected a map that offers"):
        operator_norm(J, solver=Certified(), upper_rtol=1.0)
    v = torch.tensor([[1.0], [0.0], [0.0]], dtype=F64)
    unknown = torch.tensor(math.inf, dtype=F64)
    claim = Candidate(v, unknown, 0.0, weights=[torch.ones(3, 3)])
    assert float(certify(J, claim).upper) == math.inf
    two = Chain([SelfAttention(parameters()), SelfAttention(parameters())])
    unknown_keys = SelfAttention(parameters(), kernel=KeysUnknown())
    for F in (two, unknown_keys):
        with pytest.raises(
            NotImplementedError, match="several in a row .* without feature_slopes"
        ):
            local_lipschitz(F, drawn(0), solver=Certified(), upper_rtol=1.0)


@pytest.mark.parametrize("rounds", [1, 4, 16])
def test_rounds_cost_tightness_and_never_truth(rounds):
    g = torch.Generator().manual_seed(0)
    F = SelfAttention(AttentionParameters.random(16, n_heads=2, generator=g), causal=True)
    mu = LayerNorm(torch.ones(16, dtype=F64))(
        ParticleMeasure.from_sequence(torch.randn(20, 16, dtype=F64, generator=g))
    )
    exact = local_lipschitz(F, mu, solver=Dense())
    found = local_lipschitz(F, mu, solver=Certified(rounds), upper_rtol=2.0)
    assert 1 <= float(found.upper / exact.value) <= {1: 2.6, 4: 1.9, 16: 1.6}[rounds]


def test_adversarial_tokens_light_and_absent_atoms():
    eye = torch.eye(2, dtype=F64)
    F = SelfAttention(AttentionParameters.from_bilinear(-eye, eye))
    for n, radius in ((2, 0.5), (2, 1.5), (5, 1.5), (40, 1.5)):
        X = sampling.sphere(1, 2, radius=radius).expand(n, 2).clone()
        X[1:] *= -1
        # At (2, 0.5) another eigenvector comes to the top as weights change.
        found = local_lipschitz(F, ParticleMeasure(X), solver=Certified(), upper_rtol=1.0)
        assert 1 - 1e-12 <= float(found.upper / found.value) <= 1.06
    G = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]))
    light = sampling.two_diracs(radius=450**0.5, log_ratio=-900.0, direction=[1.0])
    exact = local_lipschitz(G, light, solver=Dense())
    found = local_lipschitz(G, light, solver=Certified(), strict=False)
    assert float(exact.value) <= float(found.upper) <= 1.5 * float(exact.value)
    absent = ParticleMeasure([[5.0], [1.0], [-1.0]], weights=[0.0, 0.5, 0.5])
    present = ParticleMeasure([[1.0], [-1.0]])
    both = [
        float(local_lipschitz(G, mu, solver=Certified(), upper_rtol=1.0).upper)
        for mu in (absent, present)
    ]
    assert both[0] == pytest.approx(both[1], rel=1e-2)


def test_a_batch_has_a_certificate_each_and_single_precision_one_too():
    layer = AttentionParameters.random(16, n_heads=4, std=0.3)
    points = torch.randn(3, 12, 16, dtype=F64, generator=torch.Generator().manual_seed(0))
    F, mu = SelfAttention(layer, causal=True), ParticleMeasure.from_sequence(points)
    together = local_lipschitz(F, mu, solver=Certified(), upper_rtol=1.0).upper
    alone = [local_lipschitz(F, one, solver=Certified(), upper_rtol=1.0).upper for one in mu]
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-6, atol=0)
    single = AttentionParameters.random(16, n_heads=4, std=0.3, dtype=torch.float32)
    G, nu = SelfAttention(single), ParticleMeasure(points.float())
    found = local_lipschitz(G, nu, solver=Certified(), rtol=1e-3, strict=False)
    exact = local_lipschitz(G, nu, solver=Dense(), rtol=1e-3).value
    assert bool((exact <= found.upper).all() and (found.upper <= 2 * exact).all())


def test_large_maps_are_bounded_by_runs_of_layers(monkeypatch):
    """Beyond the size that is factored; two attentions in a row multiply."""
    mu, layers = drawn(6), layered()
    F = layers["block"]
    constant = float(local_lipschitz(F, mu).value)
    one = float(bounds.local_upper(F, mu))
    assert one == pytest.approx(constant, rel=1e-9)
    monkeypatch.setattr("meanfield.maps.map._FACTORED", 0)
    joined = float(bounds.local_upper(F, mu))
    assert constant <= joined <= 1.8 * constant
    twice = Chain([F, F])
    product = joined * float(bounds.local_upper(F, F(mu)))
    assert float(local_lipschitz(twice, mu).value) <= float(bounds.local_upper(twice, mu))
    assert float(bounds.local_upper(twice, mu)) <= product * (1 + 1e-9)
    both = Sum([layers["residual"], layers["RMS"]])
    assert float(local_lipschitz(both, mu).value) <= float(bounds.local_upper(both, mu))


def test_top_eigenvalues_are_bounded_within_a_percent():
    g = torch.Generator().manual_seed(0)
    root = torch.randn(4, 120, 150, generator=g, dtype=F64)
    root[1, 0] *= 50  # one direction far above the rest
    root[2] = 0
    root[3] *= 1e-15
    for part in (slice(0, 120), slice(1, 20)):
        gram = root[:, part] @ root[:, part].mT
        found, true = top_eigenvalues(gram), torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0)
        assert bool(((true <= found) & (found <= 1.01 * true)).all())
    assert float(top_eigenvalues(torch.full((1, 3, 3), math.nan, dtype=F64))) == math.inf


def test_the_value_must_still_converge():
    mu = drawn(7)
    J = linearize(MAPS["dot product"], mu, geometry="wasserstein").atoms
    with pytest.raises(ConvergenceError):
        operator_norm(J, solver=Certified(max_steps=1), upper_rtol=math.inf)
    with pytest.raises(ValueError, match="rounds: expected"):
        Certified(rounds=0)


def test_the_bound_does_not_depend_on_how_many_rows_are_taken_at_a_time(monkeypatch):
    w = 10 ** torch.randn(N, N, dtype=F64, generator=torch.Generator().manual_seed(0))
    blocks, _ = blocks_and_dense(MAPS["rotary"], drawn(2))
    J = linearize(MAPS["rotary"], drawn(2), geometry="wasserstein").atoms

    def both() -> list[float]:
        certificates = [w, *Certified(3).weights(J)]
        return [float(row_bound(blocks, each)) for each in certificates]

    together = both()
    for squares in (True, False):
        entries = blocks.core.entries(squares=squares)
        monkeypatch.setattr("meanfield.linalg.blocks._PAIR_ENTRIES", 3 * entries)
        assert blocks.portions(squares=squares) == [slice(0, 3), slice(3, 6), slice(6, 7)]
        assert both() == pytest.approx(together, rel=1e-12)


@pytest.mark.parametrize("name", ["dot product", "rotary, masked", "pre-norm", "block"])
def test_sums_over_blocks_err_by_less_than_is_taken_for_their_rounding(name):
    """Against the numbers that are stored, multiplied in longer precision, one after another."""
    blocks, dense = blocks_and_dense(MAPS[name], drawn(1))
    exact = long_blocks(blocks)
    np.testing.assert_allclose(exact.astype(float), dense, rtol=1e-9, atol=1e-11)
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        s = 10 ** (3 * torch.rand(N, N, dtype=F64, generator=g))
        found, slack = blocks.gram(s, slice(0, N))
        wanted = np.einsum("ij,ijad,ijbd->iab", s.numpy().astype(np.longdouble), exact, exact)
        off = np.linalg.norm((found.numpy() - wanted).astype(float), 2, (-2, -1))
        assert (off <= slack.numpy()).all()


def long_blocks(blocks: TokenBlocks) -> np.ndarray:
    """Jᵢⱼ = LᵢTᵢⱼRⱼ + δᵢⱼDᵢ in longer precision, block by block, (n, n, e, d)."""
    core = blocks.core
    assert isinstance(core, AttentionCore)
    M, N_, v, r, q, V, K, W, A = (
        t.numpy().astype(np.longdouble)
        for t in (core.values, core.keys, core.v, core.means, core.q, core.V, core.K, core.W,
                  core.slopes.expand(len(core.q), N, -1, -1))
    )  # fmt: skip
    n, e, d = blocks.shape
    out = np.zeros((n, n, e, d), dtype=np.longdouble)
    for i in range(n):
        for j in range(n):
            T = sum(
                W[h] @ (M[h, i, j] * V[h] + N_[h, i, j] * np.outer(v[h, j] - r[h, i], u))
                for h, u in enumerate(K[h].T @ A[h, j].T @ q[h, i] for h in range(len(q)))
            )
            L = T if blocks.left is None else blocks.left[i].numpy() @ T
            R = L if blocks.right is None else L @ blocks.right[j].numpy()
            out[i, j] = R + (i == j) * blocks.diagonal[i].numpy()
    return out


class Whole(Core):
    """Whole numbers in equal rows: their own sums are right to the last bit."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(0)
        rows = torch.randint(-9, 10, (3, 3, 1, 4), generator=g)
        self.T = rows.double().expand(-1, -1, 4, -1).contiguous()

    def own(self, rows):
        return self.T[rows].diagonal(0, 0, 1).movedim(-1, 0)

    def gram(self, s, rows, metric):
        return torch.einsum("ij,ijad,ijbd->iab", s, self.T[rows], self.T[rows]), 0 * s[:, 0]

    def entries(self, *, squares):
        return 48

    def step(self, x, s, rows, metric): ...
    def seen(self, rows): ...
    def size(self): ...
    def scaled(self, factor): ...


@pytest.mark.parametrize("seed", range(4))
def test_each_factor_of_a_block_pays_for_its_own_rounding(seed):
    """Sizes over twelve decades; L takes nearly all of T away, but not what was rounded before."""
    g, core = torch.Generator().manual_seed(seed), Whole()
    D, L = torch.randn(2, 3, 4, 4, dtype=F64, generator=g)
    L -= L.mean(-1, keepdim=True)
    s = 2.0 ** torch.randint(-3, 4, (3, 3), generator=g)
    T, weights = exactly(core.T), exactly(s)
    for of_d, of_l in itertools.product((0.0, 1e-6, 1.0, 1e6), (None, 1e-6, 1e6)):
        left = None if of_l is None else of_l * L
        blocks = TokenBlocks(of_d * D, core, left, None)
        found, slack = blocks.gram(s, slice(0, 3))
        for i, (row, room) in enumerate(zip(found, slack, strict=True)):
            J = T[i] if left is None else [exactly(left[i]) @ t for t in T[i]]
            J = [t + exactly(of_d * D[i]) if i == j else t for j, t in enumerate(J)]
            off = sum(w * (t @ t.T) for w, t in zip(weights[i], J, strict=True)) - exactly(row)
            assert np.linalg.norm(off.astype(float), 2) <= float(room)


def exactly(matrix: torch.Tensor) -> np.ndarray:
    return np.vectorize(Fraction, otypes=[object])(matrix.numpy())


def test_what_rounding_may_have_taken_is_added(monkeypatch):
    blocks, _ = blocks_and_dense(MAPS["dot product"], drawn(0))
    weights = torch.ones(N, N, dtype=F64)
    plain, gram = float(row_bound(blocks, weights)), TokenBlocks.gram

    def uncertain(self, s, rows):
        found, slack = gram(self, s, rows)
        return found, slack + 1.0

    monkeypatch.setattr(TokenBlocks, "gram", uncertain)
    assert float(row_bound(blocks, weights)) ** 2 == pytest.approx(plain**2 + N, rel=1e-9)


def test_atoms_that_a_frobenius_norm_rules_out_do_not_hide_the_largest():
    """The largest Frobenius norm is not the largest norm, and some are within rounding of it."""

    def largest(blocks: torch.Tensor) -> torch.Tensor:
        J = LinearMap.pointwise(blocks)
        return largest_block_norm(J, solver=Dense(), strict=False)[0].upper

    flat = 0.9 * torch.eye(6, dtype=torch.float64)  # ‖·‖_F = 2.2
    peak = torch.zeros(6, 6, dtype=torch.float64)
    peak[0, 1] = 1.0
    small = 0.1 * torch.eye(6, dtype=torch.float64)
    matrices = torch.stack([flat, small, peak, small])
    batch = torch.stack([matrices, 2 * matrices.flip(0), 0 * matrices])
    found = largest(batch[..., None, :, :])
    assert found.tolist() == pytest.approx([1.0, 2.0, 0.0], rel=1e-11)
    assert bool((found >= torch.tensor([1.0, 2.0, 0.0])).all())
    for power in (-900, -540, 520, 900):
        found = largest(2.0**power * matrices[..., None, :, :])
        assert 1.0 <= float(found) / 2.0**power <= 1 + 1e-11
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(5, 30, 1, 7, 9, generator=generator, dtype=torch.float64)
    norms = torch.linalg.matrix_norm(wide, 2)[..., 0].amax(-1)
    found = largest(wide)
    assert bool((found >= norms).all()) and bool((found <= norms * (1 + 1e-10)).all())


def test_a_bound_of_what_leaves_the_number_range_is_refused():
    par = AttentionParameters.random(16, generator=0)
    F = SelfAttention(
        AttentionParameters(1e155 * par.query, 1e155 * par.key, par.value, par.output)
    )
    mu = ParticleMeasure(
        torch.randn(80, 16, generator=torch.Generator().manual_seed(1), dtype=F64)
    )
    for bound in (F.local_upper, lambda mu: F.ball_bounds(mu, 0.1)):
        with pytest.raises(OverflowError, match="cannot be represented"):
            bound(mu)


@pytest.mark.parametrize("power", [0, -40, 40])
def test_blocks_are_ruled_out_by_their_own_measure_a_few_at_a_time(power, monkeypatch):
    """The largest is the last, beside flat ones of larger Frobenius norm in other units."""
    flat = 0.9 * torch.eye(8, dtype=F64).expand(12, 8, 8)
    peak = torch.zeros(8, 8, dtype=F64)
    peak[2, 1] = 1.0
    near = torch.cat([flat[1:], peak[None]])
    blocks = torch.stack([2.0**power * near, near.flip(0), 3 * flat])[:, :, None]
    assert blocks.numel() > 256  # fewer are all factored
    for entries in (2**20, 100, 1):
        monkeypatch.setattr("meanfield.linalg.dense._CHUNK_ENTRIES", entries)
        for solver in (Dense(), Certified()):
            found, block = largest_block_norm(LinearMap.pointwise(blocks), solver=solver)
            norms = torch.tensor([2.0**power, 1.0, 2.7], dtype=F64)
            torch.testing.assert_close(found.upper, norms, rtol=1e-12, atol=0)
            assert bool((found.upper >= norms).all()) and found.miss == 0
            assert block[:2].tolist() == [11, 0]


def test_a_certain_norm_is_that_of_the_larger_component(monkeypatch):
    """x ↦ x − mean has the derivative 0 at one atom, and 1 where that splits."""
    monkeypatch.setattr("meanfield.maps.map._FACTORED", 0)
    eye = torch.eye(2, dtype=F64)[None]
    F = Residual(SelfAttention(AttentionParameters(0 * eye, 0 * eye, eye, -eye)))
    bound = certain_norm(linearize(F, ParticleMeasure(torch.ones(1, 2, dtype=F64))))
    assert bound is not None and 1.0 <= float(bound) <= 1 + 1e-12
