"""No private member of a framework is touched, or it is named here with a test that fails when it goes away."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

import cannikin.integrations

FOLDER = Path(cannikin.integrations.__file__).parent
TOUCHED = {
    ("torchft.py", "_pg"),
    ("torchft.py", "_quorum_id"),
    ("torchft.py", "_use_async_quorum"),
    ("ray.py", "_orig_mod"),  # of torch.compile, whose wrapper has no public name for what it wraps
}
PUBLIC = {"_replace", "_fields"}  # of named tuples: documented, underscore and all
OURS = {("transformers.py", "_begin")}  # of HeteroTrainer, called by its callback


def private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def touched_in(path: Path) -> set[tuple[str, str]]:
    """The private names that a file reads or writes on anything but `self`, by a dot or by a string."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            found.add(node.attr)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
            found |= {each.value for each in node.args if isinstance(each, ast.Constant)}
        if isinstance(node, ast.ImportFrom):
            found |= {*(node.module or "").split("."), *(each.name for each in node.names)}
    return {(path.name, name) for name in found if private(name)}


def test_the_private_members_that_integrations_touch_are_those_listed_here():
    found = set().union(*(touched_in(path) for path in FOLDER.glob("*.py")))
    assert found == TOUCHED | OURS


def own_names(kind: type) -> set[str]:
    """The private names that a class and its instances have by its own body."""
    body = ast.parse(inspect.getsource(kind)).body[0]
    on_self = {
        node.attr
        for node in ast.walk(body)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    return {name for name in {*vars(kind), *on_self} - {"_abc_impl"} if private(name)}


def names_of(base: type) -> set[str]:
    """The private names of a class and of what it inherits, those that only its methods set included."""
    text = "".join(inspect.getsource(each) for each in base.__mro__ if each is not object)
    return {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)} | set(dir(base))


@pytest.mark.parametrize(
    ("module", "name", "framework"),
    [
        ("lightning", "CannikinStrategy", "lightning"),
        ("transformers", "HeteroTrainer", "transformers"),
        ("accelerate", "PreparedLoader", "accelerate"),
    ],
)
def test_what_a_subclass_keeps_for_itself_has_no_name_that_its_framework_uses(monkeypatch, module, name, framework):
    """A name of ours that is theirs too would put our value in the place of theirs, in silence."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as the import of Lightning does, for good
    pytest.importorskip(framework)
    kind = getattr(importlib.import_module(f"cannikin.integrations.{module}"), name)
    bases = [base for base in kind.__bases__ if base.__module__.partition(".")[0] == framework]
    assert bases
    for base in bases:
        assert own_names(kind) & names_of(base) == set()


def test_torchs_compiled_module_names_the_module_that_it_wraps():
    """Else Ray's adapter would wrap a compiled DDP module once more."""
    torch = importlib.import_module("torch")
    net = torch.nn.Linear(1, 1)
    assert torch.compile(net, backend="eager")._orig_mod is net


@pytest.mark.parametrize("name", sorted(name for file, name in TOUCHED if file == "torchft.py"))
def test_torchfts_manager_has_the_private_members_that_are_touched(name):
    """Without `_use_async_quorum` a manager that cuts batches before it knows who is in would no longer be refused."""
    manager = pytest.importorskip("torchft", reason="torchft is not installed: make test-torchft").Manager
    assert f"self.{name}" in inspect.getsource(manager)
