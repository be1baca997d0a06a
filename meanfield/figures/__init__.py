"""Figures: each is a function of a Dataset that draws on one Axes and returns it.

Nothing here computes or shows, and only `save_all` and `save_animations` write files. Colours run
from dark (small) to light (large) where they stand for a quantity; a bound is dashed, a
measurement is a line with markers.
"""

from meanfield.figures.animations import animate_particles, save_animations
from meanfield.figures.canvas import style
from meanfield.figures.constants import (
    plot_growth_in_n,
    plot_growth_in_radius,
    plot_lemma_3_2,
    plot_light_weight,
    plot_masked_bound,
    plot_regimes,
    plot_secants,
    plot_sharpness,
    plot_splitting,
    plot_token_sharpness,
)
from meanfield.figures.contractions import (
    plot_bits_per_character,
    plot_inverse,
    plot_inverse_steps,
    plot_l2_ratio,
    plot_l2_tightness,
    plot_layer_constants,
    plot_training_curves,
)
from meanfield.figures.depth import (
    plot_constants_through_depth,
    plot_displacement_through_depth,
    plot_families,
)
from meanfield.figures.flows import (
    plot_cluster_count,
    plot_constant_through_depth,
    plot_covariance,
    plot_covariance_error,
    plot_depth_against_weight,
    plot_distance_to_first,
    plot_first_mode,
    plot_masked_clusters,
    plot_mean_field_limit,
    plot_noise_threshold,
    plot_particle_paths,
    plot_placements,
    plot_staircase,
)
from meanfield.figures.growth import plot_kernel_growth
from meanfield.figures.saving import save_all
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
    "animate_particles",
    "plot_adversarial",
    "plot_adversarial_heads",
    "plot_bits_per_character",
    "plot_bound_beside_constant",
    "plot_cluster_count",
    "plot_constant_against_n",
    "plot_constant_through_depth",
    "plot_constants_through_depth",
    "plot_covariance",
    "plot_covariance_error",
    "plot_depth_against_weight",
    "plot_displacement_through_depth",
    "plot_distance_to_first",
    "plot_exponents",
    "plot_families",
    "plot_first_mode",
    "plot_growth_in_n",
    "plot_growth_in_radius",
    "plot_head_constants",
    "plot_inverse",
    "plot_inverse_steps",
    "plot_kernel_growth",
    "plot_l2_ratio",
    "plot_l2_tightness",
    "plot_large_radius",
    "plot_layer_constants",
    "plot_lemma_3_2",
    "plot_light_weight",
    "plot_masked_bound",
    "plot_masked_clusters",
    "plot_mean_field_limit",
    "plot_noise_threshold",
    "plot_particle_paths",
    "plot_placements",
    "plot_quadratic_growth",
    "plot_radius_against_n",
    "plot_regimes",
    "plot_released",
    "plot_released_on_text",
    "plot_scaling_factor",
    "plot_secants",
    "plot_sharpness",
    "plot_splitting",
    "plot_staircase",
    "plot_token_sharpness",
    "plot_training_curves",
    "save_all",
    "save_animations",
    "style",
]
