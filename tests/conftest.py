import os
import pathlib

import hypothesis
import jax
import matplotlib
import pytest

from dcliques_jax._engine import cache_key

matplotlib.use("Agg")
# The first example of a test may compile something; and what fails must fail again.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True)
hypothesis.settings.load_profile("tests")
jax.config.update("jax_numpy_rank_promotion", "raise")
_compile = jax.stages.Lowered.compile
_QUICKLY = {"xla_cpu_use_fusion_emitters": False}
try:
    _compile(jax.jit(lambda x: x).lower(1.0), _QUICKLY)
except jax.errors.JaxRuntimeError:  # jax 0.12 has no such option
    _QUICKLY = {}


def pytest_collection_modifyitems(items):
    """Long tests first, so that no process waits for another's last one; then those that need another compiler."""
    items.sort(key=lambda item: (item.get_closest_marker("slow") is None, not is_optimised(item)))


def is_optimised(item):
    return item.get_closest_marker("optimised") is not None


@pytest.hookimpl(tryfirst=True)  # before fixtures
def pytest_runtest_setup(item):
    """Compiles without optimisation, in a third of the time, but for tests of bits, of speed and of memory.

    Processes that share checkpoints with a test need the same compiler: mark it, too.
    """
    quick = not is_optimised(item)
    compiler = compile_quickly if quick else _compile
    if jax.stages.Lowered.compile is not compiler:
        jax.stages.Lowered.compile = compiler
        jax.config.update("jax_disable_most_optimizations", quick)
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(quick))  # for processes that tests start
        cache_key._compiled.clear()
        jax.clear_caches()


def compile_quickly(lowered, compiler_options=None):
    return _compile(lowered, _QUICKLY | (compiler_options or {}))


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
def fused(monkeypatch):
    """Compiled a little less quickly: max_pool compares numbers with what XLA else computes twice, not to the bit."""
    monkeypatch.setattr(jax.stages.Lowered, "compile", _compile)
