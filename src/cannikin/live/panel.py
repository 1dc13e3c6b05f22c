"""What a live view looks like: the state of a run as a panel for rich, and as one line of text.

Lines are cut and framed here and not by rich's `Text` and `Panel`, with which a drawing takes three times as long: the
training waits while its own live view is drawn.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style

from cannikin.live.rank_table import Line, Look, Part, RankNow, bar, cells, rank_lines, rank_rows, ranks_now
from cannikin.live.state import LiveState
from cannikin.words import amount, clock, counted, percent, printable, rank_name, short_count, split_sum
from cannikin.words import use as use_words

_MAX_ROWS = 8  # ranks with a row of their own
_OTHER_LINES = 17  # that a panel has beside those rows
_LABEL = 14  # cells before a fact
_LEVELS = "▁▂▃▄▅▆▇█"  # of a sparkline
# For terminals that write ASCII only; each stands in one cell.
_AS_ASCII = dict(zip("█▓░▒━╸─│·×…▁▂▃▄▅▆▇", "#=.~##-||x~_.-==##", strict=True))


class LivePanel:
    """A run as it is now, for any width from about 60 columns on, with a note of the viewer's, if any."""

    def __init__(self, state: LiveState, note: str = "") -> None:
        self.state, self.note = state, note

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(20, options.max_width)
        max_rows = min(_MAX_ROWS, max(2, (options.height or console.height) - _OTHER_LINES))
        ascii_only = options.ascii_only
        coloured = console.color_system is not None and not console.no_color and not ascii_only
        look = Look(width - 4, *(("━", "━━━━") if coloured else ("─", "█▓░▒")))
        ranks = ranks_now(self.state)
        table = rank_lines(rank_rows(ranks, max_rows), look)
        sections = [_progress(self.state, look), table, _facts(self.state, ranks, look), _news(self.state, look)]
        styles: dict[str, Style | None] = {"": None}
        for line in _framed(_title(self.state, self.note, width - 6), [lines for lines in sections if lines], width):
            for text, style in line:
                if style not in styles:
                    styles[style] = console.get_style(style)
                if text:
                    yield Segment(_ascii(text) if ascii_only else text, styles[style])
            yield Segment.line()


def _framed(title: Line, sections: list[list[Line]], width: int) -> list[Line]:
    """Return lines of exactly this width: the title in the upper edge, a blank line between two sections."""
    inside = [line for section in sections for line in ([], *section)][1:]
    return [
        [("╭─ ", "dim"), *title, (" ─╮", "dim")],
        *([("│ ", "dim"), *_fitted(line, width - 4), (" │", "dim")] for line in inside),
        [("╰" + "─" * (width - 2) + "╯", "dim")],
    ]


def _fitted(line: Line, width: int) -> Line:
    """Return the line in exactly `width` cells, cut or filled, in which nothing moves the cursor."""
    whole = "".join([text for text, _ in line])
    room = width - cells(whole)
    if room >= 0 and whole.isprintable():  # as most lines are: looking at each part takes longer
        return [*line, (" " * room, "")]
    kept: Line = []
    room = width
    for text, style in line:
        shown = printable(text)
        size = cells(shown)
        if size > room:
            return [*kept, (set_cell_size(shown, room - 1) + "…" if room else "", style)]
        kept.append((shown, style))
        room -= size
    return [*kept, (" " * room, "")]


def _size(line: Line) -> int:
    return cells("".join([text for text, _ in line]))


def _ascii(text: str) -> str:
    return "".join(c if c.isascii() else _AS_ASCII.get(c, "?" * cell_len(c)) for c in text)


def _fact(label: str, *parts: Part) -> Line:
    return [(f"{label:<{_LABEL}}", "dim"), *parts]


def _title(state: LiveState, note: str, width: int) -> Line:
    """Return what ran at the left and where it is at the right; what does not fit is cut, the left first."""
    words, header = [], state.header
    if header is not None:
        words += [header.policy] if header.policy != "cannikin" else []
        words.append(counted(header.world_size, "rank"))
        size = header.model.num_parameters
        parameters = f", {short_count(size)} parameters" if size else ""
        words += [header.model.name + parameters] if header.model.name else []
    left: Line = [("cannikin", "bold"), *((f" · {word}", "") for word in words)]
    elapsed = "" if state.elapsed_ms is None else f" · {clock(state.elapsed_ms / 1e3)}"
    right: Line = [(f"step {state.step:,}{elapsed}", "bold")]
    if state.end is not None:
        right.append((f" · {state.end.ending}", "yellow" if state.end.is_early else "bold green"))
    elif note:
        right.append((f" · {note}", "yellow"))
    right = _fitted(right, min(_size(right), width - 2))
    left = _fitted(left, min(_size(left), max(0, width - 3 - _size(right))))
    return [*left, (f" {'─' * (width - 2 - _size(left) - _size(right))} ", "dim"), *right]


def _progress(state: LiveState, look: Look) -> list[Line]:
    """Return how far it is, as a bar with the time left, as far as that is known."""
    now, share = state.current_pass, state.goal_share
    if state.header is None:
        return [[("waiting for the run to begin", "dim")]]
    if now is None:
        unmeasured = "no step was measured" if state.end else "waiting for the first steps to be measured"
        return [] if state.window is not None else [[(unmeasured, "dim")]]
    words = f"epoch {now.epoch}"
    if share is not None and state.window is not None and state.window.progress is not None:
        words += f"  {state.window.progress:.2f} of {amount(now.goal or 0)} passes"
    else:
        share = state.pass_share
    if share is None:
        return [[(words, "bold")]]
    left = state.left_s
    until = "to its end" if now.goal is None else "left"
    after = f" {share:4.0%}" + ("" if left is None or state.end else f"  {clock(left)} {until}")
    size = max(4, look.width - len(words) - len(after) - 2)
    return [[(f"{words}  ", "bold"), *bar(share, size, "green", look), (after, "bold")]]


# Numbers of the whole run, and what happened.


def _facts(state: LiveState, ranks: list[RankNow], look: Look) -> list[Line]:
    if state.window is None:
        return []
    steps, totals = ([getattr(point, name) for point in state.points] for name in ("step_ms", "total_batch"))
    lines = [_with_spark(_step_time(state), steps, look), _with_spark(_total_batch(state), totals, look)]
    more = (_throughput(state), _use(state), _noise(state), _slowest(ranks))
    return [*lines, *(line for line in more if line is not None)]


def _with_spark(line: Line, values: list[float | None], look: Look) -> Line:
    """Return the line with a sparkline at its right end, where there is room and something to see."""
    used = _size(line)
    size = min(30, look.width - 62, look.width - used - 2)
    if size < 6 or len(values) < 2:
        return line
    drawn = sparkline(values, size)
    return [*line, (" " * (look.width - used - len(drawn)), ""), (drawn, "cyan")]


def _step_time(state: LiveState) -> Line:
    assert state.window is not None
    measured, predicted = state.window.step_ms, state.predicted_ms
    parts = [("not measured" if measured is None else f"{amount(measured)} ms", "bold")]
    if predicted is not None:
        parts.append((f", predicted {amount(predicted)} ms", ""))
        if measured is not None and predicted > 0:
            off = measured / predicted - 1
            parts.append((f" ({off:+.1%})", "green" if abs(off) < 0.05 else "yellow" if abs(off) < 0.2 else "red"))
    if state.wait_share is not None:
        parts.append((f"; ranks wait {state.wait_share:.0%} of it", ""))
    return _fact("step time", *parts)


def _total_batch(state: LiveState) -> Line:
    assert state.window is not None
    parts, planned = [(f"{state.window.total_batch:,}", "bold")], state.plan
    if planned is not None and planned.local_batches != state.window.local_batches:
        few = len(planned.local_batches) <= _MAX_ROWS
        total = split_sum(planned.local_batches) if few else f"{planned.total_batch:,}"
        parts.append((f", from step {planned.first_step:,} on {total}", "cyan"))
    if state.header is not None:
        job = state.header.job
        bounds = f"{job.batch_size:,} to {job.max_batch_size:,}" if job.max_batch_size else "fixed"
        parts.append((f" ({bounds})", "dim"))
    return _fact("total batch", *parts)


def _throughput(state: LiveState) -> Line | None:
    pace, share, goodput = state.speed
    if pace is None:
        return None
    parts = [(f"{amount(pace)} samples/s", "bold")]
    if goodput is not None and share is not None:
        parts.append((f", goodput {amount(goodput)}/s ({share:.0%} efficient)", ""))
    return _fact("throughput", *parts)


def _use(state: LiveState) -> Line | None:
    use = state.use
    if use is None:
        return None
    share, rest = use_words(use, state.even_speed).split(" ", 1)
    return _fact("use", (share, "bold"), (f" {rest}", ""))


def _noise(state: LiveState) -> Line | None:
    assert state.window is not None
    noise, factor = state.window.noise, state.window.lr_factor
    parts: list[Part] = []
    if noise is not None:
        parts.append(("not known" if noise.noise_scale is None else amount(noise.noise_scale), "bold"))
        if noise.low is not None or noise.high is not None:
            low = "0" if noise.low is None else amount(noise.low)
            parts.append((f" ({low} to {'any' if noise.high is None else amount(noise.high)})", ""))
    if factor is not None:
        parts += [(" · learning rate ", "dim")] if parts else []
        parts.append((f"×{amount(factor)}", "bold"))
    return _fact("noise scale" if noise is not None else "learning rate", *parts) if parts else None


def _slowest(ranks: list[RankNow]) -> Line | None:
    paces = [(rank.ms_per_sample, rank) for rank in ranks if rank.ms_per_sample is not None]
    if len(paces) < 2:
        return None
    (slow, slowest), (fast, fastest) = max(paces), min(paces)
    parts = [(rank_name(slowest.rank, slowest.device), "bold"), (f": {amount(slow)} ms/sample", "")]
    parts += [(f", {slow / fast:.1f}× {rank_name(fastest.rank)}", "")] if fast > 0 else []
    return _fact("slowest", *parts)


def _news(state: LiveState, look: Look) -> list[Line]:
    """Return the last evaluation, the last plan's reason and the last events."""
    lines = []
    if state.metrics:
        words = ", ".join(f"{name} {amount(value)}" for name, value in state.metrics.items())
        lines.append(_fact("evaluation", (words, "bold"), (f"  at step {state.metrics_step:,}", "dim")))
    if state.plan is not None:
        reason = f"{state.plan.reason} ({state.plan.phase}, step {state.plan.step:,})"
        rows = textwrap.wrap(" ".join(reason.split()), max(10, look.width - _LABEL), max_lines=3, placeholder="…")
        lines += [_fact("" if i else "last plan", (text, "")) for i, text in enumerate(rows)]
    for i, event in enumerate(state.events):
        style = "yellow" if event.kind in ("changed_speed", "nonfinite", "out_of_memory") else ""
        words = event.text or event.kind
        lines.append(_fact("" if i else "events", (f"step {event.step:,}  ", "dim"), (words, style)))
    return lines


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return the last `width` values as small bars between their extremes; blank where there is none.

    What changes by less than a quarter does not fill the height: noise is to look like noise.

    Example:
        >>> sparkline([1.0, None, 8.0, 4.0], 4), sparkline([50.0, 51.0, 50.0], 3)
        ('▁ █▄', '▁▁▁')
    """
    shown = values[-width:] if width > 0 else []
    known = [value for value in shown if value is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    span = max(high - low, abs(high) / 4, 1e-12)
    shares = [None if value is None else min(1.0, max(0.0, (value - low) / span)) for value in shown]  # NaN becomes 0
    return "".join(" " if share is None else _LEVELS[int(share * (len(_LEVELS) - 1))] for share in shares)


# One line.


def status_line(state: LiveState) -> str:
    """Return the run as it is now in one line, for a log that no terminal shows.

    Example:
        >>> status_line(LiveState())
        'cannikin: the run has not begun'
    """
    if state.header is None:
        return "cannikin: the run has not begun"
    words = [f"step {state.step:,}"]
    if state.current_pass is not None:
        words.append(f"epoch {state.current_pass.epoch}")
    share = state.goal_share if state.goal_share is not None else state.pass_share
    if share is not None:
        left = None if state.end is not None else state.left_s
        words.append(f"{share:.0%}" + ("" if left is None else f", {clock(left)} left"))
    window = state.window
    if window is not None:
        words.append(f"total batch {split_sum(window.local_batches, plus='+')}")
        measured = "step not measured" if window.step_ms is None else f"step {amount(window.step_ms)} ms"
        words.append(measured + ("" if state.predicted_ms is None else f" (predicted {amount(state.predicted_ms)})"))
        words += [f"waiting {state.wait_share:.0%}"] if state.wait_share is not None else []
        use, even_speed = state.use, state.even_speed
        if use is not None:
            words.append(f"use {percent(use)}" + (f" (DDP {percent(use * even_speed)})" if even_speed else ""))
        scale = None if window.noise is None else window.noise.noise_scale
        words += [f"noise scale {amount(scale)}"] if scale else []
        words += [f"learning rate x{amount(window.lr_factor)}"] if window.lr_factor is not None else []
    words += [f"{name} {amount(value)}" for name, value in state.metrics.items()]
    return printable("cannikin: " + ", ".join(words))
