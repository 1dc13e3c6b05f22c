"""The list of benchmarks; their figures are no tests."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS, main

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("module", BENCHMARKS.values())
def test_every_benchmark_can_be_run_without_arguments(module):
    tree = ast.parse((FOLDER / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    (function,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    assert len(function.args.args) == len(function.args.defaults)


def test_an_unknown_benchmark_is_refused_with_the_names_there_are(capsys):
    assert main(["fastest"]) == 2
    assert "no benchmark called fastest: choose from adaptdl, controller, gpu" in capsys.readouterr().err


def test_options_go_to_the_one_benchmark_that_is_named(capsys):
    assert main(["solver", "paper", "--help"]) == 2
    assert main(["solver", "--help"]) == 2
    assert "--help: options follow one name out of gpu, lab_limit, paper" in capsys.readouterr().err
    assert main(["paper", "--help"]) == 0
    assert "Usage: python -m benchmarks paper" in capsys.readouterr().out
