"""What every test has: a police that lets nothing be left behind, and golden files for what users see printed."""

from __future__ import annotations

import difflib
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import settings
from leaks import leaks, look

from cannikin.lab.mechanisms.mps import CONTROL, start_daemon

settings.register_profile("cannikin", deadline=None)  # how long a case takes says nothing on a shared machine
settings.load_profile("cannikin")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # begun behind a shell's `&`: the tests of Ctrl-C need it
    signal.signal(signal.SIGINT, signal.default_int_handler)

GOLDENS = Path(__file__).parent / "goldens"
_REWRITE = "--rewrite-goldens"
_HAS_FAILED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        _REWRITE,
        action="store_true",
        help="Write tests/goldens/*.txt anew from what is printed now, and compare nothing.",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    item.stash[_HAS_FAILED] = item.stash.get(_HAS_FAILED, False) or report.failed
    return report


@pytest.fixture(autouse=True, scope="module")
def _module_leaves_nothing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail the last test of a file whose fixtures leave something behind."""
    before = look(tmp_path_factory.getbasetemp())
    yield
    _fail_for(leaks(before, tmp_path_factory.getbasetemp()), "this file's fixtures or tests")


@pytest.fixture(autouse=True)
def _leaves_nothing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail a test that leaves something behind; one that has failed already may hold it by its traceback."""
    before = look(tmp_path_factory.getbasetemp())
    yield
    if not request.node.stash.get(_HAS_FAILED, False):
        _fail_for(leaks(before, tmp_path_factory.getbasetemp()), "this test")


def _fail_for(found: list[str], who: str) -> None:
    if found:
        lines = [f"{who} left something behind (tests/leaks.py):", *(f"  {sentence}" for sentence in found)]
        pytest.fail("\n".join(lines), pytrace=False)


@pytest.fixture(scope="session")
def mps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of ranks that share a GPU side by side; empty where there is no MPS, and they take turns."""
    with ExitStack() as undo:
        yield start_daemon(tmp_path_factory.mktemp("mps"), undo) if shutil.which(CONTROL) else {}


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
