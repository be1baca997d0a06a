"""Every public function that takes a map is right about any attention, or refuses in words.

What each has to answer stands in `doors`; a public function without a row there fails here.
"""

from __future__ import annotations

import collections
import importlib
import inspect
import re
import traceback
import warnings
from pathlib import Path

import pytest

import meanfield
from meanfield import ConvergenceError, Map
from tests.interface.attentions import KERNELS, Problem, draw, splitting
from tests.interface.calls import GONE
from tests.interface.doors import ROWS

PACKAGES = (
    *("meanfield", "meanfield.attention", "meanfield.bounds", "meanfield.dynamics"),
    *("meanfield.layers", "meanfield.linalg", "meanfield.lipschitz", "meanfield.maps"),
)
TAKES_A_MAP = re.compile(r"\b(MeasureMap|Map|SelfAttention|Linearisation|LinearMap)\b")
# Answers and parts of maps, what is told a candidate beside the map (tests/linalg), and maps
# made of maps (tests/maps).
NO_DOORS = {"Linearisation", "certify", "contractive"}
PACKAGE = str(Path(meanfield.__file__).parent)
REFUSALS = (ValueError, TypeError, NotImplementedError, ConvergenceError)


def doors() -> set[str]:
    """The public functions that take a map."""
    found = set()
    for name in PACKAGES:
        module = importlib.import_module(name)
        for public in module.__all__:
            function = getattr(module, public)
            if not callable(function) or inspect.ismodule(function):
                continue
            try:
                arguments = inspect.signature(function).parameters.values()
            except ValueError:
                continue
            taken = (TAKES_A_MAP.search(str(one.annotation)) for one in arguments)
            if isinstance(function, type) and issubclass(function, Map):
                continue
            if any(taken) or {one.name for one in arguments} & {"F", "layer", "network"}:
                found.add(public)
    return found - NO_DOORS


def ask(name: str, problem: Problem) -> str:
    """ "right", or "refused" in words; anything else is raised."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            ROWS[name](problem)
    except REFUSALS as error:
        if not traceback.extract_tb(error.__traceback__)[-1].filename.startswith(PACKAGE):
            raise
        return "refused" if len(str(error)) > 20 else "refused without words"
    except AttributeError as error:
        if inspect.ismodule(error.obj):
            raise LookupError(f"{error.obj.__name__}.{error.name} {GONE}") from None
        raise
    except AssertionError as error:
        raise AssertionError(f"{name}, {problem.kind}: {error}") from None
    return "right"


def drawn(name: str, seed: int) -> Problem:
    """One that the function is for."""
    return draw(seed, ("l2",) if name.startswith("l2_") else KERNELS)


def test_every_public_function_that_takes_a_map_has_a_row():
    assert doors() <= set(ROWS)


@pytest.mark.parametrize("name", sorted(ROWS))
def test_answers_are_right_or_refused(name):
    first = 2 * sorted(ROWS).index(name)
    found = [ask(name, drawn(name, seed)) for seed in (first, first + 1)]
    assert {*found} <= {"right", "refused"}


@pytest.mark.parametrize("name", sorted(ROWS))
def test_answers_are_right_where_splitting_is_the_worst(name):
    refuses = {name for name in ROWS if name.startswith("l2_")}
    assert ask(name, splitting()) == ("refused" if name in refuses else "right")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ROWS))
def test_thousands_of_answers_are_right_or_refused(name):
    found = collections.Counter(ask(name, drawn(name, seed)) for seed in range(1000, 1060))
    assert {*found} <= {"right", "refused"} and found["right"] >= 4
