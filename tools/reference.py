"""Reference pages made of the code: the command line, settings and results with their defaults, the log's contents."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from tools.links import slugs
from warpline import Completion, EngineConfig, ModelConfig, SamplingParams, Timings, TokenLogprob
from warpline.cli.main import app

LOG = Path(__file__).parents[1] / "docs" / "log.md"


# --- the command line -------------------------------------------------------------------------------------------------


def commands() -> str:
    """Every command with its arguments and options, as `--help` has them."""
    root = typer.main.get_command(app)
    return "\n\n".join(_commands(root, "warpline", None))


def _commands(command: Any, path: str, parent: Any) -> Iterator[str]:
    context = type(command).context_class(command, info_name=path, parent=parent)
    inner = getattr(command, "commands", None)
    if inner is None:
        yield _page(command, path, context)
        return
    if parent is not None and not hasattr(command, "DEFAULT"):
        yield f"## {path}\n\n{_prose(command.help)}"
    for name, child in inner.items():
        # A group's default command is called by the group's own name.
        default = name == getattr(command, "DEFAULT", None)
        yield from _commands(child, path if default else f"{path} {name}", context)


def _page(command: Any, path: str, context: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument" and not getattr(p, "hidden", False)]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden and p.name != "help"]
    usage = " ".join([path, *(["[options]"] if options else []), *(_placeholder(p) for p in arguments)])
    level = "##" if len(path.split()) == 2 else "###"
    parts = [f"{level} {path}", _prose(command.help), f"```console\n$ {usage}\n```"]
    rows = [(f"`{_placeholder(p)}`", _default(p), p.help) for p in arguments]
    rows += [(", ".join(f"`{name}`" for name in (*p.opts, *p.secondary_opts)), _default(p), p.help) for p in options]
    if rows:
        lines = [f"| {names} | {default} | {_cell(text or '')} |" for names, default, text in rows]
        parts.append("\n".join(["| option | default | meaning |", "| --- | --- | --- |", *lines]))
    return "\n\n".join(part for part in parts if part)


def _placeholder(parameter: Any) -> str:
    name = f"{parameter.name.upper().replace('_', '-')}{'…' if parameter.nargs == -1 else ''}"
    return name if parameter.required else f"[{name}]"


def _default(parameter: Any) -> str:
    value = parameter.default
    if parameter.required:
        return "required"
    unset = value is None or value is False or value in ((), [], "") or "Sentinel" in type(value).__name__
    if callable(value) or unset:
        return ""
    text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return f"`{text}`"


def _prose(text: str | None) -> str:
    """A docstring's paragraphs, each in one line."""
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(text or "").replace("\b", ""))
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


# --- settings and results ---------------------------------------------------------------------------------------------


def settings() -> str:
    """The fields of every public dataclass: name, type, default, and the comment above it."""
    shown = (SamplingParams, EngineConfig, ModelConfig, Completion, TokenLogprob, Timings)
    return "\n\n".join(_fields(kind) for kind in shown)


def _fields(kind: Any) -> str:
    notes = _notes(kind)
    lines = []
    for field in dataclasses.fields(kind):
        if not field.repr:
            continue
        default = "" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
        kinds = str(field.type).replace("|", "\\|")
        lines.append(f"| `{field.name}` | `{kinds}` | {default} | {notes.get(field.name, '')} |")
    for name, value in vars(kind).items():
        wrapped = getattr(value, "fget", None) or getattr(value, "func", None)
        if wrapped is not None and not name.startswith("_") and kind in (Completion, Timings):
            lines.append(f"| `{name}` | `{_returned(wrapped)}` |  | {_cell(wrapped.__doc__)} |")
    summary = inspect.cleandoc(kind.__doc__).split("\n\n")[0]
    head = "| field | type | default | meaning |\n| --- | --- | --- | --- |"
    return f"## {kind.__name__}\n\n{' '.join(summary.split())}\n\n{head}\n" + "\n".join(lines)


def _returned(function: Any) -> str:
    return str(inspect.signature(function).return_annotation).replace("|", "\\|")


def _notes(kind: Any) -> dict[str, str]:
    """Of each field the comment (`#:`) above it or behind it, or else what the class's docstring says under Args."""
    source = inspect.cleandoc(inspect.getsource(kind))
    lines = source.splitlines()
    found = _arguments(kind)
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        above: list[str] = []
        at = item.lineno - 2
        while lines[at].strip().startswith("#:"):
            above.insert(0, lines[at].strip().removeprefix("#:").strip())
            at -= 1
        behind = lines[item.lineno - 1].partition("  # ")[2]
        if note := " ".join(above) or behind:
            found[item.target.id] = _cell(note)
    return found


def _arguments(kind: Any) -> dict[str, str]:
    _, _, section = inspect.cleandoc(kind.__doc__).partition("\nArgs:\n")
    items = re.findall(r"^    (\w+): (.+(?:\n {6,}.+)*)", section, re.MULTILINE)
    return {name: _cell(text) for name, text in items}


# --- the log ----------------------------------------------------------------------------------------------------------


def contents() -> str:
    """Its entries, newest first, with the line that each begins with where that line is a conclusion."""
    lines = []
    text = LOG.read_text(encoding="utf-8")
    for heading, anchor in slugs(text):
        match = re.fullmatch(r"(\d{4}-\d\d-\d\d) · (.+)", heading)
        if match is not None:
            lines.append(f"- {match[1]} · [{match[2]}](#{anchor}){_conclusion(text, heading)}")
    return "\n".join(lines)


def _conclusion(text: str, heading: str) -> str:
    """What an entry says it found out, if it begins with it in one line of its own."""
    _, _, entry = text.partition(f"\n## {heading}\n\n")
    found = re.match(r"\*Conclusion:\* (.+?)\n\n", entry, flags=re.DOTALL)
    return f": {' '.join(found[1].split())}" if found else ""
