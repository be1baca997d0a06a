"""Where values are: one way to the host, no tensor on a device of its own, few looks at values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meanfield import ParticleMeasure, checks
from tests.interface.test_architecture import calls, modules


def test_tensors_become_arrays_in_one_function():
    strays = []
    for path in modules():
        found = list(calls(path, "numpy", "cpu"))
        found += [
            call
            for call in calls(path, "to")
            if any(getattr(word, "value", None) == "cpu" for word in call.args)
        ]
        strays += [f"{path.name}:{call.lineno}" for call in found]
    allowed = [place for place in strays if place.startswith("checks.py")]
    assert strays == allowed and len(allowed) == 2, "use checks.to_host"


def test_the_way_to_the_host_keeps_values_and_drops_the_derivative():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    found = checks.to_host(x)
    assert isinstance(found, np.ndarray) and found.tolist() == [1.0, 2.0]


def test_blocks_are_larger_on_devices():
    assert checks.at_once(100, torch.device("cpu")) == 100
    assert checks.at_once(100, torch.device("cuda")) == 12_800


def test_a_device_without_double_precision_is_refused(monkeypatch):
    monkeypatch.setattr(checks, "_WITHOUT_DOUBLE", {"meta"})
    with pytest.raises(TypeError, match=r"double precision.* got one on meta; use \.cpu\(\)"):
        ParticleMeasure(torch.zeros(3, 2, device="meta"))
