"""What the published scripts compute
==================================

Beside the norm, on a random GPT-2.

::

    python examples/07_released_code.py [--quick] [--out DIR]

Their loop takes the value and not the tangent out of the forward-mode pair, and settles on
√‖Df(X)ᵀ f(X)‖. At the worst case of a head the two happen to grow alike; at random token ids the
norm hardly grows, and n^1/4 belongs to the other quantity.
"""

# %%
import argparse
from pathlib import Path

import numpy as np

from meanfield import experiments, figures, results

parser = argparse.ArgumentParser(description="What the published scripts compute")
parser.add_argument("--quick", action="store_true")
parser.add_argument("--out", type=Path, default=Path("results/07_released_code"))
options = parser.parse_args()
options.out.mkdir(parents=True, exist_ok=True)

# %%
released_code = experiments.get("released-code")
settings = released_code.quick if options.quick else released_code.settings
ds = released_code.run(settings)
results.write_dataset(ds, options.out / "released_code.nc")
print(f"{ds.attrs['model']}, {settings.depth or 12} layers, layer {settings.layer}")
print(ds[["constant", "released"]].to_dataframe().round(4).to_string())
free = ds.isel(fit=np.flatnonzero(ds.fit_law == "free"))
print(free.fit_exponent.to_dataframe().round(3).to_string())

# %%
with figures.style():
    for name, draw in released_code.figures.items():
        draw(ds).figure.savefig(options.out / f"{name}.png")
