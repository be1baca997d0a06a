"""The constants of L2 attention: reference values, and thousands of Jacobians below them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from meanfield import bounds
from tests import oracles


def l2_attention(X: Tensor, W: Tensor, V: Tensor, output: Tensor) -> Tensor:
    """One sequence (n, d); as `oracles.l2_attention`, in torch."""
    root = W.shape[-1] ** 0.5
    projected = X @ W
    gaps = (projected[:, :, None] - projected[:, None]).square().sum(-1)
    heads = (-gaps / root).softmax(-1) @ projected @ W.mT @ V / root
    return heads.transpose(0, 1).flatten(1) @ output


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize(("heads", "k"), [(1, 1), (2, 1), (2, 2)])
def test_no_jacobian_exceeds_the_bounds(n, heads, k):
    d = heads * k
    generator = torch.Generator().manual_seed(n)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    W, V, output = draw(heads, d, k), draw(heads, d, k), draw(d, d)
    sizes = 10.0 ** torch.linspace(-1.5, 1.0, 400, dtype=torch.float64)
    X = sizes[:, None, None] * draw(400, n, d)
    np.testing.assert_allclose(
        l2_attention(X[0], W, V, output),
        oracles.l2_attention(X[0].numpy(), W.numpy(), V.numpy(), output.numpy()),
    )
    J = torch.func.vmap(torch.func.jacrev(lambda Y: l2_attention(Y, W, V, output)))(X)
    J = J.reshape(400, n * d, n * d)
    assert float(J.abs().sum(-1).max()) <= bounds.l2_attention_inf(n, W, V, output)
    spectral = torch.linalg.matrix_norm(J, 2).max()
    assert float(spectral) <= bounds.l2_attention_2(n, W, V, output)


def test_the_formulas_have_the_reference_values_and_agree_with_the_oracle():
    one = np.ones((1, 1, 1))
    found = [bounds.l2_attention_inf(n, one, one, one[0]) for n in (2, 5, 10, 20, 50)]
    np.testing.assert_allclose(found, [2.11, 3.87, 5.40, 7.09, 9.54], atol=0.006)
    rng = np.random.default_rng(0)
    W, V, output = rng.normal(size=(2, 4, 2)), rng.normal(size=(2, 4, 2)), rng.normal(size=(4, 3))
    arguments = (7, W, V, output)
    assert bounds.l2_attention_inf(*arguments) == pytest.approx(oracles.l2_bound_inf(*arguments))
    assert bounds.l2_attention_2(*arguments) == pytest.approx(oracles.l2_bound_2(*arguments))


def test_bad_arguments_are_refused():
    one = np.ones((1, 1, 1))
    with pytest.raises(ValueError, match="at least 1 token"):
        bounds.l2_attention_inf(0, one, one, one[0])
    with pytest.raises(ValueError, match=r"output \(H·k, d_out\)"):
        bounds.l2_attention_2(2, one, one, np.ones((2, 1)))
