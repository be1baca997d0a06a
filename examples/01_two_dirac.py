"""Two unbalanced clusters
=======================

Through the library, and the Dataset analysed with xarray.

::

    python examples/01_two_dirac.py [--quick] [--out DIR]

Without running anything, the same analysis works on the full run in ``data/``, and draws the
figure of the README::

    python examples/01_two_dirac.py --open data/two_dirac.nc
"""

# %%
import argparse
from pathlib import Path

import numpy as np

from meanfield import AttentionParameters, SelfAttention, experiments, figures, results, sampling
from meanfield.lipschitz import local_lipschitz

parser = argparse.ArgumentParser(description="Two unbalanced clusters")
parser.add_argument("--quick", action="store_true")
parser.add_argument("--open", type=Path, metavar="FILE", help="a finished run to analyse")
parser.add_argument("--out", type=Path, default=Path("results/01_two_dirac"))
options = parser.parse_args()
options.out.mkdir(parents=True, exist_ok=True)

# %%
# One measure by hand: a light atom of weight e^-900 decides the constant.
F = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]))
mu = sampling.two_diracs(np.sqrt(450.0), -900.0, direction=[1.0])
constant = local_lipschitz(F, mu)
print(f"{mu}\n  local constant {constant.value:.6g}, residual {constant.residual:.1e}")

# %%
# The sweep, or a finished one.
two_dirac = experiments.get("two-dirac")
if options.open:
    ds = results.read_dataset(options.open)
else:
    ds = two_dirac.run(two_dirac.quick if options.quick else two_dirac.settings)
    results.write_dataset(ds, options.out / "two_dirac.nc")

# %%
# Long form: one row per case. The best pair for each radius, and how close the bounds are.
pairs = ds.isel(case=np.flatnonzero((ds.crowd == -1) & ~ds.causal))
best = pairs.groupby("radius").max()[["value", "two_dirac_lower", "mean_field_bound"]]
print(best.to_dataframe().round(3))

# %%
# The growth with n, one token against n − 1: √(n − 1) in a large ball, while n is small beside it.
short = pairs.isel(
    case=np.flatnonzero((pairs.n_tokens > 1) & (pairs.radius == pairs.radius.max()))
)
fit = results.fit_power(short.n_tokens - 1, short.euclidean)
p, low, high = (float(fit[f"exponent{end}"]) for end in ("", "_lower", "_upper"))
largest = float(pairs.radius.max())
print(f"euclidean constant ~ (n - 1)^{p:.3f} [{low:.3f}, {high:.3f}] at R = {largest:g}")

# %%
# Where splitting an atom matters, and the figure.
split = ds.isel(case=np.flatnonzero(ds.splitting > ds.particle))
print(f"splitting exceeds moving in {split.sizes['case']} of {ds.sizes['case']} cases,",
      f"by a factor up to {float((split.splitting / split.particle).max()):.2f}")  # fmt: skip
with figures.style():
    ax = two_dirac.figures["growth-in-radius"](ds)
    ax.figure.savefig(options.out / "growth_in_radius.png")
