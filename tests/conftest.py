"""What every test has: golden files for what users see printed."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

import pytest

GOLDENS = Path(__file__).parent / "goldens"
_REWRITE = "--rewrite-goldens"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        _REWRITE,
        action="store_true",
        help="Write tests/goldens/*.txt anew from what is printed now, and compare nothing.",
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` fails with a unified diff unless the text is that of tests/goldens/NAME.txt."""

    def check(name: str, text: str) -> None:
        path = GOLDENS / f"{name}.txt"
        if request.config.getoption(_REWRITE):
            path.write_text(text, encoding="utf-8")
            return
        expected = path.read_text(encoding="utf-8") if path.exists() else ""
        if text != expected:
            shown = f"tests/goldens/{path.name}"
            diff = difflib.unified_diff(expected.splitlines(), text.splitlines(), shown, "printed now", lineterm="")
            file = request.path.relative_to(request.config.rootpath)
            advice = f"If users are to see this, run: pytest {file} {_REWRITE}; then read: git diff {shown}"
            pytest.fail("\n".join([*diff, "", advice]), pytrace=False)

    return check
