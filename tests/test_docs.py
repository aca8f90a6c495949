"""The site builds without warnings and every notebook runs; no example rots."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_all_notebooks_run(tmp_path):
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "-d", tmp_path / "doctrees", "docs", tmp_path / "site"],
        cwd=ROOT,
        # Nothing is timed: without optimisation programs compile in half the time.
        env=os.environ
        | {
            "DCLIQUES_SMALL": "1",
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    assert len(NOTEBOOKS) == 8
    for notebook in NOTEBOOKS:
        page = (tmp_path / "site/notebooks" / f"{notebook.stem}.html").read_text()
        assert "cell_output" in page, f"{notebook.name} was not run"
    assert len(list((tmp_path / "site/_images").glob("*.png"))) > 10


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_without_outputs(notebook):
    cells = json.loads(notebook.read_text())["cells"]
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)


def test_no_line_of_the_docs_is_taken_for_a_comment():
    """MyST drops lines that begin with a percent sign, also within a paragraph."""
    for page in (ROOT / "docs").rglob("*.md"):
        lost = [line for line in page.read_text().splitlines() if line.lstrip().startswith("%")]
        assert not lost, f"{page.name}: {lost}"
