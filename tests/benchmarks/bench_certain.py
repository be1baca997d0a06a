"""How far certain bounds at an input are above the constant, and what they cost.

    python tests/benchmarks/bench_certain.py [--families random adversarial minilm] [--out FILE]
    python tests/benchmarks/bench_certain.py --attacks 1000 [--seed 0]

For each input: the constant, the certain bound over it, and CPU seconds of that alone and over
those of `Lanczos` (in one process, one after the other). Attacks hand random weights, light and
absent atoms, ties and masks to `row_bound`, and count the bounds below the largest
singular value of the dense matrix; and bounds in a ball, with certain constants, below what climbs
find there. Four of five kernels are rotary, capped or normalised. MiniLM needs its package, and
MEANFIELD_DATA a folder with the text. Rows of families that are not run stay in the file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from meanfield import (
    AttentionParameters,
    ParticleMeasure,
    SelfAttention,
    pretrained,
    sampling,
)
from meanfield.attention import kernels
from meanfield.layers import Chain, LayerNorm, Residual
from meanfield.linalg import Certified, Lanczos, operator_norm
from meanfield.linalg.certain import row_bound
from meanfield.linalg.evidence import proved
from meanfield.lipschitz import local_lipschitz
from meanfield.maps import Map, linearize
from meanfield.maps import map as map_module
from tests.pretrained import small_models

F64 = torch.float64
Case = tuple[str, Map, ParticleMeasure]


def random() -> Iterator[Case]:
    for n, d, heads in ((16, 16, 2), (64, 32, 4), (256, 64, 4)):
        for causal in (False, True):
            for seed in range(4 if n < 100 else 1):
                g = torch.Generator().manual_seed(seed)
                par = AttentionParameters.random(d, n_heads=heads, generator=g)
                norm = LayerNorm(torch.ones(d, dtype=F64))
                X = ParticleMeasure.from_sequence(torch.randn(n, d, dtype=F64, generator=g))
                F, name = SelfAttention(par, causal=causal), f"{n} × {d}{', masked' * causal}"
                yield name, F, norm(X)
                yield f"block, {name}", Residual(Chain([norm, F])), X


def adversarial(
    sizes: tuple[int, ...] = (2, 12, 40, 200), radii: tuple[float, ...] = (0.5, 1.5, 2.5)
) -> Iterator[Case]:
    """The tokens of [CAP24] Proposition 3.4, d = 2, A = −I."""
    eye = torch.eye(2, dtype=F64)
    F = SelfAttention(AttentionParameters.from_bilinear(-eye, eye))
    for n, radius in itertools.product(sizes, radii):
        X = sampling.sphere(1, 2, radius=radius).expand(n, 2).clone()
        X[1:] *= -1
        yield f"n = {n}", F, ParticleMeasure.from_sequence(X)


def tokens_of_alice() -> tuple[pretrained.Transformer, torch.Tensor]:
    """MiniLM, and tokens of a text."""
    source = pretrained.load("minilm")
    text = Path(os.environ["MEANFIELD_DATA"], "carroll-alice.txt").read_text(encoding="utf-8")
    return source, source.encode(text[5_000:20_000])


def layers_of_minilm(windows: Iterable[tuple[int, int]]) -> Iterator[Case]:
    """The six attention layers of MiniLM on windows (start, length) of a text."""
    source, ids = tokens_of_alice()
    for start, n in windows:
        for layer, points in enumerate(source.attention_inputs(ids[start : start + n])):
            F = source.attention(layer)
            yield f"n = {n}, layer {layer}", F, ParticleMeasure.from_sequence(points)


def minilm() -> Iterator[Case]:
    yield from layers_of_minilm((0, n) for n in (12, 64, 160))
    source, ids = tokens_of_alice()
    yield "n = 12, block 0", source.block(0), source.embeddings(ids[:12])


def checkpoints() -> Iterator[Case]:
    """A small model of every family: attention and block, at its tokens and at larger ones."""
    for case in dict.fromkeys(name.split(",")[0] for name in small_models.CASES):
        source = small_models.small(case)
        for n, factor in ((8, 1.0), (8, 10.0), (64, 1.0)):
            # The models have some 30 positions: a longer sequence is windows, one after the other.
            windows = (torch.arange(1, n + 1) % 50).split(16)
            points = torch.cat([source.embeddings(window).points for window in windows])
            mu = source.block(0, length=n)(ParticleMeasure.from_sequence(points))
            mu = mu.replace(factor * mu.points)
            name = f"{case}, n = {n}{f', inputs times {factor:g}' * (factor > 1)}"
            yield name, source.attention(1, length=n), mu
            yield f"block, {name}", source.block(1, length=n), mu


FAMILIES = {
    "random": random,
    "adversarial": adversarial,
    "minilm": minilm,
    "checkpoints": checkpoints,
}


def measured(F: Map, mu: ParticleMeasure) -> dict[str, float]:
    J = linearize(F, mu, geometry="wasserstein").atoms
    start = time.process_time()
    found = operator_norm(J, rtol=1e-3, solver=Lanczos(), strict=False)
    krylov = time.process_time() - start
    out = {"constant": float(found.value), "upper": float(found.upper / found.value)}
    start = time.process_time()
    sure = proved(J, Certified().weights(J))
    spent = time.process_time() - start
    certain = {
        "certain": float(sure / found.value),
        "CPU s": spent,
        "over Lanczos": spent / krylov,
    }
    return out | certain


def attacked(seed: int) -> tuple[int, int, int]:
    """Bounds at an input, how many are below the norm, and whether a climb exceeds a ball."""
    g = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=g))

    n, d, heads = draw(1, 9), draw(1, 6), draw(1, 3)
    std = float(10 ** (2 * torch.rand((), generator=g) - 1))
    par = AttentionParameters.random(d, n_heads=heads, head_dim=2, std=std, generator=g)
    kernel = (
        kernels.dot_product,
        kernels.rotary(length=n),
        kernels.soft_cap(1.0),
        kernels.soft_cap(2.0, inner=kernels.rotary(length=n)),
        kernels.rotary(length=n, inner=kernels.qk_norm(eps=1e-3)),
    )[draw(0, 4)]
    F: Map = SelfAttention(par, causal=bool(draw(0, 1)), kernel=kernel)
    if draw(0, 1):
        F = Residual(Chain([LayerNorm(torch.ones(d, dtype=F64), eps=0.1), F]))
    logs = (0.0, 2.0, 300.0)[draw(0, 2)] * torch.randn(n, dtype=F64, generator=g)
    if n > 1 and not draw(0, 2):
        logs[draw(0, n - 1)] = -math.inf
    logs = logs.log_softmax(-1)
    X = 2 * torch.randn(n, d, dtype=F64, generator=g)
    s = torch.randint(1, n + 1, (n,), generator=g).to(F64) / n  # ties
    mu = ParticleMeasure(X, log_weights=logs, positions=s)
    J = linearize(F, mu, geometry="wasserstein").atoms
    sigma = float(torch.linalg.matrix_norm(J.to_dense(), 2)) * (1 - 1e-13)
    blocks = J.blocks(0)  # type: ignore[misc]
    certificates = []
    for power in (0.0, 2.0, 30.0, 390.0):
        w = (power * torch.randn(n, n, dtype=F64, generator=g)).clamp(-700, 700).exp()
        certificates.append(w)
    certificates += Certified(4).weights(J)
    low = sum(float(row_bound(blocks, each)) < sigma for each in certificates)
    eps = float(10 ** (4 * torch.rand((), generator=g) - 4))
    upper, largest, centre = map_module.ball_bounds(F, mu, eps).upper, 0.0, X
    for reach in (1.0, 0.3, 0.1):
        step = torch.randn(8, n, d, dtype=F64, generator=g)
        moved = centre - X + reach * eps * step / step.norm(dim=-1, keepdim=True)
        moved = moved * (eps / moved.norm(dim=-1, keepdim=True).clamp_min(eps))
        batch = ParticleMeasure(
            X + moved, log_weights=logs.expand(8, -1), positions=s.expand(8, -1)
        )
        there = local_lipschitz(F, batch, strict=False).value
        if float(there.max()) > largest:
            largest, centre = float(there.max()), X + moved[there.argmax()]
    return len(certificates), low, int(largest * (1 - 1e-9) - 1e-12 > float(upper))


def draw_layers(found: list[dict], path: Path) -> None:
    """Bound over the constant, layer by layer of MiniLM; `before`: of columns, as it once was."""
    from matplotlib import pyplot as plt

    fig, ax = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for n, colour in ((12, "C0"), (64, "C1"), (160, "C2")):
        rows = [r for r in found if r["input"].startswith(f"n = {n}, layer")]
        for key, style, word in (("before", "o--", "columns"), ("certain", "o-", "rows")):
            shown = [(int(r["input"][-1]), r[key]) for r in rows if key in r]
            if shown:
                ax.plot(*zip(*shown, strict=True), style, color=colour, label=f"{word}, n = {n}")
    ax.set(xlabel="layer of MiniLM", ylabel="certain bound / constant", yscale="log", ylim=(1, 12))
    ax.set_yticks([1, 1.5, 2, 4, 8], ["1", "1.5", "2", "4", "8"], minor=False)
    ax.minorticks_off()
    ax.legend(ncol=2, fontsize=8, loc="center right")
    fig.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--attacks", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figure", type=Path, help="draw the layers of MiniLM, from the file")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("certain.json"))
    options = parser.parse_args()
    map_module._FACTORED = 0  # what larger layers get
    if options.attacks:
        counts = torch.tensor([attacked(options.seed + k) for k in range(options.attacks)])
        total, low, beyond = counts.sum(0).tolist()
        print(f"{total} bounds at inputs, {low} below; {options.attacks} balls, {beyond} exceeded")
        return
    found = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else []
    if options.figure is not None:
        draw_layers(found, options.figure)
        return
    found = [row for row in found if row["family"] not in options.families]
    for family in options.families:
        for name, F, mu in FAMILIES[family]():
            row = {"family": family, "input": name} | measured(F, mu)
            found.append(
                {k: v if isinstance(v, str) else float(f"{v:.4g}") for k, v in row.items()}
            )
            print(found[-1], flush=True)
    assert all(math.isfinite(row["certain"]) for row in found)
    options.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
