"""`cannikin bench`: says where the paper's evaluation is now; goes with the next release."""

from __future__ import annotations

import click

from cannikin.errors import InvalidInputError


@click.command("bench", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def command() -> None:
    """Moved: in a checkout of cannikin, run python -m benchmarks paper."""
    raise InvalidInputError("bench has moved: in a checkout of cannikin, run python -m benchmarks paper (same options)")
