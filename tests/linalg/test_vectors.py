"""Lengths of long vectors, against double precision and over the number range."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention
from meanfield.attention import kernels
from meanfield.attention.normalizations import sigmoid
from meanfield.layers import Chain, LayerNorm, Residual
from meanfield.linalg.vectors import beside, lengths, normalised


@pytest.mark.parametrize("size", [1, 1000, 4096, 5000, 3 * 10**6 + 7])
@pytest.mark.parametrize("falling", [False, True])
def test_lengths_in_single_precision_are_right_to_their_last_digits(size, falling):
    vectors = torch.rand(2, size, generator=torch.Generator().manual_seed(0)) + 0.5
    if falling:
        vectors = vectors / torch.arange(1, size + 1) ** 0.5
    exact = vectors.double().square().sum(-1).sqrt()
    # Long ones are added in double precision, part by part.
    room = 3e-7 if size <= 4096 else 1.2e-7
    torch.testing.assert_close(lengths(vectors).double(), exact, rtol=room, atol=0)
    unit, length = normalised(vectors)
    torch.testing.assert_close(length.double(), exact, rtol=3e-7, atol=0)
    ones = unit.double().square().sum(-1)
    torch.testing.assert_close(ones, torch.ones_like(ones), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [3, 10_000])
def test_lengths_whose_squares_leave_the_number_range(dtype, size):
    kind = torch.finfo(dtype)
    for scale in (kind.tiny * 8, kind.max / 4 / size):
        vectors = torch.full((size,), scale, dtype=dtype)
        expected = scale * math.sqrt(size)
        assert float(lengths(vectors)) == pytest.approx(expected, rel=1e-5)
    unit, length = normalised(torch.zeros(2, size, dtype=dtype))
    assert not bool(unit.any()) and not bool(length.any())


@pytest.mark.parametrize("leading", [(), (3,)])
def test_a_constant_beside_a_moving_tensor_is_itself_with_the_derivative_0(leading):
    constant = torch.tensor([[1.0, -math.inf], [2.0, 3.0]], dtype=torch.float64)
    x, along = torch.ones(2, *leading, 5, 4, dtype=torch.float64)
    assert beside(constant, x) is constant
    value, tangent = torch.func.jvp(lambda x: beside(constant, x), (x,), (along,))
    assert torch.equal(value, constant.expand(*leading, 2, 2)) and not tangent.any()
    own, both = constant[1:], (constant[1:], x)
    value, tangent = torch.func.jvp(lambda c, x: beside(c, x), both, (2 * own, along))
    assert torch.equal(tangent, (2 * own).expand(*leading, 1, 2))


def attention(biased=False, **settings):
    par = AttentionParameters.random(4, n_heads=2)
    if biased:
        own = {name: getattr(par, name) for name in ("query", "key", "value", "output")}
        inner, outer = torch.ones(2, 2, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
        inside = dict.fromkeys(("query_bias", "key_bias", "value_bias"), inner)
        par = AttentionParameters(**own, **inside, output_bias=outer)
    return SelfAttention(par, **settings)


def layer_norm():
    ones = torch.ones(4, dtype=torch.float64)
    return LayerNorm(2 * ones, ones)


@pytest.mark.parametrize(
    "F",
    [
        attention(),
        attention(biased=True),
        attention(causal=True),
        attention(kernel=kernels.l2),
        attention(kernel=kernels.rotary()),
        attention(normalization=sigmoid),
        layer_norm(),
        Residual(Chain([layer_norm(), attention()]), 0.5),
    ],
    ids=["plain", "biased", "masked", "l2", "rotary", "sigmoid", "layer norm", "block"],
)
def test_forward_derivatives_do_not_ask_python_for_shapes(F):
    """A sum or product with a constant does, in some thirty times the time (torch 2.13)."""
    mu, asked = ParticleMeasure.from_sequence(torch.randn(6, 4, dtype=torch.float64)), []

    def watch(frame, event, _):
        if event == "call" and "_prims_common" in frame.f_code.co_filename:
            asked.append(frame)

    def move(x):
        return F(mu.replace(x)).points

    for ask in (lambda x: move(x + torch.ones(4, dtype=torch.float64)), move):
        asked.clear()
        sys.setprofile(watch)
        try:
            torch.func.jvp(ask, (mu.points,), (mu.points,))
        finally:
            sys.setprofile(None)
        if not asked and ask is not move:
            pytest.skip("this version of torch does not")
    assert not asked


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_vector_that_is_infinite_or_no_number_has_such_a_length(dtype):
    given = torch.tensor(
        [[math.inf, 1.0], [math.nan, 1.0], [0.0, 0.0], [0.0, 5e-324]], dtype=dtype
    )
    found = lengths(given)
    assert float(found[0]) == math.inf and bool(found[1].isnan())
    assert found[2:].tolist() == [0.0, float(given[3, 1])]
