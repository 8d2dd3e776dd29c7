"""A conversation, or a text written in turns, with a model in this process or on a server."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from warpline.config import SamplingParams
from warpline.errors import ConfigError, WarplineError
from warpline.serve.address import address_of

if TYPE_CHECKING:
    from warpline.engine.llm import LLM

Messages = list[dict[str, str]]
#: Settings that other servers may not know: sent only where they differ from the default.
_OURS = ("top_k", "min_p", "repetition_penalty")


class TooLong(WarplineError):
    """The text does not fit into the model's context."""


class Reply:
    """Pieces of an answer as they come. Closing it cancels the rest."""

    def __init__(self, pieces: Iterator[str], close: Callable[[], None]):
        self._pieces, self._close = pieces, close
        self.tokens = self.used = 0  # of the answer, and with its prompt, where that is known

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def close(self) -> None:
        """Cancel the rest of the answer."""
        self._close()


class Partner(Protocol):
    """A model that answers, local or remote."""

    described: str
    chats: bool  # whether it was made for conversations
    context: int | None

    def answer(self, messages: Messages, params: SamplingParams) -> Reply:
        """Answer a conversation."""

    def go_on(self, text: str, params: SamplingParams) -> Reply:
        """Continue a text."""

    def close(self) -> None:
        """Release what the partner holds; no request follows."""


class Local:
    """A model in this process."""

    def __init__(self, llm: LLM, template: str | None = None):
        from warpline.serve.chat import template_of

        self._llm, self._template = llm, template_of(template, llm.model, llm.folder)
        self.described = f"{llm.model}, {llm.dtype}, {llm.executor.described} on {llm.device.name}"
        self.chats = self._template.name != "plain" or template is not None
        self.context: int | None = llm.config.n_positions

    def answer(self, messages: Messages, params: SamplingParams) -> Reply:
        """Answer by the model's template."""
        text, stops = self._template.render(messages)
        return self.go_on(text, replace(params, stop=(*params.stops, *stops)))

    def go_on(self, text: str, params: SamplingParams) -> Reply:
        """Generate on the engine's own thread, so that an interrupt only stops the waiting."""
        ids = self._llm.tokenizer.encode(text, special=True)
        if len(ids) >= self._llm.config.n_positions:
            raise TooLong(f"the text has {len(ids):,} tokens, and the model's context is {self.context:,}")
        handle = self._llm.submit(ids, params)

        def pieces() -> Iterator[str]:
            for piece in handle:
                reply.tokens = len(handle.token_ids)
                reply.used = len(ids) + reply.tokens
                yield piece
            reply.tokens = len(handle.result().token_ids)
            reply.used = len(ids) + reply.tokens

        reply = Reply(pieces(), handle.cancel)
        return reply

    def close(self) -> None:
        """Stop the engine's thread, before Python ends."""
        self._llm.close()


class Remote:
    """A server with the OpenAI protocol."""

    def __init__(self, url: str, *, model: str | None = None, key: str | None = None, timeout: float = 300.0):
        where = address_of(url)
        self._kind = http.client.HTTPSConnection if where.secure else http.client.HTTPConnection
        self._where, self.url = where, where.url
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._timeout = timeout
        found = self._models()
        known = next((one for one in found if one.get("id") == model), found[0] if found and model is None else {})
        name = model or known.get("id")
        if not name:
            raise ConfigError(f"{self.url} does not say which models it has: name one with --model")
        self._model = str(name)
        self.described = f"{self._model} at {self.url}"
        self.chats = known.get("chat_template") != "plain"
        self.context: int | None = known.get("max_model_len")

    def answer(self, messages: Messages, params: SamplingParams) -> Reply:
        """Answer by the server's template."""
        return self._ask("/chat/completions", {"messages": messages}, params)

    def go_on(self, text: str, params: SamplingParams) -> Reply:
        """Continue a text."""
        return self._ask("/completions", {"prompt": text}, params)

    def close(self) -> None:
        """Do nothing: a connection lasts as long as an answer."""

    def _models(self) -> list[dict[str, Any]]:
        with closing(self._open()) as connection:
            answer = self._sent(connection, "GET", "/models", None)
            try:
                found = json.loads(answer.read())["data"]
                return [one for one in found if isinstance(one, dict)]
            except (ValueError, KeyError, TypeError):
                return []

    def _ask(self, path: str, body: dict[str, Any], params: SamplingParams) -> Reply:
        usual = SamplingParams()
        body |= {"model": self._model, "stream": True, "stream_options": {"include_usage": True}}
        body |= {name: getattr(params, name) for name in ("max_tokens", "temperature", "top_p", "seed")}
        body |= {n: getattr(params, n) for n in _OURS if getattr(params, n) != getattr(usual, n)}
        body |= {"stop": list(params.stops)} if params.stops else {}
        body = {name: value for name, value in body.items() if value is not None}
        connection = self._open()
        try:
            answer = self._sent(connection, "POST", path, json.dumps(body).encode())
        except BaseException:
            connection.close()
            raise

        def pieces() -> Iterator[str]:
            try:
                for event in _events(answer):
                    if event.get("error"):
                        raise WarplineError(f"{self.url}: {_message(event)}")
                    usage = event.get("usage") or {}
                    reply.tokens = usage.get("completion_tokens") or reply.tokens
                    reply.used = usage.get("total_tokens") or reply.used
                    for choice in event.get("choices") or ():
                        yield choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            except (OSError, http.client.HTTPException) as error:
                raise WarplineError(f"{self.url}: the connection broke ({error or type(error).__name__})") from error
            finally:
                connection.close()

        reply = Reply(pieces(), connection.close)
        return reply

    def _open(self) -> http.client.HTTPConnection:
        return self._kind(self._where.host, self._where.port, timeout=self._timeout)

    def _sent(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None
    ) -> http.client.HTTPResponse:
        try:
            connection.request(method, f"{self._where.prefix}/v1{path}", body, self._headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise WarplineError(f"{self.url} cannot be reached: {reason}") from error
        if answer.status == 200:
            return answer
        try:
            found = json.loads(answer.read())
        except (ValueError, OSError):
            found = {}
        said, code = _message(found) or answer.reason, _error(found).get("code")
        if code == "context_length_exceeded":
            raise TooLong(said)
        if answer.status == 401:
            raise ConfigError(f"{self.url} wants another API key: see --api-key-file")
        raise WarplineError(f"{self.url}: {said}")


def _events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in answer:
        data = line.strip().removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            try:
                found = json.loads(data)
            except ValueError:
                raise WarplineError(f"the server sent what is no JSON: {data[:80]!r}") from None
            if isinstance(found, dict):
                yield found


def _error(found: Any) -> dict[str, Any]:
    error = found.get("error") if isinstance(found, dict) else None
    return error if isinstance(error, dict) else {"message": error or ""}


def _message(found: Any) -> str:
    return " ".join(str(_error(found).get("message", "")).split())


class Conversation:
    """The messages so far. With `write` they are one text: every input is appended to it, and the model continues."""

    def __init__(
        self, partner: Partner, params: SamplingParams, *, system: str | None = None, write: bool | None = None,
        note: Callable[[str], None] = lambda line: None,
    ):  # fmt: skip
        self.partner, self.params = partner, params
        self.write = not partner.chats if write is None else write
        self._system: Messages = [{"role": "system", "content": system}] if system else []
        self._said: Messages = []
        self._text = ""
        self._before = self._earlier = ""  # the text before the last answer, and before the one before
        self._used = 0
        self._note = note
        self.reply: Reply | None = None

    @property
    def begun(self) -> bool:
        """Whether there is an answer that can be generated again."""
        return bool(self._text if self.write else self._said)

    @property
    def text(self) -> str:
        """The whole text of the conversation."""
        return self._text if self.write else "\n".join(f"{m['role']}: {m['content']}" for m in self._said)

    def clear(self) -> None:
        """Start a new conversation."""
        self._said, self._text, self._before, self._earlier, self._used = [], "", "", "", 0

    def say(self, words: str) -> Iterator[str]:
        """Yield the pieces of the answer. Those that came are kept, also if the caller stops in the middle."""
        if self.write:
            self._earlier, self._before = self._before, self._joined(words)
        else:
            self._said.append({"role": "user", "content": words})
        return self._answer(self.params)

    def again(self) -> Iterator[str]:
        """Yield another answer to the last input, with a new seed."""
        if not self.write and self._said and self._said[-1]["role"] == "assistant":
            self._said.pop()
        return self._answer(replace(self.params, seed=None))

    def _joined(self, words: str) -> str:
        """Append words to the text: in the same line, or in a new line after the end of a sentence."""
        if not self._text or not words or self._text[-1].isspace():
            return self._text + words
        return self._text + ("\n" if self._text[-1] in ".!?\"”'’…" else " ") + words

    def _answer(self, params: SamplingParams) -> Iterator[str]:
        room = min(params.max_tokens, (self.partner.context or 0) // 4)
        if self.partner.context is not None and self._used > self.partner.context - room:
            self._shorten()
        while True:
            try:
                reply = self._asked(params)
                break
            except TooLong:
                if not self._shorten():
                    self._forget()
                    raise
            except BaseException:
                self._forget()
                raise
        self.reply, parts = reply, list[str]()
        try:
            for piece in reply:
                parts.append(piece)
                yield piece
        finally:
            reply.close()
            self._used = reply.used
            answer = "".join(parts)
            if self.write:
                self._text = self._before + answer
            else:
                self._said.append({"role": "assistant", "content": answer.strip()})

    def _asked(self, params: SamplingParams) -> Reply:
        if self.write:
            return self.partner.go_on(self._before or "<|endoftext|>", params)
        return self.partner.answer([*self._system, *self._said], params)

    def _forget(self) -> None:
        """Remove the input that could not be answered."""
        if self.write:
            self._before = self._earlier
        elif self._said and self._said[-1]["role"] == "user":
            self._said.pop()

    def _shorten(self) -> bool:
        """Leave out the oldest part; return False if nothing can be left out."""
        if self.write:
            third = len(self._before) // 3
            cut = next((i + 1 for i in range(third, len(self._before) // 2) if self._before[i] in ".\n"), third)
            shorter = bool(cut)
            self._before = self._before[cut:].lstrip() if cut else self._before
        else:
            shorter = len(self._said) > 2
            del self._said[: 2 if shorter else 0]
        if shorter:
            self._note("the beginning no longer fits into the model's context and is left out from now on")
        return shorter
