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
from meanfield import ConvergenceError
from tests.interface.attentions import KERNELS, draw
from tests.interface.doors import ROWS

PACKAGES = (
    *("meanfield", "meanfield.attention", "meanfield.bounds", "meanfield.dynamics"),
    *("meanfield.layers", "meanfield.linalg", "meanfield.lipschitz", "meanfield.maps"),
)
TAKES_A_MAP = re.compile(
    r"\b(MeasureMap|Map|SelfAttention|CrossAttention|Linearisation|LinearMap)\b"
)
# Answers and parts of maps, and what is told a candidate beside the map (tests/linalg).
NO_DOORS = {"Linearisation", "certify"}
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
            if any(taken) or {one.name for one in arguments} & {"F", "layer", "network"}:
                found.add(public)
    return found - NO_DOORS


def ask(name: str, seed: int) -> str:
    """ "right", or "refused" in words; anything else is raised."""
    problem = draw(seed, ("l2",) if name.startswith("l2_") else KERNELS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            ROWS[name](problem)
    except REFUSALS as error:
        if not traceback.extract_tb(error.__traceback__)[-1].filename.startswith(PACKAGE):
            raise
        return "refused" if len(str(error)) > 20 else "refused without words"
    except AssertionError as error:
        raise AssertionError(f"{name}, seed {seed}, {problem.kind}: {error}") from None
    return "right"


def test_every_public_function_that_takes_a_map_has_a_row():
    assert doors() <= set(ROWS)


def asked(name: str, first: int, cases: int) -> collections.Counter[str]:
    """How often the function of this name was right, and how often it refused."""
    return collections.Counter(ask(name, seed) for seed in range(first, first + cases))


@pytest.mark.parametrize("name", sorted(ROWS))
def test_answers_are_right_or_refused(name):
    assert sum(asked(name, 2 * sorted(ROWS).index(name), 2).values()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ROWS))
def test_thousands_of_answers_are_right_or_refused(name):
    assert asked(name, 1000, 60)["right"] >= 4
