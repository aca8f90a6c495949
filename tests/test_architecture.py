"""The import order is the architecture: modules import downward only, and functions are short."""

import ast
import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
SOURCE = ROOT / "src" / "dcliques_jax"
PACKAGE = "dcliques_jax"

# From the bottom to the top: a module imports only from those before it.
LAYERS = """
    _checks _arrays _html _random
    _store.files
    _sources.tfds _sources.published
    datasets _partitions.partitioned partitions _cliques.central _cliques.decentralised cliques features wirings _edges
    _engine.xla _engine.chunks
    _mixing.entries _mixing.forms _mixing.groups _mixing.push _mixing.sequences
    _mixing.paced _mixing.spectrum _mixing.growth
    faults clocks
    _topologies.topology _topologies.matrices _topologies.moving
    _topologies.lattices _topologies.random_graphs _topologies.exponential _topologies.base
    _topologies.drawn _topologies.stl_fw
    topologies
    mixing _store.arrays_by_name
    _mesh.placement _mesh.transfer _mesh.halos
    _reports.measures _reports.expected _reports.report _reports.comparison reports
    compressors
    _algorithms.contract _algorithms.descent _algorithms.exact _algorithms.momentum _algorithms.push_sum
    _algorithms.choco _algorithms.wrappers
    augmentations schedules
    layers _models.contract _models.flax_modules
    _models.parts _models.residual _models.vgg models
    algorithms metrics results _plotting.style _plotting.positions _plotting.graphs plotting
    _mesh.guards
    _engine.sampling _engine.interrupts _engine.tally _engine.cache_key
    _engine.outages _engine.plan _engine.program _engine.layout _engine.memory _engine.fit _engine.sweeps _engine.state
    _engine.evaluation _engine.simulation _engine.setup
    _store.provenance _store.checkpoints
    _engine.loop
    _simulate
    _studies.names _studies.file _studies.cases _studies.kept _studies.runner _studies.tables studies
    paper.settings paper.claims paper.found paper.runs paper.experiments paper.figures paper.reports
    paper paper.__main__
    dcliques_jax __main__
"""
ORDER = LAYERS.split()

# What may be imported upward, where a method is called: `topology.report()` and the plots.
CONVENIENCES = {
    ("_topologies.topology", "mixing"),
    ("_topologies.topology", "reports"),
    ("_topologies.topology", "plotting"),
    ("_partitions.partitioned", "plotting"),
    ("results", "plotting"),
}

MOST_LINES = 45
ENTRY_FUNCTIONS = {"simulate", "prepare"}  # whose signatures are their documentation, and are not counted


def files():
    """All modules by their names within the package; packages that hold no code are none."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
            if not path.read_text().strip():
                continue
        found[".".join(parts) or PACKAGE] = path
    return found


MODULES = files()


def imported(node):
    """The modules of this package that an import statement needs."""
    if isinstance(node, ast.Import):
        names = [(alias.name, None) for alias in node.names]
    else:
        assert node.level == 0, "imports are absolute"
        names = [(node.module, alias.name) for alias in node.names]
    for module, name in names:
        if module.partition(".")[0] != PACKAGE:
            continue
        within = module[len(PACKAGE) + 1 :]
        longer = ".".join(part for part in (within, name) if part)
        yield longer if longer in ORDER else within or PACKAGE


def imports(tree):
    """Pairs of a module that is imported and whether that happens when the module is loaded."""

    def visit(node, at_load):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                yield from ((name, at_load) for name in imported(child))
            deferred = isinstance(child, ast.FunctionDef | ast.Lambda | ast.AsyncFunctionDef)
            typing_only = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            yield from visit(child, at_load and not deferred and not typing_only)

    return visit(tree, True)


def upward(module, source):
    """What a module imports against the order."""
    rank = {name: number for number, name in enumerate(ORDER)}
    return [
        f"{module} imports {name}"
        for name, at_load in imports(ast.parse(source))
        if (name not in rank or rank[name] >= rank[module]) and (at_load or (module, name) not in CONVENIENCES)
    ]


def test_every_module_has_its_place_in_the_order():
    assert sorted(ORDER) == sorted(MODULES)


@pytest.mark.parametrize("module", ORDER)
def test_modules_import_downward_only(module):
    assert upward(module, MODULES[module].read_text()) == []


def test_conveniences_are_used():
    used = {(module, name) for module, path in MODULES.items() for name, _ in imports(ast.parse(path.read_text()))}
    assert used >= CONVENIENCES


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("topologies", "from dcliques_jax import plotting"),
        ("topologies", "import dcliques_jax.plotting"),
        ("topologies", "from dcliques_jax.reports import make_report"),
        ("algorithms", "from dcliques_jax._engine.plan import Plan"),
        ("algorithms", "from dcliques_jax._engine import plan"),
        ("algorithms", "def dsgd():\n    from dcliques_jax import datasets, results"),
        ("_engine.plan", "if True:\n    from dcliques_jax._engine import setup"),
        ("mixing", "from dcliques_jax import simulate"),
        ("mixing", "import dcliques_jax"),
        ("mixing", "from dcliques_jax import mixing"),
        ("mixing", "from dcliques_jax.gone import anything"),
    ],
)
def test_an_upward_import_is_found(module, source):
    assert len(upward(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("algorithms", "import jax\nfrom dcliques_jax import mixing\nfrom dcliques_jax.topologies import Topology"),
        ("_topologies.topology", "def plot():\n    from dcliques_jax import plotting"),
        ("_topologies.topology", "if TYPE_CHECKING:\n    from dcliques_jax.reports import Report"),
        ("_mixing.forms", "from dcliques_jax._engine.xla import unfused"),
    ],
)
def test_a_downward_import_and_a_convenience_are_allowed(module, source):
    assert upward(module, source) == []


# CONTRIBUTING


def table():
    """The rows of modules in CONTRIBUTING's table, each a list of names."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.search(r"\| module \| question \|\n\|---\|---\|\n((?:\|.*\|\n)+)", text)[1].splitlines()
    found = []
    for row in rows:
        names = re.findall(r"`([\w.]+)`", row.split("|")[1])
        package = names[0].rpartition(".")[0]
        found.append([package + name if name.startswith(".") else name for name in names])
    return found


def row_of(module, rows):
    """The row that names a module, or else its package; None if there is none."""
    for name in (module, module.partition(".")[0]):
        for number, names in enumerate(rows):
            if name in names:
                return number
    return None


def test_contributing_names_every_module_in_their_order():
    places = {module: row_of(module, table()) for module in ORDER if module != PACKAGE}
    assert [module for module, place in places.items() if place is None] == []
    assert list(places.values()) == sorted(places.values())


def test_contributing_names_no_module_that_is_gone():
    packages = {module.rpartition(".")[0] for module in ORDER}
    assert [name for names in table() for name in names if name not in {*ORDER, *packages}] == []


# Functions


def length(function):
    """Lines of a function without its docstring; of entry functions without their signatures, too."""
    has_docstring = ast.get_docstring(function) is not None
    first = function.body[0]
    lines = function.end_lineno - function.lineno + 1
    if has_docstring:
        lines -= first.end_lineno - first.lineno + 1
    if function.name in ENTRY_FUNCTIONS:
        lines -= first.lineno - function.lineno
    return lines


@pytest.mark.parametrize("module", ORDER)
def test_functions_are_short(module):
    functions = [node for node in ast.walk(ast.parse(MODULES[module].read_text())) if isinstance(node, ast.FunctionDef)]
    lengths = {function.name: length(function) for function in functions}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}


def test_docstrings_do_not_count_as_lines():
    (function,) = ast.parse('def f(\n    x,\n):\n    """One.\n\n    Two.\n    """\n    return x\n').body
    assert length(function) == 4


# Outside of the package


def outside():
    """Python source of benchmarks and examples, notebooks included, by file."""
    for path in sorted([*(ROOT / "benchmarks").glob("*"), *(ROOT / "examples").glob("*")]):
        if path.suffix == ".py":
            yield pytest.param(path.read_text(), id=path.name)
        elif path.suffix == ".ipynb":
            cells = json.loads(path.read_text())["cells"]
            yield pytest.param("\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code"), id=path.name)


def private(source):
    """The private modules that a source imports, or reaches through the package."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    needed = {name for node in nodes for name in imported(node)}
    return sorted(name for name in needed if name.startswith("_")) + re.findall(r"\bdc\._[a-z]\w*", source)


@pytest.mark.parametrize("source", list(outside()))
def test_benchmarks_and_examples_use_what_is_public(source):
    assert private(source) == []


def test_private_modules_are_found():
    assert private("from dcliques_jax._engine.xla import unfused") == ["_engine.xla"]
    assert private("import dcliques_jax as dc\ndc._simulate.simulate()") == ["dc._simulate"]
