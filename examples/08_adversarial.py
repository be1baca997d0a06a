"""The worst inputs of a GPT-2 layer
=================================

The inputs of Proposition 3.4 in a random layer: growth in n, and choice of the head.

::

    python examples/08_adversarial.py [--quick] [--out DIR]
"""

# %%
import argparse
from pathlib import Path

import numpy as np

from meanfield import experiments, figures, results

parser = argparse.ArgumentParser(description="The worst inputs of a GPT-2 layer")
parser.add_argument("--quick", action="store_true")
parser.add_argument("--out", type=Path, default=Path("results/08_adversarial"))
options = parser.parse_args()
options.out.mkdir(parents=True, exist_ok=True)

# %%
adversarial = experiments.get("adversarial")
ds = adversarial.run(adversarial.quick if options.quick else adversarial.settings)
results.write_dataset(ds, options.out / "adversarial.nc")
far = ds.isel(case=np.flatnonzero(ds.n_tokens == ds.n_tokens.max()))
print(far[["constant", "head_constant", "gamma", "general_bound"]].to_dataframe().round(3))
searched = ds.isel(case=np.flatnonzero(np.isfinite(ds.searched)))
print(searched[["constant", "searched"]].to_dataframe().round(3))
print(f"best head: {ds.attrs['best_head']}")
free = ds.isel(fit=np.flatnonzero(ds.fit_law == "free"))
print(free.fit_exponent.to_dataframe().round(3).to_string())

# %%
with figures.style():
    for name, draw in adversarial.figures.items():
        draw(ds).figure.savefig(options.out / f"{name}.png")
