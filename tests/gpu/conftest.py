from __future__ import annotations

import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from cannikin.lab.mechanisms.mps import CONTROL, start_daemon

sys.path.insert(0, str(Path(__file__).parent.parent / "runtime"))  # the training scripts of the parity tests


@pytest.fixture(scope="session")
def mps(tmp_path_factory):
    """The environment of ranks that share the GPU side by side; empty where there is no MPS, and they take turns."""
    with ExitStack() as undo:
        yield start_daemon(tmp_path_factory.mktemp("mps"), undo) if shutil.which(CONTROL) else {}
