"""
Your own checkpoint, your own text
==================================

A trained transformer is a chain of maps of measures. Its constants at *your* text take ten lines.

Here the checkpoint is a small BERT with random weights that the tutorial saves itself, so that
nothing is downloaded. Put the path of your folder in its place: BERT, RoBERTa, DistilBERT,
ELECTRA, ALBERT, ViT, GPT-2, GPT-NeoX, Llama, Mistral, Qwen 2 and 3, Gemma 1 to 3, OLMo 2, Phi 3,
as ``save_pretrained`` writes them; of mixtures of experts (gpt-oss, Mixtral) attention alone.
This page needs ``pip install ".[models]"``.
"""

# %%
# A checkpoint and a text
# -----------------------
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from transformers import BertConfig, BertModel, BertTokenizer
from transformers.utils import logging

from meanfield import ParticleMeasure, bounds, experiments, figures, pretrained, results
from meanfield.lipschitz import local_lipschitz, localize

logging.disable_progress_bar()
folder = Path(tempfile.mkdtemp())
text = folder / "text.txt"
text.write_text(
    "a cloud of tokens is a measure and attention moves each of its atoms . "
    "how far does a small change of one token spread ? that depends on the layer , on the text , "
    "and on how many tokens there are . a light token among heavy ones can matter most of all . "
    * 8
)
words = sorted(set(text.read_text().split()))
(folder / "vocab.txt").write_text(
    "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])
)
config = BertConfig(
    vocab_size=5 + len(words), hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
    intermediate_size=128, max_position_embeddings=128, initializer_range=0.2,
)  # fmt: skip
torch.manual_seed(0)
BertModel(config).save_pretrained(folder / "checkpoint")
tokenizer = BertTokenizer(str(folder / "vocab.txt"))
files = tokenizer.save_pretrained(folder / "checkpoint")

# %%
# All layers at once
# ------------------
# ``load`` compares every block with the model's own module, in one run on a few tokens: what it
# does not understand (an adapter, a mask, a field of the configuration) it refuses.
# ``constants`` takes a text, a list of texts, ids or what a tokenizer returns.
source = pretrained.load(folder / "checkpoint")
constants = source.constants("how far does a small change of one token spread ?")
constants[["attention", "block", "block_upper", "block_bound"]].to_dataframe().round(2)

# %%
# ``_upper`` holds but for the probability ``_miss``, ``_bound`` always; ``bounds=False`` leaves
# the latter out, which takes most of the time, and ``layers=[0, 2]`` other layers. The network:
print(float(constants.network), "at most", float(constants.network_upper))

# %%
# All three in a figure. Of several texts, of one length or not, each has its curve.
texts = ["how far does a small change of one token spread ?", "a cloud of tokens is a measure ."]
with figures.style():
    figures.plot_constants(source.constants(texts))

# %%
# One layer
# ---------
# ``attention_inputs`` are the token clouds that enter the attention of each layer, and
# ``attention(layer)`` is that layer alone: all heads and the output projection, no residual.
ids = source.encode(text.read_text())[:24]
X = source.attention_inputs(ids[None], layers=[0, 1, 2])
mu = ParticleMeasure.from_sequence(X[1][0])
layer = source.attention(1)
constant = local_lipschitz(layer, mu, geometry="euclidean")
constant

# %%
# Which tokens and which heads carry it?
shares = localize(constant, layer, mu)
top = shares.particles.argmax()
print(f"token {int(top)}, {float(shares.particles[top]):.0%} of the worst displacement")
print("shares of the heads:", shares.heads.numpy().round(3))

# %%
# All the bounds there are, at this layer and the radius of these tokens:
bounds.table(layer, float(mu.points.norm(dim=-1).max()), n=len(ids))

# %%
# The whole network
# -----------------
# Embeddings in, last layer out, residuals and norms included.
start = source.embeddings(ids)
network = source.network(length=len(ids))
print(local_lipschitz(network, start, geometry="euclidean"))

# %%
# A figure: growth with n
# -----------------------
# The experiment ``real-text`` cuts the text into windows of n tokens and fits a power of n to
# each layer.
real_text = experiments.get("real-text")
settings = replace(
    real_text.settings,
    model=str(folder / "checkpoint"),
    text=str(text),
    n_tokens=(4, 8, 16, 32),
    n_windows=3,
)
ds = real_text.run(settings, progress=False)
with figures.style():
    real_text.figures["constants"](ds)

# %%
# All its figures in files, and a sentence in place of each that needs other cases:
print(len(figures.save_all(ds, real_text.figures, folder, formats=("png", "pdf"))), "lines")

# %%
# The Dataset has everything that was measured; it is plain xarray, and a file of it keeps where
# it came from.
results.write_dataset(ds, folder / "constants.nc")
ds[["constant", "radius"]].median("window").to_dataframe().round(3).head(8)

# %%
# The same from the command line, with a page of figures at the end::
#
#    meanfield run real-text --set model=FOLDER --set text=FILE --set 'n_tokens=[4,8,16,32]' \
#        --set n_windows=3 --out results
#    meanfield report results/real-text.zarr
#
# A model that is in memory, in training say, is read by ``pretrained.read(model)``; so is a
# ``torch.nn.TransformerEncoder``. All layers with rotary positions, grouped queries or RMS norms
# work alike; they need ``length=n``, and refuse a measure whose positions are of another n.
