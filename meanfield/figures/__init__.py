"""Figures: each is a function of a Dataset that draws on one Axes and returns it.

Here are those of anybody's Dataset; an experiment has its own beside its measurement, see
`experiments.get`. Nothing here computes or shows, and only `save_all` writes
files. Colours run from dark (small) to light (large) where they stand for a quantity; a bound is
dashed, a measurement is a line with markers.
"""

# Files, each importing only those before it: `legends`, `canvas` (style, Axes, the options that
# all figures take), `selection` (which cases), `curves` (columns and formulas), `charts` (figures
# that are a list of curves), `plots`, `saving`.

from meanfield.figures.canvas import figure, style
from meanfield.figures.plots import plot_constants, plot_growth, plot_particle_paths
from meanfield.figures.saving import save_all
from meanfield.habits import hint_names

__all__ = [
    "figure",
    "plot_constants",
    "plot_growth",
    "plot_particle_paths",
    "save_all",
    "style",
]
hint_names(__name__, __all__)
