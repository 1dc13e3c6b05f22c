"""The list of benchmarks; their figures are no tests."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS, main

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.parametrize("module", BENCHMARKS.values())
def test_every_benchmark_can_be_run_without_arguments(module):
    tree = ast.parse((FOLDER / f"{module}.py").read_text(encoding="utf-8"))
    (function,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    assert len(function.args.args) == len(function.args.defaults)


def test_an_unknown_benchmark_is_refused_with_the_names_there_are(capsys):
    assert main(["fastest"]) == 2
    assert "no benchmark called fastest: choose from adaptdl, controller, gpu" in capsys.readouterr().err
