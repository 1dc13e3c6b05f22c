"""`cannikin plan runs/1`: what a run's job would gain with more ranks or lose with fewer, by what it has learned.

What it prints for programs is a form of its own, with a version: docs/reference/advice.md.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cannikin import words
from cannikin.cli.printing import measured, say
from cannikin.core.advice import LearnedCluster, LearnedRank, Outlook
from cannikin.errors import InvalidInputError
from cannikin.runlog import Header, RunLogReader, numbers_only
from cannikin.runlog.learned import learned_cluster
from cannikin.runlog.times import step_of
from cannikin.toml_files import naming

FORMAT, VERSION = "cannikin-advice", 1
_MAX_ADDED = 1024  # ranks by one --add
_MAX_DIGITS = 9  # of any number here: Python refuses to read one of thousands
_MAX_SHOWN = 60  # characters of what cannot be read
_MAX_TRIED = 64  # ranks that are left out in turn; of more ranks one of each device is


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Other ranks for the job: some left out, some added, and what it does then."""

    without: tuple[int, ...] = ()
    add: tuple[tuple[str, int], ...] = ()
    outlook: Outlook

    def gain(self, now: Outlook) -> float | None:
        """Return by which share the goodput grows; None where the job cannot run so."""
        return None if self.outlook.reason else self.outlook.goodput_per_s / now.goodput_per_s - 1


def is_run(path: Path) -> bool:
    """Return whether a path names a run rather than a cluster file, which may have any name."""
    return path.is_dir() or path.suffix == ".jsonl" or not (path.suffix or path.exists())


def parse_add(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    """Return devices and how many of each."""
    pairs = []
    for value in values:
        name, _, count = value.rpartition("=") if "=" in value else (value, "", "1")
        number = int(count) if count.isdecimal() and len(count) <= _MAX_DIGITS else 0
        if not name or not 1 <= number <= _MAX_ADDED:
            text = f"{value!r:.{_MAX_SHOWN}} is not DEVICE or DEVICE=N, N from 1 to {_MAX_ADDED}"
            raise click.BadParameter(text, ctx, param)
        pairs.append((name, number))
    return tuple(pairs)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as its log tells of it: steps so far, the learned cluster, and profiles of other devices by name.

    `damaged` says of the profiles that cannot be used what is wrong with each.
    """

    path: Path
    step: int
    cluster: LearnedCluster
    stored: dict[str, dict[str, Any]]
    damaged: dict[str, str]

    @property
    def devices(self) -> list[str]:
        """Devices that may join: those of the run, then those of the profile store."""
        return list(dict.fromkeys([*(rank.device for rank in self.cluster.ranks if rank.device), *self.stored]))

    def newcomer(self, name: str) -> LearnedRank:
        """Return a rank on the device of this name, or on the only one with this in its name."""
        wanted, devices = name.casefold(), list(dict.fromkeys([*self.devices, *self.damaged]))
        found = [device for device in devices if device.casefold() == wanted]
        found = found or [device for device in devices if wanted in device.casefold()]
        if not found:
            known = ", ".join(self.devices) or "none"
            raise InvalidInputError(
                f"--add {name}: no such device is known, only {known}; --profiles names the store of a run that used it"
            )
        if len(found) > 1:
            raise InvalidInputError(f"--add {name}: may be any of {', '.join(found)}: give more of the name")
        if found[0] not in self.devices:
            raise InvalidInputError(f"--add {name}: {self.damaged[found[0]]}")
        return self.cluster.like(found[0]) or self.cluster.from_profile(found[0], self.stored[found[0]])

    def changed(self, without: tuple[int, ...], add: tuple[tuple[str, int], ...]) -> LearnedCluster:
        """Return the cluster with these devices added and these ranks left out."""
        cluster = self.cluster
        for name, count in add:  # before others leave: somebody may be all that is left
            cluster = cluster.plus(self.newcomer(name), count)
        return cluster.without(*without) if without else cluster


def read_run(path: Path, profiles: Path | None) -> Run:
    """Read a run's log, and the profiles of its model where a store is given."""
    with RunLogReader(path) as reader:
        records = reader.poll()
    with numbers_only(reader.path), naming(reader.path):
        cluster = learned_cluster(records)
    model = next(record.model for record in reversed(records) if isinstance(record, Header))
    stored, damaged = ({}, {}) if profiles is None else _read_profiles(profiles, model.profile_key)
    return Run(path=path, step=max(map(step_of, records)), cluster=cluster, stored=stored, damaged=damaged)


def _read_profiles(path: Path, key: str) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the profiles of a model in a store, by device, and what is wrong with those that are damaged."""
    from cannikin.runtime.profile_store import ProfileStore, find_damaged  # needs torch, which takes seconds to import

    if not path.is_file():
        raise InvalidInputError(f"--profiles {path}: there is no such file; give what the script has as profiles=")
    if not key:
        raise InvalidInputError(f"--profiles {path}: the log does not say which model ran, as that of a real run does")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        try:
            known = ProfileStore(path, key).known()
        except RuntimeWarning as warning:
            raise InvalidInputError(f"--profiles {path}: is no store of profiles") from warning
    damaged = find_damaged(known, path)
    return {device: profile for device, profile in known.items() if device not in damaged}, damaged


def advise(
    path: Path, without: tuple[str, ...], add: tuple[tuple[str, int], ...], profiles: Path | None, *, as_json: bool
) -> None:
    """Print what the job does now, and with the ranks asked for, or with one less and one more of each kind."""
    run = read_run(path, profiles)
    now = run.cluster.outlook()
    if now.reason:
        raise InvalidInputError(f"{path}: {now.reason}")
    asked = rank_numbers(without)
    choices = [_choice(run, asked, add)] if asked or add else list(_usual_choices(run))
    for device in () if asked or add else run.damaged:
        if device not in run.devices:
            click.echo(f"cannikin: left out: {words.printable(run.damaged[device])}", err=True)
    if as_json:
        click.echo(json.dumps(_as_json(run, now, choices), allow_nan=False))
    else:
        _print(run, now, choices)


def rank_numbers(without: Iterable[str]) -> tuple[int, ...]:
    """Return ranks that are given by number."""
    numbers: list[int] = []
    for text in without:
        if not text.isdecimal() or len(text) > _MAX_DIGITS:
            shown = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
            raise InvalidInputError(f"--without {shown}: of a run, give a rank by its number, from 0")
        if int(text) in numbers:
            raise InvalidInputError(f"--without {text}: is given twice, and a rank can leave once")
        numbers.append(int(text))
    return tuple(numbers)


def _choice(run: Run, without: tuple[int, ...], add: tuple[tuple[str, int], ...]) -> Choice:
    named = tuple((run.newcomer(name).device, count) for name, count in add)
    return Choice(without=without, add=named, outlook=run.changed(without, add).outlook())


def _usual_choices(run: Run) -> Iterator[Choice]:
    """Yield one choice for each rank that may leave, and for each device of which one more may join."""
    ranks = run.cluster.ranks
    if len(ranks) > _MAX_TRIED:
        found = (run.cluster.like(device) for device in dict.fromkeys(rank.device for rank in ranks))
        ranks = tuple(rank for rank in found if rank is not None)
    if run.cluster.num_ranks > 1:
        for rank in ranks:
            assert rank.rank is not None
            yield _choice(run, (rank.rank,), ())
    for device in run.devices:
        yield _choice(run, (), ((device, 1),))


# What programs read.


def _as_json(run: Run, now: Outlook, choices: list[Choice]) -> dict[str, Any]:
    listed = [
        {
            "without": list(choice.without),
            "add": [{"device": device, "count": count} for device, count in choice.add],
            "gain": choice.gain(now),
            **choice.outlook.as_dict(),
        }
        for choice in choices
    ]
    return {
        "format": FORMAT,
        "version": VERSION,
        "run": os.fspath(run.path),
        "step": run.step,
        "cluster": run.cluster.as_dict(),
        "now": now.as_dict(),
        "choices": listed,
    }


# What a person reads.


def _print(run: Run, now: Outlook, choices: list[Choice]) -> None:
    """Print a row for each choice, and the best and the cheapest of them in a sentence."""
    table = Table(box=box.SIMPLE_HEAD)
    for header in ("ranks", "total batch", "step time", "goodput/s", "gain"):
        table.add_column(header, justify="left" if header == "ranks" else "right", overflow="fold")
    table.add_row(f"now, {words.counted(run.cluster.num_ranks, 'rank')}", *_cells(now, now), "")
    for choice in choices:
        gain = choice.gain(now)
        cells = _cells(choice.outlook, now) if gain is not None else ("", "", "does not fit")
        mark = "*" if choice.outlook.extrapolated else ""
        table.add_row(_said(run, choice), *cells, "" if gain is None else f"{gain:+.1%}{mark}")
    parts: list[Text | Table] = [Text(f"{run.path}, after {words.counted(run.step, 'step')}", style="bold"), table]
    parts += [Text(text) for text in _notes(run, now, choices)]
    indented = [part if isinstance(part, Table) else Padding(part, (0, 0, 0, 1)) for part in parts]
    say(*indented, min_width=max(80, measured(table).minimum))


def _cells(outlook: Outlook, now: Outlook) -> tuple[str, str, str]:
    step_ms = words.figures(outlook.step_s * 1e3, now.step_s * 1e3)
    goodput = words.figures(outlook.goodput_per_s, now.goodput_per_s)
    return f"{outlook.total_batch:,}", f"{step_ms} ms", goodput


def _said(run: Run, choice: Choice) -> str:
    """Return a choice in words: "one more t4", "without rank 3 (a100)"."""
    devices = {rank.rank: rank.device for rank in run.cluster.ranks}
    added = [f"{'one' if count == 1 else count} more {words.printable(device)}" for device, count in choice.add]
    left = [words.rank_name(rank, words.printable(devices[rank])) for rank in choice.without]
    return " and ".join([*added, *(["without " + ", ".join(left)] if left else [])])


def _notes(run: Run, now: Outlook, choices: list[Choice]) -> Iterator[str]:
    gains = [(gain, choice) for choice in choices if (gain := choice.gain(now)) is not None]
    more = max((pair for pair in gains if pair[1].add), key=lambda pair: pair[0], default=None)
    fewer = max((pair for pair in gains if not pair[1].add), key=lambda pair: pair[0], default=None)
    said = [f"{_verb(gain)} {_from(run, choice)}" for gain, choice in filter(None, (more, fewer))]
    if said:
        yield f"This job would {', and '.join(said)}."
    for choice in choices:
        if choice.outlook.reason:
            yield f"{_said(run, choice).capitalize()}: {choice.outlook.reason}."
    if any(choice.outlook.extrapolated for choice in choices):
        yield "* a rank gets a batch far from all it was measured at: less certain"
    unknown = [str(rank.rank) for rank in run.cluster.ranks if not rank.known]
    if unknown:
        yield f"Rank {', '.join(unknown)} ran batches too alike to tell fixed from per-sample time: less certain."
    if run.cluster.num_ranks == 1 and any(choice.add for choice in choices):
        yield "One rank alone has no communication: what it costs among several is not known, and counts as nothing."


def _verb(gain: float) -> str:
    if round(abs(gain), 3) == 0:
        return "run as fast"
    return f"{'gain' if gain > 0 else 'lose'} {words.percent(abs(gain))}"


def _from(run: Run, choice: Choice) -> str:
    said = _said(run, choice)
    return f"from {said}" if choice.add and not choice.without else said
