"""An answer in progress: its sequences, what is sent of them, and the cleanup at its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

import msgspec

from warpline.serve.choice import Choice
from warpline.serve.errors import ApiError
from warpline.serve.events import DONE, Scored, Style, scored, usage_of
from warpline.serve.pieces import Piece

if TYPE_CHECKING:
    from warpline.serve.asked import Asked
    from warpline.serve.state import State

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Generation:
    """One request that generates. Everything here runs in the event loop."""

    def __init__(self, state: State, asked: Asked, style: Style):
        self.state, self.asked, self.style = state, asked, style
        self.eos = state.backend.config.eos_token_id
        self.choices, self.scorers = asked.begin(self, state)
        self._open = sum(not choice.closed for choice in (*self.choices, *self.scorers))
        self._changed = [choice for choice in self.choices if choice.closed]  # finished already: they want no tokens
        self._waiter: asyncio.Future[None] | None = None
        self._gone = self._started = False
        self.sending_since: float | None = None
        self.abort: Callable[[], None] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._plain = style.ending()
        self._heads = [style.opening_of(i, first=False) for i in range(len(self.choices))]

    # --- news -------------------------------------------------------------------------------------------------------

    def arrived(self, choice: Choice) -> None:
        """Note that a sequence has new tokens or has ended."""
        if choice.finished and not choice.closed:
            choice.closed = True
            self._open -= 1
            self.state.ended(self, choice)
        if choice.streamed and not choice.changed:
            choice.changed = True
            self._changed.append(choice)
        if self._waiter is not None and (choice.streamed or not self._open):
            self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _is_gone(self, _: asyncio.Task[None]) -> None:
        self._gone = True
        self._wake()

    async def _news(self) -> None:
        if not self._gone:
            self._waiter = self.state.loop.create_future()
            await self._waiter

    def _failure(self) -> ApiError | None:
        for choice in (*self.scorers, *self.choices):
            if choice.finished and choice.job.error is not None:
                return self.state.failure(choice.job.error)
        return None

    def close(self) -> None:
        """Cancel what is unfinished, once, and return its places."""
        left = [choice for choice in (*self.choices, *self.scorers) if not choice.closed]
        for choice in left:
            choice.closed = choice.finished = True
        unfinished = [choice.job for choice in left if not choice.job.finished]
        if unfinished:
            self.state.backend.engine.cancel(unfinished)
        for choice in left:
            self.state.aborted(choice)

    def cut(self) -> None:
        """End the connection of a client that does not read, if the server allows it, else cancel the task."""
        if self.abort is not None:
            self.abort()
        elif self._task is not None:
            self._task.cancel()

    # --- answering --------------------------------------------------------------------------------------------------

    async def run(self, receive: Receive, send: Send) -> None:
        """Send the answer; afterwards cancel and release everything."""
        self.state.answers.add(self)
        watch: asyncio.Task[None] | None = None
        try:
            if self._open:  # first, so that the engine works while the rest is prepared
                self.state.backend.start([c.job for c in (*self.choices, *self.scorers) if not c.closed])
            self._task = asyncio.current_task()
            watch = self.state.loop.create_task(_left(receive))
            watch.add_done_callback(self._is_gone)
            await (self._stream(send) if self.asked.streamed else self._whole(send))
        except asyncio.CancelledError:
            if self.state.status != "draining":
                raise
            failure = ApiError(503, "the server is shutting down, and the time for that is over", code="draining")
            if not self._started:
                raise failure from None
            await send({"type": "http.response.body", "body": self._last(failure)})
        finally:
            self.state.answers.discard(self)
            if watch is not None:
                watch.remove_done_callback(self._is_gone)
                watch.cancel()
            self.close()

    async def _whole(self, send: Send) -> None:
        while self._open and not self._gone:
            await self._news()
        if self._gone:
            return
        if (failure := self._failure()) is not None:
            raise failure
        body = self.style.answer([self._choice(c) for c in self.choices], self._usage(), self._timings())
        await self.state.respond(send, 200, body)

    async def _stream(self, send: Send) -> None:
        while any(not scorer.finished for scorer in self.scorers) and not self._gone:
            await self._news()
        body = b"".join(self._echo(choice) for choice in self.choices) if self.asked.echoes else b""
        while not self._gone:
            changed, self._changed = self._changed, []
            parts = [body]
            for choice in changed:
                choice.changed = False
                parts.append(self._events(choice))
            body = b"".join(parts)
            failure = self._failure()
            if failure is not None and not self._started:
                raise failure
            ended = failure is not None or (not self._open and not self._changed)
            if ended:
                body += self._last(failure)
            if body:
                if not self._started:
                    await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
                    self._started = True
                self.sending_since = self.state.loop.time()
                await send({"type": "http.response.body", "body": body, "more_body": not ended})
                self.sending_since = None
                body = b""
            if ended:
                return
            if not self._changed:
                await self._news()

    # --- events -----------------------------------------------------------------------------------------------------

    def _events(self, choice: Choice) -> bytes:
        first = not choice.begun
        pieces = choice.pieces()
        if self.asked.plain and len(pieces) == 1 and not first and not choice.finished:
            text = pieces[0].text
            return self._heads[choice.index] + text + self._plain if text else b""
        if not pieces and not choice.finished:
            return b""
        *before, last = pieces or [Piece(b"", choice.sent, choice.sent, [])]
        found = [self._event(choice, piece, None) for piece in before]
        return b"".join(found) + self._event(choice, last, choice.job.finish_reason if choice.finished else None)

    def _event(self, choice: Choice, piece: Piece, reason: str | None) -> bytes:
        first, job = not choice.begun, choice.job
        if not piece.text and reason is None and piece.first == piece.last:
            return b""
        logprobs, more = b"null", b""
        if self.asked.logprobs is not None:
            logprobs = msgspec.json.encode(self._logprobs(choice, piece.first, piece.last, piece.offsets or []))
        if self.asked.returns_ids:
            last = len(job.tokens) if reason is not None else piece.last
            more = b',"token_ids":' + msgspec.json.encode(job.tokens[piece.first : last])
            if first:
                more += b',"prompt_token_ids":' + msgspec.json.encode(self.asked.ids[self.asked.prompt_of(choice)])
        if not piece.text and reason is None and self.asked.plain:
            return b""
        choice.begun = True
        opening = self.style.opening_of(choice.index, first=first)
        return opening + piece.text + self.style.ending(reason, logprobs, more)

    def _echo(self, choice: Choice) -> bytes:
        """Return the event with the prompt, which comes before any generated text."""
        number = self.asked.prompt_of(choice)
        logprobs = b"null"
        if self.asked.logprobs is not None:
            tokens, offsets = self._scored_prompt(number)
            logprobs = msgspec.json.encode(self.style.logprobs(self.state.table, tokens, offsets))
        choice.begun = True
        opening = self.style.opening_of(choice.index, first=True)
        return opening + msgspec.json.encode(self.asked.texts[number])[1:-1] + self.style.ending(None, logprobs)

    def _last(self, failure: ApiError | None) -> bytes:
        """Return the bytes that end a stream."""
        if failure is not None:
            return b"data: " + failure.body() + b"\n\n" + DONE
        more = self._timings() | ({"usage": self._usage()} if self.asked.wants_usage else {})
        return (self.style.last_event(more) if more else b"") + DONE

    # --- contents ---------------------------------------------------------------------------------------------------

    def _choice(self, choice: Choice) -> dict[str, Any]:
        """Return one choice of a whole answer."""
        asked, number = self.asked, self.asked.prompt_of(choice)
        pieces = choice.pieces() if choice.maker is not None else []
        text = "".join(msgspec.json.decode(b'"' + piece.text + b'"') for piece in pieces)
        logprobs = None
        if asked.logprobs is not None:
            tokens, offsets = self._scored_prompt(number) if asked.echoes else ([], [])
            for piece in pieces:
                tokens += self._scored(choice, piece.first, piece.last)
                offsets += piece.offsets or []
            logprobs = self.style.logprobs(self.state.table, tokens, offsets)
        if asked.echoes:
            text = asked.texts[number] + text
        found = self.style.choice(choice.index, text, logprobs, choice.job.finish_reason or "length")
        if asked.returns_ids:
            found |= {"token_ids": choice.job.tokens, "prompt_token_ids": asked.ids[number]}
        return found

    def _logprobs(self, choice: Choice, first: int, last: int, offsets: list[int]) -> dict[str, Any]:
        return self.style.logprobs(self.state.table, self._scored(choice, first, last), offsets)

    def _scored(self, choice: Choice, first: int, last: int) -> list[Scored]:
        job, count = choice.job, self.asked.logprobs or 0
        return [scored(job.tokens[i], job.logprobs[i], count) for i in range(first, last)]

    def _scored_prompt(self, number: int) -> tuple[list[Scored], list[int]]:
        job, ids, count = self.scorers[number].job, self.asked.ids[number], self.asked.logprobs or 0
        rest = [scored(token, job.logprobs[i], count) for i, token in enumerate(ids[1:])]
        return [(ids[0], None, []), *rest], self.asked.offsets(number, self.state)

    def _usage(self) -> dict[str, int]:
        return usage_of(sum(map(len, self.asked.ids)), sum(len(choice.job.tokens) for choice in self.choices))

    def _timings(self) -> dict[str, Any]:
        return {"timings": self.state.timings(self)} if self.asked.wants_timings else {}


async def _left(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
