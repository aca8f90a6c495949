"""Configuration of Sphinx: `python -m sphinx -W docs build/docs` builds the site and runs every notebook."""

import inspect
import pathlib
import re
import shutil

import dcliques_jax

ROOT = pathlib.Path(__file__).parent.parent

project = "dcliques_jax"
author = "the authors of dcliques_jax"
html_show_copyright = False
version = release = dcliques_jax.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx.ext.mathjax",
]
exclude_patterns = ["build", "paper/report.md", "comparison/tables.md", "**/.ipynb_checkpoints"]
html_theme = "furo"
html_title = "dcliques_jax"
html_static_path = ["_static"]

autosummary_generate = True
autosummary_ignore_module_all = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures have them
autodoc_default_options = {"members": True}
default_role = "code"
napoleon_google_docstring = True

myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_timeout = 3600  # seconds per cell: one trains ResNet-20 on CIFAR-10
nb_execution_raise_on_error = True
nb_output_stderr = "remove"  # progress bars
# The pages of verdicts and of the comparison include one that has no title of its own.
suppress_warnings = ["mystnb.unknown_mime_type", "myst.header"]

# Sphinx reads what lies in its folder only: the notebooks are copied there.
shutil.rmtree(ROOT / "docs/notebooks", ignore_errors=True)
shutil.copytree(ROOT / "examples", ROOT / "docs/notebooks", ignore=shutil.ignore_patterns("*.py", "__pycache__", ".*"))


def literal_equations(app, what, name, obj, options, lines):
    """Indented paragraphs of docstrings, equations and code, are literal; reStructuredText wants to be told so."""
    for number in range(len(lines) - 1, 0, -1):
        before = lines[number - 2] if number > 1 else ""
        if lines[number].startswith("    ") and not lines[number - 1] and before and not before.startswith(" "):
            lines[number:number] = ["::", ""]


def documented_fields(app, what, name, obj, options, lines):
    """Fields of records are documented by the comments beside them."""
    if what == "class" and obj.__module__.startswith("dcliques_jax"):
        fields = re.findall(r"^    (\w+): .+?  # (.+)$", inspect.getsource(obj), re.MULTILINE)
        lines.extend(["", *(f"- `{field}`: {comment}".replace("|", r"\|") for field, comment in fields)])


def setup(app):
    app.connect("autodoc-process-docstring", documented_fields)
    # Before napoleon, which turns sections such as `Args` into something else.
    app.connect("autodoc-process-docstring", literal_equations, priority=100)
