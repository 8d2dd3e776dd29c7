"""The `warpline` command: its verbs, and how every error becomes one line and an exit code."""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated, NoReturn

import typer

from warpline import __version__
from warpline.cli import doctor, export, generate, kernels, models
from warpline.errors import WarplineError

BAD_INPUT, INTERRUPTED, CLOSED_PIPE = 2, 130, 141

app = typer.Typer(
    help="GPT-2 inference at the speed of memory, and the instruments that prove it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Any command takes --debug: full tracebacks and a log (or set WARPLINE_DEBUG=1).",
)
app.command("generate")(generate.generate)
app.command("models")(models.models)
app.command("export")(export.export)
app.add_typer(kernels.app, name="kernels")
app.command("doctor")(doctor.doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"warpline {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        word = "note" if record.levelno <= logging.WARNING else "error"
        return f"{word}: {record.getMessage()}"


def _set_up_logging(debug: bool) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine())
    log = logging.getLogger("warpline")
    log.handlers = [handler]
    log.setLevel(logging.DEBUG if debug else logging.WARNING)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    debug = "--debug" in options or os.environ.get("WARPLINE_DEBUG", "0") not in ("", "0")
    if "--debug" in options:
        arguments.remove("--debug")
    _set_up_logging(debug)
    sys.exit(_run(arguments, debug))


def _run(arguments: list[str], debug: bool) -> int:
    try:
        # Not app(): that would turn interrupts and closed pipes into exit codes of its own.
        command = typer.main.get_command(app)
        with command.make_context("warpline", arguments) as context:
            command.invoke(context)
        sys.stdout.flush()
        return 0
    except typer.Exit as done:
        return done.exit_code
    except WarplineError as error:
        if debug:
            raise
        return _complain(str(error))
    except BrokenPipeError:
        # Whoever read our output went away, which is no error; nothing may be flushed into the pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped\n")
        return INTERRUPTED
    except Exception as error:
        # Wrong usage; the class lives in click or inside typer, depending on typer's version.
        explain = getattr(error, "format_message", None)
        if explain is None or debug:
            raise
        path = getattr(getattr(error, "ctx", None), "command_path", "warpline")
        return _complain(f"{explain().rstrip('.')}; see {path} --help")


def _complain(message: str) -> int:
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    return BAD_INPUT
