"""A run in one line, for a log that no terminal shows."""

from __future__ import annotations

from cannikin.report.live_state import LiveState
from cannikin.words import amount, clock, printable, split_sum

__all__ = ["status_line"]


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
        words.append(f"total batch {split_sum(window.local_batches, plus='+')}")
        measured = "step not measured" if window.step_ms is None else f"step {amount(window.step_ms)} ms"
        words.append(measured + ("" if state.predicted_ms is None else f" (predicted {amount(state.predicted_ms)})"))
        words += [f"waiting {state.wait_share:.0%}"] if state.wait_share is not None else []
        words += (
            [f"noise scale {amount(window.noise.noise_scale)}"] if window.noise and window.noise.noise_scale else []
        )
        words += [f"learning rate x{amount(window.lr_factor)}"] if window.lr_factor is not None else []
    words += [f"{name} {amount(value)}" for name, value in state.metrics.items()]
    return printable("cannikin: " + ", ".join(words))
