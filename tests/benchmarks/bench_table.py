"""Ascent against every row of the table of bounds: the largest share of each that is reached.

A case is a layer with query, key, value and output biases (or none), one or two heads, a kernel, a
mask, and in every third case a norm before it; a cloud in the ball and its weights are climbed.
At the end the constants, Euclidean and Wasserstein, are held against every upper row that speaks
of them, a priori and at the points. A share above 1 refutes a bound. Run as

    python -m tests.benchmarks.bench_table [--cases 200] [--steps 25] [--seed 0]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

from meanfield import AttentionParameters, Map, ParticleMeasure, SelfAttention, bounds, sampling
from meanfield.attention.kernels import alibi, dot_product, l2, qk_norm, rotary, soft_cap
from meanfield.experiments.sharpness import climb
from meanfield.layers import Chain, LayerNorm, RMSNorm
from meanfield.lipschitz import local_lipschitz

F64 = torch.float64
KERNELS = (dot_product, rotary(length=7.0), soft_cap(1.5), dot_product, qk_norm(eps=0.1), l2)
BIASES = ("query_bias", "key_bias", "value_bias")


def layer(case: int, d: int, g: torch.Generator) -> Map:
    """A layer of any kind; every other with biases of one sort or all of them."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=F64, generator=g)

    heads, causal = 1 + case % 2, bool(case // 2 % 2)
    kernel = KERNELS[case % len(KERNELS)]
    if case % 13 == 0:
        kernel = alibi([0.5] * heads, length=4.0)
    if kernel is l2:
        par = AttentionParameters.tied_l2(draw(heads, 2, d), draw(heads, 2, d), draw(heads, d, 2))
    else:
        kinds = BIASES if case % 4 == 1 else (BIASES[case % 3],) if case % 2 else ()
        query, key = draw(heads, 2, d), draw(heads, 2, d)
        biases = {name: 2 * draw(heads, 2) for name in kinds}
        key = -query if case % 5 == 0 else key
        par = AttentionParameters(query, key, draw(heads, 2, d), draw(heads, d, 2), **biases)
    F = SelfAttention(par, causal=causal, kernel=kernel)
    if case % 3:
        return F
    weight = torch.rand(d, dtype=F64, generator=g) + 0.5
    norm = LayerNorm(weight, draw(d), 0.01) if case % 2 else RMSNorm(weight, 0.01)
    return Chain([norm, F])


def shares(case: int, steps: int, g: torch.Generator) -> Iterator[tuple[str, float]]:
    """Of each upper row: the constant that was climbed to, over the row."""
    d, n, radius = 2 + case % 2, 3 + case % 4, (0.3, 1.0, 2.0)[case % 3]
    F = layer(case, d, g)
    tokens = ParticleMeasure.from_sequence(sampling.ball(n, d, radius=radius, generator=g))
    logs = (2 * torch.randn(n, dtype=F64, generator=g)).log_softmax(-1)
    weighted = ParticleMeasure(tokens.points, log_weights=logs, positions=tokens.positions)
    for start in (tokens, weighted):
        mu, _ = climb(F, start, radius, steps=steps)
        table = bounds.table(F, radius, points=mu)
        found = {
            geometry: float(local_lipschitz(F, mu, geometry=geometry).value)
            for geometry in ("euclidean", "wasserstein")
        }
        for row in table.applicable:
            euclidean = row.of.startswith("Euclidean")
            # Rows of n tokens are about equal weights; "sphere" is about moves along it.
            uniform = row.name != "Thm C.3" and euclidean
            if row.side == "upper" and row.name != "sphere" and (start is tokens or not uniform):
                yield row.name, found["euclidean" if euclidean else "wasserstein"] / float(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("cases", 200), ("steps", 25), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    g, worst, counted = torch.Generator().manual_seed(options.seed), {}, {}
    for case in range(options.cases):
        for name, share in shares(case, options.steps, g):
            worst[name] = max(worst.get(name, 0.0), share)
            counted[name] = counted.get(name, 0) + 1
    for name, share in worst.items():
        print(f"{name:25} {share:.4f} of the bound at most, in {counted[name]} ascents")


if __name__ == "__main__":
    main()
