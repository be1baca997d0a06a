"""The callback of a training loop measures the same as a loop by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, pretrained
from meanfield.lipschitz import local_lipschitz, monitor


def test_a_model_in_training_is_followed_by_a_hook_of_its_optimizer():
    transformers = pytest.importorskip("transformers")
    from tests.pretrained.small_models import CASES

    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**CASES["gpt2"][1])).double()
    source = pretrained.read(model)
    ids = torch.arange(3, 10)
    mu = source.embeddings(ids)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def blocks():
        return [source.block(layer) for layer in range(source.n_layers)]

    callback = monitor(blocks, mu, every=2, rtol=1e-6)
    callback.measure()
    optimizer.register_step_post_hook(callback)
    by_hand = []
    for step in range(4):
        optimizer.zero_grad()
        model(input_ids=ids[None], labels=ids[None]).loss.backward()
        optimizer.step()
        if step % 2:
            values, at = [], mu
            for F in blocks():
                values.append(float(local_lipschitz(F, at, rtol=1e-6).value))
                at = F(at)
            by_hand.append(values)
    ds = callback.dataset()
    assert list(ds.step) == [0, 2, 4]
    np.testing.assert_allclose(ds.constant[1:], by_hand, rtol=1e-9)
    assert bool(ds.constant_converged.all())
    assert (ds.constant_upper >= ds.constant * (1 - 1e-12)).all()
    assert np.abs(ds.constant[2] / ds.constant[0] - 1).max() > 1e-3
    assert all(v.attrs["long_name"] for v in ds.data_vars.values())


def test_what_cannot_be_monitored_is_refused():
    F = SelfAttention(AttentionParameters.from_bilinear([[0.0]], [[2.0]]))
    mu = ParticleMeasure([[1.0], [-1.0]])
    with pytest.raises(ValueError, match="≥ 1"):
        monitor(lambda: [F], mu, every=0)
    with pytest.raises(TypeError, match="function"):
        monitor([F], mu)
    with pytest.raises(ValueError, match="none in 0 steps"):
        monitor(lambda: [F], mu).dataset()
    pytest.importorskip("transformers")
    with pytest.raises(TypeError, match="model of transformers"):
        pretrained.read(torch.nn.Linear(1, 1))
