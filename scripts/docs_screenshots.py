"""The pictures of the live view and the report in docs/assets, from the run directory of a demo.

    python scripts/docs_screenshots.py runs/demo-20261115-121921      # or: make screenshots RUN=runs/demo-...

The live view is that of the run under cannikin's policy as `cannikin watch` showed it in the middle of the run. Needs
Chromium.
"""

from __future__ import annotations

import io
import math
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from cannikin.live.panel import LivePanel
from cannikin.live.state import LiveState
from cannikin.report.write import write_report
from cannikin.runlog import PlanRecord, RunLogReader

ASSETS = Path(__file__).parent.parent / "docs" / "assets"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
FLAGS += ("--disable-component-update", "--disable-sync", "--hide-scrollbars", "--virtual-time-budget=6000")


def draw_live_view(run: Path, out: Path) -> tuple[int, int]:
    """Draw the panel after half of a run's plans, as SVG; its width and height."""
    with RunLogReader(run) as reader:
        records = reader.poll()
    plans = [place for place, record in enumerate(records) if isinstance(record, PlanRecord)]
    state = LiveState()
    for record in records[: plans[len(plans) // 2] + 1]:
        state.take(record)
    console = Console(record=True, width=104, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(LivePanel(state))
    console.save_svg(str(out), title=f"cannikin watch {run}")
    size = re.search(r'viewBox="0 0 (\S+) (\S+)"', out.read_text())
    assert size is not None
    return math.ceil(float(size[1])), math.ceil(float(size[2]))


def shoot(page: Path, name: str, width: int, height: int) -> None:
    """A picture of the page's upper left corner."""
    chromium = shutil.which("chromium") or sys.exit("this needs chromium on the path")
    with tempfile.TemporaryDirectory() as folder:
        command = [chromium, *FLAGS, f"--user-data-dir={folder}", f"--window-size={width},{height}"]
        command += [f"--screenshot={ASSETS / name}", page.resolve().as_uri()]
        subprocess.run(command, check=True, timeout=60, stderr=subprocess.DEVNULL)


def main(demo: Path) -> None:
    """Draw and shoot all three."""
    with tempfile.TemporaryDirectory() as folder:
        size = draw_live_view(demo / "cannikin", live := Path(folder, "live.svg"))
        shoot(live, "live-view.png", *size)
        shoot(write_report([demo], Path(folder, "demo.html")), "report.png", 1280, 1380)
        shoot(write_report([demo / "cannikin"], Path(folder, "run.html")), "report-run.png", 1280, 2120)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
