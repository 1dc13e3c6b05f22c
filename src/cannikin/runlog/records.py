"""The records of a run log, as they are in memory and, field by field, in the file.

Legend: n ranks, J gradient buckets. `Real` is a finite number, or None where it was NaN or infinite or is not known.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

FORMAT = "cannikin-runlog"
VERSION = 1
RUNLOG_NAME = "runlog.jsonl"  # in the run directory
LEAST_MS, MOST = 1e-9, 1e15  # outside of these, a number of a damaged log is no time, and above no batch

Real = float | None
Reals = tuple[float | None, ...]


class JobInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the planner may choose from; None means no bound in `max_local`, a fixed total in `max_batch_size`."""

    batch_size: int
    max_batch_size: int | None = None
    min_local: tuple[int, ...] = ()
    max_local: tuple[int | None, ...] = ()
    num_samples: int | None = None


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank runs; `name` is for people, such as the node's name in a cluster file.

    What a device says of itself is None where it does not: `memory_bytes` is its size, `memory_limit_bytes` what the
    rank's process might take of it when training began, `capability` NVIDIA's compute capability, such as (9, 0).
    `uuid` tells a GPU from all others; "" where there is none.
    """

    name: str = ""
    host: str = ""
    device: str = ""
    uuid: str = ""
    memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    capability: tuple[int, int] | None = None
    num_multiprocessors: int | None = None
    clock_mhz: float | None = None


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained; `bucket_bytes` has one entry per gradient bucket, in the order they are reduced.

    A real run's buckets are not known before it has begun: `Timeline.bucket_bytes` has their sizes. `profile_key` is
    what profile stores know model and precision by; "" in logs of older versions.
    """

    name: str = ""
    num_parameters: int | None = None
    bucket_bytes: tuple[int, ...] = ()
    profile_key: str = ""


class Header(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="header"):
    """What runs, on what. The first record of a log, and the first after each resume.

    Args:
        cannikin_version, torch_version: as the packages say; "" where torch is not used.
        started: ISO 8601 time at which this process began, by the caller's clock.
        policy: the planner's name.
        world_size: n. `ranks` has one entry per rank, or none.
        first_step: step the run begins with; above 0 where it resumes.
        precision: for instance "float32" or "bfloat16".
        tags: anything else that tells runs apart.
    """

    format: str = FORMAT
    version: int = VERSION
    cannikin_version: str
    torch_version: str = ""
    started: str
    policy: str
    world_size: int
    first_step: int = 0
    job: JobInfo
    ranks: tuple[RankInfo, ...] = ()
    model: ModelInfo = ModelInfo()
    precision: str = ""
    tags: dict[str, str] = {}

    def rank(self, rank: int) -> RankInfo:
        """Return where this rank runs; nothing is known of a rank that is not listed."""
        return self.ranks[rank] if rank < len(self.ranks) else RankInfo()


class NoiseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The gradient noise scale and its limits; None is infinite, or not known. `flags` as in `NoiseTracker`.

    `num_batches` batches pile up for each step of the optimizer: a sample's worth is that at so many times the total.
    """

    signal_sqnorm: Real = None
    noise_trace: Real = None
    noise_scale: Real = None
    low: Real = None
    high: Real = None
    flags: tuple[str, ...] = ()
    num_batches: int = 1


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """One step in full, on all ranks.

    Args:
        step: its number.
        local_batches: b_i, [n].
        before_ms: a_i, optimizer step and forward, [n].
        ready_ms, done_ms: moments each bucket was ready and its all-reduce done, after the rank's own start of
            backward, [n, J]. Ranks' clocks differ: align them by the end of the last all-reduce.
        bucket_bytes: size of each bucket, [J]; () where it is not known, or as in the header.
    """

    step: int
    local_batches: tuple[int, ...]
    before_ms: Reals
    ready_ms: tuple[Reals, ...]
    done_ms: tuple[Reals, ...]
    bucket_bytes: tuple[int, ...] = ()


class WindowRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="window"):
    """What a window of steps took. Medians are over the valid steps that had the window's most frequent split.

    Args:
        first_step, num_steps: the steps measured.
        num_valid: steps with this split that count on every rank.
        total_batch, local_batches: the most frequent split.
        step_ms: a whole step, as the median rank saw it.
        before_ms, backward_ms: a_i and P_i, [n]; None for a rank without a valid step.
        done_ms: end of the last all-reduce after start of backward, [n].
        wait_ms: part of done_ms - backward_ms spent waiting for a slower rank, [n]; the rest is communication that no
            computing hid.
        loader_ms, other_ms: waiting for data, and the user's own work between steps, [n]; () where not measured. The
            latter is a mean over all valid steps, because few of them have work such as an evaluation.
        loader_inside: whether `before_ms` includes the wait for data, as with a loader without workers.
        elapsed_ms: since the run started, by the caller's clock (simulated time in a simulation).
        progress: passes over the data at the initial batch size, so far.
        lr_factor: factor on the learning rate at the window's end.
        num_skipped: steps of the window that the optimizer did not take.
    """

    first_step: int
    num_steps: int
    num_valid: int
    total_batch: int
    local_batches: tuple[int, ...]
    step_ms: Real = None
    before_ms: Reals = ()
    backward_ms: Reals = ()
    done_ms: Reals = ()
    wait_ms: Reals = ()
    loader_ms: Reals = ()
    other_ms: Reals = ()
    loader_inside: bool = False
    elapsed_ms: Real = None
    progress: Real = None
    lr_factor: Real = None
    num_skipped: int = 0
    noise: NoiseRecord | None = None
    timeline: Timeline | None = None


class PlanRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="plan"):
    """A plan: decided at `step`, in force from `first_step`; `predicted_step_ms` is None while no model is known.

    `candidate_totals` are the total batches that the planner compared, increasing, among them the one in force.
    `candidate_goodputs` says what each would give, in samples at the initial batch per second; None where the ranks
    cannot hold it. Both are empty where the total is fixed or nothing was compared.

    `even_speed` says how fast DDP's even split of the same total batch would be against this one, by the planner's
    model: 0 where it breaks a rank's bound, None where it is not known, as in logs of older versions.
    """

    step: int
    first_step: int
    total_batch: int
    local_batches: tuple[int, ...]
    predicted_step_ms: Real = None
    phase: str
    reason: str
    elapsed_ms: Real = None
    candidate_totals: tuple[int, ...] = ()
    candidate_goodputs: Reals = ()
    even_speed: Real = None


class EventRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="event"):
    """Something that happened at a step: `text` for people, `data` for programs.

    `kind` is one word of an open set, so readers show a kind they do not know as it is:

        changed_speed   a rank became faster or slower          data: rank, factor
        nonfinite       a gradient was not finite               data: count
        out_of_memory   a rank trained on a batch in parts      data: rank, local_batch, max_batch (from now on)
        resume          the run goes on from a saved state      data: world_size
        epoch           a pass over the data began              data: epoch, position (samples of it already seen),
                                                                goal (passes of progress asked for), if known
        eval            the user evaluated the model            data: metrics by name
        end             the run ended; one that was killed or raised   data: early (true) where that was before its
                        has no such event                              time: SIGTERM, sys.exit() in the middle of a pass
    """

    step: int
    kind: str
    text: str = ""
    data: dict[str, bool | int | float | str | None] = {}
    elapsed_ms: Real = None

    @property
    def is_early(self) -> bool:
        """Whether a run that this event ends was not over."""
        return bool(self.data.get("early", False))

    @property
    def ending(self) -> str:
        """What to say of a run that this event ends."""
        return "ended early" if self.is_early else "ended"


Record = Header | WindowRecord | PlanRecord | EventRecord


class Observer(Protocol):
    """Receives the records of a run: the run log, a live view, a tracker of experiments."""

    def write(self, event: Record, /) -> None:
        """Take one record; the first is a `Header`."""
