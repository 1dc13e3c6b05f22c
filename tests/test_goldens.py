"""What users see printed is what the files in tests/goldens say; `pytest --rewrite-goldens` writes them anew."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conftest import GOLDENS
from printed import printed

ROOT = Path(__file__).parent.parent

MINE = """
[comm]
gamma = 0.25
overlapped_ms = 2
last_ms = 1

[[node]]
name = "fast"
forward_ms = { fixed = 1, per_sample = 0.25 }
backward_ms = { fixed = 1, per_sample = 0.25 }
min_batch = 2
max_batch = 64

[[node]]
name = "slow"
forward_ms = { fixed = 1, per_sample = 0.5 }
backward_ms = { fixed = 1, per_sample = 0.5 }
min_batch = 3
max_batch = 64
"""
LAB = """
sample_ms = 1

[[rank]]
speed = 1
"""
FILES = {
    "mine.toml": MINE,
    "wrong-key.toml": MINE.replace("max_batch", "max_batches"),
    "no-comm.toml": MINE[MINE.index("[[node]]") :],
    "not-toml.toml": MINE.replace("fixed =", "fixed"),
    "wrong-device.toml": '[link]\nbandwidth_gbit = 25\n[[node]]\ndevice = "a100x"\n',
    "lab.toml": LAB,
    "wrong-lab.toml": LAB.replace("speed", "speeed"),
    "train.py": "",
}

# Golden file -> the commands whose output it has.
COMMANDS = {
    "help": ["--help"],
    "help-demo": ["demo --help"],
    "help-plan": ["plan --help"],
    "help-simulate": ["simulate --help"],
    "help-lab": ["lab --help"],
    "help-doctor": ["doctor --help"],
    "help-report": ["report --help"],
    "help-trace": ["trace --help"],
    "help-watch": ["watch --help"],
    "help-bench": ["bench --help", "bench paper --help"],
    "plan": [
        "plan three-kinds.toml --batch 1024",
        "plan three-kinds.toml --batch 1024 --without v100 --without v100 --without v100 --without v100",
        "plan mine.toml --batch 5",
    ],
    "plan-range": [
        "plan three-kinds.toml --batch-range 256:8192 --noise-scale 3000",
        "plan mine.toml --batch-range 5:100",
    ],
    "plan-json": ["plan three-kinds.toml --batch 1024 --json", "plan mine.toml --batch-range 8:64 --json"],
    "simulate": [
        "simulate a --workload bert --policy even,lb-bsp,adaptdl,cannikin --max-epochs 0.05",
        "simulate b --workload ncf --policy even --seeds 0,1 --max-epochs 0.02 --batch-size 4096",
    ],
    "errors-plan": [
        "plan mine.toml",
        "plan mine.toml --batch 4",
        "plan mine.toml --batch many",
        "plan mine.toml --batch 8 --without h100",
        "plan mine.toml --batch 8 --fast",
        "plan missing.toml --batch 8",
        "plan wrong-key.toml --batch 8",
        "plan no-comm.toml --batch 8",
        "plan not-toml.toml --batch 8",
    ],
    "errors-simulate": [
        "simulate d --workload bert",
        "simulate a --workload gpt",
        "simulate a --workload bert --policy ddp",
        "simulate a --workload bert --batch-size 2",
        "simulate wrong-device.toml --workload bert",
    ],
    "errors-lab": [
        "lab -- train.py",
        "lab --ranks 1,0.5",
        "lab --ranks 1,0 -- train.py",
        "lab --ranks 1 --policy luck -- train.py",
        "lab --ranks 1 --link 1gbit --mechanism portable -- train.py",
        "lab lab.toml -- missing.py",
        "lab wrong-lab.toml -- train.py",
    ],
    "errors": ["paln", "demo --policy luck", "report missing", "trace missing", "watch missing --once"],
}
SIMULATED = "simulate a --workload bert --max-epochs 0.05 --run-dir runs"
OF_A_RUN = [
    "simulate --from-run runs/cannikin-seed0 --policy even,cannikin",
    "trace runs/cannikin-seed0",
    "trace runs/cannikin-seed0 --steps 5,50 --out few.json",
    "trace runs/cannikin-seed0 --steps 5000",
    "watch runs/cannikin-seed0",
    "watch runs/cannikin-seed0 --once",
    "report runs/cannikin-seed0",
    "report runs --out page.html",
    "report runs --target F1",
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of input files, to work in: printed paths are relative to it."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "examples" / "clusters" / "three-kinds.toml", tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_print_what_their_golden_says(folder, golden, name):
    golden(name, printed(*COMMANDS[name]))


def test_what_verbs_say_of_a_simulated_run_is_what_its_golden_says(folder, golden):
    pytest.importorskip("plotly", reason="needs plotly: pip install 'cannikin[report]'")
    printed(SIMULATED)
    golden("run", printed(*OF_A_RUN))


TWO_RANKS = """
import os, sys, time
from pathlib import Path

if os.environ["RANK"] == "0":
    print("epoch 1 of", sys.argv[1], flush=True)
    Path("said").touch()
    time.sleep(60)
while not Path("said").exists():
    time.sleep(0.01)
sys.exit(3)
"""


def test_the_lab_says_what_it_makes_and_who_failed_as_its_golden_says(folder, golden):
    Path("fails.py").write_text(TWO_RANKS)
    lines = printed("lab --ranks 1,0.5 --sample-ms 2 -- fails.py 9").splitlines(keepends=True)
    golden("lab", "".join(line for line in lines if not line.startswith("[torchrun]")))


# The goldens themselves


def test_every_golden_is_some_tests():
    source = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert [path.name for path in GOLDENS.iterdir() if f'"{path.stem}"' not in source] == []


def test_another_word_fails_with_a_diff_and_the_way_to_rewrite(golden, pytestconfig):
    if pytestconfig.getoption("--rewrite-goldens"):
        pytest.skip("nothing is compared while goldens are written")
    text = (GOLDENS / "plan.txt").read_text()
    golden("plan", text)
    with pytest.raises(pytest.fail.Exception) as failure:
        golden("plan", text.replace("even split", "equal split", 1))
    told = str(failure.value).splitlines()
    assert told[:2] == ["--- tests/goldens/plan.txt", "+++ printed now"]
    assert [line[1:].split()[0] for line in told if line.startswith(("-", "+"))][2:] == ["even", "equal"]
    assert told[-1].endswith("--rewrite-goldens; then read: git diff tests/goldens/plan.txt")
