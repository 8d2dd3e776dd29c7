"""`warpline chat`: talk to a model, or write a text together, in a terminal."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from warpline.cli import interrupt
from warpline.cli.common import (
    NEW_TOKENS,
    Device,
    Dtype,
    KvDtype,
    RepetitionPenalty,
    Seed,
    Speculate,
    SpeculativeTable,
    SpeculativeTokens,
    Temperature,
    TopK,
    TopP,
    as_options,
    read_key,
)
from warpline.config import EngineConfig, SamplingParams
from warpline.errors import ConfigError, WarplineError
from warpline.hardware import wake_gpu
from warpline.model.builtin import DEFAULT
from warpline.progress import progress

if TYPE_CHECKING:
    from warpline.serve.talk import Conversation, Partner

_SAMPLING = SamplingParams()
_ENGINE = EngineConfig(max_batch=1)
_HELP = (
    ("Enter", "sends (nothing: it goes on); a line that ends with \\ goes on in the next"),
    ("Ctrl-C", "stops the answer"),
    ("/again", "another answer to the same"),
    ("/new", "begins anew"),
    ("/save FILE", "writes all of it to a file"),
    ("/exit", "or Ctrl-D ends"),
)


def chat(
    url: Annotated[str | None, typer.Option(help="A server with OpenAI's API, instead of a local model.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="A name from 'warpline models', a folder, …; or the server's.")
    ] = None,
    write: Annotated[
        bool | None,
        typer.Option("--write/--talk", help="Continue one text together, or talk; default: what suits the model."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "--max-tokens", NEW_TOKENS, help="Tokens of an answer at most.")
    ] = 160,
    temperature: Temperature = _SAMPLING.temperature,
    top_k: TopK = _SAMPLING.top_k,
    top_p: TopP = _SAMPLING.top_p,
    repetition_penalty: RepetitionPenalty = _SAMPLING.repetition_penalty,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="End an answer at this text; can be repeated.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="A file with the server's API key.")] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="A Jinja file, plain or dialogpt; of a local model.")
    ] = None,
    device: Device = _ENGINE.device,
    dtype: Dtype = _ENGINE.dtype,
    kv_dtype: KvDtype = _ENGINE.kv_dtype,
    executor: Annotated[str, typer.Option(help="auto, or one by name.")] = _ENGINE.executor,
    threads: Annotated[int | None, typer.Option(help="CPU threads; default: all cores.")] = None,
    speculate: Speculate = _ENGINE.speculate,
    speculative_tokens: SpeculativeTokens = _ENGINE.speculative_tokens,
    speculative_table: SpeculativeTable = _ENGINE.speculative_table,
) -> None:
    """Talk to a model. One that was not made for conversations continues your text instead. Ctrl-C stops an answer,
    /help lists the commands. Lines that are piped in are answered one by one."""
    with as_options(max_tokens="--max-new-tokens"):
        params = SamplingParams(
            max_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
            repetition_penalty=repetition_penalty, seed=seed, stop=stop or (),
        )  # fmt: skip
        engine = EngineConfig(
            device=device, dtype=dtype, kv_dtype=kv_dtype, executor=executor, threads=threads, max_batch=1,
            speculate=speculate, speculative_tokens=speculative_tokens, speculative_table=speculative_table,
        )  # fmt: skip
    if url is not None and (engine, chat_template) != (_ENGINE, None):
        raise ConfigError("settings of the engine and --chat-template are for a local model, not for --url")
    if write and system is not None:
        raise ConfigError("--system is for conversations: leave --write out")
    from warpline.serve.talk import Conversation

    partner = _local(model or DEFAULT, engine, chat_template) if url is None else _remote(url, model, api_key_file)
    with closing(partner):
        _Terminal(Conversation(partner, params, system=system, write=write, note=_note)).run()


def _remote(url: str, model: str | None, key_file: Path | None) -> Partner:
    from warpline.serve.talk import Remote

    return Remote(url, model=model, key=read_key(key_file))


def _local(model: str, engine: EngineConfig, template: str | None) -> Partner:
    try:
        import msgspec  # noqa: F401 - the server's conversation templates need it
    except ImportError:
        raise ConfigError("chatting needs msgspec and jinja2: pip install 'warpline[serve]'") from None
    wake_gpu(engine.device)
    from warpline.engine.llm import LLM
    from warpline.serve.talk import Local

    with progress(f"Loading {model}"):
        llm = LLM(model, **asdict(engine))
        llm.generate([0], SamplingParams(max_tokens=2))  # compiles everything before the first answer
    return Local(llm, template)


class _Terminal:
    """Reads lines and prints answers. Without a terminal it prints nothing but answers."""

    def __init__(self, talk: Conversation):
        self._talk = talk
        self._there = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": self._help, "/again": self._again, "/new": self._new, "/save": self._save,
        }  # fmt: skip

    def run(self) -> None:
        """Answer lines until the input ends."""
        if sys.stdin is None:
            raise ConfigError("standard input is closed: chat reads from it")
        if self._there:
            import readline  # noqa: F401 - makes lines editable, and earlier ones available by the arrow keys

            how = "Begin, and the model goes on" if self._talk.write else "Say something"
            self._dim(f"{self._talk.partner.described}\n{how}. /help says what else there is.")
        while (line := self._line()) is not None:
            word, _, rest = line.strip().partition(" ")
            if word in ("/exit", "/quit"):
                return
            try:
                if word in self._commands:
                    self._commands[word](rest.strip())
                elif word.startswith("/") and self._there:
                    self._dim(f"there is no {word}: /help says what there is")
                elif line.strip() or (self._talk.write and self._talk.begun):
                    self._show(lambda line=line: self._talk.say(line.rstrip("\n")))  # type: ignore[misc]
            except WarplineError as error:
                if not self._there:
                    raise
                self._dim(f"error: {error}")

    def _line(self) -> str | None:
        parts: list[str] = []
        while True:
            try:
                line = input("" if not self._there else "› " if not parts else "… ")
            except EOFError:
                if self._there:
                    sys.stdout.write("\n")
                return "\n".join(parts) if parts else None
            except KeyboardInterrupt:
                if not self._there:
                    raise
                interrupt.again()
                sys.stdout.write("\n")
                self._dim("/exit or Ctrl-D ends")
                parts = []
                continue
            except UnicodeDecodeError as error:
                raise ConfigError(f"standard input is not UTF-8 (byte {error.start}): convert it first") from None
            if not line.endswith("\\"):
                return "\n".join([*parts, line])
            parts.append(line[:-1])

    def _show(self, begin: Callable[[], Iterator[str]]) -> None:
        """Print an answer while it is generated."""
        out = _Wrapped() if self._there else _Plain()
        began, first, stopped = time.perf_counter(), 0.0, False
        pieces = begin()
        try:
            for piece in pieces:
                if piece and not first:
                    first = time.perf_counter()
                out.write(piece)
        except KeyboardInterrupt:
            interrupt.again()
            stopped = True
        finally:
            pieces.close()  # type: ignore[attr-defined]
            out.end()
        if self._there:
            self._statistics(began, first, stopped)

    def _statistics(self, began: float, first: float, stopped: bool) -> None:
        reply, seconds = self._talk.reply, time.perf_counter() - first
        parts = ["stopped"] if stopped else []
        if reply is not None and reply.tokens > 1 and first:
            parts += [f"{reply.tokens} tokens, {(reply.tokens - 1) / seconds:,.0f}/s"]
        parts += [f"the first after {1e3 * (first - began):,.0f} ms"] if first else ["nothing came"]
        self._dim(" · ".join(parts))

    def _help(self, rest: str) -> None:
        self._dim("\n".join(f"{name:<11} {what}" for name, what in _HELP))

    def _again(self, rest: str) -> None:
        if not self._talk.begun:
            self._dim("there is no answer yet")
            return
        self._show(self._talk.again)

    def _new(self, rest: str) -> None:
        self._talk.clear()
        self._dim("a new beginning")

    def _save(self, rest: str) -> None:
        if not rest:
            raise ConfigError("say where to: /save FILE")
        path = Path(rest).expanduser()
        try:
            with path.open("x", encoding="utf-8") as file:  # existing files are not overwritten
                file.write(self._talk.text + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
        self._dim(f"saved to {path}")

    def _dim(self, text: str) -> None:
        if sys.stderr is not None:
            lines = text.splitlines()
            sys.stderr.write("".join(f"\x1b[2m{line}\x1b[0m\n" if self._there else f"{line}\n" for line in lines))
            sys.stderr.flush()


class _Plain:
    """Prints an answer as it is, without leading spaces, on lines of its own."""

    def __init__(self) -> None:
        self._begun = False

    def write(self, text: str) -> None:
        """Print text as it comes."""
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        self._put(text)

    def end(self) -> None:
        """End the line."""
        self._flush("\n")

    def _put(self, text: str) -> None:
        self._flush(text)

    @staticmethod
    def _flush(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


class _Wrapped(_Plain):
    """Breaks lines between words at the terminal's width; a word is held back until it is complete."""

    def __init__(self) -> None:
        super().__init__()
        import shutil

        self._width = max(20, shutil.get_terminal_size().columns)
        self._column, self._word, self._spaces = 0, "", ""

    def _put(self, text: str) -> None:
        from rich.cells import cell_len

        found = []
        for part in re.findall(r"\n|[^\S\n]+|\S+", text):
            if part.isspace():
                found.append(self._placed(cell_len(self._word)))
                if part == "\n":
                    found.append("\n")
                    self._column, self._spaces = 0, ""
                else:
                    self._spaces += part
            else:
                self._word += part
        self._flush("".join(found))

    def _placed(self, width: int) -> str:
        """Return the held-back word, with a line break before it if it does not fit; `width` is its width in cells."""
        if not self._word:
            return ""
        spaces = self._spaces
        if self._column and self._column + len(spaces) + width > self._width - 1:
            spaces, self._column = "\n", 0
            text = spaces + self._word
        else:
            text = spaces + self._word
            self._column += len(spaces)
        self._column += width
        self._word = self._spaces = ""
        return text

    def end(self) -> None:
        """Print the held-back word and end the line."""
        from rich.cells import cell_len

        self._flush(self._placed(cell_len(self._word)) + "\n")


def _note(line: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"note: {line}\n")
