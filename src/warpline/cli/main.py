"""The `warpline` command: its verbs, and how every error becomes one line and an exit code."""

from __future__ import annotations

import errno
import logging
import os
import sys
from typing import Annotated, NoReturn

import typer

from warpline import __version__
from warpline.cli import (
    batch,
    bench,
    bench_serve,
    chat,
    diff,
    doctor,
    evaluate,
    export,
    generate,
    hf,
    interrupt,
    kernels,
    ladder,
    models,
    profile,
    serve,
    tune,
)
from warpline.cli.common import DefaultGroup
from warpline.errors import WarplineError

BAD_INPUT, CLOSED_PIPE = 2, 141
_COMPLETION = "_WARPLINE_COMPLETE"

app = typer.Typer(
    help="Fast GPT-2 inference on GPUs and CPUs, and the instruments that measure it.",
    no_args_is_help=True,
    rich_markup_mode=None,  # panels show a flag's type and leave little room for text at 80 columns
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Any command takes --debug: full tracebacks and a log (or set WARPLINE_DEBUG=1).",
)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("serve")(serve.serve)
app.command("batch")(batch.batch)
app.command("models")(models.models)
app.command("export")(export.export)
benches = typer.Typer(cls=DefaultGroup)
benches.command(DefaultGroup.DEFAULT, epilog="A server is measured by warpline bench serve.")(bench.bench)
benches.command("serve")(bench_serve.serve)
app.add_typer(benches, name="bench", help=bench.bench.__doc__)
app.add_typer(kernels.app, name="kernels")
app.command("ladder")(ladder.ladder)
app.command("tune")(tune.tune)
app.command("profile")(profile.profile)
app.command("hf")(hf.hf)
app.command("diff")(diff.diff)
app.command("eval")(evaluate.evaluate)
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


class _OneLine(logging.Handler):
    """Prints a log record as a line on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is not None:
            word = "note" if record.levelno <= logging.WARNING else "error"
            sys.stderr.write(f"{word}: {record.getMessage()}\n")


def _set_up_logging(debug: bool) -> None:
    log = logging.getLogger("warpline")
    log.handlers = [_OneLine()]
    log.setLevel(logging.DEBUG if debug else logging.WARNING)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    debug = "--debug" in options or os.environ.get("WARPLINE_DEBUG", "0") not in ("", "0")
    if "--debug" in options:
        arguments.remove("--debug")
    _set_up_logging(debug)
    if sys.stdout is None:
        sys.exit(_complain("standard output is closed: there is nowhere to print to"))
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows "?"
    code = _run(arguments, debug)
    interrupt.leave_at_once()
    sys.exit(code)


def _run(arguments: list[str], debug: bool) -> int:
    try:
        if _COMPLETION in os.environ:  # a shell asks for completions of a line
            app(arguments, prog_name="warpline")
        # Not app(), which would turn interrupts and closed pipes into its own exit codes.
        command, code = typer.main.get_command(app), 0
        try:
            with command.make_context("warpline", arguments) as context:
                command.invoke(context)
        except typer.Exit as done:
            code = done.exit_code
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output has ended, which is no error
        _discard_output()
        return CLOSED_PIPE
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped\n")
        return interrupt.INTERRUPTED
    except Exception as error:
        message = _explanation(error)
        if message is None or debug:
            raise
        return _complain(message) if message else BAD_INPUT


def _explanation(error: Exception) -> str | None:
    """Return one line about an error of the user's, empty if it has been shown; None for a bug."""
    if isinstance(error, WarplineError):
        return str(error)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        _discard_output()
        return "the output cannot be written: no space is left there"
    # A usage error; its class is in click or inside typer, depending on typer's version.
    explain = getattr(error, "format_message", None)
    if explain is None:
        return None
    message = str(explain()).rstrip(".")
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stderr.write(f"{message}\n")
        return ""
    path = getattr(getattr(error, "ctx", None), "command_path", "warpline")
    return f"{message}; see {path} --help" if message else ""


def _discard_output() -> None:
    """Redirect standard output, so that the flush at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str) -> int:
    if sys.stderr is not None:
        sys.stderr.write(f"error: {' '.join(message.split())}\n")
    return BAD_INPUT
