"""Files are replaced whole: by the helper itself, and by all that write pages, traces, profiles and metrics."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from live_records import run as records_of

from cannikin.runlog import RUNLOG_NAME, RunLogWriter, Timeline, WindowRecord
from cannikin.whole_files import whole_file

SOURCE = Path(__file__).parent.parent / "src"


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_what_was_there_stays_until_all_is_written(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("old")
    with whole_file(path) as file:
        file.write("new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert names(tmp_path) == ["page.html"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_where_writing_fails_what_was_there_stays_and_nothing_else_is_left(tmp_path, error):
    path = tmp_path / "page.html"
    path.write_text("old")

    def write_half() -> None:
        with whole_file(path) as file:
            file.write("half")
            raise error

    with pytest.raises(error):
        write_half()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["page.html"]


def test_a_link_to_a_shared_file_stays_a_link(tmp_path):
    shared, link = tmp_path / "shared.json", tmp_path / "mine.json"
    shared.write_text("old")
    link.symlink_to(shared)
    with whole_file(link) as file:
        file.write("new")
    assert link.is_symlink()
    assert shared.read_text() == "new"


def test_a_file_of_a_long_name_is_written(tmp_path):
    path = tmp_path / ("x" * 250)
    with whole_file(path) as file:
        file.write("new")
    assert path.read_text() == "new"


def test_a_new_file_can_be_read_by_whom_the_umask_lets(tmp_path):
    path = tmp_path / "run.prom"
    with whole_file(path) as file:
        file.write("new")
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_file_keeps_its_permissions(tmp_path):
    path = tmp_path / "profiles.json"
    path.write_text("old")
    path.chmod(0o640)
    with whole_file(path) as file:
        file.write("new")
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_device_is_written_to_and_not_replaced():
    with whole_file(os.devnull) as file:
        file.write("new")
    assert not Path(os.devnull).is_file()


# Who writes by it


@pytest.fixture
def run_dir(tmp_path):
    """A run's directory; its trace takes more than 4 KB."""
    times = {"before_ms": (10.0, 10.0), "ready_ms": ((10.0,), (26.0,)), "done_ms": ((30.0,), (30.0,))}
    with RunLogWriter(tmp_path / "run" / RUNLOG_NAME) as log:
        for record in records_of(30):
            if isinstance(record, WindowRecord):
                timeline = Timeline(step=record.first_step, local_batches=record.local_batches, **times)
                record = msgspec.structs.replace(record, timeline=timeline)
            log.write(record)
    return tmp_path / "run"


def on_a_full_disk(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command whose files cannot grow beyond 4 KB."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "cannikin", *arguments]
    return subprocess.run(
        command, env=environment, preexec_fn=limit, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(("verb", "page"), [("report", "report.html"), ("trace", "trace.json")])
def test_a_full_disk_leaves_the_page_that_was_there(run_dir, verb, page):
    if verb == "report":
        pytest.importorskip("plotly", reason="needs plotly: pip install 'cannikin[report]'")
    (run_dir / page).write_text("a good page")
    done = on_a_full_disk(verb, str(run_dir))
    assert done.returncode == 1
    assert done.stderr == "cannikin: output could not be written: File too large\n"
    assert (run_dir / page).read_text() == "a good page"
    assert names(run_dir) == sorted([page, RUNLOG_NAME])


def test_profiles_are_not_written_through_a_link_that_waits_where_they_used_to_be_made(tmp_path):
    pytest.importorskip("torch")
    from cannikin.runtime.profile_store import ProfileStore

    victim, path = tmp_path / "victim", tmp_path / "profiles.json"
    victim.write_text("precious")
    (tmp_path / f"profiles.json.{os.getpid()}.part").symlink_to(victim)
    ProfileStore(path, "net").save(["card"], [{"batches": [8.0]}])
    assert victim.read_text() == "precious"
    assert not path.is_symlink()


def test_metrics_are_not_written_through_a_link_that_waits_where_they_used_to_be_made(tmp_path):
    pytest.importorskip("prometheus_client")
    import threading

    from cannikin.trackers import PrometheusObserver

    victim, path = tmp_path / "victim", tmp_path / "run.prom"
    victim.write_text("precious")
    (tmp_path / f"run.prom.{os.getpid()}.{threading.current_thread().ident}").symlink_to(victim)
    observer = PrometheusObserver(path)
    for record in records_of(2):
        observer.write(record)
    assert victim.read_text() == "precious"
    assert path.read_text().startswith("# HELP")
