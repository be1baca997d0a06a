"""Constants during training
=========================

A loop that measures the layers of a model every so many steps of its training: their local
constants with the evidence, and the largest score of each head.

::

    python examples/26_monitor.py [--quick] [--out DIR]
"""

# %%
import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import xarray as xr

from meanfield import ParticleMeasure, figures, local_lipschitz, pretrained, results, sampling

parser = argparse.ArgumentParser(description="Constants during training")
parser.add_argument("--quick", action="store_true")
parser.add_argument("--out", type=Path, default=Path("results/26_monitor"))
options = parser.parse_args()
options.out.mkdir(parents=True, exist_ok=True)

# %%
# An encoder of torch, and a task: the largest of the tokens' first coordinates.
torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(8, 2, 32, dropout=0.0, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()
head = torch.nn.Linear(8, 1).double()
optimiser = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=3e-3)
generator = torch.Generator().manual_seed(1)


def batch(size):
    X = torch.randn(size, 10, 8, generator=generator, dtype=torch.float64)
    return X, X[..., 0].amax(1, keepdim=True)


# %%
# ``measured`` reads maps of the layers as they are at that step; ``mu`` is what enters the first,
# and each later one gets the image under those before.
mu = ParticleMeasure(sampling.ball(10, 8, radius=3.0, generator=generator))


@torch.no_grad()
def measured():
    source, at, rows = pretrained.read(model.eval()), mu, []
    for k in range(source.n_layers):
        F = source.block(k)
        row = local_lipschitz(F, at, rtol=1e-3, strict=False).to_dataset()
        row["largest_logit"] = ("head", F.largest_logits(at))
        row.largest_logit.attrs["long_name"] = "largest score of a head, its absolute value"
        rows.append(row.drop_vars(["direction", "splitting_direction"], errors="ignore"))
        at = F(at)
    return xr.concat(rows, "layer")


steps, every = (120, 20) if options.quick else (1000, 50)
found = {0: measured()}  # before the first step
for step in range(steps):
    model.train()
    X, y = batch(64)
    loss = (head(model(X).mean(1)) - y).square().mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    if (step + 1) % every == 0:
        found[step + 1] = measured()
    if step % every == 0:
        print(f"step {step:4d}  loss {loss.item():.4f}")

# %%
# The answer is a labelled Dataset: constants, their upper ends and residuals, largest scores.
ds = xr.concat(found.values(), "step").assign_coords(step=list(found))
ds.step.attrs["long_name"] = "training step"
results.write_dataset(ds, options.out / "monitor.nc")
ds

# %%
with figures.style():
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    for k in range(ds.sizes["layer"]):
        left.plot(ds.step, ds.constant.isel(layer=k), "o-", label=f"block {k}")
        for h in range(ds.sizes["head"]):
            largest = ds.largest_logit.isel(layer=k, head=h)
            right.plot(
                ds.step, largest, "os"[h] + "-", color=f"C{k}", label=f"block {k}, head {h}"
            )
    left.set(xlabel="step", ylabel="local constant in $W_2$", title="Constants of the blocks")
    right.set(xlabel="step", ylabel="largest |score|", title="Largest scores", ylim=(0, None))
    left.legend()
    right.legend(ncols=2, loc="lower center")
    fig.savefig(options.out / "monitor.png")
print(options.out / "monitor.png")
