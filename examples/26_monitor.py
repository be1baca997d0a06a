"""Constants during training
=========================

A character model learns a chapter of *Alice*; at some steps its layers are measured on text that
it never saw: local constants with their probable and certain upper ends, the largest score of each
head, how fast a block can pull tokens apart, and how far it moves the cloud in W₂.

::

    python examples/26_monitor.py [--quick] [--open FILE] [--out DIR]

A full run takes about ten minutes on one core; ``data/training.nc`` is one, and ``--open`` draws
it without another. For a loop of your own, the Trainer of transformers, Weights & Biases and
TensorBoard there are recipes on the page *Constants in your training loop*.
"""

# %%
import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import xarray as xr

from meanfield import figures, pretrained, results
from meanfield.lipschitz import one_sided
from meanfield.transport import solve_w2

DATA = Path(__file__).resolve().parent.parent / "data"
parser = argparse.ArgumentParser(description="Constants during training")
parser.add_argument("--quick", action="store_true")
parser.add_argument("--open", type=Path, help="a Dataset of an earlier run")
parser.add_argument("--out", type=Path, default=Path("results/26_monitor"))
options = parser.parse_args()
options.out.mkdir(parents=True, exist_ok=True)
steps = (0, 2, 5) if options.quick else (0, 5, 10, 20, 50, 100, 200, 400, 700, 1000, 1500, 2000)
n, d, layers = (8, 8, 2) if options.quick else (32, 32, 3)

# %%
# The text as numbers of characters, its last tenth kept aside; an encoder of torch, masked.
characters = (DATA / "alice_chapter_1.txt").read_text(encoding="utf-8")
symbols = sorted(set(characters))
text = torch.tensor([symbols.index(c) for c in characters])
text, unseen = text.tensor_split([len(text) * 9 // 10])


class Model(torch.nn.Module):
    """Embeddings of characters and places, blocks, scores of the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.characters, self.places = (
            torch.nn.Embedding(len(symbols), d),
            torch.nn.Embedding(n, d),
        )
        block = torch.nn.TransformerEncoderLayer(
            d, 4, 4 * d, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = torch.nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.scores = torch.nn.Linear(d, len(symbols))
        self.register_buffer("mask", torch.nn.Transformer.generate_square_subsequent_mask(n))

    def embedded(self, ids):
        return self.characters(ids) + self.places.weight

    def forward(self, ids):
        return self.scores(self.encoder(self.embedded(ids), self.mask.to(self.places.weight)))


# %%
# What is measured at a step: the table of ``constants``, with certain bounds, and beside it what
# maps and distances say of each block, at four windows of text that is not trained on.
windows = unseen[: 4 * n].reshape(4, n)


@torch.no_grad()
def measured(model) -> xr.Dataset:
    source = pretrained.read(model.encoder, causal=True, verify=False)
    tokens = model.embedded(windows)
    ds, mu = source.constants(tokens, progress=False), source.embeddings(tokens)
    rows = []
    for k in range(source.n_layers):
        block = source.block(k)
        image = block(mu)
        rate = one_sided(block, mu, strict=False)
        moved = [
            solve_w2(x, y, strict=False) for x, y in zip(mu.points, image.points, strict=True)
        ]
        rows.append(
            {
                "largest_logit": (("text", "head"), block.largest_logits(mu)),
                "omega": ("text", rate.value - 1),  # of the velocity F(x) − x
                "omega_upper": ("text", rate.upper - 1),
                "moved_lower": ("text", [float(w.lower) for w in moved]),
                "moved": ("text", [float(w) for w in moved]),
            }
        )
        mu = image
    ds = ds.merge(xr.concat([xr.Dataset(row) for row in rows], "layer").assign_coords(ds.coords))
    for name, words in {
        "largest_logit": "largest score of a head, its absolute value",
        "omega": "one-sided constant of what a block adds to its input",
        "omega_upper": "one-sided constant of what a block adds: probable upper end",
        "moved": "W₂ between what enters a block and what leaves it",
        "moved_lower": "W₂ between what enters a block and what leaves it: certain lower end",
    }.items():
        ds[name].attrs["long_name"] = words
    return ds


# %%
# ``results.numbers`` makes of such a table the flat dict of numbers that a log takes.
def trained() -> xr.Dataset:
    torch.manual_seed(0)
    model = Model().double()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found, generator, tokens = [], torch.Generator().manual_seed(1), torch.arange(n + 1)
    for step in range(steps[-1] + 1):
        starts = torch.randint(len(text) - n, (32, 1), generator=generator)
        batch = text[starts + tokens]
        scores = model(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
        if step in steps:
            model.eval()
            found.append(measured(model).assign(loss=loss.item()))
            found[-1].loss.attrs["long_name"] = "loss of the batch, nats per character"
            model.train()
            log = results.numbers(found[-1].median("text"))  # as in the figure
            print(f"step {step:5d}  loss {log['loss']:.3f}  block 0 {log['block/layer0']:.2f}")
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    ds = xr.concat(found, "step", combine_attrs="drop_conflicts").assign_coords(step=list(steps))
    ds.step.attrs["long_name"] = "training step"
    ds.attrs["model"] = f"masked encoder of {layers} blocks, d = {d}, on data/alice_chapter_1.txt"
    return ds


ds = results.read_dataset(options.open) if options.open else trained()
if not options.open:
    results.write_dataset(ds, options.out / "training.nc")
ds

# %%
# Medians over the windows; dashed is certain, and lies on the constants: of so few coordinates the
# derivatives are factored.
middle = ds.median("text", keep_attrs=True)
panels = {
    "block": "constant of the block",
    "omega": "one-sided constant of what it adds",
    "largest_logit": "largest |score|",
    "moved": "W₂ moved",
}
with figures.style():
    fig, axes = plt.subplots(2, 2, figsize=(8.4, 6), sharex=True)
    for (name, words), ax in zip(panels.items(), axes.flat, strict=True):
        rows = middle[name].max("head") if "head" in middle[name].dims else middle[name]
        for k in rows.layer.values:
            ax.plot(ds.step, rows.sel(layer=k), "o-", color=f"C{k}", label=f"block {k}")
            if name == "block":
                ax.plot(ds.step, middle.block_bound.sel(layer=k), "--", color=f"C{k}", lw=0.9)
        ax.set(title=words)
        ax.set_xscale("symlog", linthresh=5)
    axes[0, 0].set_yscale("log")
    axes[0, 0].legend()
    for ax in axes[1]:
        ax.set_xlabel("step")
    fig.savefig(options.out / "training.png")
print(options.out / "training.png")
