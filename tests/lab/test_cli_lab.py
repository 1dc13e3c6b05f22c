"""`cannikin lab`: bad input is one line and exit status 2, before anything is started."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from cannikin.cli import lab as lab_command
from cannikin.cli import main
from cannikin.lab.cluster import LabCluster, Slowdown
from cannikin.lab.mechanisms import MECHANISMS


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('started')\n")
    return str(path)


def lab(*args: str):
    return CliRunner().invoke(main, ["lab", *args])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--ranks", "1,0.5"], "no script to run"),
        (["--ranks", "1,0.5", "--", "-m"], "no script to run"),
        (["--ranks", "1,0.5", "--", "none.py"], "none.py: there is no such script"),
        (["--", "SCRIPT"], "say what the cluster is"),
        (["--ranks", "1", "cluster.toml", "--", "SCRIPT"], "give either --ranks or cluster.toml"),
        (["cluster.toml", "--", "SCRIPT"], "cluster.toml: cannot be read"),
        (["--ranks", "1,0", "--", "SCRIPT"], "speed 0 of rank 1 must be from 0.001"),
        (["--ranks", "1,-2", "--", "SCRIPT"], "speed -2 of rank 1"),
        (["--ranks", "one", "--", "SCRIPT"], "'one' is not a number"),
        (["--ranks", "1", "--link", "1 furlong", "--", "SCRIPT"], "kbit, mbit or gbit"),
        (["--ranks", "1", "--link", "1gbit", "--mechanism", "portable", "--", "SCRIPT"], "use --mechanism hosts"),
        (["--ranks", "1", "--mechanism", "magic", "--", "SCRIPT"], "'magic' is not one of"),
        (["--ranks", "1", "--policy", "luck", "--", "SCRIPT"], "'luck' is not one of"),
        (["--ranks", "1", "--sample-ms", "-1", "--", "SCRIPT"], "sample_ms=-1 must be above 0"),
        (["--ranks", "1", "--slow", "1:0.5@3", "--", "SCRIPT"], "there is no rank 1"),
        (["--ranks", "1", "--slow", "half", "--", "SCRIPT"], "write RANK:FACTOR@STEP"),
    ],
)
def test_bad_input_is_one_line_and_status_2(script, args, words):
    result = lab(*[script if arg == "SCRIPT" else arg for arg in args])
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("cannikin: ")
    assert words in line


def test_the_help_and_the_option_list_every_mechanism():
    shown = lab("--help").stdout
    assert f"[auto|{'|'.join(MECHANISMS)}]" in shown
    for name, mechanism in MECHANISMS.items():
        assert f"{name:<10}{mechanism.summary}\n" in shown


@pytest.fixture
def launched(monkeypatch):
    calls = []

    def launch(cluster, script, **keywords):
        calls.append((cluster, script, keywords))
        return 7

    monkeypatch.setattr(lab_command, "launch", launch)
    return calls


def test_words_and_options_describe_a_cluster_and_the_rest_is_the_scripts_own(launched):
    words = ["--ranks", "1,0.5", "--sample-ms", "2", "--slow", "1:0.5@9", "--link", "1gbit", "--policy", "even"]
    assert lab(*words, "--", "train.py", "--link", "x").exit_code == 7
    cluster = LabCluster(
        speeds=(1.0, 0.5), sample_s=0.002, link_bit_per_s=1e9, slowdowns=(Slowdown(rank=1, factor=0.5, step=9),)
    )
    keywords = {"mechanism": "auto", "environment": {"CANNIKIN_POLICY": "even"}}
    assert launched == [(cluster, ("train.py", "--link", "x"), keywords)]


def test_options_go_before_what_a_file_says(launched, tmp_path):
    path = tmp_path / "lab.toml"
    path.write_text("mechanism = 'hosts'\nsample_ms = 1\nfixed_ms = 3\n[[rank]]\nspeed = 1\n")
    assert lab(str(path), "--sample-ms", "2", "--mechanism", "portable", "--", "-m", "package.train").exit_code == 7
    ((cluster, script, keywords),) = launched
    assert (cluster.sample_s, cluster.fixed_s) == (0.002, 0.003)
    assert script == ("-m", "package.train")
    assert keywords == {"mechanism": "portable", "environment": {}}


def test_the_launcher_itself_does_not_import_torch():
    code = "import sys, cannikin.cli.lab; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
