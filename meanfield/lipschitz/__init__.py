"""Lipschitz constants of maps of measures.

Works for any map of measures; one that brings its own linearisation (``linearize``,
``linearize_field``) is faster.
"""

from meanfield.lipschitz.local import LocalLipschitz, local_lipschitz

__all__ = ["LocalLipschitz", "local_lipschitz"]
