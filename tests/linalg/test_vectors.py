"""Lengths of long vectors, against double precision and over the number range."""

from __future__ import annotations

import math

import pytest
import torch

from meanfield.linalg.vectors import lengths, normalised


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
