"""A module of one's own
=====================

Constants of torch's attention, of an encoder, and of any other module, layer by layer.

::

    python examples/16_your_own_module.py [--quick] [--out DIR]
"""

# %%
import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, figures, pretrained
from meanfield.bounds import local_upper
from meanfield.lipschitz import local_lipschitz, localize

parser = argparse.ArgumentParser(description="A module of one's own")
parser.add_argument("--quick", action="store_true")
parser.add_argument("--out", type=Path, default=Path("results/16_your_own_module"))
options = parser.parse_args()
options.out.mkdir(parents=True, exist_ok=True)
n, d = (12, 16) if options.quick else (48, 64)
torch.manual_seed(0)
tokens = torch.randn(n, d, dtype=torch.float64)
mu = ParticleMeasure.from_sequence(tokens)

# %%
# Torch's attention is three matrices, and a mask that is said at the call. As a layer of this
# package it knows atoms of any weight, has bounds, and streams over long sequences. Gradients of
# the constant reach the module, unless they are turned off as here.
attention = nn.MultiheadAttention(d, 4, batch_first=True, dtype=torch.float64).eval()
attention.requires_grad_(False)
F = SelfAttention(AttentionParameters.from_module(attention), causal=True)
mask = nn.Transformer.generate_square_subsequent_mask(n, dtype=torch.float64)
theirs = attention(tokens, tokens, tokens, attn_mask=mask, need_weights=False)[0]
print(f"the same map up to {float((F(mu).points - theirs).abs().max()):.1e}")
constant = local_lipschitz(F, mu)
print(f"constant {float(constant):.4f}, certainly at most {float(local_upper(F, mu)):.4f}")

# %%
# An encoder becomes blocks and a network, compared with the module when it is read.
layer = nn.TransformerEncoderLayer(d, 4, 2 * d, norm_first=True, dtype=torch.float64)
encoder = nn.TransformerEncoder(
    layer, 4, nn.LayerNorm(d, dtype=torch.float64), enable_nested_tensor=False
).eval()
for each in encoder.parameters():  # the layers are copies of one: draw them anew
    each.data.mul_(1 + 0.5 * torch.randn_like(each))
source = pretrained.read(encoder)
print(source)
ds = source.constants(tokens)
for place in range(source.n_layers):
    block, upper = float(ds.block[place]), float(ds.block_upper[place])
    print(f"block {place}: {block:.3f}, at most {upper:.3f}")
print(f"network: {float(ds.network):.3f}; product of the blocks {float(ds.block.prod()):.3f}")

# %%
# Any other module is differentiated as it stands. It knows sequences and no weights, so its
# constant is that of the map of sequences: ``geometry="euclidean"``.


class Mine(nn.Module):
    """Fused attention beside a convolution along the sequence: nothing that has a name here."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(d, 3 * d, dtype=torch.float64)
        self.along = nn.Conv1d(d, d, 3, padding=1, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 4, -1)).permute(1, 2, 0, 3)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + mixed.transpose(0, 1).flatten(1) + self.along(x.T).T


mine = Mine().eval()
own = local_lipschitz(lambda nu: nu.replace(mine(nu.points)), mu, geometry="euclidean")
shares = localize(own, lambda nu: nu.replace(mine(nu.points)), mu)
token, share = int(shares.particles.argmax()), float(shares.particles.max())
print(
    f"mine: {float(own):.3f}; token {token} has the largest share, {share:.0%} (1/n: {1 / n:.0%})"
)

# %%
# How do the constants of the encoder's blocks change as its tokens grow?
scales = [0.25, 1.0, 4.0] if options.quick else [0.25, 0.5, 1.0, 2.0, 4.0, 8.0]
curves = [source.constants(scale * tokens).block.values for scale in scales]
with figures.style():
    ax = plt.subplots()[1]
    for place, curve in enumerate(zip(*curves, strict=True)):
        ax.loglog(scales, curve, "osx^"[place] + "-", label=f"block {place}")
    ax.set(xlabel="factor of the tokens", ylabel="local constant of the block")
    ax.legend()
    ax.figure.savefig(options.out / "constants.png")
