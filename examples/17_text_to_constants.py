"""From a text to constants
========================

A folder with a Llama, ten lines, one Dataset.

::

    python examples/17_text_to_constants.py [--quick] [--model FOLDER] [--text FILE] [--out DIR]

Without a folder the script takes a small Llama with random weights.
"""

# %%
import argparse
from pathlib import Path

from meanfield import figures, pretrained, results

parser = argparse.ArgumentParser(description="From a text to constants")
parser.add_argument("--quick", action="store_true")
parser.add_argument("--model", type=Path, default=None)
parser.add_argument("--text", type=Path, default=None)
parser.add_argument("--out", type=Path, default=Path("results/17_text_to_constants"))
options = parser.parse_args()
options.out.mkdir(parents=True, exist_ok=True)
texts = [
    "a cloud of tokens is a measure and attention moves each of its atoms",
    "how far does a small change of one token spread",
]
if options.text is not None:
    texts = [options.text.read_text(encoding="utf-8")[:400]]
elif options.quick:
    texts = [" ".join(text.split()[:6]) for text in texts]

# %%
# The ten lines. Every block is compared with the model's own module when it is read;
# an adapter, a window or a mask that was not understood would be refused here. The texts may be
# of several lengths, and may as well be ids or what a tokenizer returns.
if options.model is None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes |= {"intermediate_size": 64, "initializer_range": 0.15}
    source = pretrained.load("random:llama", config=sizes)
else:
    source = pretrained.load(options.model)
ds = source.constants(texts)
print(source)
print(ds[["attention", "block", "block_upper"]].to_dataframe().round(3))
print("network:", ds.network.values.round(2), "at most", ds.network_upper.values.round(2))
print("but for a probability of", float(ds.network_miss.max()))
assert bool(ds.block_converged.all())
results.write_dataset(ds, options.out / "constants.nc")

# %%
# Token by token: which maps are behind the numbers.
mu = source.embeddings(texts[0])
network = source.network(length=mu.n_particles)
print(mu, "to", network(mu))

# %%
with figures.style():
    ax = figures.plot_constants(ds)
    ax.figure.savefig(options.out / "constants.png")
