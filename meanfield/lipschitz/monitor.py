"""Constants and largest logits of the layers of a model while it is trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from meanfield.checks import count, describe
from meanfield.lipschitz.constant import LocalLipschitz
from meanfield.lipschitz.local import local_lipschitz
from meanfield.maps import Map
from meanfield.maps.map import as_map
from meanfield.measures import MeasureMap, ParticleMeasure, check_single
from meanfield.results import Variable
from meanfield.results.labels import dataset

if TYPE_CHECKING:
    import xarray as xr

_VARIABLES = LocalLipschitz.columns(
    "constant",
    words="local Lipschitz constant of the layer at the measure that enters it",
    dims=("step", "layer"),
)
_LOGIT = Variable(
    "largest_logit", "largest score of a head, its absolute value", dims=("step", "layer", "head")
)
_STEP = Variable("step", "training step", dims=("step",), dtype="int64")
_LAYER = Variable("layer", "layer", dims=("layer",), dtype="int64")
_HEAD = Variable("head", "head of attention in the layer", dims=("head",), dtype="int64")


class Monitor:
    """Counts steps and measures at some of them; made by `monitor`."""

    def __init__(
        self,
        read: Callable[[], Sequence[MeasureMap]],
        mu: Callable[[], ParticleMeasure],
        every: int,
        settings: dict[str, Any],
    ) -> None:
        self._read, self._mu, self._every, self._settings = read, mu, every, settings
        self.steps = 0
        self._found: dict[int, list[dict[str, Any]]] = {}
        self._logits: dict[int, list[list[float]]] = {}

    def __call__(self, *ignored: Any) -> None:
        """Count one step; the arguments that a hook gets are ignored."""
        self.steps += 1
        if self.steps % self._every == 0:
            self.measure()

    @torch.no_grad()
    def measure(self) -> None:
        """Measure now, whatever the step."""
        mu, found, logits = self._mu(), [], []
        for F in map(as_map, self._read()):
            constant = local_lipschitz(F, mu, strict=False, **self._settings)
            found.append(constant.values("constant"))
            logits.append(F.largest_logits(mu).tolist())
            mu = F(mu)
        self._found[self.steps], self._logits[self.steps] = found, logits

    def dataset(self) -> xr.Dataset:
        """What was measured so far: constants over (step, layer), and logits with `head` too.

        Layers with fewer heads than others have NaN in their places.

        Raises:
            ValueError: nothing yet.
        """
        if not self._found:
            raise ValueError(
                f"expected at least one measurement, got none in {self.steps} steps; one is made "
                f"every {self._every} steps, or by measure()"
            )
        rows = list(self._found.values())
        values = {v.name: [[one[v.name] for one in row] for row in rows] for v in _VARIABLES}
        heads = max(len(layer) for row in self._logits.values() for layer in row)
        values[_LOGIT.name] = [
            [layer + [math.nan] * (heads - len(layer)) for layer in row]
            for row in self._logits.values()
        ]
        coords = {
            "step": (_STEP, list(self._found)),
            "layer": (_LAYER, np.arange(len(rows[0]))),
            "head": (_HEAD, np.arange(heads)),
        }
        return dataset((*_VARIABLES, _LOGIT), values, coords=coords)


def monitor(
    read: Callable[[], Sequence[MeasureMap]],
    mu: ParticleMeasure | Callable[[], ParticleMeasure],
    *,
    every: int = 100,
    **settings: Any,
) -> Monitor:
    """A callback that measures layers every so many steps of a training loop.

    For each layer its local constant with the evidence, and the largest logit of each head
    inside it (`Map.largest_logits`).

    ``optimizer.register_step_post_hook(callback)`` calls it after each step; so does a line
    ``callback()`` in a loop of one's own.

    Args:
        read: the layers as they are now, in the order in which they act, for example
            ``lambda: [source.block(l) for l in range(source.n_layers)]`` with
            ``source = pretrained.read(model)``.
        mu: the measure that enters the first layer, or a function without arguments that
            returns it, for embeddings that are trained too; each later layer gets the image
            under those before.
        every: steps between measurements.
        settings: of `local_lipschitz`: geometry, rtol, …

    Returns:
        A callable with ``measure()``, to measure at once, and ``dataset()``.

    Example:
        >>> from meanfield.attention import AttentionParameters, SelfAttention
        >>> F = SelfAttention(AttentionParameters.from_bilinear([[0.0]], [[2.0]]))
        >>> callback = monitor(lambda: [F, F], ParticleMeasure([[1.0], [-1.0]]), every=2)
        >>> for _ in range(4):
        ...     callback()
        >>> callback.dataset().constant.values
        array([[2., 2.],
               [2., 2.]])
        >>> callback.dataset().largest_logit.shape
        (2, 2, 1)
    """
    every = count(every, "every")
    if not callable(read) or isinstance(read, Map):
        raise TypeError(
            f"read: expected a function without arguments, lambda: [F, G, …], got {describe(read)}"
        )
    if not callable(mu):
        check_single(mu)

    def entering() -> ParticleMeasure:
        return check_single(mu() if callable(mu) else mu)

    return Monitor(read, entering, every, settings)
