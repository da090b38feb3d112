"""Entry point of `vidgen`: collects the sub-commands and turns every user error into one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points

import typer
from typer.exceptions import TyperException

import vidgen
from vidgen.cli.convert import app as convert_app
from vidgen.cli.data import app as data_app
from vidgen.cli.demo import demo
from vidgen.cli.direct import direct
from vidgen.cli.doctor import doctor
from vidgen.cli.generate import generate
from vidgen.cli.lm import app as lm_app
from vidgen.cli.train import train
from vidgen.cli.world import app as world_app

USER_ERROR = 2
INTERRUPTED = 130

app = typer.Typer(
    name="vidgen",
    help="Long videos with causal video diffusion. `vidgen COMMAND --help` explains a command.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command()(generate)
app.command(context_settings={"allow_extra_args": False})(train)
app.command()(direct)
app.command()(doctor)
app.command()(demo)
app.add_typer(convert_app, name="convert")
app.add_typer(data_app, name="data")
app.add_typer(lm_app, name="lm")
app.add_typer(world_app, name="world")


def _print_version(requested: bool) -> None:
    if requested:
        print(f"vidgen {vidgen.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Show the version."),
) -> None:
    pass


def add_installed_commands() -> None:
    """Adds the sub-commands of other packages: entry points of group `vidgen.commands` that name a `typer.Typer`."""
    taken = {group.name for group in app.registered_groups}
    for entry_point in entry_points(group="vidgen.commands"):
        if entry_point.name not in taken:
            app.add_typer(entry_point.load(), name=entry_point.name)


def report(error: BaseException) -> None:
    """Prints an error as one line on stderr, or as a traceback where VIDGEN_DEBUG is set."""
    if os.environ.get("VIDGEN_DEBUG"):
        raise error
    text = error.format_message() if isinstance(error, TyperException) else str(error)
    text = " ".join(text.split()).removeprefix("Invalid value: ")
    print(f"error: {text or type(error).__name__}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: Words after the program's name; None takes them from the process.

    Returns:
        Exit code: 0 done, 2 for what the user can put right, 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        add_installed_commands()
        code = app(arguments or ["--help"], prog_name="vidgen", standalone_mode=False)
    except (TyperException, ValueError, OSError, ImportError, MemoryError) as error:
        report(error)
        return USER_ERROR
    except typer.Abort:
        return INTERRUPTED
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
