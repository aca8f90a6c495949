import functools
import importlib.metadata
import json
import os
import pathlib
import pty
import re
import subprocess
import sys
import termios
import tomllib
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dcliques_jax
from dcliques_jax import models
from dcliques_jax._static import Static

ROOT = pathlib.Path(__file__).parent.parent


def python(code, **kwargs):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, **kwargs).stdout


def test_import_is_light():
    heavy = ["matplotlib", "networkx", "pandas", "mlxtend", "tensorflow", "tensorflow_datasets", "flax.nnx", "orbax"]
    loaded = python(f"import sys, dcliques_jax; print([name for name in {heavy} if name in sys.modules])")
    assert loaded.strip() == "[]"


def test_public_names_are_there_and_documented():
    for name in dcliques_jax.__all__:
        assert getattr(dcliques_jax, name).__doc__
    assert importlib.metadata.version("dcliques_jax") == dcliques_jax.__version__


def test_metadata_agrees():
    assert f"version: {dcliques_jax.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {dcliques_jax.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"demo", "tfds", "test", "docs"} <= set(project["optional-dependencies"])
    assert not [requirement for requirement in project["dependencies"] if "<" in requirement or "=" not in requirement]


def test_the_readme_has_one_command_for_each_job():
    readme = (ROOT / "README.md").read_text()
    for heading, target in [("Quick start", "make quickstart"), ("Tests", "make test")]:
        section = readme.split(f"## {heading}\n")[1].split("\n## ")[0]
        assert re.findall(r"```sh\n(.*?)```", section, re.DOTALL) == [f"{target}\n"]
        assert re.search(rf"^{target.split()[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_readme_s_python_runs():
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    code = code.replace("model=model)", "model=model, epochs=1)")
    assert "495 edges" in python(f"import matplotlib; matplotlib.use('Agg')\n{code}")


def test_the_quick_start_saves_its_picture(tmp_path):
    picture = tmp_path / "picture.png"
    arguments = ["--nodes", "20", "--epochs", "1", "--picture", str(picture)]
    done = subprocess.run(
        [sys.executable, ROOT / "examples/quickstart.py", *arguments], capture_output=True, text=True, check=True
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    for line in ("ring: 20 nodes", "D-Cliques (fully connected): 20 nodes, 2 cliques", "Saved"):
        assert line in done.stdout


def test_all_benchmarks_run_and_both_sides_agree(tmp_path):
    command = [sys.executable, ROOT / "benchmarks/run.py", "--quick", "--out", tmp_path]
    subprocess.run(command, capture_output=True, text=True, check=True)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["machine"]["jax"] == jax.__version__
    asked = {line["question"] for line in results["lines"]}
    assert {"a round", "a round of GN-LeNet", "mixing", "evaluating all nodes", "Greedy Swap"} <= asked
    table = (tmp_path / "results.md").read_text()
    assert len(re.findall(r"^\| (?!question)", table, re.MULTILINE)) == len(results["lines"])


def test_progress_shows_accuracy_and_speed_in_a_terminal_only():
    code = "from dcliques_jax import *\nsimulate(topologies.ring(10), datasets.synthetic(), epochs=2, progress={})"

    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}

    def in_terminal(progress, environment=outside):
        reader, writer = pty.openpty()
        termios.tcsetwinsize(writer, (24, 120))
        subprocess.run([sys.executable, "-c", code.format(progress)], stderr=writer, env=environment, check=True)
        os.close(writer)
        shown = b""
        try:
            while chunk := os.read(reader, 10_000):
                shown += chunk
        except OSError:  # the end, on Linux
            pass
        os.close(reader)
        return shown.decode()

    shown = in_terminal("True")
    assert re.search(r"ring: a round takes \d+ MB of memory", shown)
    assert re.search(r"ring: 100%.*8/8 .*round/s, accuracy=0\.\d+ / 0\.\d+ / 0\.\d+", shown)
    assert in_terminal("False") == ""
    assert in_terminal("True", os.environ) == "", "it is not quiet under pytest"
    piped = subprocess.run([sys.executable, "-c", code.format("True")], capture_output=True, env=outside, check=True)
    assert piped.stderr == piped.stdout == b""
    in_notebook = f"import ipykernel\n{code.format('True')}"
    shown = subprocess.run([sys.executable, "-c", in_notebook], capture_output=True, text=True, env=outside, check=True)
    assert "8/8" in shown.stderr
    assert "IProgress" not in shown.stderr


# Functions as keys of compiled programs


class Net(nn.Module):
    width: int = 3
    extra: object = nn.relu

    @nn.compact
    def __call__(self, inputs):
        return self.extra(nn.Dense(self.width)(inputs))


def scaled(factor, extra=None):
    def function(x):
        return factor * x if extra is None else extra(x)

    return function


@pytest.mark.parametrize(
    "build",
    [
        lambda factor: scaled(factor),
        lambda factor: scaled(1, scaled(factor)),
        lambda factor: functools.partial(scaled, factor, extra=[factor]),
        lambda factor: {"a": (factor, [scaled(factor)])},
        lambda factor: scaled(models.logistic_regression(factor)),
        lambda factor: models.as_model(Net(factor)).apply,
        lambda factor: models.as_model(Net(3, extra=scaled(factor))).init,
        lambda factor: (Net(factor).init, Net(factor).apply),
    ],
)
def test_functions_are_equal_if_they_were_built_alike(build):
    assert Static(build(2.0)) == Static(build(2.0))
    assert hash(Static(build(2.0))) == hash(Static(build(2.0)))
    assert Static(build(2.0)) != Static(build(3.0))
    assert Static(build(2.0)) != build(2.0)


def test_the_same_number_of_another_type_is_another_program():
    assert Static(scaled(1)) != Static(scaled(1.0))


class Changeable:
    factor = 1.0


@pytest.mark.parametrize(
    "value", [Changeable(), np.ones(2), jnp.ones(2), {1, 2}, Net(extra=np.ones(2)), Net(extra=Changeable())]
)
def test_a_function_of_what_may_change_is_equal_to_itself_only(value):
    function = scaled(value)
    assert Static(function) == Static(function)
    assert Static(function) != Static(scaled(value))
    assert Static((function, 1)) != Static((scaled(value), 1))
    assert Static((value, 1)) == Static((value, 1))


NOTEBOOK = {
    "a function": """
def apply(x):
    return [helper(x) * SCALE for _ in x]
""",
    "a flax module": """
class Layer(nn.Module):
    def __call__(self, x):
        return helper(x)
class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Layer()(x) * SCALE
def apply(x, net=Net()):
    return net(x)
""",
    "a class": """
class Config:
    scale = SCALE
    def change(x):
        return helper(x)
def apply(x):
    return Config.scale * Config.change(x)
""",
}


@pytest.mark.parametrize("kind", NOTEBOOK)
def test_what_is_redefined_in_a_notebook_is_noticed(kind):
    """Only the last lines of a cell are run again after a constant or a helper that its function uses was changed."""
    cells = {"nn": nn, "__name__": "notebook"}
    start = "SCALE = 1.0\ndef helper(x): return x"
    exec(start, cells)
    exec(NOTEBOOK[kind], cells)
    again = "".join(NOTEBOOK[kind].partition("def apply")[1:])
    exec(again, cells)
    first = Static(cells["apply"])
    exec(again, cells)
    assert Static(cells["apply"]) == first
    if kind == "a class":
        cells["Config"].scale = 2.0
    else:
        exec("SCALE = 2.0", cells)
    exec(again, cells)
    assert Static(cells["apply"]) != first
    if kind == "a class":
        cells["Config"].scale = 1.0
    exec("SCALE = 1.0\ndef helper(x): return -x", cells)
    exec(again, cells)
    assert Static(cells["apply"]) != first
    exec(start, cells)
    exec(again, cells)
    assert Static(cells["apply"]) == first


def test_a_module_of_one_s_own_may_change():
    own = types.ModuleType("own")
    cells = {"own": own}
    cell = "def apply(x): return own.helper(x)"
    exec(cell, cells)
    first = Static(cells["apply"])
    exec(cell, cells)
    assert Static(cells["apply"]) != first


def test_functions_that_close_over_themselves_are_keys_too():
    def build():
        def endless(x):
            return endless(x)

        return endless

    assert Static(build()) == Static(build())


def test_different_code_is_different():
    assert Static(lambda x: x + 1) != Static(lambda x: x + 2)

    def one(x, y=1):
        return x

    same, other = one, type(one)(one.__code__, one.__globals__, argdefs=(2,))
    assert Static(one) == Static(same)
    assert Static(one) != Static(other)
