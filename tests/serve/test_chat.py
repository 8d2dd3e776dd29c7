"""Messages become prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.serve.live import Standin, serving
from warpline.errors import ConfigError, ModelError
from warpline.serve.chat import template_of
from warpline.serve.errors import ApiError
from warpline.serve.state import Settings

TALK = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}, {"role": "assistant", "content": "A"},
        {"role": "user", "content": "V"}]  # fmt: skip


def test_plain() -> None:
    assert template_of(None, "gpt2", None).render(TALK) == (
        "S\nUser: U\nAssistant: A\nUser: V\nAssistant:",
        ("\nUser:",),
    )


def test_dialogpt() -> None:
    """The form of its model card: every turn ends with the end of text."""
    end = "<|endoftext|>"
    for asked, model in ((None, "microsoft/DialoGPT-small"), ("dialogpt", "gpt2")):
        assert template_of(asked, model, None).render(TALK[1:]) == (f"U{end}A{end}V{end}", ())


@pytest.mark.parametrize("where", ["tokenizer_config.json", "chat_template.jinja", "named", "option"])
def test_a_models_own_template(tmp_path: Path, where: str) -> None:
    """Rendered as by transformers."""
    source = (
        "{%- for m in messages %}\n    {%- if m.role == 'nobody' %}{{ raise_exception('who?') }}{% endif %}\n"
        "{{ '<' + m.role + '>' + m.content | trim + eos_token }}\n{% endfor %}\n"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    named: Any = [{"name": "tools", "template": "x"}, {"name": "default", "template": source}]
    settings = {"eos_token": {"content": "</s>"}, "chat_template": named if where == "named" else source}
    if where == "chat_template.jinja":
        (tmp_path / where).write_text(source)
    if where in ("chat_template.jinja", "option"):
        del settings["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "mine.jinja").write_text(source)
    asked = str(tmp_path / "mine.jinja") if where == "option" else None
    found = template_of(asked, str(tmp_path), tmp_path)
    from transformers.utils.chat_template_utils import render_jinja_template

    expected, _ = render_jinja_template(
        conversations=[TALK], chat_template=source, add_generation_prompt=True, eos_token="</s>"
    )
    assert found.render(TALK) == (expected[0], ())
    with pytest.raises(ApiError, match="who"):
        found.render([{"role": "nobody", "content": ""}])


def test_templates_are_in_a_sandbox(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}"
    )
    with pytest.raises(ApiError, match="template"):
        template_of(None, "m", tmp_path).render(TALK)


def test_broken_templates(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{% if")
    with pytest.raises(ModelError, match="broken"):
        template_of(None, "m", tmp_path)
    with pytest.raises(ConfigError, match="plain or dialogpt"):
        template_of(str(tmp_path / "nothing"), "m", None)


def test_over_http() -> None:
    with serving(Standin(text=" word\nUser: no"), Settings(chat_template="plain")) as live:
        ask = {"messages": [{"role": "user", "content": "Hello"}]}
        said = live.request("/v1/chat/completions", ask)[1]
        assert said["choices"][0]["message"]["content"] == " word"
        assert said["choices"][0]["finish_reason"] == "stop"
        for messages in ([], [{"role": "user"}], [{"content": "x"}], [{"role": "user", "content": 3}]):
            assert live.request("/v1/chat/completions", {"messages": messages})[0] == 400
        assert live.request("/v1/chat/completions", ask | {"max_tokens": 0})[1]["usage"]["completion_tokens"] == 0
        assert live.request("/v1/chat/completions", ask | {"response_format": {"type": "json_object"}})[0] == 400
