"""Turns chat messages into a prompt: by a template from the model's folder, DialoGPT's form, or a plain one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from warpline.errors import ConfigError, ModelError
from warpline.model.tokenizer import END_OF_TEXT
from warpline.serve.errors import bad
from warpline.serve.protocol import Message

#: Names that `--chat-template` accepts besides a file.
NAMED = ("plain", "dialogpt")


def conversation(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Return the messages as roles and texts; any content but text raises an error."""
    found = []
    for number, message in enumerate(messages):
        content = message.content
        if content is None:
            raise bad(f"messages[{number}] has no content", "messages")
        if not isinstance(content, str):
            for part in content:
                if part.type != "text" or part.text is None:
                    raise bad(f"content of type '{part.type[:40]}' is not supported: this model reads text", "messages")
            content = "".join(part.text or "" for part in content)
        found.append({"role": message.role, "content": content} | ({"name": message.name} if message.name else {}))
    return found


class Template(Protocol):
    """Makes a prompt from messages."""

    name: str  # "plain", "dialogpt", or "own" for a template from the model's folder or a file

    def render(self, messages: list[dict[str, str]]) -> tuple[str, tuple[str, ...]]:
        """Return the prompt, and stop texts of the answer."""


class Plain:
    """For models without a template: a line for each message, and the answer ends where a user's line would begin."""

    name = "plain"

    def render(self, messages: list[dict[str, str]]) -> tuple[str, tuple[str, ...]]:
        """Put the role before each message, except system and developer messages."""
        lines = [
            m["content"] if m["role"] in ("system", "developer") else f"{m['role'].capitalize()}: {m['content']}"
            for m in messages
        ]
        return "\n".join([*lines, "Assistant:"]), ("\nUser:",)


class DialoGPT:
    """DialoGPT's form: each turn ends with the end of text, and roles are not marked."""

    name = "dialogpt"

    def render(self, messages: list[dict[str, str]]) -> tuple[str, tuple[str, ...]]:
        """Join all turns in order."""
        return "".join(m["content"] + END_OF_TEXT for m in messages), ()


class Jinja:
    """A Jinja template in the form of model folders, rendered in a sandbox."""

    name = "own"

    def __init__(self, source: str, special: dict[str, Any], where: str):
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False)
        self._special, self._error = special, TemplateError
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelError(f"{where}: the chat template is broken: {error}") from error

    def render(self, messages: list[dict[str, str]]) -> tuple[str, tuple[str, ...]]:
        """Render the template; messages it cannot render raise an error."""
        try:
            said = self._template.render(messages=messages, add_generation_prompt=True, tools=None, **self._special)
        except (self._error, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise bad(f"the model's chat template refuses these messages: {error}", "messages") from None
        return said, ()


def _raise(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def template_of(asked: str | None, model: str, folder: Path | None) -> Template:
    """Return the requested template (a name or a file), else the model's own, else one chosen by the model's name."""
    if asked is not None and asked not in NAMED:
        path = Path(asked).expanduser()
        try:
            return Jinja(path.read_text(encoding="utf-8"), _special(folder), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the chat template {asked}: {error} (or say plain or dialogpt)") from error
    if asked is None and folder is not None:
        source = _own(folder)
        if source is not None:
            return Jinja(source, _special(folder), str(folder))
    named = asked or ("dialogpt" if "dialogpt" in model.lower() else "plain")
    return DialoGPT() if named == "dialogpt" else Plain()


def _own(folder: Path) -> str | None:
    """Return a folder's chat_template.jinja, or the template in its tokenizer_config.json; None if it has neither."""
    if (file := folder / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8")
    found = _settings(folder).get("chat_template")
    if isinstance(found, list):  # several templates with names
        found = next((one.get("template") for one in found if one.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def _special(folder: Path | None) -> dict[str, Any]:
    settings = {} if folder is None else _settings(folder)
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = settings.get(name)
        found[name] = value.get("content") if isinstance(value, dict) else value
    return {name: value if isinstance(value, str) else END_OF_TEXT for name, value in found.items()}


def _settings(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {file}: {error}") from error
    return found if isinstance(found, dict) else {}
