"""Four virtual devices, and a compilation cache of the tests' own."""

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
hypothesis.settings.register_profile(
    "tests", deadline=None
)  # the first example pays for compilation
hypothesis.settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--campaign", action="store_true", help="also run the tests that are marked as a campaign"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--campaign"):
        skip = pytest.mark.skip(reason="a campaign: runs with --campaign")
        for item in items:
            if item.get_closest_marker("campaign"):
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def interrupts_are_not_ignored():
    """In the background of a script SIGINT is ignored; a test that sends itself one expects it to arrive."""
    with default_signals((signal.SIGINT, signal.SIGTERM)):
        yield


@pytest.fixture(autouse=True)
def compile_quickly(request: pytest.FixtureRequest):
    """Most of the time of these tests is spent in the compiler. Where its work is the point, they are `optimized`."""
    jax.config.update(
        "jax_disable_most_optimizations", request.node.get_closest_marker("optimized") is None
    )


@pytest.fixture(autouse=True)
def strict_promotion(request: pytest.FixtureRequest):
    """Refuse implicit dtype promotion, which hides mistakes: `standard_promotion` tests need it."""
    is_standard = request.node.get_closest_marker("standard_promotion") is not None
    jax.config.update("jax_numpy_dtype_promotion", "standard" if is_standard else "strict")


@pytest.fixture
def pipeline() -> Pipeline:
    """Batches of 8 from 64 examples of a linear problem."""
    return Pipeline(ArraySource(make_arrays()), batch_size=8, seed=3)


@pytest.fixture
def no_thread_left():
    """Fails a test that leaves a thread of ftrain's behind."""
    import threading

    yield
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("ftrain")]
    assert not left


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
