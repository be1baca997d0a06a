"""A device of torch that is only pretended, for machines without a GPU.

`register()` builds it once, into torch's cache of extensions; it needs a C++ compiler and ninja.
From then on `torch.device("pretended")` behaves to a program as "cuda" does: its tensors do not
mix with the CPU's, have no `.numpy()`, and `.item()` waits. The CPU does the work, so that it says
nothing about speed, but `counted()` says what a block of code asks of a device.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils import cpp_extension

NAME = "pretended"


def missing() -> str | None:
    """Why it cannot be built here, or None."""
    for program in ("c++", "ninja"):
        if shutil.which(program) is None:
            return f"the pretended device needs {program}"
    return None


@functools.cache
def register() -> None:
    """Build the device and make it known to torch."""
    source = str(Path(__file__).with_name("pretended.cpp"))
    cpp_extension.load(NAME, [source], extra_cflags=["-O1"], is_python_module=False)
    torch.utils.rename_privateuse1_backend(NAME)
    module = types.ModuleType(f"torch.{NAME}")
    for name, answer in {
        "is_available": True,
        "is_initialized": True,
        "_is_in_bad_fork": False,
        "current_device": 0,
        "device_count": 1,
        "manual_seed_all": None,
        "get_amp_supported_dtype": [torch.float16, torch.bfloat16],
        "mem_get_info": (2**37, 2**37),
    }.items():
        setattr(module, name, lambda *_, answer=answer: answer)
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()


class Asked(Counter[str]):
    """How often a block asked for what: "operation NAME", "look NAME", "sent"."""

    def _total(self, kind: str) -> int:
        return sum(n for what, n in self.items() if what.split()[0] == kind)

    @property
    def operations(self) -> int:
        """About as many kernels would be launched."""
        return self._total("operation")

    @property
    def looks(self) -> int:
        """So often does the host wait for the device."""
        return self._total("look")

    @property
    def sent(self) -> int:
        """Copies from the host."""
        return self._total("sent")


@contextlib.contextmanager
def counted() -> Iterator[Asked]:
    """Count what a block asks of the device."""
    torch.ops.pretended.take_counts()
    asked = Asked()
    yield asked
    asked.update(torch.ops.pretended.take_counts())
