"""What a live view looks like: the state of a run as a panel for rich."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment

from cannikin.report.live_lines import (
    ASCII,
    COLOURED,
    UNCOLOURED,
    Glyphs,
    Line,
    bar,
    fitted,
    sparkline,
    wrapped,
)
from cannikin.report.live_ranks import TRACK_STYLE, device_of, extremes, rank_lines, rank_rows
from cannikin.report.live_state import LiveState
from cannikin.words import amount, clock, counted, rank_name, short_count, split_sum

__all__ = ["LivePanel"]

_MAX_ROWS = 8  # ranks with a row of their own
_OTHER_LINES = 16  # that a panel has beside those rows
_LABEL = 14  # cells before a fact


class LivePanel:
    """A run as it is now, for any width from about 60 columns on.

    Args:
        state: what is known; later changes of it show when drawn again.
        note: of the viewer, such as that nothing has come for a while; "" for none.
    """

    def __init__(self, state: LiveState, note: str = "") -> None:
        self.state, self.note = state, note

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(20, options.max_width)
        max_rows = min(_MAX_ROWS, max(2, (options.height or console.height) - _OTHER_LINES))
        glyphs = COLOURED if console.color_system and not console.no_color else UNCOLOURED
        glyphs = ASCII if options.ascii_only else glyphs
        for line in panel_lines(self.state, self.note, width, max_rows, glyphs):
            for text, style in line:
                yield Segment(text, console.get_style(style) if style else None)
            yield Segment.line()


def panel_lines(state: LiveState, note: str, width: int, max_rows: int, glyphs: Glyphs) -> list[Line]:
    """The panel in lines of exactly this width."""
    inner = width - 4
    sections = [_progress(state, inner, glyphs)]
    rows = rank_rows(state, max_rows)
    if rows:
        sections.append(rank_lines(rows, inner, glyphs))
    sections.append(_facts(state, inner, glyphs))
    happened = _happened(state, inner)
    if happened:
        sections.append(happened)
    edge = (glyphs.down, "dim")
    lines = [_border(_title(state, glyphs), _right_title(state, note, glyphs), width, glyphs)]
    for i, section in enumerate(section for section in sections if section):
        if i:
            lines.append([edge, (" " * (width - 2), ""), edge])
        lines += [[edge, (" ", ""), *fitted(line, inner, glyphs), (" ", ""), edge] for line in section]
    lines.append([(glyphs.corners[2] + glyphs.across * (width - 2) + glyphs.corners[3], "dim")])
    return lines


def _border(left: Line, right: Line, width: int, glyphs: Glyphs) -> Line:
    """The upper edge with words in it; what does not fit is cut, the left first."""
    right_size = _size(right)
    if right_size > width - 8:
        right, right_size = fitted(right, width - 8, glyphs), width - 8
    room = width - 6 - (right_size + 3 if right else 0)
    cut = [(text, style) for text, style in fitted(left, max(room, 0), glyphs)]
    while cut and not cut[-1][0].strip():
        cut.pop()
    size = _size(cut)
    filling = glyphs.across * max(0, width - 6 - size - (right_size + 2 if right else 0))
    line: Line = [(glyphs.corners[0] + glyphs.across + " ", "dim"), *cut, (" " + filling, "dim")]
    line += [(" ", ""), *right, (" ", "")] if right else []
    return [*line, (glyphs.across + glyphs.corners[1], "dim")]


def _size(line: Line) -> int:
    """Its cells: not every letter takes one."""
    return sum(cell_len(text) for text, _ in line)


def _title(state: LiveState, glyphs: Glyphs) -> Line:
    header = state.header
    if header is None:
        return [("cannikin", "bold")]
    words = [header.policy] if header.policy != "cannikin" else []
    words.append(counted(header.world_size, "rank"))
    if header.model.name:
        size = header.model.num_parameters
        words.append(header.model.name + (f", {short_count(size)} parameters" if size else ""))
    return [("cannikin", "bold"), *[(f" {glyphs.dot} {word}", "") for word in words]]


def _right_title(state: LiveState, note: str, glyphs: Glyphs) -> Line:
    elapsed = "" if state.elapsed_ms is None else f" {glyphs.dot} {clock(state.elapsed_ms / 1e3)}"
    words: Line = [(f"step {state.step:,}{elapsed}", "bold")]
    if state.end is not None:
        words.append((f" {glyphs.dot} ended", "bold green"))
    elif note:
        words.append((f" {glyphs.dot} {note}", "yellow"))
    return words


def _progress(state: LiveState, width: int, glyphs: Glyphs) -> list[Line]:
    """How far it is, as a bar with the time left, as far as that is known."""
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
    size = max(4, width - len(words) - len(after) - 2)
    done = bar(share, size, glyphs)
    return [
        [(f"{words}  ", "bold"), (done, "green"), (glyphs.track * (size - len(done)), TRACK_STYLE), (after, "bold")]
    ]


def _fact(label: str, *parts: tuple[str, str]) -> Line:
    return [(f"{label:<{_LABEL}}", "dim"), *parts]


def _facts(state: LiveState, width: int, glyphs: Glyphs) -> list[Line]:
    """Total batch, speed, noise and rates."""
    if state.window is None:
        return []
    spark = max(0, min(30, width - 62))
    lines = [_with_spark(_step_time(state), [point.step_ms for point in state.points], width, spark, glyphs)]
    totals = [float(point.total_batch) for point in state.points]
    lines.append(_with_spark(_total_batch(state, glyphs), totals, width, spark, glyphs))
    lines += [line for line in (_goodput(state, glyphs), _noise(state, glyphs), _slowest(state, glyphs)) if line]
    return lines


def _with_spark(line: Line, values: list[float | None] | list[float], width: int, size: int, glyphs: Glyphs) -> Line:
    """The line with a sparkline at its right end, where there is room and something to see."""
    used = sum(len(text) for text, _ in line)
    size = min(size, width - used - 2)
    if size < 6 or len(values) < 2:
        return line
    drawn = sparkline(values, size, glyphs)
    return [*line, (" " * (width - used - len(drawn)), ""), (drawn, "cyan")]


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


def _total_batch(state: LiveState, glyphs: Glyphs) -> Line:
    assert state.window is not None
    total, planned = state.window.total_batch, state.plan
    parts = [(f"{total:,}", "bold")]
    if planned is not None and planned.local_batches != state.window.local_batches:
        parts.append((f", from step {planned.first_step:,} on {split_sum(planned.local_batches)}", "cyan"))
    job = None if state.header is None else state.header.job
    if job is not None:
        bounds = f"{job.batch_size:,} to {job.max_batch_size:,}" if job.max_batch_size else "fixed"
        parts.append((f" ({bounds})", "dim"))
    return _fact("total batch", *parts)


def _goodput(state: LiveState, glyphs: Glyphs) -> Line | None:
    pace, goodput, share = state.samples_per_s, state.goodput, state.efficiency
    if pace is None:
        return None
    parts = [(f"{amount(pace)} samples/s", "bold")]
    if goodput is not None and share is not None:
        parts.append((f", goodput {amount(goodput)}/s ({share:.0%} efficient)", ""))
    return _fact("throughput", *parts)


def _noise(state: LiveState, glyphs: Glyphs) -> Line | None:
    assert state.window is not None
    noise, factor = state.window.noise, state.window.lr_factor
    parts: Line = []
    if noise is not None:
        scale = "not known" if noise.noise_scale is None else amount(noise.noise_scale)
        parts.append((scale, "bold"))
        if noise.low is not None or noise.high is not None:
            low = "0" if noise.low is None else amount(noise.low)
            parts.append((f" ({low} to {'any' if noise.high is None else amount(noise.high)})", ""))
    if factor is not None:
        parts += [(f" {glyphs.dot} learning rate ", "dim")] if parts else []
        parts.append((f"{glyphs.times}{amount(factor)}", "bold"))
    return _fact("noise scale" if noise is not None else "learning rate", *parts) if parts else None


def _slowest(state: LiveState, glyphs: Glyphs) -> Line | None:
    found = extremes(state)
    if found is None:
        return None
    (slowest, slow), (fastest, fast) = found
    parts = [(rank_name(slowest, device_of(state, slowest)), "bold"), (f": {amount(slow)} ms/sample", "")]
    if fast > 0:
        parts.append((f", {slow / fast:.1f}{glyphs.times} rank {fastest}", ""))
    return _fact("slowest", *parts)


def _happened(state: LiveState, width: int) -> list[Line]:
    """The last evaluation, the last plan's reason and the last events."""
    lines: list[Line] = []
    if state.metrics:
        words = ", ".join(f"{name} {amount(value)}" for name, value in state.metrics.items())
        lines.append(_fact("evaluation", (words, "bold"), (f"  at step {state.metrics_step:,}", "dim")))
    if state.plan is not None:
        reason = wrapped(f"{state.plan.reason} ({state.plan.phase}, step {state.plan.step:,})", width - _LABEL, 3)
        lines += [_fact("" if i else "last plan", (text, "")) for i, text in enumerate(reason)]
    for i, event in enumerate(state.events):
        style = "yellow" if event.kind in ("changed_speed", "nonfinite", "oom") else ""
        words = event.text or event.kind
        lines.append(_fact("" if i else "events", (f"step {event.step:,}  ", "dim"), (words, style)))
    return lines
