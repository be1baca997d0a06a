"""A figure as a value: its curves and formulas over one axis, for each value of a parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from meanfield.figures.canvas import figure, in_words, kind, ticks_at
from meanfield.figures.curves import curve, formula, law, power_law
from meanfield.figures.selection import attribute, by_level, fits_of, levels, spelled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Callable[[xr.Dataset], xr.Dataset]
_Words = str | Callable[[xr.Dataset], str]


class _At(dict[str, Any]):
    """What a formula knows besides x: the attributes of a Dataset, and values of parameters."""

    def __init__(self, ds: xr.Dataset, values: Mapping[str, Any]) -> None:
        super().__init__({**ds.attrs, **values})
        self.ds = ds

    def __missing__(self, name: str) -> Any:
        return attribute(self.ds, name)  # says that it is not there


def _with_margin(ax: Axes) -> None:
    """Above the data as much of the axis as usual, wherever it begins."""
    scale, bottom, top = ax.yaxis.get_transform(), ax.get_ylim()[0], ax.dataLim.y1
    if bottom < top < np.inf:
        low, high = scale.transform([bottom, top])
        share: Any = ax.margins()
        ax.set_ylim(top=float(scale.inverted().transform(high + share[1] * (high - low))))


class Drawn:
    """One thing that a chart shows, once for each value of its parameter.

    Args:
        label: in the legend; of a chart `by` a parameter with its values, ``"R = {radius}"``,
            or a function of the cases of one value.
        fmt: as in `Axes.plot`.
        rows: which of the cases, or the cases with further columns.
        key: an entry of the legend for those of all values, in black.
        once: whether it is drawn once, of all cases, and not for each value.
        **style: properties of the line.
    """

    def __init__(
        self,
        label: _Words = "",
        fmt: str = "",
        *,
        rows: Rows = lambda ds: ds,
        key: str = "",
        once: bool = False,
        **style: Any,
    ) -> None:
        self.label, self.fmt, self.rows, self.key, self.once = label, fmt, rows, key, once
        self.style = style

    def draw(self, ax: Axes, x: str, rows: xr.Dataset, at: _At, style: dict[str, Any]) -> None:
        """Draw it on the Axes."""
        raise NotImplementedError

    def styled(self, rows: xr.Dataset, words: Mapping[str, Any], colour: Any) -> dict[str, Any]:
        """The properties of the line for one value."""
        label = self.label(rows) if callable(self.label) else self.label
        label = label.format(**words) if words and not callable(self.label) else label
        named = {"label": label} if label else {}
        return ({} if colour is None else {"color": colour}) | named | self.style


class Curve(Drawn):
    """A column of the cases; further arguments as of `Drawn`.

    Args:
        y: its name, or a quotient of two as ``"a/b"``.
        flag: the truth values by which points are marked; ``{y}_converged`` if there is one.
        along: a dimension of which medians are drawn, and the range as a band.
    """

    def __init__(
        self,
        y: str,
        label: _Words = "",
        fmt: str = "o-",
        *,
        flag: str | None = None,
        along: str = "",
        **more: Any,
    ) -> None:
        super().__init__(label, fmt, **more)
        self.y, self.flag, self.along = y, flag, along

    def draw(self, ax: Axes, x: str, rows: xr.Dataset, at: _At, style: dict[str, Any]) -> None:
        """Draw it on the Axes."""
        curve(ax, rows, x, self.y, self.fmt, flag=self.flag, along=self.along, **style)


class Formula(Drawn):
    """A function of x, on a fine grid of its own; further arguments as of `Drawn`.

    Args:
        f: from x, and the value of `by` and the attributes of the Dataset by name, to y.
        whole: whether x is a whole number.
    """

    def __init__(
        self,
        f: Callable[[Any, Mapping[str, Any]], Any],
        label: _Words = "",
        fmt: str = "k:",
        *,
        whole: bool = False,
        **more: Any,
    ) -> None:
        super().__init__(label, fmt, **more)
        self.f, self.whole = f, whole

    def draw(self, ax: Axes, x: str, rows: xr.Dataset, at: _At, style: dict[str, Any]) -> None:
        """Draw it on the Axes."""
        formula(ax, lambda x: self.f(x, at), rows[x], self.fmt, whole=self.whole, **style)


class Key(Drawn):
    """An entry of the legend alone, in black, for the curves of all values."""

    def __init__(self, label: str, fmt: str, **style: Any) -> None:
        super().__init__(label, fmt, once=True, **({"color": "black"} | style))

    def draw(self, ax: Axes, x: str, rows: xr.Dataset, at: _At, style: dict[str, Any]) -> None:
        """Draw it on the Axes."""
        ax.plot([], [], self.fmt, **style)


class Law(Drawn):
    """The power law fitted to a quantity of these cases, named with the interval of its exponent.

    Args:
        quantity: what it is fitted to.
        label: what stands in front of it in the legend.
        **style: properties of the line.
    """

    def __init__(self, quantity: str, label: str = "", **style: Any) -> None:
        super().__init__(label, **style)
        self.quantity = quantity

    def draw(self, ax: Axes, x: str, rows: xr.Dataset, at: _At, style: dict[str, Any]) -> None:
        """Draw it on the Axes."""
        known = {
            str(name): levels(rows, str(name)) for name in rows.coords if f"fit_{name}" in rows
        }
        alike = {name: found[0] for name, found in known.items() if len(found) == 1}
        fits = fits_of(rows, law="free", quantity=self.quantity, **alike)
        words = style.pop("label", "") + law(fits)
        power_law(ax, fits, rows[x], **style, label=words.removesuffix(": "))


class Chart:
    """Curves of a Dataset on one Axes; a chart is called as any figure, see `canvas.figure`.

    Args:
        caption: its first line is the caption.
        x: the variable on the horizontal axis, labelled with its long name.
        drawn: what is drawn.
        title: of the figure, or a function of the cases.
        by: a parameter, each of whose values has a colour; of `causal` labels say ``{kind}``.
        rows: the cases that are drawn.
        log: the logarithmic axes, "x", "y" or "xy".
        ticks: whether the horizontal axis has ticks where the data are.
        legend: where it is unless the caller says so, as in `canvas.figure`.
        **axes: as of `Axes.set`: labels and limits.
    """

    def __init__(
        self,
        caption: str,
        x: str,
        drawn: Sequence[Drawn],
        title: _Words,
        *,
        by: str = "",
        rows: Rows = lambda ds: ds,
        log: str = "",
        ticks: bool = False,
        legend: bool | str = True,
        **axes: Any,
    ) -> None:
        self.__doc__, self.x, self.drawn, self.title = caption, x, drawn, title
        self.by, self.rows, self.log, self.ticks = by, rows, log, ticks
        self.legend, self.axes = legend, axes

    @property
    def columns(self) -> tuple[str, ...]:
        """The variables of the Dataset that are drawn, and flags that are not of their name."""
        curves = [one for one in self.drawn if isinstance(one, Curve)]
        named = [one.y for one in curves] + [one.flag for one in curves if one.flag]
        return tuple(dict.fromkeys(named))

    def __call__(self, ds: xr.Dataset, *, ax: Axes | None = None, **how: Any) -> Axes:
        """Draw it; the options are those of `canvas.figure`."""

        def chart(ds: xr.Dataset, *, ax: Axes) -> Axes:
            return self.on(ax, ds)

        # In messages.
        chart.__name__ = chart.__qualname__ = f"{', '.join(self.columns)} against {self.x}"
        return figure(*self.columns)(chart)(ds, ax=ax, **{"legend": self.legend, **how})

    def on(self, ax: Axes, ds: xr.Dataset) -> Axes:
        """Draw it as it is, for a figure that has these options of its own."""
        rows = self.rows(ds)
        ax.set(**{f"{name}scale": "log" for name in self.log})
        for value, words, colour, cases in self._groups(rows):
            for one in self.drawn:
                if not one.once:
                    self._draw(one, ax, cases, value, words, colour)
        for one in self.drawn:
            if one.once:
                self._draw(one, ax, rows, {}, {}, None)
            if one.key:
                thin: Any = {"linewidth": 0.9} | one.style | {"color": "black"}
                ax.plot([], [], one.fmt.removeprefix("k"), label=one.key, **thin)
        if "xlabel" not in self.axes:
            ax.set_xlabel(in_words(str(rows[self.x].attrs.get("long_name", self.x))))
        ax.set(**self.axes)
        if self.axes.get("ylim", (0, 0))[1] is None:
            _with_margin(ax)
        if self.ticks:
            ticks_at(ax, rows[self.x])
        ax.set_title(self.title(rows) if callable(self.title) else self.title)
        return ax

    def _draw(
        self,
        one: Drawn,
        ax: Axes,
        cases: xr.Dataset,
        value: Mapping[str, Any],
        words: Mapping[str, Any],
        colour: Any,
    ) -> None:
        rows = one.rows(cases)
        one.draw(ax, self.x, rows, _At(rows, value), one.styled(rows, words, colour))

    def _groups(self, rows: xr.Dataset) -> Iterator[tuple[Any, Any, Any, xr.Dataset]]:
        """Of each value: itself by name, the words for labels, the colour, and the cases."""
        if not self.by:
            yield {}, {}, None, rows
            return
        texts = spelled(levels(rows, self.by))
        for text, (colour, value, cases) in zip(texts, by_level(rows, self.by), strict=True):
            words = {"kind": kind(value)} if self.by == "causal" else {self.by: text}
            yield {self.by: value}, words, colour, cases
