"""Attention maps beside the same projections and torch's fused attention, or a script by hand.

    python tests/benchmarks/bench_maps.py [--quick] [--device cuda]

One head, d = 64, float32, or a layer of GPT-2's shape; the weighted and the other kernels at
n = 2,048. What a person writes has no evidence and no checks, and one line per kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from tables import beside, main
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention
from meanfield.attention import kernels, normalizations

Script = Callable[[], Tensor]
WINDOW = 128


def cloud(n: int, dim: int, device: str) -> ParticleMeasure:
    points = torch.randn(n, dim, generator=torch.Generator().manual_seed(n))
    return ParticleMeasure.from_sequence(points.to(device))


def random(dim: int, heads: int, device: str) -> AttentionParameters:
    generator = torch.Generator().manual_seed(0)
    return AttentionParameters.random(
        dim, n_heads=heads, dtype=torch.float32, generator=generator
    ).to(device)


def projected(par: AttentionParameters, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of all heads, (batch, H, n, ·): the fused kernel is for four axes."""
    matrix = torch.cat([m.flatten(0, 1) for m in (par.query, par.key, par.value)])
    parts = (x.reshape(-1, *x.shape[-2:]) @ matrix.mT).chunk(3, -1)
    return tuple(part.unflatten(-1, (par.n_heads, -1)).transpose(-3, -2) for part in parts)


def joined(par: AttentionParameters, heads: Tensor) -> Tensor:
    outer = par.output.movedim(0, 1).flatten(1)
    return heads.transpose(-3, -2).flatten(-2) @ outer.mT


def by_sdpa(par: AttentionParameters, x: Tensor, **how: object) -> Tensor:
    """The layer as one writes it: three products and the fused kernel."""
    return joined(par, sdpa(*projected(par, x), **how)).reshape(x.shape)


def fused(par: AttentionParameters, mu: ParticleMeasure, **how: object) -> Script:
    return partial(by_sdpa, par, mu.points, **how)


def by_hand(
    par: AttentionParameters, mu: ParticleMeasure, weights_of: Callable[[Tensor], Tensor]
) -> Script:
    """A function of the scores between rows and all columns, 128 rows at a time."""

    def run() -> Tensor:
        q, k, v = projected(par, mu.points)
        q = q / math.sqrt(q.shape[-1])
        parts = [weights_of(rows @ k.mT) @ v for rows in q.split(128, -2)]
        return joined(par, torch.cat(parts, -2))

    return run


def banded(par: AttentionParameters, mu: ParticleMeasure, width: int) -> Script:
    """Attention to the last `width` columns, 128 rows at a time."""

    def run() -> Tensor:
        q, k, v = projected(par, mu.points)
        q, n, parts = q / math.sqrt(q.shape[-1]), mu.n_particles, []
        for start in range(0, n, 128):
            first, stop = max(0, start - width + 1), min(start + 128, n)
            scores = q[..., start:stop, :] @ k[..., first:stop, :].mT
            i, j = torch.arange(start, stop), torch.arange(first, stop)
            far = (j > i[:, None]) | (j <= i[:, None] - width)
            p = scores.masked_fill_(far.to(scores.device), -math.inf).softmax(-1)
            parts.append(p @ v[..., first:stop, :])
        return joined(par, torch.cat(parts, -2))

    return run


def rotated(par: AttentionParameters, mu: ParticleMeasure) -> Script:
    """Rotary positions, and the fused kernel."""
    n = mu.n_particles

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        one, other = x.chunk(2, -1)
        return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)

    def run() -> Tensor:
        q, k, v = projected(par, mu.points)
        half = q.shape[-1] // 2
        frequencies = 10_000.0 ** -(torch.arange(half, device=q.device) / half)
        angles = torch.arange(1, n + 1, device=q.device)[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        return joined(par, sdpa(turn(q, cos, sin), turn(k, cos, sin), v))

    return run


def euclidean(par: AttentionParameters, mu: ParticleMeasure) -> Script:
    """L2 attention as products with one more coordinate, and the fused kernel."""

    def run() -> Tensor:
        q, k, v = projected(par, mu.points)
        q = torch.cat([2 * q, torch.ones_like(q[..., :1])], -1)
        k = torch.cat([k, -k.square().sum(-1, keepdim=True)], -1)
        width = k.shape[-1] - v.shape[-1]
        v = torch.nn.functional.pad(v, (0, width))
        scale = 1 / math.sqrt(k.shape[-1] - 1)
        return joined(par, sdpa(q, k, v, scale=scale)[..., :-width])

    return run


def doubly_stochastic(par: AttentionParameters, mu: ParticleMeasure) -> Script:
    """Sinkhorn steps in the logarithmic domain until the columns are right to 1e-5."""

    def run() -> Tensor:
        q, k, v = projected(par, mu.points)
        log_p = (q @ k.mT) / math.sqrt(q.shape[-1])
        for _ in range(1000):
            log_p = log_p - log_p.logsumexp(-1, keepdim=True)
            off = log_p.logsumexp(-2, keepdim=True)
            if float(off.expm1().abs().max()) <= 1e-5:
                break
            log_p = log_p - off
        return joined(par, log_p.exp() @ v)

    return run


def shapes(quick: bool, device: str) -> Iterator[dict]:
    """Plain, masked and weighted at several sizes."""
    sizes = ((64, 1, (2, 16, 256) if quick else (2, 16, 64, 256, 1024, 4096)),)
    sizes += ((768, 12, (64,) if quick else (256, 1024)),)
    for dim, heads, numbers in sizes:
        par = random(dim, heads, device)
        for n in numbers:
            mu, name = cloud(n, dim, device), f"d = {dim}, {heads} heads, n = {n:,}"
            for causal in (False, True):
                F, words = SelfAttention(par, causal=causal), "causal" if causal else "plain"
                yield beside(
                    f"{words}, {name}",
                    lambda F=F, mu=mu: F(mu),
                    fused(par, mu, is_causal=causal),
                    peer="projections and SDPA",
                    device=device,
                )


def kinds(n: int, device: str) -> Iterator[dict]:
    """Every other kernel and normalisation at one size."""
    par, mu = random(64, 1, device), cloud(n, 64, device)
    masses = torch.rand(n, generator=torch.Generator().manual_seed(1)).to(device) + 0.5
    heavy = ParticleMeasure(mu.points, masses / masses.sum(), positions=mu.positions)
    bias = heavy.log_weights[None]
    sigmoid = normalizations.sigmoid
    sinkhorn = normalizations.sinkhorn(rtol=1e-5)
    cap = 5.0
    cases = [
        ("weighted", SelfAttention(par), heavy, fused(par, mu, attn_mask=bias.expand(n, n)),
         "projections and SDPA with a bias"),
        ("rotary", SelfAttention(par, kernel=kernels.rotary(length=n)), mu, rotated(par, mu),
         "rotations and SDPA"),
        ("L2", SelfAttention(par, kernel=kernels.l2), mu, euclidean(par, mu),
         "one more coordinate and SDPA"),
        (f"window of {WINDOW}, causal",
         SelfAttention(par, causal=True, kernel=kernels.window((WINDOW - 0.5) / n)), mu,
         banded(par, mu, WINDOW), "bands of 128 rows"),
        ("soft cap", SelfAttention(par, kernel=kernels.soft_cap(cap)), mu,
         by_hand(par, mu, lambda s: (cap * (s / cap).tanh()).softmax(-1)), "128 rows at a time"),
        ("sigmoid", SelfAttention(par, normalization=sigmoid), mu,
         by_hand(par, mu, lambda s: s.sigmoid() / n), "128 rows at a time"),
        ("Sinkhorn", SelfAttention(par, normalization=sinkhorn), mu,
         doubly_stochastic(par, mu), "Sinkhorn steps to 1e-5"),
    ]  # fmt: skip
    for name, F, at, script, peer in cases:
        yield beside(
            f"{name}, d = 64, n = {n:,}",
            lambda F=F, at=at: F(at),
            script,
            peer=peer,
            device=device,
        )


def derivatives(numbers: tuple[int, ...], device: str) -> Iterator[dict]:
    """Of small layers, backwards and forwards."""
    par = random(64, 1, device)
    F, torch_func = SelfAttention(par), torch.func

    def ours(x: Tensor) -> Tensor:
        return F(ParticleMeasure(x)).points

    # Scaled beforehand: in forward mode a product with a number takes torch half a millisecond.
    query = par.query / math.sqrt(par.query.shape[-2])
    scaled = AttentionParameters(query, par.key, par.value, par.output)

    def softmax(x: Tensor) -> Tensor:  # the fused kernel has no forward derivative
        q, k, v = projected(scaled, x)
        return joined(par, (q @ k.mT).softmax(-1) @ v)

    for n in numbers:
        x = cloud(n, 64, device).points

        def gradient(f: Callable[[Tensor], Tensor], x: Tensor = x) -> Script:
            def run() -> Tensor:
                at = x.clone().requires_grad_()
                f(at).square().sum().backward()
                return at.grad

            return run

        def forward(f: Callable[[Tensor], Tensor], x: Tensor = x) -> Script:
            return lambda: torch_func.jvp(f, (x,), (x,))[1]

        for name, one, other, peer in (
            ("gradient", gradient(ours), gradient(partial(by_sdpa, par)), "projections and SDPA"),
            ("forward derivative", forward(ours), forward(softmax), "softmax by hand"),
        ):
            yield beside(f"{name}, d = 64, n = {n:,}", one, other, peer=peer, device=device)


def rows(quick: bool, device: str) -> Iterator[dict]:
    yield from shapes(quick, device)
    yield from derivatives((16,) if quick else (16, 64, 256), device)
    yield from kinds(256 if quick else 2048, device)


if __name__ == "__main__":
    main(__file__, rows)
