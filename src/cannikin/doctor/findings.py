"""What a finding is, and the words for counts and sizes in them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LEVELS", "Finding", "blocker", "counted", "gib", "note", "ok", "rate", "warning"]

LEVELS = ("ok", "note", "warning", "blocker")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Args:
        subject: what, in a word or two.
        level: "ok", "note" (worth knowing), "warning" (it will cost speed or samples, or break a likely launch) or
            "blocker" (training is impossible as things are).
        text: what is so.
        advice: what to do about it, one sentence; "" where there is nothing to do.
        limits: how it will limit a run, a few words for the summary; "" where it will not.
    """

    subject: str
    level: str
    text: str
    advice: str = ""
    limits: str = ""


def ok(subject: str, text: str, *, limits: str = "") -> Finding:
    """As it should be."""
    return Finding(subject=subject, level="ok", text=text, limits=limits)


def note(subject: str, text: str, advice: str = "", *, limits: str = "") -> Finding:
    """Worth knowing."""
    return Finding(subject=subject, level="note", text=text, advice=advice, limits=limits)


def warning(subject: str, text: str, advice: str, *, limits: str = "") -> Finding:
    """Will cost speed or break a likely launch."""
    return Finding(subject=subject, level="warning", text=text, advice=advice, limits=limits)


def blocker(subject: str, text: str, advice: str, *, limits: str = "") -> Finding:
    """Makes training impossible."""
    return Finding(subject=subject, level="blocker", text=text, advice=advice, limits=limits or text)


def counted(number: float, noun: str) -> str:
    """How many, with the noun in the right number.

    >>> counted(1, "GPU"), counted(2.5, "core")
    ('1 GPU', '2.5 cores')
    """
    return f"{number:g} {noun}{'' if number == 1 else 's'}"


def gib(num_bytes: float) -> str:
    """A size as people say it.

    >>> gib(64 * 2**20), gib(40 * 2**30), gib(1.5 * 2**30)
    ('64 MiB', '40 GiB', '1.5 GiB')
    """
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:.0f} MiB"
    size = num_bytes / 2**30
    return f"{size:.0f} GiB" if size >= 10 or size == int(size) else f"{size:.1f} GiB"


def rate(speed_mbit: float) -> str:
    """A link's speed as people say it.

    >>> rate(100), rate(2500), rate(100_000)
    ('100 Mbit/s', '2.5 Gbit/s', '100 Gbit/s')
    """
    return f"{speed_mbit / 1000:g} Gbit/s" if speed_mbit >= 1000 else f"{speed_mbit:g} Mbit/s"
