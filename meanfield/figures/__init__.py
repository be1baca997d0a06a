"""Figures: each is a function of a Dataset that draws on one Axes and returns it.

Nothing here computes or shows, and only `save_all` writes files. Colours run from dark (small) to
light (large) where they stand for a quantity; a bound is dashed, a measurement is a line with
markers.
"""

from meanfield.figures.canvas import style
from meanfield.figures.contractions import (
    plot_bits_per_character,
    plot_inverse,
    plot_inverse_steps,
    plot_l2_ratio,
    plot_l2_tightness,
    plot_layer_constants,
    plot_training_curves,
)
from meanfield.figures.files import save_all
from meanfield.figures.measures import (
    plot_growth_in_n,
    plot_growth_in_radius,
    plot_lemma_3_2,
    plot_light_weight,
    plot_masked_bound,
    plot_regimes,
    plot_secants,
    plot_splitting,
)
from meanfield.figures.transformers import (
    plot_adversarial,
    plot_adversarial_heads,
    plot_bound_beside_constant,
    plot_constant_against_n,
    plot_exponents,
    plot_head_constants,
    plot_large_radius,
    plot_quadratic_growth,
    plot_radius_against_n,
    plot_released,
    plot_released_on_text,
    plot_scaling_factor,
)

__all__ = [
    "plot_adversarial",
    "plot_adversarial_heads",
    "plot_bits_per_character",
    "plot_bound_beside_constant",
    "plot_constant_against_n",
    "plot_exponents",
    "plot_growth_in_n",
    "plot_growth_in_radius",
    "plot_head_constants",
    "plot_inverse",
    "plot_inverse_steps",
    "plot_l2_ratio",
    "plot_l2_tightness",
    "plot_large_radius",
    "plot_layer_constants",
    "plot_lemma_3_2",
    "plot_light_weight",
    "plot_masked_bound",
    "plot_quadratic_growth",
    "plot_radius_against_n",
    "plot_regimes",
    "plot_released",
    "plot_released_on_text",
    "plot_scaling_factor",
    "plot_secants",
    "plot_splitting",
    "plot_training_curves",
    "save_all",
    "style",
]
