"""A constant as a penalty
=======================

Three character models: trained plainly, with a penalty on the constants of their blocks, and with
blocks that are contractive by construction.

::

    python examples/18_penalised_training.py [--quick] [--out DIR] [--text FILE] [--steps N]

``local_lipschitz(F, mu).value`` has a gradient in the parameters of F, so that a constant can
stand in a loss. Here the loss is the cross entropy plus ``--penalty`` times the mean of log σ over
the blocks, σ the constant of a block at one sequence of the batch. The constants at a
validation sequence and the largest logit of every head are followed. The contractive model has
residual layers x + c f(x)/L with a bound L of L2 attention and of the MLP, no norms, and a
constant that no input can exceed.
"""

# %%
import argparse
import math
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import xarray as xr
from torch import Tensor

from meanfield import bounds, corpora, figures
from meanfield.attention import AttentionParameters, SelfAttention, kernels
from meanfield.layers import MLP, Chain, LayerNorm, Residual, contractive
from meanfield.lipschitz import local_lipschitz
from meanfield.measures import ParticleMeasure

VARIANTS = ("plain", "penalised", "contractive")

parser = argparse.ArgumentParser(description="A constant as a penalty")
parser.add_argument("--quick", action="store_true", help="a smoke test: tiny sizes")
parser.add_argument("--out", type=Path, default=Path("results/18_penalised_training"))
parser.add_argument("--text", default=None, help="a text file; this script if none is given")
parser.add_argument("--dim", type=int, default=24)
parser.add_argument("--heads", type=int, default=3)
parser.add_argument("--depth", type=int, default=2)
parser.add_argument("--context", type=int, default=24)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--rate", type=float, default=3e-3, help="of Adam")
parser.add_argument("--penalty", type=float, default=0.2, help="of the mean log σ of the blocks")
parser.add_argument("--factor", type=float, default=0.9, help="c of the contractive layers")


# %%
# The weights are named tensors, and the blocks are maps of measures made of them at each step.
def initial(options: argparse.Namespace, n_symbols: int) -> dict[str, Tensor]:
    """Independent normal entries of standard deviation 1/√(columns)."""
    generator = torch.Generator().manual_seed(0)
    d, H = options.dim, options.heads
    k = d // H

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator) / math.sqrt(size[-1])

    found = {"symbols": draw(n_symbols, d), "places": draw(options.context, d)}
    found |= {"gain": torch.ones(d), "readout": draw(n_symbols, d)}
    for b in range(options.depth):
        found |= {f"{b}.query": draw(H, k, d), f"{b}.key": draw(H, k, d)}
        found |= {f"{b}.value": draw(H, k, d), f"{b}.output": draw(H, d, k)}
        found |= {f"{b}.inner": draw(2 * d, d), f"{b}.outer": draw(d, 2 * d)}
        found |= {f"{b}.gain{i}": torch.ones(d) for i in (1, 2)}
    return {name: tensor.requires_grad_() for name, tensor in found.items()}


def block(variant: str, w: dict[str, Tensor], options: argparse.Namespace) -> Chain:
    """Pre-norm, or two contractive layers."""
    if variant == "contractive":
        matrices = w["query"], w["value"], w["output"]
        attends = SelfAttention(AttentionParameters.tied_l2(*matrices), True, kernels.l2)
        mlp = MLP(w["inner"], w["outer"])
        exact = AttentionParameters.tied_l2(*(t.detach().double() for t in matrices))
        bound = bounds.l2_attention_2(exact, options.context)
        return Chain(
            [
                contractive(attends, options.factor, constant=bound),
                contractive(mlp, options.factor, constant=mlp.global_upper),
            ]
        )
    dot = AttentionParameters(w["query"], w["key"], w["value"], w["output"])
    attends = Chain([LayerNorm(w["gain1"]), SelfAttention(dot, causal=True)])
    mlp = Chain([LayerNorm(w["gain2"]), MLP(w["inner"], w["outer"])])
    return Chain([Residual(attends), Residual(mlp)])


def blocks(variant: str, weights: dict[str, Tensor], options: argparse.Namespace) -> list[Chain]:
    """All blocks as they are now."""
    parts = [
        {n.split(".", 1)[1]: t for n, t in weights.items() if n.startswith(f"{b}.")}
        for b in range(options.depth)
    ]
    return [block(variant, w, options) for w in parts]


def embedded(weights: dict[str, Tensor], windows: Tensor) -> ParticleMeasure:
    """Tokens as the measure of a sequence."""
    return ParticleMeasure.from_sequence(weights["symbols"][windows] + weights["places"])


def entropy(maps: list[Chain], weights: dict[str, Tensor], windows: Tensor) -> Tensor:
    """Mean cross entropy in nats per character."""
    mu = Chain(maps)(embedded(weights, windows[:, :-1]))
    logits = LayerNorm(weights["gain"])(mu).points @ weights["readout"].mT
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def penalty(maps: list[Chain], mu: ParticleMeasure) -> Tensor:
    """The mean of log σ over the blocks, each at the measure that enters it."""
    logs = []
    for F in maps:
        # Not strict: a tie of singular values at one step of a thousand is no reason to stop.
        logs.append(local_lipschitz(F, mu, rtol=1e-2, strict=False).value.log())
        mu = F(mu)
    return torch.stack(logs).mean()


# %%
# Constants and largest logits of the blocks at a validation sequence, each at what enters it.
@torch.no_grad()
def measured(maps: list[Chain], mu: ParticleMeasure) -> xr.Dataset:
    constants, logits = [], []
    for F in maps:
        constants.append(local_lipschitz(F, mu, rtol=1e-3, strict=False).value)
        logits.append(F.largest_logits(mu))
        mu = F(mu)
    return xr.Dataset(
        {
            "constant": ("layer", torch.stack(constants)),
            "largest_logit": (("layer", "head"), torch.stack(logits)),
        }
    )


# %%
# Training one model.
def train(variant: str, text: Tensor, valid: Tensor, options: argparse.Namespace) -> dict:
    """Validation bits, constants and logits along the training, and CPU seconds a step."""
    weights = initial(options, int(torch.cat([text, valid.flatten()]).max()) + 1)
    adam = torch.optim.Adam(weights.values(), lr=options.rate)
    generator = torch.Generator().manual_seed(1)
    every = max(1, options.steps // 10)

    def read() -> list[Chain]:
        return blocks(variant, weights, options)

    bits, seconds, found = [], [], {}
    for step in range(1, options.steps + 1):
        starts = torch.randint(len(text) - options.context, (options.batch,),
                               generator=generator)  # fmt: skip
        windows = torch.stack([text[s : s + options.context + 1] for s in starts.tolist()])
        began = time.process_time()
        maps = read()
        loss = entropy(maps, weights, windows)
        if variant == "penalised":
            one = embedded(weights, windows[:1, :-1])[0]
            loss = loss + options.penalty * penalty(maps, one)
        adam.zero_grad()
        loss.backward()
        seconds.append(time.process_time() - began)
        adam.step()
        if step % every == 0:
            with torch.no_grad():
                bits.append(float(entropy(read(), weights, valid)) / math.log(2))
                found[step] = measured(read(), embedded(weights, valid[0, :-1]))
    dataset = xr.concat(found.values(), "step").assign_coords(step=list(found))
    return {"dataset": dataset, "bits": bits, "seconds": float(np.median(seconds))}


# %%
def draw_curves(runs: dict[str, dict], out: Path) -> None:
    """Loss, constant of the blocks, and largest logit against the steps."""
    with figures.style():
        figure, axes = plt.subplots(1, 3, figsize=(9.6, 3.2), layout="constrained")
        for k, (variant, run) in enumerate(runs.items()):
            ds, colour = run["dataset"], f"C{k}"
            axes[0].plot(ds.step, run["bits"], "o-", color=colour, label=variant)
            axes[1].plot(ds.step, ds.constant.prod("layer"), "o-", color=colour)
            axes[2].plot(ds.step, ds.largest_logit.max(("layer", "head")), "o-", color=colour)
        axes[0].set(ylabel="validation bits per character")
        axes[1].set(yscale="log", ylabel="product of the blocks' constants")
        axes[2].set(ylabel="largest logit of all heads")
        for ax in axes:
            ax.set_xlabel("training steps")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        figure.savefig(out / "curves.png")


def main() -> None:
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(dim=12, heads=2, context=12, batch=8, steps=20)
    options = parser.parse_args()
    corpus = corpora.corpus(options.text or __file__, download=False)
    symbols = sorted(set(corpus.text))
    numbers = torch.tensor([symbols.index(c) for c in corpus.text])
    cut, n = len(numbers) * 9 // 10, options.context
    places = range(cut, len(numbers) - n - 1, n)
    valid = torch.stack([numbers[s : s + n + 1] for s in places][:16])
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"{corpus}, {len(symbols)} symbols")
    runs = {v: train(v, numbers[:cut], valid, options) for v in VARIANTS}
    plain = runs["plain"]["seconds"]
    print("variant       bits   constants of the blocks   largest logit   CPU time of a step")
    for variant, run in runs.items():
        last = run["dataset"].isel(step=-1)
        each = ", ".join(f"{float(x):.2f}" for x in last.constant)
        logit, cost = float(last.largest_logit.max()), run["seconds"] / plain
        print(f"{variant:12}  {run['bits'][-1]:.3f}  {each:24} {logit:13.2f}{cost:15.1f} × plain")
    cap = (1 + options.factor) ** (2 * options.depth)
    cap = math.ceil(1e4 * cap) / 1e4
    print(f"No input can make the product of the contractive model's constants exceed {cap:.4f}.")
    draw_curves(runs, options.out)


if __name__ == "__main__":
    main()
