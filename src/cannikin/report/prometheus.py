"""A run's numbers for Prometheus: its text format, in a file that node_exporter's textfile collector reads.

Names are those of `cannikin.report.scalars` as Prometheus has them, all of them gauges, times in its base unit:

    cannikin/step_ms           cannikin_step_seconds
    cannikin/rank0/wait_ms     cannikin_rank_wait_seconds{rank="0",device="...",host="..."}
    cannikin/eval/accuracy     cannikin_eval{metric="accuracy"}
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from cannikin.errors import InvalidInputError
from cannikin.report.scalars import SCALARS, scalars
from cannikin.runlog import EventRecord, Header, Record, WindowRecord

__all__ = ["PrometheusObserver", "prometheus_text"]

_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_RANK_SCALAR = re.compile(r"cannikin/rank(\d+)/(\w+)")


def prometheus_text(
    values: Mapping[str, float], header: Header | None = None, labels: Mapping[str, str] | None = None
) -> str:
    """Scalars in Prometheus's text format, every family with its HELP and TYPE.

    Args:
        values: by the names of `SCALARS`.
        header: of the run: adds `cannikin_info`, and where each rank runs.
        labels: put on every line.

    Example:
        >>> print(prometheus_text({"cannikin/rank0/wait_ms": 5.0}, labels={"run": 'a "b"'}), end="")
        # HELP cannikin_rank_wait_seconds waiting for a slower rank
        # TYPE cannikin_rank_wait_seconds gauge
        cannikin_rank_wait_seconds{run="a \\"b\\"",rank="0"} 0.005
    """
    families: dict[str, list[str]] = {}
    helps: dict[str, str] = {}
    shared = dict(labels or {})
    if header is not None:
        helps["cannikin_info"] = "What runs; always 1"
        info = {"policy": header.policy, "version": header.cannikin_version, "world_size": str(header.world_size)}
        families["cannikin_info"] = [_sample("cannikin_info", {**shared, **info}, 1.0)]
    for name, value in values.items():
        template, own = _template(name, header)
        family = _family(template)
        helps[family] = SCALARS[template].meaning
        scale = 1e-3 if template.endswith("_ms") else 1.0
        families.setdefault(family, []).append(_sample(family, {**shared, **own}, value * scale))
    return "".join(
        f"# HELP {family} {helps[family]}\n# TYPE {family} gauge\n{''.join(lines)}"
        for family, lines in families.items()
    )


def _template(name: str, header: Header | None) -> tuple[str, dict[str, str]]:
    """The entry of `SCALARS` that a name belongs to, and the labels that tell its lines apart."""
    found = _RANK_SCALAR.fullmatch(name)
    if found is None:
        metric = name.removeprefix("cannikin/eval/")
        return (name, {}) if metric == name else ("cannikin/eval/{name}", {"metric": metric})
    rank = int(found[1])
    own = {"rank": str(rank)}
    if header is not None and rank < len(header.ranks):
        own |= {"device": header.ranks[rank].device, "host": header.ranks[rank].host}
    return f"cannikin/rank{{rank}}/{found[2]}", own


def _family(template: str) -> str:
    """A name of `SCALARS` as Prometheus has it.

    Example:
        >>> _family("cannikin/rank{rank}/compute_ms"), _family("cannikin/eval/{name}")
        ('cannikin_rank_compute_seconds', 'cannikin_eval')
    """
    words = template.replace("{rank}", "").replace("/{name}", "").replace("/", "_")
    return f"{words.removesuffix('_ms')}_seconds" if words.endswith("_ms") else words


def _sample(family: str, labels: Mapping[str, str], value: float) -> str:
    inside = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
    return f"{family}{{{inside}}} {value!r}\n" if inside else f"{family} {value!r}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class PrometheusObserver:
    """Keeps a file of a run's latest numbers, always whole: each time it is written beside and renamed.

    Args:
        path: the file, ending in .prom for node_exporter, in the folder its textfile collector reads.
        labels: put on every line; needed where several runs on one host are collected, which must differ.
        every_s: least seconds between two writes.
        clock: seconds, for tests.

    Raises:
        InvalidInputError: a label's name is none that Prometheus takes.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        labels: Mapping[str, str] | None = None,
        every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name in labels or {}:
            if not _LABEL.fullmatch(name) or name.startswith("__") or name in ("rank", "device", "host", "metric"):
                raise InvalidInputError(
                    f"label {name!r}: use letters, digits and _, no digit first, and not rank, device, host or metric"
                )
        self.path = Path(path)
        self._labels = dict(labels or {})
        self._every_s, self._clock = every_s, clock
        self._written_at = -float("inf")
        self._header: Header | None = None
        self._latest: dict[str, float] = {}
        self._window: WindowRecord | None = None

    def write(self, event: Record, /) -> None:
        """Take a record of the run."""
        if isinstance(event, Header):
            self._header, self._latest, self._window = event, {}, None
        elif isinstance(event, WindowRecord):
            self._window = event  # taken apart only when it is written
        else:
            self._latest |= scalars(event)
        ended = isinstance(event, EventRecord) and event.kind == "end"
        now = self._clock()
        if ended or now - self._written_at >= self._every_s:
            self._written_at = now
            self._save()

    @property
    def text(self) -> str:
        """The latest numbers in Prometheus's text format."""
        batch = None if self._header is None else self._header.job.batch_size
        known = {} if self._window is None else scalars(self._window, initial_batch=batch)
        return prometheus_text({**known, **self._latest}, self._header, self._labels)

    def _save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")  # not .prom: it is not to be collected
        beside.write_text(self.text, encoding="utf-8")
        os.replace(beside, self.path)
