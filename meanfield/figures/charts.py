"""A figure as a value: its curves and formulas over one axis, for each value of a parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import xarray as xr

from meanfield.figures.canvas import FORMULA, figure, kind, ticks_at
from meanfield.figures.curves import curve, formula
from meanfield.figures.selection import attribute, by_level, by_mask

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class _At(dict[str, Any]):
    """What a formula knows besides x: the attributes of a Dataset, and values of parameters."""

    def __init__(self, ds: xr.Dataset, values: Mapping[str, Any]) -> None:
        super().__init__({**ds.attrs, **values})
        self.ds = ds

    def __missing__(self, name: str) -> Any:
        return attribute(self.ds, name)  # says that it is not there


@dataclass(frozen=True)
class Curve:
    """A column of the cases.

    Args:
        y: its name.
        label: in the legend; of a chart `by` a parameter with its values, ``"R = {radius:g}"``,
            or a function of the cases of one value.
        fmt: as in `Axes.plot`.
        key: an entry of the legend for the curves of all values, in black.
        rows: which of the cases, or the cases with further columns.
        flag: the truth values by which points are marked; ``{y}_converged`` if there is one.
        of: what it is of the Dataset, as in `canvas.figure`: ``"a/b"``; y if "".
        once: drawn once, of all cases, and not for each value.
        style: properties of the line.
    """

    y: str
    label: str | Callable[[xr.Dataset], str] = ""
    fmt: str = "o-"
    key: str = ""
    rows: Callable[[xr.Dataset], xr.Dataset] = lambda ds: ds
    flag: str | None = None
    of: str = ""
    once: bool = False
    style: Mapping[str, Any] = field(default_factory=dict)

    def draw(self, ax: Axes, x: str, rows: xr.Dataset, at: _At, style: dict[str, Any]) -> None:
        """Draw it on the Axes."""
        curve(ax, self.rows(rows), x, self.y, self.fmt, flag=self.flag, **style)


@dataclass(frozen=True)
class Formula:
    """A function of x, on a fine grid of its own; the other arguments are those of `Curve`.

    Args:
        f: from x, and the value of `by` and the attributes of the Dataset by name, to y.
        whole: whether x is a whole number.
        flat: a horizontal line through the whole figure; x is then None.
    """

    f: Callable[[Any, Mapping[str, Any]], Any]
    label: str | Callable[[xr.Dataset], str] = ""
    fmt: str = "k:"
    key: str = ""
    whole: bool = False
    flat: bool = False
    once: bool = False
    style: Mapping[str, Any] = field(default_factory=dict)

    def draw(self, ax: Axes, x: str, rows: xr.Dataset, at: _At, style: dict[str, Any]) -> None:
        """Draw it on the Axes."""
        if not self.flat:
            of = lambda values: self.f(values, at)  # noqa: E731
            formula(ax, of, rows[x], self.fmt, whole=self.whole, **style)
            return
        line: Any = {"linestyle": self.fmt.removeprefix("k"), "linewidth": 0.9, "gid": FORMULA}
        line |= {"color": "black"} if self.fmt.startswith("k") else {}
        ax.axhline(self.f(None, at), **{**line, **style})


@dataclass(frozen=True)
class Chart:
    """Curves of a Dataset on one Axes; a chart is called as any figure, see `canvas.figure`.

    Args:
        caption: its first line is the caption.
        x: the variable on the horizontal axis.
        curves: what is drawn.
        title: of the figure, or a function of the cases.
        by: parameters, each of whose values has a colour; those of `causal` have two of their
            own, and labels say ``{kind}``.
        rows: the cases that are drawn.
        log: the logarithmic axes, "x", "y" or "xy".
        axes: as of `Axes.set`: labels and limits.
        ticks: whether the horizontal axis has ticks where the data are.
    """

    caption: str
    x: str
    curves: Sequence[Curve | Formula]
    title: str | Callable[[xr.Dataset], str] = ""
    by: str | tuple[str, ...] = ()
    rows: Callable[[xr.Dataset], xr.Dataset] = lambda ds: ds
    log: str = ""
    axes: Mapping[str, Any] = field(default_factory=dict)
    ticks: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "__doc__", self.caption)

    @property
    def columns(self) -> tuple[str, ...]:
        """The variables of the Dataset that are drawn, and flags that are not of their name."""
        drawn = [one for one in self.curves if isinstance(one, Curve)]
        named = [one.of or one.y for one in drawn] + [one.flag for one in drawn if one.flag]
        return tuple(dict.fromkeys(named))

    def __call__(self, ds: xr.Dataset, *, ax: Axes | None = None, **how: Any) -> Axes:
        """Draw it; the options are those of `canvas.figure`."""

        def chart(ds: xr.Dataset, *, ax: Axes) -> Axes:
            return self._drawn(ax, self.rows(ds))

        return figure(*self.columns)(chart)(ds, ax=ax, **how)

    def _drawn(self, ax: Axes, rows: xr.Dataset) -> Axes:
        for name in self.log:
            ax.set(**{f"{name}scale": "log"})
        for words, colour, cases in self._groups(rows):
            for one in self.curves:
                if not one.once:
                    style = self._style(one, cases, words, colour)
                    one.draw(ax, self.x, cases, _At(cases, words), style)
        for one in self.curves:
            if one.once:
                one.draw(ax, self.x, rows, _At(rows, {}), self._style(one, rows, {}, {}))
            if one.key:
                thin: Any = {"linewidth": 0.9, **one.style, "color": "black"}
                ax.plot([], [], one.fmt.removeprefix("k"), label=one.key, **thin)
        ax.set(**self.axes)
        if self.ticks:
            ticks_at(ax, rows[self.x])
        ax.set_title(self.title if isinstance(self.title, str) else self.title(rows))
        return ax

    def _groups(self, rows: xr.Dataset) -> Iterator[tuple[dict[str, Any], dict[str, Any], Any]]:
        """The words for labels, the colour, and the cases of each value."""
        if not self.by:
            yield {}, {}, rows
        elif self.by == "causal":
            for colour, causal, cases in by_mask(rows):
                yield {"kind": kind(causal)}, {"color": colour}, cases
        else:
            names = (self.by,) if isinstance(self.by, str) else self.by
            for colour, *values, cases in by_level(rows, *names):
                yield dict(zip(names, values, strict=True)), {"color": colour}, cases

    def _style(
        self, one: Curve | Formula, rows: xr.Dataset, words: dict[str, Any], colour: dict[str, Any]
    ) -> dict[str, Any]:
        label = one.label if isinstance(one.label, str) else one.label(rows)
        label = label.format(**words) if words and isinstance(one.label, str) else label
        return {**colour, **({"label": label} if label else {}), **one.style}
