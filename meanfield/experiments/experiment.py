"""An experiment as a value: its settings, its measurement, what the numbers mean, its figures."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meanfield.checks import describe
from meanfield.experiments.settings import marked, quick_of, values_of, without_grid
from meanfield.results import Variable
from meanfield.results.cases import answered
from meanfield.sweeps import Task, sweep

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["Experiment"]


@dataclass(frozen=True, repr=False)
class Experiment:
    """One question. The file of the settings gives the name, and its docstring the question.

    Args:
        measure: the numbers of one case. It takes the settings as `s`, the parameters of the case
            by name and, if it likes, the case's own `seed` or `generator`, see `sweeps.Task`. The
            settings are resolved, and empty where they are the grid's.
        settings: of the whole experiment: a frozen dataclass of fields made by
            `settings.setting`, `over` (the grid) and `along` (coordinates of the results), among
            them `seed`.
        variables: what `measure` returns.
        figures: by the name of their file, functions of a Dataset and ``ax=``; the first line of
            the docstring is the caption.
        resolve: from settings to settings that say all: called once before the first case, it may
            fill in what is left open, and refuse what every case would fail at.
        grid: from settings to the grid of `meanfield.sweep`; by default all combinations of the
            fields made by `over`, the last changing first.
        parameters: what parameters of the grid mean that no field is made `over`.
        coords: what coordinates mean that no field is made `along`, and their values or a
            function of the settings.
        attrs: from settings to attributes of the Dataset.
        batched: `measure` takes the parameters of many cases as arrays, see `sweeps.Task`.
        conclude: from the finished sweep to the Dataset, for fits over all cases.
        answer: from the Dataset to the lines with which `meanfield run` ends: the numbers that
            answer the question.

    Example:
        >>> from meanfield.experiments.settings import over, setting
        >>> @dataclass(frozen=True)
        ... class Settings:
        ...     radii: tuple[float, ...] = over("radius", (1.0, 2.0, 4.0), "R", quick=(1.0, 2.0))
        ...     power: int = setting(2, "exponent")
        ...     seed: int = setting(0, "not used")
        >>> def area(s, radius):
        ...     return {"area": 3 * radius**s.power}
        >>> areas = Experiment(area, Settings(), [Variable("area", "area")])
        >>> areas.run(areas.quick, progress=False).area.values
        array([ 3., 12.])
    """

    measure: Callable[..., Mapping[str, Any]]
    settings: Any
    variables: Sequence[Variable]
    figures: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    resolve: Callable[[Any], Any] = lambda settings: settings
    grid: Callable[[Any], Any] | None = None
    parameters: Sequence[Variable] = ()
    coords: Mapping[Variable, Any] = field(default_factory=dict)
    attrs: Callable[[Any], Mapping[str, Any]] = lambda settings: {}
    batched: bool = False
    conclude: Callable[[xr.Dataset], xr.Dataset] = lambda ds: ds
    answer: Callable[[xr.Dataset], Sequence[str]] = lambda ds: ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Those of the library are pickled by name: their figures have functions without one."""
        from meanfield.experiments import EXPERIMENTS, get

        if self.name in EXPERIMENTS and get(self.name) is self:
            return get, (self.name,)
        return super().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"<Experiment {self.name}: {self.question.partition(chr(10))[0]}>"

    @property
    def name(self) -> str:
        """What `meanfield run` calls it."""
        return type(self.settings).__module__.rpartition(".")[2].replace("_", "-")

    @property
    def question(self) -> str:
        """What is asked: a title, an empty line, and paragraphs."""
        return inspect.getdoc(inspect.getmodule(type(self.settings))) or self.name

    @property
    def quick(self) -> Any:
        """The settings of a run of seconds."""
        return quick_of(self.settings)

    def plan(self, settings: Any = None) -> dict[str, Any]:
        """The arguments of `meanfield.sweep` that make the experiment; in full size if None."""
        settings = self.settings if settings is None else settings
        if not isinstance(settings, type(self.settings)):
            raise TypeError(
                f"settings: expected {type(self.settings).__name__} or None, got "
                f"{describe(settings)}; dataclasses.replace(experiment.settings, NAME=value) "
                "makes others, and experiment.quick is the small run"
            )
        s = self.resolve(settings)
        axes, dims = marked(s, "over"), marked(s, "along")
        coords = {
            **{dim: values_of(s, one) for dim, one in dims.items()},
            **{v.name: of(s) if callable(of) else of for v, of in self.coords.items()},
        }
        labels = [Variable(n, f.metadata["meaning"], **f.metadata["labels"])
                  for n, f in (axes | dims).items()]  # fmt: skip
        product = {name: values_of(s, one) for name, one in axes.items()}
        return {
            "fn": Task(
                self.measure,
                self.variables,
                [*labels, *self.parameters, *self.coords],
                coords,
                batched=self.batched,
            ),
            "grid": self.grid(s) if self.grid else product,
            "fixed": {"s": without_grid(s)},
            "seed": s.seed,
            "attrs": {"experiment": self.name, **self.attrs(s)},
        }

    def run(self, settings: Any = None, **how: Any) -> xr.Dataset:
        """Run the sweep.

        Args:
            settings: what to run over; the whole experiment if None.
            **how: as in `meanfield.sweep`: store, executor, …

        Raises:
            TypeError: settings of another kind, or given one by one.
        """
        if own := sorted(set(how) & set(vars(self.settings))):
            raise TypeError(
                f"run: expected settings as one value, got {', '.join(own)}; write "
                f"run(dataclasses.replace(experiment.settings, {own[0]}=…))"
            )
        if "quick" in how:
            raise TypeError("run: expected settings, got quick=; write run(experiment.quick)")
        return self.finish(sweep(**self.plan(settings), **how))

    def finish(self, ds: xr.Dataset) -> xr.Dataset:
        """A sweep as it was stored, or a selection of its cases, with what is fitted to them.

        The same if no case has an answer, or if the cases are no longer in rows.
        """
        return self.conclude(ds) if answered(ds).sizes.get("case") else ds
