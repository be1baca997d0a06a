"""Settings that every test shares."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("MPLBACKEND", "Agg")
# A second thread of NumPy and SciPy waits in a loop; `set_num_threads` of torch does not reach it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
settings.register_profile(
    "default",
    derandomize=True,
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("search", derandomize=False, deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_configure() -> None:
    """One thread: the problems are small, and a second one waits more than it works."""
    import torch

    torch.set_num_threads(1)
    # A shell lets what runs in its background ignore Ctrl-C, and so would processes of the tests.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    import numpy as np
    import torch

    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 - for libraries that draw from the global state


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        help="where the tests marked gpu run: a device of torch, or pretended (default: cuda "
        "where there is one, otherwise pretended)",
    )


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The device of the tests marked gpu."""
    import torch

    from tests.device import pretended

    name = request.config.getoption("--device")
    name = name or ("cuda" if torch.cuda.is_available() else pretended.NAME)
    if name == pretended.NAME:
        if why := pretended.missing():
            pytest.skip(why)
        pretended.register()
    return name


@pytest.fixture(autouse=True)
def figures_are_closed():
    """matplotlib warns of more than 20 open figures, which tests of one process add up to."""
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")
