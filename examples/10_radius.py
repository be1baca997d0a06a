"""Two sides of the radius
=======================

Growth as R², and what is left far out.

::

    python examples/10_radius.py [--quick] [--out DIR]
"""

# %%
import argparse
from pathlib import Path

from meanfield import experiments, figures, results

parser = argparse.ArgumentParser(description="Two sides of the radius")
parser.add_argument("--quick", action="store_true")
parser.add_argument("--out", type=Path, default=Path("results/10_radius"))
options = parser.parse_args()
options.out.mkdir(parents=True, exist_ok=True)

# %%
# Three tokens (Ru, −Ru, 0): the general bound's R² is reached.
quadratic_growth = experiments.get("quadratic-growth")
growth = quadratic_growth.run(quadratic_growth.quick if options.quick else None)
results.write_dataset(growth, options.out / "quadratic_growth.nc")
print(growth[["quadratic_lower", "constant", "general_bound"]].to_dataframe().round(3))

# %%
# Any tokens with unique best keys, scaled by λ: a limit below ‖V‖√n, and a hump near ties.
large_radius = experiments.get("large-radius")
limit = large_radius.run(large_radius.quick if options.quick else None)
results.write_dataset(limit, options.out / "large_radius.nc")
print(limit[["constant", "limit", "ceiling"]].to_dataframe().round(3))

# %%
with figures.style():
    quadratic_growth.figures["growth"](growth).figure.savefig(options.out / "quadratic.png")
    large_radius.figures["limit"](limit).figure.savefig(options.out / "large_radius.png")
