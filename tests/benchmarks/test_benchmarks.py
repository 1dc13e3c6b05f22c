"""The list of benchmarks; their figures are no tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS, WITH_OPTIONS, main

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md"), *FOLDER.glob("reports/*.md")]


@pytest.mark.parametrize("module", BENCHMARKS.values())
def test_every_benchmark_can_be_run_without_arguments(module):
    tree = ast.parse((FOLDER / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    (function,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    assert len(function.args.args) == len(function.args.defaults)


def test_an_unknown_benchmark_is_refused_with_the_names_there_are(capsys):
    assert main(["fastest"]) == 2
    assert f"no benchmark called fastest: choose from {', '.join(BENCHMARKS)}" in capsys.readouterr().err


def test_options_go_to_the_one_benchmark_that_is_named(capsys):
    assert main(["solver", "paper", "--help"]) == 2
    assert main(["solver", "--help"]) == 2
    assert f"--help: options follow one name out of {', '.join(WITH_OPTIONS)}" in capsys.readouterr().err
    assert main(["paper", "--help"]) == 0
    assert "Usage: python -m benchmarks paper" in capsys.readouterr().out


def commands(text: str) -> set[str]:
    """The benchmarks that a page tells its readers to run: names, and modules as ".module"."""
    found = re.findall(r"python -m benchmarks(\.\w+)?((?: \w+)*)", text)
    return {name for module, names in found for name in ([module] if module else names.split())}


def test_every_benchmark_that_a_page_names_exists():
    assert commands("`python -m benchmarks solver paper --out x`, `python -m benchmarks.gpu limit`") == {
        *("solver", "paper", ".gpu")
    }
    modules = {f".{path.stem}" for path in FOLDER.glob("*.py")}
    for page in PAGES:
        unknown = commands(page.read_text(encoding="utf-8")) - set(BENCHMARKS) - modules
        assert not unknown, f"{page.relative_to(ROOT)} names what there is not"
