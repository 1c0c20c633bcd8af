"""The `leadline` command. Sub-commands are imported when they run, so that help is quick."""

from __future__ import annotations

import importlib
import io
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from leadline import __version__
from leadline.cli.options import flat, note
from leadline.errors import LeadlineError

_COMMANDS = {
    "generate": "Continue a text.",
    "chat": "Talk to the model.",
    "serve": "Serve the model over HTTP: OpenAI's and Anthropic's protocols.",
    "bench": "Measure a running server.",
    "verify": "Check this machine's results against a recording.",
    "plan": "Show a model's layers, sizes and memory needs, from its configuration alone.",
    "ops": "List the operators, their implementations and what runs here.",
}


class _LazyGroup(TyperGroup):
    """Lists commands by their one-line help; imports only the one that runs."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return TyperCommand(cmd_name, help=_COMMANDS[cmd_name]) if cmd_name in _COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and _load(str(command.name)), rest


def _load(name: str) -> Any:
    found = getattr(importlib.import_module(f"leadline.cli.{name}"), name)
    if not isinstance(found, typer.Typer):  # that is a group of commands
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command(name)(flat(found))
        found = single
    command = typer.main.get_command(found)
    command.name = name
    return command


app = typer.Typer(cls=_LazyGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """DeepSeek V4.1 inference: exact, small, readable."""


def main() -> None:
    """Runs the command line. Errors end it with one red line on stderr: wrong usage with status 2, our own errors and
    those of files and devices (a full disk behind stdout) with status 1; Ctrl-C ends it with status 130. A standard
    stream that is closed is empty. Output is UTF-8 like input, whatever the locale."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (for as long as we run)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")  # escapes: of names that are not text
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], prog_name="leadline", standalone_mode=False))
    except LeadlineError as error:
        message, status = str(error), 1
    except typer.TyperException as error:  # the context says which command was meant
        where = getattr(error, "ctx", None)
        hint = f"; see `{where.command_path} --help`" if where is not None else ""
        message, status = f"{error.format_message().rstrip('.')}{hint}", error.exit_code
    except OSError as error:  # a write to stdout knows no file name
        message, status = f"{error.filename or 'stdout'}: {error.strerror or error}", 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left of the output would fail again at the end
    note("error: " + message.replace("\n", " "), style="red")
    sys.exit(status)
