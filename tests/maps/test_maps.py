"""What a map declares, how a plain function is wrapped, and wrong arguments."""

from __future__ import annotations

import functools

import pytest
import torch

from meanfield import Map, SelfAttention, linearize
from meanfield.layers import Chain, Pointwise
from meanfield.lipschitz import ball_upper, local_lipschitz
from meanfield.maps.map import as_map
from tests.maps import small_maps as small

F64 = torch.float64


class Lookalike:
    """A map that declares its mask without being a `Map`."""

    causal = True

    def __call__(self, mu):
        return mu


class Halves(torch.nn.Module):
    """A module that is called with a measure."""

    def forward(self, mu):
        return mu.replace(0.5 * mu.points)


class Both(Map, torch.nn.Module):
    """A module that declares something."""

    particlewise = True

    def __init__(self):
        torch.nn.Module.__init__(self)
        self.factor = torch.nn.Parameter(torch.tensor(0.5, dtype=F64))

    def __call__(self, mu):
        return mu.replace(self.factor * mu.points)


def test_a_map_is_itself_and_a_function_declares_nothing():
    F = small.attention(True)
    assert as_map(F) is F
    for plain in (small.plain, functools.partial(small.plain), Halves()):
        G = as_map(plain)
        assert (G.causal, G.particlewise, G.dim, G.heads) == (False, False, None, ())
        mu = small.cloud()
        assert torch.equal(G(mu).points, plain(mu).points)


def test_members_that_nobody_would_read_are_refused():
    mu = small.cloud()
    for ask in (as_map, lambda F: linearize(F, mu), lambda F: local_lipschitz(F, mu),
                lambda F: Chain([F])):  # fmt: skip
        with pytest.raises(TypeError, match=r"subclass of meanfield.Map, .* has causal; write"):
            ask(Lookalike())
    assert float(local_lipschitz(lambda mu: Lookalike()(mu), mu).value) == pytest.approx(1)


@pytest.mark.parametrize(
    "bad", [3, None, "attention", SelfAttention, small.attention().parameters]
)
def test_what_is_no_function_is_refused(bad):
    with pytest.raises(TypeError, match="F: expected a map of measures"):
        as_map(bad)


def test_a_module_may_be_a_map():
    F, mu = Both(), small.cloud()
    assert as_map(F) is F
    assert float(local_lipschitz(F, mu).value.detach()) == pytest.approx(0.5)


def test_what_is_not_declared_is_refused_by_name():
    mu = small.cloud()
    with pytest.raises(
        NotImplementedError, match="F: expected a map that declares an upper bound, got plain"
    ):
        as_map(small.plain).local_upper(mu)
    with pytest.raises(NotImplementedError, match="F: expected a map .* got Drift"):
        ball_upper(small.Drift(), mu, 0.1)


def test_an_abstract_map_cannot_be_made():
    with pytest.raises(TypeError, match="abstract"):
        Map()
    assert Pointwise(torch.sin).particlewise
