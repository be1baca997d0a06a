"""Answers as Datasets, as floats, and as what a terminal and a notebook show."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meanfield import bounds, layers, lipschitz, results, transport
from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.linalg import operator_norm
from meanfield.linearisation import linearize
from meanfield.measures import ParticleMeasure

PARAMETERS = AttentionParameters.random(2, n_heads=2)
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
        read = results.read(results.write(ds, tmp_path / f"answer{suffix}"))
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
