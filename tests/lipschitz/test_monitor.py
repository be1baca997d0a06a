"""The callback of a training loop measures the same as a loop by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, pretrained
from meanfield.attention import kernels
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


def test_the_largest_logit_of_every_head_is_that_of_the_scores():
    """By double loops over what each head sees, also of layers that have no head."""
    from meanfield.layers import Chain, LayerNorm, Residual
    from tests.maps.small_maps import attention, cloud, mlp

    mu = cloud(absent=True)
    block = Residual(Chain([LayerNorm(torch.ones(mu.dim).double()), attention(True)]))
    network = Chain([block, attention(False, kernel=kernels.soft_cap(1.5))])
    callback = monitor(lambda: [network, mlp()], mu, every=1)
    callback()
    found = callback.dataset().largest_logit.values[0]
    expected = []
    inner, outer = block.map.maps[1], network.maps[1]
    for F, at in ((inner, block.map.maps[0](mu)), (outer, block(mu))):
        par = F.parameters
        for h in range(par.n_heads):
            sizes = [0.0]
            for i in range(mu.n_particles):
                for j in range(mu.n_particles):
                    hidden = F.causal and mu.positions[j] > mu.positions[i]
                    if hidden or not (mu.weights[i] > 0 and mu.weights[j] > 0):
                        continue
                    q = par.query[h] @ at.points[i]
                    q = q if par.query_bias is None else q + par.query_bias[h]
                    k = par.per_head(par.key)[h] @ at.points[j]
                    k = k if par.key_bias is None else k + par.per_head(par.key_bias)[h]
                    score = float(par.scale[h] * q @ k)
                    sizes.append(abs(score if F is inner else 1.5 * np.tanh(score / 1.5)))
            expected.append(max(sizes))
    np.testing.assert_allclose(found[0], expected, rtol=1e-12)
    assert np.isnan(found[1]).all()
