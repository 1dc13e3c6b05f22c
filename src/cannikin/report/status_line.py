"""A run in one line, for a log that no terminal shows."""

from __future__ import annotations

from cannikin.report.live_lines import clock, number, printable
from cannikin.report.live_state import LiveState

__all__ = ["status_line"]

_MOST_BATCHES = 8  # local batches that are listed one by one


def status_line(state: LiveState) -> str:
    """The run as it is now.

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
        words.append(f"total batch {window.total_batch:,}{_split(window.local_batches)}")
        measured = "step not measured" if window.step_ms is None else f"step {number(window.step_ms)} ms"
        words.append(measured + ("" if state.predicted_ms is None else f" (predicted {number(state.predicted_ms)})"))
        words += [f"waiting {state.wait_share:.0%}"] if state.wait_share is not None else []
        words += (
            [f"noise scale {number(window.noise.noise_scale)}"] if window.noise and window.noise.noise_scale else []
        )
        words += [f"learning rate x{number(window.lr_factor)}"] if window.lr_factor is not None else []
    words += [f"{name} {number(value)}" for name, value in state.metrics.items()]
    return printable("cannikin: " + ", ".join(words))


def _split(batches: tuple[int, ...]) -> str:
    if len(batches) > _MOST_BATCHES:
        return f" ({min(batches)} to {max(batches)} a rank)"
    return f" = {'+'.join(map(str, batches))}" if len(batches) > 1 else ""
