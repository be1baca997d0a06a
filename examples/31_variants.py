"""Which attention is Lipschitz?
=============================

The constants of the variants of attention on a ball of radius R, for measures and W₂, against R.

::

    python examples/31_variants.py [--quick] [--out DIR]

‖A‖ = ‖V‖ = 1, so that ‖A‖R² is R². The bounds hold for every such A; A = −I nearly reaches that of
the softmax, and with A = I the constant is far smaller at large R. Curves that still bend upwards
at R = 3 grow exponentially in R².
"""

# %%
import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from meanfield import bounds
from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.attention.normalizations import sigmoid

parser = argparse.ArgumentParser(description="Constants of variants of attention")
parser.add_argument("--quick", action="store_true", help="a smoke test: few radii")
parser.add_argument("--out", type=Path, default=Path("results/31_variants"))

SIGMOID = SelfAttention(AttentionParameters.from_bilinear([[1.0]], [[1.0]]), normalization=sigmoid)
VARIANTS = {
    "softmax": lambda R: bounds.mean_field(1, 1, R),
    "softmax, masked": lambda R: bounds.masked_mean_field(1, 1, R),
    "null key, β = 0": lambda R: bounds.mean_field(1, 1, R, sink=0.0),
    "null key, β = R²": lambda R: bounds.mean_field(1, 1, R, sink=R**2),
    "soft cap, τ = 1": lambda R: bounds.capped_mean_field(1, 1, R, 1.0),
    "L2, one dimension": lambda R: bounds.l2_mean_field(1, 1, R, 1),
    "L2, two dimensions": lambda R: bounds.l2_mean_field(1, 1, R, 2),
    "1,000 tokens, softmax": lambda R: bounds.tokens(1, 1, R, 1000),
    "linear, averaged": lambda R: 3 * R**2,
    "sigmoid, averaged": lambda R: [bounds.table(SIGMOID, r).row("sigmoid").value for r in R],
    "gated, ‖G‖ = 1": lambda R: bounds.mean_field(1, 1, R) + R / 4,
    "differential, λ = ½": lambda R: 1.5 * bounds.mean_field(1, 1, R),
}


# %%
# One curve each; the legend is in the order of their ends.
def draw(R):
    ax = plt.subplots(figsize=(9, 5), layout="constrained")[1]
    for k, (name, constant) in enumerate(VARIANTS.items()):
        style = ("-", "--", ":")[k % 3]
        ax.semilogy(R, constant(R), style, color=f"C{k % 10}", label=name)
    lines, names = ax.get_legend_handles_labels()
    order = np.argsort([-float(line.get_ydata()[-1]) for line in lines])
    beside = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
    ax.legend([lines[k] for k in order], [names[k] for k in order], fontsize=8, **beside)
    ax.set(xlabel="radius R of the ball", ylabel="upper bound of the constant in W₂")
    ax.set_title("Variants of attention on a ball")
    return ax


if __name__ == "__main__":
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    radii = np.linspace(0.1, 3.0, 5 if options.quick else 100)
    for name, constant in VARIANTS.items():
        print(f"{name:36s} at R = 3: {constant(np.array([3.0]))[0]:12.6g}")
    draw(radii).figure.savefig(options.out / "variants.png", dpi=150)
