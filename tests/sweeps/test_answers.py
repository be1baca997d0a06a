"""Answers as Datasets, as floats, and as shown by terminals and notebooks."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from meanfield import bounds, layers, lipschitz, results, transport
from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.linalg import operator_norm
from meanfield.maps import linearize
from meanfield.measures import ParticleMeasure
from meanfield.results.answers import Answer, labelled
from meanfield.sweeps import sweep

PARAMETERS = AttentionParameters.random(2, n_heads=2, generator=0)
F = SelfAttention(PARAMETERS)
POINTS = torch.randn(2, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
BATCH = ParticleMeasure(POINTS)
MU, NU = BATCH[0], BATCH[1]
CONSTANT = lipschitz.local_lipschitz(F, MU)
SECANT = lipschitz.secant_ratio(F, MU, NU)
PAIR = transport.solve_w2(MU, NU)
LAYER = layers.contractive(layers.Pointwise(torch.sin), 0.5, constant=1.0)

DATASETS = {
    "constant": CONSTANT,
    "constants": lipschitz.local_lipschitz(F, BATCH),
    "euclidean": lipschitz.local_lipschitz(F, MU, geometry="euclidean"),
    "secant": SECANT,
    "shares": lipschitz.localize(CONSTANT, F, MU),
    "pair": PAIR,
    "pairs": transport.solve_w2(BATCH, NU),
    "NumPy": transport.solve_w2(POINTS[0].numpy(), POINTS[1].numpy()),
    "infinite": transport.solve_conditional_w2(
        ParticleMeasure.from_sequence(POINTS[0]), ParticleMeasure.from_sequence(POINTS[1, :3])
    ),
    "bounds": bounds.table(F, 1.0, 4),
}


@pytest.mark.parametrize("name", DATASETS)
def test_an_answer_is_a_labelled_dataset_that_files_keep(name, tmp_path):
    ds = DATASETS[name].to_dataset()
    assert all("long_name" in variable.attrs for variable in ds.data_vars.values())
    assert not any(variable.attrs.get("units") == "1" for variable in ds.variables.values())
    for suffix in (".nc", ".zarr"):
        read = results.read_dataset(results.write_dataset(ds, tmp_path / f"answer{suffix}"))
        assert read.equals(ds)


def test_the_datasets_hold_the_numbers():
    ds = DATASETS["constants"].to_dataset()
    np.testing.assert_array_equal(ds.constant, DATASETS["constants"].value)
    assert ds.direction.dims == ("case", "particle", "feature")
    assert float(SECANT.to_dataset().secant_lower) == float(SECANT.lower)
    assert SECANT.to_dataset().image_distance_upper == float(SECANT.numerator.upper)
    pair = PAIR.to_dataset()
    cost = np.square(POINTS[0].numpy()[pair.row] - POINTS[1].numpy()[pair.column]).sum(-1)
    assert float((np.exp(pair.log_mass) * cost).sum()) == pytest.approx(float(pair.distance) ** 2)
    assert [DATASETS[name].to_dataset().conditional for name in ("pairs", "infinite")] == [0, 1]
    assert DATASETS["shares"].to_dataset().head_share.sum() == pytest.approx(1.0)


def test_one_number_is_a_float_and_a_batch_is_none():
    assert float(CONSTANT) == float(CONSTANT.value)
    assert float(SECANT) == float(SECANT.value)
    assert float(PAIR) == float(PAIR.value)
    assert float(operator_norm(linearize(F, MU).atoms)) > 0
    assert float(lipschitz.infinity_norm(F, MU)) > 0
    assert float(bounds.table(F, 1.0, 4).row("Thm 3.5")) > 1
    for several in (DATASETS["constants"], DATASETS["pairs"]):
        with pytest.raises(TypeError, match=r"of shape \(2,\)"):
            float(several)
    with pytest.raises(ValueError, match="expected a statement that applies"):
        float(bounds.table(F, 1.0).row("tokens"))


def test_an_answer_on_either_side_of_an_operator_is_its_value():
    answer = length(0.25, 0.2, 0.3)
    found = 1 - answer, answer - 1, 1 / answer, answer / 2, 2 * answer, 1 + answer, answer**2
    assert [float(x) for x in found] == [0.75, -0.75, 4.0, 0.125, 0.5, 1.25, 0.0625]


SHOWN = [
    F,
    PARAMETERS,
    PAIR,
    PAIR.coupling,
    CONSTANT,
    operator_norm(linearize(F, MU).atoms),
    lipschitz.infinity_norm(F, MU),
    layers.invert(LAYER, MU),
    bounds.table(F, 1.0, 4),
]


@pytest.mark.parametrize("answer", SHOWN, ids=lambda answer: type(answer).__name__)
def test_a_terminal_gets_a_line_of_words_and_a_notebook_a_table(answer):
    assert " object at 0x" not in repr(answer) and "tensor(" not in repr(answer)
    page = answer._repr_html_()
    assert page.startswith("<table") and page.endswith("</table>")


def test_a_linear_map_says_its_shapes():
    assert repr(linearize(F, MU).atoms) == "LinearMap((4, 2) → (4, 2), dtype=float64)"


class Length(Answer, noun="length", title="Length of a curve"):
    """An answer with a field of every kind."""

    value: torch.Tensor = labelled("length of the curve", units="m")
    lower: torch.Tensor = labelled("lower end", beside=True)
    upper: torch.Tensor = labelled("upper end", beside=True)
    converged: torch.Tensor = labelled("whether it converged", dtype="bool", beside=True)
    corners: torch.Tensor | None = labelled("corners", dims=("corner",))
    straight: Answer | None = labelled("distance of the ends", name="chord")
    method: str = labelled("method", attribute=True, default="polygon")
    private: object = None


def length(value, lower, upper, **fields) -> Length:
    value, lower, upper = (torch.tensor(x, dtype=torch.float64) for x in (value, lower, upper))
    given = {"converged": upper - lower < 0.1, "corners": None, "straight": None}
    return Length(value, lower, upper, **(given | fields))


def test_a_value_and_its_ends_are_printed_with_the_digits_in_which_they_differ():
    near = repr(length(1.0, 1.0 - 2e-12, 1.0))
    assert near.startswith("Length(value=1, lower=0.999999999998, upper=1, converged=True")
    assert "value=0.333333, lower=0.25, upper=inf" in repr(length(1 / 3, 0.25, np.inf))
    assert "value=nan" in repr(length(np.nan, 0.0, 1.0))


def test_a_format_of_numbers_is_that_of_the_value():
    assert f"{length(1 / 3, 0.25, np.inf):.3f}" == "0.333"
    assert f"{length(1 / 3, 0.25, np.inf)}".startswith("Length(value=")
    with pytest.raises(TypeError, match="expected one length as a float, got several"):
        format(length([1.0, 2.0], [1.0, 1.0], [1.0, 3.0]), ".3f")


def test_converged_is_one_flag_per_measure_and_counts_are_shown_of_a_batch():
    assert bool(CONSTANT.converged) and CONSTANT.converged.shape == ()
    assert "converged=1 of 2" in repr(length([1.0, 2.0], [1.0, 1.0], [1.0, 3.0]))


def test_columns_and_values_have_the_names_of_the_table_and_agree():
    found = length(1.0, 0.5, 1.0, private="hidden")
    row = found.values("worst")
    names = ["worst", "worst_lower", "worst_upper", "worst_converged"]
    columns = Length.columns("worst", words="longest curve", dims=("layer",))
    assert [variable.name for variable in columns] == list(row) == names
    assert row["worst"] == 1.0 and row["worst_converged"] is False
    assert [c.long_name for c in columns[:2]] == ["longest curve", "longest curve: lower end"]
    assert columns[0].units == "m" and columns[0].dims == ("layer",)
    assert found.values("a", "method", "value") == {"a_method": "polygon", "a": 1.0}
    assert np.isnan(found.values("a", "corners")["a_corners"])
    with pytest.raises(ValueError, match=r"expected some of .*'corners'.*, got \['sides'\]"):
        Length.columns("worst", "sides")


def test_a_dataset_holds_what_is_labelled_and_there():
    part = length(1.0, 0.5, 1.0)
    ds = length(2.0, 1.0, 2.0, corners=torch.zeros(3), straight=part, private=object).to_dataset()
    assert list(ds) == [
        *("length", "length_lower", "length_upper", "length_converged", "corners"),
        *("chord", "chord_lower", "chord_upper", "chord_converged"),
    ]
    assert ds.attrs == {"method": "polygon"} and ds.length.attrs["units"] == "m"
    assert ds.chord_lower.long_name == "distance of the ends: lower end"
    several = length([2.0, 3.0], [1.0, 2.0], [2.0, 3.0], corners=torch.zeros(2, 3))
    assert several.to_dataset().corners.dims == ("case", "corner")


def test_a_value_that_asks_for_a_gradient_is_shown_and_stored():
    value = torch.tensor(1.5, requires_grad=True)
    found = length(1.5, 1.0, 2.0)
    found = Length(value, found.lower, found.upper, found.converged, None, None)
    assert float(found) == 1.5 == float(found.to_dataset().length)
    assert "value=1.5" in repr(found)


def test_an_answer_without_one_value_is_no_float():
    with pytest.raises(TypeError, match="one value, got Localization"):
        float(DATASETS["shares"])


def test_a_dataset_of_an_answer_has_memory_of_its_own():
    answer = lipschitz.local_lipschitz(F, MU)
    before = float(answer)
    answer.to_dataset()["constant"][...] = 7.0
    assert float(answer) == before


@pytest.mark.parametrize("answer", [CONSTANT, PAIR, SECANT], ids=["constant", "pair", "secant"])
def test_a_sweep_takes_the_values_of_an_answer_and_says_so(answer):
    ds = sweep(lambda x: answer.values("found"), {"x": [1.0, 2.0]}, progress=False)
    assert ds["found"].values.tolist() == [float(answer)] * 2 and "found_upper" in ds
    with pytest.raises(ValueError, match=r"as answer\.values\('name'\)"):
        sweep(lambda x: answer, {"x": [1.0]}, progress=False)


def test_a_deep_copy_keeps_its_derivative_and_has_memory_of_its_own():
    mu = ParticleMeasure(POINTS[0].clone().requires_grad_())
    for found in (F(mu), lipschitz.local_lipschitz(F, mu), transport.solve_w2(mu, NU)):
        again = copy.deepcopy(found)
        for name, mine in vars(found).items():
            if isinstance(mine, torch.Tensor):
                other = getattr(again, name)
                assert torch.equal(mine, other) and mine.data_ptr() != other.data_ptr()
                assert mine.requires_grad == other.requires_grad
    assert copy.deepcopy(F(mu)).points.requires_grad
    layer = F.parameters.from_module(torch.nn.MultiheadAttention(2, 1, dtype=torch.float64))
    again = copy.deepcopy(replace(F, parameters=layer))
    assert torch.equal(again(mu).points, replace(F, parameters=layer)(mu).points)


@pytest.mark.parametrize("answer", [CONSTANT, PAIR, SECANT], ids=["constant", "pair", "secant"])
def test_answers_are_pickled_with_all_that_they_show(answer):
    assert repr(pickle.loads(pickle.dumps(answer))) == repr(answer)
