"""Maps of measures: what they may declare about themselves, and how they are linearised."""

from meanfield.maps.autodiff import Linearisation
from meanfield.maps.map import BallBounds, Map, expanded_radii, linearize

__all__ = ["BallBounds", "Linearisation", "Map", "expanded_radii", "linearize"]
