"""The `weightwire` command."""

from __future__ import annotations

import gc
import sys
from importlib.metadata import version
from typing import Annotated

import typer
from rich.markup import escape
from typer.exceptions import TyperException

from weightwire.service.cli import bench, follow, inspect, limit, load, plan, pull, serve, source
from weightwire.service.cli.exit_codes import DONE, FAILED, WRONG_USAGE
from weightwire.service.cli.output import fail, print_json, stderr
from weightwire.service.settings import check_environment
from weightwire.transfer.errors import CancelledError, TransferError

app = typer.Typer(
    name="weightwire",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Gives a new inference instance its weights from instances that already hold them, every byte verified.\n\n"
    "Start with [bold]weightwire serve[/], then [bold]weightwire source[/] where the weights are, and "
    "[bold]weightwire pull[/] where they are wanted. [bold]weightwire plan[/] shows what would move.",
)
app.command("serve")(serve.serve)
app.command("source")(source.source)
app.command("pull")(pull.pull)
app.command("plan")(plan.plan)
app.command("load")(load.load)
app.command("inspect")(inspect.inspect)
app.command("status")(follow.status)
app.command("cancel")(follow.cancel)
app.command("limit")(limit.limit)
app.add_typer(bench.app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"weightwire {version('weightwire')}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code: 0 done, 1 failed, 2 usage, 3 cancelled, 4 deadline."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # What the imports made lives as long as the process: a collection in the middle of a transfer need not walk it.
    gc.freeze()
    sys.exit(run(arguments))


def run(arguments: list[str]) -> int:
    """Run one command; returns its exit code. Every failure is printed, in JSON if the command was asked for it."""
    as_json = "--json" in arguments
    try:
        check_environment()
        result = app(arguments, standalone_mode=False)
    except TyperException as error:
        if as_json:
            print_json({"error": {"code": "usage", "detail": error.format_message()}})
        # Without a command the help is printed already, and there is nothing to say.
        if message := error.format_message():
            stderr.print(f"[bold red]usage[/]: {escape(message)}; --help says more", highlight=False)
        return WRONG_USAGE
    except typer.Exit as stop:
        return stop.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return fail(CancelledError("cancelled from the keyboard"), as_json=as_json)
    except TransferError as error:
        return fail(error, as_json=as_json)
    except OSError as error:
        # Such as a full disk behind stdout: nothing of ours, and nothing that a traceback would explain.
        stderr.print(f"[bold red]error[/] {escape(str(error))}", highlight=False)
        return FAILED
    return result if isinstance(result, int) else DONE
