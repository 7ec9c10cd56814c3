"""Four virtual devices, a compilation cache for the tests, and common fixtures."""

import os
import signal
import tempfile

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault(
    "XDG_CACHE_HOME", os.path.join(tempfile.gettempdir(), f"ftrain-tests-{os.getuid()}")
)

import hypothesis
import jax
import numpy as np
import pytest
from processes import default_signals
from regression import make_arrays

from ftrain.data import ArraySource, Pipeline
from ftrain.training import use_compilation_cache

use_compilation_cache()
# No deadline, because the first example includes the time to compile.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--campaign", action="store_true", help="also run the tests marked campaign")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--campaign"):
        skip = pytest.mark.skip(reason="a campaign: runs with --campaign")
        for item in items:
            if item.get_closest_marker("campaign"):
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def interrupts_are_not_ignored():
    """Handle SIGINT and SIGTERM by default, for tests that send themselves a signal.

    A process in the background of a script ignores SIGINT.
    """
    with default_signals((signal.SIGINT, signal.SIGTERM)):
        yield


@pytest.fixture(autouse=True)
def compile_quickly(request: pytest.FixtureRequest):
    """Compile with few optimizations, because compilation takes most of the time of the tests.

    Tests of what the compiler produces are marked `optimized`.
    """
    jax.config.update(
        "jax_disable_most_optimizations", request.node.get_closest_marker("optimized") is None
    )


@pytest.fixture(autouse=True)
def strict_promotion(request: pytest.FixtureRequest):
    """Forbid implicit dtype promotion, except in `standard_promotion` tests: it hides mistakes."""
    is_standard = request.node.get_closest_marker("standard_promotion") is not None
    jax.config.update("jax_numpy_dtype_promotion", "standard" if is_standard else "strict")


@pytest.fixture
def pipeline() -> Pipeline:
    """Batches of 8 from 64 examples of a linear problem."""
    return Pipeline(ArraySource(make_arrays()), batch_size=8, seed=3)


@pytest.fixture
def no_thread_left():
    """Fail a test that leaves a thread of ftrain running."""
    import threading

    yield
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("ftrain")]
    assert not left


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
