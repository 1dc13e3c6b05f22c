"""The run log: what a training run, real or simulated, leaves for reports, live views, resumes and replays.

One file, `runlog.jsonl`, written by rank 0: append-only, one JSON object per line, each with a `type`:

    header    what runs, on what; once, and again each time the run resumes      `Header`
    window    what a window of steps took, rank by rank                          `WindowRecord`
    plan      what the planner decided, and why                                  `PlanRecord`
    event     anything else that readers should know                             `EventRecord`

Rules of the format, version 1:

- A line counts once its newline is there. A line cut short (a kill, a full disk) is ignored, wherever it is.
- Times are milliseconds. NaN and infinity are not JSON: they are written as null, which thus means "no finite number".
- New types and new fields may come without a new version; readers skip and count lines of unknown types, and ignore
  unknown fields. Anything that changes a meaning raises `version`, and other versions are refused.
- Records stand in the order they were written. After a resume from an older state, step numbers go back.
- The log is small on purpose: a window holds medians over its steps and one step's full timeline, not every step.
  `replay_window` gives that one step back as a `StepWindow`, enough to fit a model of the cluster; the squared norms of
  single steps are not kept, only the noise scale estimated from them.

The lines are in the page cache once written, so they outlive the process, however it ends; a power cut may lose the
last ones.
"""

from __future__ import annotations

from cannikin.runlog.convert import decision_records, job_info, noise_record, plan_record, replay_window, window_record
from cannikin.runlog.predictions import Predictions, read_predictions
from cannikin.runlog.reader import RunLog, RunLogReader, numbers_only, read_runlog, refuse_overwriting, run_inside
from cannikin.runlog.records import (
    FORMAT,
    RUNLOG_NAME,
    VERSION,
    EventRecord,
    Header,
    JobInfo,
    ModelInfo,
    NoiseRecord,
    Observer,
    PlanRecord,
    RankInfo,
    Record,
    Timeline,
    WindowRecord,
)
from cannikin.runlog.writer import RunLogWriter

__all__ = [
    "FORMAT",
    "RUNLOG_NAME",
    "VERSION",
    "EventRecord",
    "Header",
    "JobInfo",
    "ModelInfo",
    "NoiseRecord",
    "Observer",
    "PlanRecord",
    "Predictions",
    "RankInfo",
    "Record",
    "RunLog",
    "RunLogReader",
    "RunLogWriter",
    "Timeline",
    "WindowRecord",
    "decision_records",
    "job_info",
    "noise_record",
    "numbers_only",
    "plan_record",
    "read_predictions",
    "read_runlog",
    "refuse_overwriting",
    "replay_window",
    "run_inside",
    "window_record",
]
