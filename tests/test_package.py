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

import jax

import dcliques_jax

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
    """Runs in one process each, in a terminal and in a pipe: the second run compiles nothing."""
    code = (
        "import os, sys\nfrom dcliques_jax import *\ndata = datasets.synthetic()\n"
        "def run(progress):\n    simulate(topologies.ring(10), data, epochs=2, progress=progress)\n"
        "    print('ended', file=sys.stderr, flush=True)\n"
    )
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}

    def in_terminal(calls):
        reader, writer = pty.openpty()
        termios.tcsetwinsize(writer, (24, 120))
        subprocess.run([sys.executable, "-c", code + calls], stderr=writer, env=outside, check=True)
        os.close(writer)
        shown = b""
        try:
            while chunk := os.read(reader, 10_000):
                shown += chunk
        except OSError:  # the end, on Linux
            pass
        os.close(reader)
        return shown.decode()

    by_pytest = "os.environ['PYTEST_CURRENT_TEST'] = 'one'"
    no, shown, under_pytest, _ = in_terminal(f"run(False)\nrun(True)\n{by_pytest}\nrun(True)").split("ended")
    assert re.search(r"ring: a round takes \d+ MB of memory", shown)
    assert re.search(r"ring: 100%.*8/8 .*round/s, accuracy=0\.\d+ / 0\.\d+ / 0\.\d+", shown)
    assert no == ""
    assert under_pytest.strip() == "", "it is not quiet under pytest"
    in_pipe = f"{code}run(True)\nimport ipykernel\nrun(True)"
    told = subprocess.run([sys.executable, "-c", in_pipe], capture_output=True, text=True, env=outside, check=True)
    piped, in_notebook, _ = told.stderr.split("ended")
    assert piped == told.stdout == ""
    assert "8/8" in in_notebook
    assert "IProgress" not in in_notebook
