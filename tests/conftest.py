import os
import pathlib

import hypothesis
import jax
import matplotlib
import pytest

matplotlib.use("Agg")
# The first example of a test may compile something; and what fails must fail again.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True)
hypothesis.settings.load_profile("tests")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(items):
    """Long tests first, so that no process waits for another's last one."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def data_dir() -> pathlib.Path:
    """The folder with the published files of MNIST and CIFAR-10."""
    path = os.environ.get("DCLIQUES_DATA_DIR")
    if not path:
        pytest.skip("needs the real data sets: set DCLIQUES_DATA_DIR to a folder with their published files")
    return pathlib.Path(path)


@pytest.fixture(scope="session")
def mnist(data_dir):
    from dcliques_jax import datasets

    return datasets.mnist(data_dir)


@pytest.fixture(scope="session")
def cifar10(data_dir):
    from dcliques_jax import datasets

    return datasets.cifar10(data_dir)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def quickly_compiled():
    """Compiles in about half the time, without most optimisations; what is compared in float32 has them all."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
