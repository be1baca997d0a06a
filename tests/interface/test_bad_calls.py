"""Every public function refuses a plausible wrong argument: what it expected, what it got.

`tests.interface.bad_calls` has the functions, the mistakes and `verdict`. By default one case in
twelve is run, and all of them under the marker `slow`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from meanfield import checks
from meanfield.checks import as_float_tensor
from meanfield.measures import ParticleMeasure
from meanfield.transport import w2
from tests.interface import bad_calls, whole_calls
from tests.interface.bad_calls import CLEAR, FOREIGN, NONSENSE, RIGHT, Call, Case, Wrong

ALL = list(bad_calls.cases())
EVERY = 12


def check(cases: Sequence[Case]) -> None:
    found = [(case, *bad_calls.verdict(case)) for case in cases]
    count = Counter(verdict for _, verdict, _ in found)
    silent = [f"{case}: {text}" for case, verdict, text in found if verdict == NONSENSE]
    foreign = [f"{case}: {text}" for case, verdict, text in found if verdict == FOREIGN]
    assert not silent
    assert count[CLEAR] >= 0.99 * (len(cases) - count[RIGHT]), foreign


def test_the_harness_is_as_wide_as_it_says():
    assert len(bad_calls.CALLS) >= 36
    assert len(whole_calls.CALLS) >= 500
    assert len({mistake for kind in bad_calls.KINDS.values() for mistake in kind}) >= 95


@pytest.mark.parametrize("call", bad_calls.CALLS, ids=lambda call: call.name)
def test_the_well_formed_call_works(call):
    if call.name == "results.write_dataset":
        pytest.skip("it writes")
    assert call() is not None


def test_one_wrong_call_in_twelve_ends_in_a_clear_error():
    check(ALL[::EVERY])


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1, EVERY))
def test_wrong_calls_end_in_a_clear_error(start):
    check(ALL[start::EVERY])


@pytest.mark.parametrize("group", whole_calls.GROUPS)
def test_wrong_calls_as_people_type_them_end_in_a_clear_error(group, tmp_path):
    calls = whole_calls.GROUPS[group].strip().splitlines()
    found = {call: whole_calls.ending(call, tmp_path) for call in calls}
    assert not {call: end for call, end in found.items() if end[0] not in (CLEAR, "signature")}


@pytest.mark.parametrize("pair", whole_calls.PAIRS, ids=lambda pair: pair[0])
def test_odd_calls_mean_what_they_say(pair, tmp_path):
    found, meant = whole_calls.values(pair, tmp_path)
    np.testing.assert_allclose(found, meant, rtol=1e-6, atol=1e-9)


def _judged(function, mistake: Wrong, monkeypatch) -> str:
    tried = Call("tried", function, {"x": 2.0}, {"x": "tried"})
    monkeypatch.setitem(bad_calls.KINDS, "tried", {"tried": mistake})
    return bad_calls.verdict(Case(tried, "x", "tried"))[0]


def test_the_judge_tells_the_four_endings_apart(monkeypatch):
    halved = lambda x: checks.number(x, "x") / 2  # noqa: E731
    text, whole = Wrong(lambda g: "2.0"), Wrong(lambda g: np.array(g), lambda g: g)
    assert _judged(halved, text, monkeypatch) == CLEAR
    assert _judged(halved, whole, monkeypatch) == RIGHT
    assert _judged(lambda x: x / 2, text, monkeypatch) == FOREIGN
    assert _judged(lambda x: float(x) / 2, text, monkeypatch) == NONSENSE
    # Not what the well-formed value gives.
    assert _judged(lambda x: type(x).__name__, whole, monkeypatch) == NONSENSE


@pytest.mark.parametrize("call", [w2, ParticleMeasure.from_sequence])
def test_a_forgotten_argument_is_named(call):
    with pytest.raises(TypeError, match=r"missing .*required positional argument"):
        call()


def test_a_misspelt_name_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'lanczos'"):
        checks.choice("lancos", "method", ("auto", "lanczos"))
    with pytest.raises(ValueError, match="got 'xyz'$"):
        checks.choice("xyz", "method", ("auto", "lanczos"))


@pytest.mark.parametrize(
    "given",
    [
        [[1, 2], [3, 4]],
        np.array([[1, 2], [3, 4]], ">f8"),
        np.array([[3.0, 4.0], [1.0, 2.0]])[::-1],
        np.ma.masked_array([[1.0, 2.0], [3.0, 4.0]]),
        np.array([[1.0, 2.0], [3.0, 4.0]], np.longdouble),
        ((1.0, 2.0), (3.0, 4.0)),
    ],
)
def test_numbers_of_any_make_are_taken(given):
    tensor = as_float_tensor(given, "x")
    assert tensor.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert tensor.dtype == torch.float64


def test_arrays_of_single_precision_stay_so_and_lists_are_double():
    assert as_float_tensor(np.ones(2, np.float32), "x").dtype == torch.float32
    assert as_float_tensor([np.float32(1.0)], "x").dtype == torch.float64
