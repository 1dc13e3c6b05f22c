"""The public names, that nothing public needs torch, and that imports go one way (design: layers)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import cannikin

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "cannikin"
EXAMPLE = ROOT / "examples" / "clusters" / "three-kinds.toml"

PUBLIC = [
    "Cluster",
    "Curve",
    "Engine",
    "HeteroBatchSampler",
    "HeteroDataLoader",
    "HeteroDataParallel",
    "LiveView",
    "NoiseEstimate",
    "NoiseTracker",
    "PrometheusObserver",
    "ScalarObserver",
    "Snapshot",
    "Split",
    "TensorBoardObserver",
    "__version__",
    "attach",
    "by_progress",
    "load_cluster",
    "noise_scale",
    "optimal_split",
    "step_time",
]
MAY_NEED_TORCH = {
    "Engine",
    "HeteroBatchSampler",
    "HeteroDataLoader",
    "HeteroDataParallel",
    "attach",
    "by_progress",
    "Snapshot",
}


def test_the_public_names_are_exactly_these():
    assert cannikin.__all__ == PUBLIC
    assert dir(cannikin) == sorted(PUBLIC)


@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "__version__"])
def test_every_public_name_resolves_to_what_its_module_exports(name):
    value = getattr(cannikin, name)
    home = sys.modules[value.__module__]
    assert value is getattr(home, name)


def test_an_unknown_name_is_an_ordinary_attribute_error():
    with pytest.raises(AttributeError, match="module 'cannikin' has no attribute 'nonsense'"):
        _ = cannikin.nonsense


# Without torch

PLAN = f"""
from cannikin.cli import main
try:
    main(["plan", {str(EXAMPLE)!r}, "--batch", "1024"])
except SystemExit as end:
    assert end.code == 0, end.code
"""
EVERYTHING = f"""
import cannikin
for name in set(cannikin.__all__) - {MAY_NEED_TORCH}:
    getattr(cannikin, name)
"""
BLOCKER = """
import sys
class Without:
    missing = {"torch"}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Without())
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("code", ["import cannikin\n", EVERYTHING, PLAN], ids=["import", "every name", "plan"])
def test_torch_is_never_imported(code):
    run(f"{code}\nimport sys\nassert 'torch' not in sys.modules")


@pytest.mark.parametrize("code", [EVERYTHING, PLAN], ids=["every name", "plan"])
def test_all_of_it_works_where_torch_cannot_be_imported(code):
    run(BLOCKER + code)


def test_importing_the_package_imports_nothing_but_itself():
    loaded = run("import sys; before = set(sys.modules)\nimport cannikin\nprint(*set(sys.modules) - before)")
    assert {name for name in loaded.split() if name.startswith(("cannikin", "numpy", "msgspec", "click", "rich"))} == {
        "cannikin",
        "cannikin._version",
    }


def test_a_split_of_buckets_imports_no_scipy():
    run(f"{PLAN}\nimport sys\nimport cannikin.core.layer_split\nassert 'scipy' not in sys.modules")


LAYERED = """
import numpy as np
from cannikin.core.layers import Layers
from cannikin.core.perf import Cluster, Curve
from cannikin.core.split import optimal_split
none = np.full(2, np.nan)
layers = Layers(shares=np.ones((1, 2)), gather_s=none, reduce_s=none, num_forward=1, ahead=True, in_flight=1)
curve = Curve(fixed_s=[1.0], per_sample_s=[1.0])
try:
    optimal_split(Cluster(forward=curve, backward=curve, gammas=[1.0], tails_s=[0.0], layers=layers), 4)
except Exception as error:
    print(error)
"""


def test_without_scipy_a_split_of_layers_names_what_to_install():
    told = run(BLOCKER.replace('{"torch"}', '{"scipy"}') + LAYERED)
    assert told == "a split of sharded modules needs scipy: pip install 'cannikin[fsdp]'\n"


def test_help_imports_no_verb():
    code = """
import sys
from cannikin.cli import main
try:
    main(["--help"])
except SystemExit:
    pass
assert "cannikin.cli.plan" not in sys.modules
"""
    assert "plan" in run(code)


def test_a_name_that_needs_torch_says_how_to_get_it():
    code = """
import cannikin
Without.missing.add("msgspec")
for name in ("HeteroDataParallel", "load_cluster"):
    try:
        getattr(cannikin, name)
    except ImportError as error:
        print(error)
"""
    needs_torch, needs_other = run(BLOCKER + code).splitlines()
    assert needs_torch == "cannikin.HeteroDataParallel needs PyTorch: pip install 'cannikin[torch]'"
    assert needs_other == "No module named 'msgspec'"


# The direction of imports

LAYERS = [
    {"_version", "errors", "words"},
    {"core", "toml_files", "whole_files"},
    {"runlog", "cluster_file"},
    {"runtime", "sim", "lab", "report", "live", "trace", "trackers"},
    {"integrations", "demo", "doctor"},
    {"cli"},
    {"__init__", "__main__"},
]
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
# What reaches the clock, the environment, files, other processes or global randomness.
EFFECTS = {
    *("os", "io", "pathlib", "glob", "tempfile", "shutil", "pickle", "shelve", "sqlite3", "mmap", "fcntl", "logging"),
    *("time", "datetime", "random", "secrets", "uuid", "platform", "getpass", "signal", "ctypes"),
    *("subprocess", "socket", "select", "threading", "multiprocessing", "asyncio", "urllib", "http"),
}
RANDOM = {"np.random", "numpy.random"}


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts)


def imports(tree: ast.AST, module: str) -> Iterator[str]:
    """Every module a source file imports, in full, `from x import y` as `x.y`."""
    package = module.split(".")[:-1]
    for part in ast.walk(tree):
        if isinstance(part, ast.Import):
            yield from (alias.name for alias in part.names)
        elif isinstance(part, ast.ImportFrom):
            base = package[: len(package) - part.level + 1] if part.level else []
            stem = ".".join([*base, *([part.module] if part.module else [])])
            yield from (f"{stem}.{alias.name}" for alias in part.names)


def layer(module: str) -> str:
    """The part of the package a module belongs to: `cannikin.core.perf.Cluster` to `core`, `cannikin` to `__init__`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LEVEL else "__init__"


# Imported in a function, by those who need it alone: test_a_split_of_buckets_imports_no_scipy.
LATE = {("cannikin.core.layer_split", "scipy")}


def violations(source: str, module: str) -> list[str]:
    """What a source file must not do, by the layer it is in."""
    here = layer(module)
    found = []
    tree = ast.parse(source)
    for name in imports(tree, module):
        root = name.partition(".")[0]
        if root == "cannikin":
            there = layer(name)
            if there != here and LEVEL[there] >= LEVEL[here]:
                found.append(f"{module} imports {name}: {here} is not above {there}")
        elif (module, root) in LATE:
            continue
        elif here == "core" and (root in EFFECTS or root not in {*sys.stdlib_module_names, "numpy"}):
            found.append(f"{module} imports {name}: core knows only numpy and the pure standard library")
    if here == "core":
        found += [f"{module} calls {name}" for name in effects(tree)]
    return found


def effects(tree: ast.AST) -> Iterator[str]:
    """Files, the terminal and numpy's global randomness, which need no import."""
    for part in ast.walk(tree):
        if (
            isinstance(part, ast.Call)
            and isinstance(part.func, ast.Name)
            and part.func.id in {"open", "print", "input"}
        ):
            yield part.func.id
        seeded = {"default_rng", "Generator", "SeedSequence"}
        if isinstance(part, ast.Attribute) and part.attr not in seeded and ast.unparse(part.value) in RANDOM:
            yield ast.unparse(part)


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=[module_name(path) for path in FILES])
def test_imports_go_one_way(path):
    assert layer(module_name(path)) in LEVEL
    assert violations(path.read_text(), module_name(path)) == []


def test_every_part_of_the_package_has_a_layer():
    parts = {path.stem if path.is_file() else path.name for path in SOURCE.iterdir() if path.suffix in {"", ".py"}}
    assert parts - {"__pycache__"} <= set(LEVEL)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("cannikin.core.perf", "import torch"),
        ("cannikin.core.perf", "import scipy.optimize"),
        ("cannikin.core.perf", "from time import monotonic"),
        ("cannikin.core.perf", "def f():\n    import os.path"),
        ("cannikin.core.perf", "import numpy as np\nnp.random.seed(0)"),
        ("cannikin.core.perf", "open('x')"),
        ("cannikin.core.perf", "from cannikin.cluster_file import load_cluster"),
        ("cannikin.core.perf", "from ..cluster_file import load_cluster"),
        ("cannikin.core.perf", "from .. import cli"),
        ("cannikin.core.perf", "from cannikin import load_cluster"),
        ("cannikin.errors", "import cannikin.core"),
        ("cannikin.cluster_file", "from cannikin.runlog import read"),
        ("cannikin.runtime.engine", "from cannikin.sim import hardware"),
        ("cannikin.report.html", "from cannikin.cli.plan import command"),
        ("cannikin.report.read", "from cannikin.live.state import LiveState"),
        ("cannikin.demo.comparison", "import cannikin.integrations.lightning"),
        ("cannikin.cli.plan", "import cannikin"),
    ],
)
def test_the_check_sees_a_wrong_import(module, source):
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("cannikin.core.perf", "import math, numpy.typing\nfrom . import records\nfrom cannikin import errors"),
        ("cannikin.core.perf", "import numpy as np\nrng = np.random.default_rng(0)"),
        ("cannikin.runtime.engine", "import torch, os\nfrom cannikin.runtime.hook import Hook"),
        ("cannikin.cli.demo", "from cannikin.demo import comparison\nfrom cannikin.sim.simulation import simulate"),
        ("cannikin.__init__", "from cannikin.runtime.engine import attach"),
    ],
)
def test_the_check_lets_a_right_import_pass(module, source):
    assert violations(source, module) == []


# Names of files


def shared_names(paths: Iterable[Path]) -> set[str]:
    """The names that two files have; a traceback or an editor's tab does not tell such files apart."""
    counts = Counter(path.name for path in paths if path.name != "__init__.py")
    return {name for name, count in counts.items() if count > 1}


def test_no_two_source_files_have_one_name():
    shared = shared_names(FILES)
    assert shared == set(), "give one of the two another name"


def test_no_two_test_files_have_one_name():
    assert shared_names((ROOT / "tests").rglob("*.py")) == set(), "pytest and its helpers import them by name alone"


def test_the_check_sees_two_files_of_one_name():
    paths = [
        Path("a", "x.py"),
        Path("b", "x.py"),
        Path("b", "y.py"),
        Path("a", "__init__.py"),
        Path("b", "__init__.py"),
    ]
    assert shared_names(paths) == {"x.py"}
