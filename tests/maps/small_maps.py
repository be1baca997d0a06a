"""Small maps of every kind, and their oracle: dense automatic differentiation."""

from __future__ import annotations

import torch

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, split
from meanfield.attention import kernels, normalizations
from meanfield.dynamics import FlowMap
from meanfield.dynamics.constraints import Velocity, constraint_at
from meanfield.layers import (
    MLP,
    Chain,
    Clip,
    LayerNorm,
    Particlewise,
    Pointwise,
    Residual,
    RMSNorm,
    Sum,
    contractive,
)
from meanfield.maps import BallBounds, Map, expanded_radii
from tests.strategies import LIGHT

F64 = torch.float64
D = 3  # the dimension of all points here


def draw(*shape, seed=0, dtype=F64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=F64).to(dtype)


# ------------------------------------------------------------------ layers and blocks


def attention(causal=False, seed=3, dtype=F64, std=0.6, **fields):
    params = AttentionParameters.random(
        D, n_heads=2, head_dim=2, biases=True, std=std, generator=seed
    )
    return SelfAttention(params.to(dtype), causal=causal, **fields)


def mlp(gated=False, activation="gelu", size=0.6, dtype=F64):
    shapes = ((6, D), (D, 6), (6, D))
    W, U, G = (size * draw(*shape, seed=k, dtype=dtype) for k, shape in enumerate(shapes))
    gate = {"gate": G, "gate_bias": draw(6, seed=6, dtype=dtype)} if gated else {}
    biases = draw(6, seed=4, dtype=dtype), draw(D, seed=5, dtype=dtype)
    return MLP(W, U, *biases, activation=activation, **gate)


def layer_norm(seed=1, dtype=F64):
    gain, shift = 1 + 0.3 * draw(D, seed=seed, dtype=dtype), draw(D, seed=2, dtype=dtype)
    return LayerNorm(gain, shift, 1e-3)


def rms_norm(dtype=F64):
    return RMSNorm(1 + 0.3 * draw(D, seed=4, dtype=dtype), 1e-3)


def post_norm(causal=False, dtype=F64):
    return Chain(
        [
            *(Residual(attention(causal, dtype=dtype)), layer_norm(dtype=dtype)),
            *(Residual(mlp(dtype=dtype)), layer_norm(7, dtype=dtype)),
        ]
    )


def pre_norm(causal=False, dtype=F64):
    first = Chain([rms_norm(dtype), attention(causal, dtype=dtype)])
    second = Chain([rms_norm(dtype), mlp(True, "silu", dtype=dtype)])
    return Chain([Residual(first), Residual(second, -0.5)])


def parallel(causal=False, dtype=F64):
    first = Chain([layer_norm(dtype=dtype), attention(causal, dtype=dtype)])
    return Residual(Sum([first, Chain([layer_norm(dtype=dtype), mlp(dtype=dtype)])]))


def network(dtype=F64):
    return Chain([pre_norm(True, dtype), parallel(True, dtype), post_norm(True, dtype)])


# ------------------------------------------------------------------ a user's own


def plain(mu):
    """Nothing but a function, that looks at all atoms and their weights."""
    mean = (mu.weights[..., None] * mu.points).sum(-2, keepdim=True)
    return mu.replace(torch.sin(mu.points) + mean * mu.points)


class Drift(Map):
    """A subclass that says little: x + (mean of what is not later)."""

    causal, dim = True, D

    def __call__(self, mu):
        seen = mu.positions[..., None, :] <= mu.positions[..., :, None]
        shares = torch.where(seen, mu.weights[..., None, :], 0.0)
        total = shares.sum(-1, keepdim=True).clamp_min(1e-30)
        return mu.replace(mu.points + shares / total @ mu.points.tanh())


class Linear(Particlewise):
    """x ↦ Wx + b: the whole of a layer, with its ball bound."""

    def __init__(self, weight, bias):
        self.weight, self.bias = weight, bias
        self.norm = torch.linalg.matrix_norm(weight, 2)

    def __call__(self, mu):
        return mu.replace(mu.points @ self.weight.mT + self.bias)

    def products(self, mu):
        return lambda eps: eps @ self.weight.mT, lambda zeta: zeta @ self.weight

    def ball_bounds(self, mu, radii, *, splitting=True):
        moved = self.norm * expanded_radii(mu, radii)
        return BallBounds.of(self.norm, torch.zeros_like(self.norm), self.norm, moved)


def linear(dtype=F64):
    return Linear(draw(2, D, seed=9, dtype=dtype), draw(2, seed=8, dtype=dtype))


# ------------------------------------------------------------------ the table


KERNELS = {
    "dot product": kernels.dot_product,
    "l2": kernels.l2,
    "cosine": kernels.cosine(2.0, eps=0.1),
    "qk norm": kernels.qk_norm(torch.tensor([[[1.2, 0.9]], [[0.7, 1.1]]], dtype=F64), 0.8),
    "soft cap": kernels.soft_cap(1.5),
    "rotary": kernels.rotary(base=100.0, length=5.0),
    "alibi": kernels.alibi([0.5, 0.25], length=5.0),
    "window": kernels.window(0.5),
}
NORMALIZATIONS = {
    "sigmoid": normalizations.sigmoid,
    "exponential": normalizations.exponential,
    "sink": normalizations.sink([0.4, -1.0]),
    "sinkhorn": normalizations.sinkhorn(rtol=1e-12),
    "softplus, sink": normalizations.RowWise(
        lambda s: torch.nn.functional.softplus(s).log(), sink=0.0
    ),
    "softplus": normalizations.RowWise(lambda s: torch.nn.functional.softplus(s).log()),
}


def _attentions():
    for causal in (False, True):
        tail = ", causal" if causal else ""
        for name, kernel in KERNELS.items():
            yield (
                f"attention, {name}{tail}",
                lambda dtype=F64, kernel=kernel, causal=causal: attention(
                    causal, dtype=dtype, kernel=kernel
                ),
            )
        for name, own in NORMALIZATIONS.items():
            if not (causal and name == "sinkhorn"):
                yield (
                    f"attention, {name}{tail}",
                    lambda dtype=F64, own=own, causal=causal: attention(
                        causal, dtype=dtype, normalization=own
                    ),
                )


def _on_the_sphere(dtype):
    return Velocity(attention(dtype=dtype), constraint_at("sphere", cloud(dtype=dtype)))


# Name -> a function of the dtype.
MAPS = {
    **dict(_attentions()),
    "pointwise": lambda dtype=F64: Pointwise(
        lambda x: torch.stack([x.sin().sum(-1), x[..., 0] ** 2], -1)
    ),
    "sine": lambda dtype=F64: Pointwise(lambda x: torch.sin(2 * x), 2.0, 4.0),
    "clip": lambda dtype=F64: Clip(1.2),
    "layer norm": lambda dtype=F64: layer_norm(dtype=dtype),
    "layer norm without ε": lambda dtype=F64: LayerNorm(draw(D, seed=1, dtype=dtype), None, 0.0),
    "rms norm": rms_norm,
    "mlp": lambda dtype=F64: mlp(dtype=dtype),
    "relu": lambda dtype=F64: mlp(activation="relu", dtype=dtype),
    "gated": lambda dtype=F64: mlp(True, "silu", dtype=dtype),
    "wider": lambda dtype=F64: MLP(
        draw(4, D, dtype=dtype), draw(6, 4, dtype=dtype), activation="tanh"
    ),
    "post-norm": lambda dtype=F64: post_norm(dtype=dtype),
    "post-norm, causal": lambda dtype=F64: post_norm(True, dtype=dtype),
    "pre-norm": lambda dtype=F64: pre_norm(dtype=dtype),
    "pre-norm, causal": lambda dtype=F64: pre_norm(True, dtype=dtype),
    "parallel": lambda dtype=F64: parallel(dtype=dtype),
    "network": network,
    "sum": lambda dtype=F64: Sum([attention(dtype=dtype), mlp(dtype=dtype)]),
    "contraction": lambda dtype=F64: contractive(mlp(dtype=dtype), 0.5, constant=9.0),
    "velocity": lambda dtype=F64: _on_the_sphere(dtype),
    "flow": lambda dtype=F64: FlowMap(attention(dtype=dtype), 0.4, method="rk4", step=0.2),
    "flow, causal": lambda dtype=F64: FlowMap(
        attention(True, dtype=dtype), 2.0, method="euler", step=1.0
    ),
    "plain function": lambda dtype=F64: plain,
    "subclass": lambda dtype=F64: Drift(),
    "particlewise subclass": linear,
}


def cloud(seed=0, n=5, dim=D, dtype=F64, *, absent=False, hard=False):
    """Weighted atoms at multiples of 1/n or 1/5, unsorted; one may have no mass.

    A hard one has beside that an atom of weight e^−900 and two atoms at one position.
    """
    logs = draw(n, seed=seed + 1)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    if absent or hard:
        logs[1] = -torch.inf
    if hard:
        logs[2], order[3] = LIGHT, order[0]
    return ParticleMeasure(
        draw(n, dim, seed=seed, dtype=dtype),
        log_weights=logs.log_softmax(-1).to(dtype),
        # Blocks of checkpoints with rotary positions stand for sequences of five tokens.
        positions=((1 + order) / max(n, 5)).to(dtype),
    )


# ------------------------------------------------------------------ dense oracles


def dense_derivative(F, mu):
    """∂yᵢ/∂xⱼ of one measure, (n, d_out, n, d), by reverse differentiation of the whole map.

    Absent atoms are cut.
    """
    jacobian = torch.func.jacrev(lambda x: F(mu.replace(x)).points)(mu.points)
    present = (mu.log_weights > -torch.inf).to(mu.dtype)
    return jacobian * present[:, None, None, None] * present[:, None]


def dense_atoms(F, mu, geometry="wasserstein", jacobian=None):
    """The matrix of J, or of D^½JD^−½; from `dense_derivative` if that is there."""
    jacobian = dense_derivative(F, mu) if jacobian is None else jacobian
    if geometry == "wasserstein":
        root = torch.where(mu.log_weights > -torch.inf, 0.5 * mu.log_weights, 0.0).exp()
        jacobian = jacobian * root[:, None, None, None] / root[:, None]
    return jacobian.flatten(2, 3).flatten(0, 1)


def dense_field(F, mu):
    """D_xΓ at the atoms: what one of two copies of an atom sees as they move apart."""
    jacobian = dense_derivative(F, split(mu))
    first = jacobian[::2, :, ::2] - jacobian[::2, :, 1::2]
    return torch.stack([first[i, :, i] for i in range(mu.n_particles)])


def by_products(J):
    """The matrix by products with J alone: `to_dense` takes the transpose where it is cheaper."""
    units = torch.eye(J.columns, dtype=J.dtype).reshape(-1, *J.in_shape)
    images = [J.matvec(unit.expand(*J.batch_shape, *J.in_shape)) for unit in units]
    return torch.stack([image.reshape(*J.batch_shape, -1) for image in images], -1)


def close(found, wanted, tolerance, size=None):
    """To a tolerance relative to the largest singular value."""
    wanted = torch.as_tensor(wanted)
    if size is None:
        size = float(torch.linalg.matrix_norm(wanted.reshape(-1, wanted.shape[-1]), 2))
    off = float((found - wanted).abs().max())
    assert off <= tolerance * size, f"off by {off / size:.1e}"


def is_map(J, wanted, tolerance, maps=slice(None)):
    """J has this matrix, and its products, forth and back, are those of the matrix.

    With vectors drawn at random, which see every entry that is off. `maps`: of a batch, those
    that are looked at.
    """
    wanted = torch.as_tensor(wanted)[maps]
    close(J.to_dense()[maps], wanted, tolerance)
    size = float(torch.linalg.matrix_norm(wanted.reshape(-1, wanted.shape[-1]), 2))
    for product, shape, matrix in (
        (J.matvec, J.in_shape, wanted),
        (J.rmatvec, J.out_shape, wanted.mT),
    ):
        x = draw(*J.batch_shape, *shape, seed=12)
        image = matrix @ x[maps].flatten(-2)[..., None]
        close(product(x)[maps].flatten(-2), image[..., 0], tolerance, size)


class Turned(torch.autograd.Function):
    """x ↦ x, with another derivative backwards than forwards."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def jvp(ctx, tangent):
        return tangent.clone()

    @staticmethod
    def backward(ctx, cotangent):
        return 1.1 * cotangent
