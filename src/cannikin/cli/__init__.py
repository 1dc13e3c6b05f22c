"""The `cannikin` command: one file per verb, imported only when that verb is used.

Whatever goes wrong on purpose ends in one line on stderr: exit status 2 for bad input, 1 where the output could not be
written.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, NoReturn

import click

from cannikin._version import __version__
from cannikin.errors import CannikinError, InvalidInputError
from cannikin.words import printable

# Verb -> its line in `cannikin --help`. The verb's module has it as `command`.
_VERBS = {
    "demo": "Train on ranks of different speed under several policies, and compare.",
    "plan": "The best split of a total batch over a cluster's ranks.",
    "simulate": "What a cluster would do with a job, in simulated time.",
    "lab": "Run a torchrun script on a cluster of unlike ranks, made on this machine.",
    "doctor": "What this machine and launch environment offer, and what will limit a run.",
    "report": "One HTML page of one run, or of several side by side.",
    "trace": "Steps of a run, rank by rank, as a file that Perfetto opens.",
    "watch": "The live view over the log of a run, from another terminal.",
    "bench": "Moved: in a checkout of cannikin, run python -m benchmarks paper.",  # goes with the next release
}


class _Verbs(click.Group):
    """A group whose verbs are imported when used and whose errors are one line each."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        command: click.Command = _bench if cmd_name == "bench" else import_module(f"cannikin.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):  # from the table: help imports no verb
            formatter.write_dl(list(_VERBS.items()))

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the verb and exit with its status."""
        kwargs["standalone_mode"] = False
        try:
            status = super().main(*args, **kwargs)
        except click.ClickException as error:
            _fail(_usage_message(error), error.exit_code)
        except click.Abort:
            _fail("interrupted", 130)
        except CannikinError as error:
            _fail(str(error), 2)
        except OSError as error:
            _fail(f"output could not be written: {error.strerror}", 1)
        sys.exit(status if isinstance(status, int) else 0)


@click.command("bench", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def _bench() -> None:
    """Moved: in a checkout of cannikin, run python -m benchmarks paper."""
    raise InvalidInputError("bench has moved: in a checkout of cannikin, run python -m benchmarks paper (same options)")


def _usage_message(error: click.ClickException) -> str:
    """Return click's message, with the command whose help says more."""
    context = getattr(error, "ctx", None)
    hint = f" (see '{context.command_path} --help')" if context is not None else ""
    return error.format_message().rstrip(".") + hint


def _fail(message: str, status: int) -> NoReturn:
    click.echo(f"cannikin: {printable(message)}", err=True)
    sys.exit(status)


@click.command(
    "cannikin",
    cls=_Verbs,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="cannikin")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Data-parallel training at the best speed a cluster of unlike GPUs can give."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
