"""A model that answers chunks of lines, in this process or in a Ray actor."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from warpline.config import SamplingParams
from warpline.engine.job import Job
from warpline.engine.request import Request
from warpline.engine.text import Text, Texts, watched
from warpline.errors import ConfigError, DeviceError, ModelError
from warpline.scale.files import Chunk, Done, Reader
from warpline.scale.lines import BadLine, OpenAI, Plain, dumped, read

if TYPE_CHECKING:
    from warpline.engine.llm import LLM
    from warpline.serve.app import App

#: Chunks in progress at once: one fills the slots that the last sequences of another leave free.
AT_ONCE = 3


def _loaded(model: str, engine: dict[str, Any]) -> LLM:
    """Load the model in a thread that ends afterwards, together with the OpenMP team that belongs to it."""
    from warpline.engine.llm import LLM

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: LLM(model, **engine)).result()


class Worker:
    """Answers chunks. Several threads may call it: their lines share one running batch."""

    def __init__(self, model: str, engine: dict[str, Any], defaults: SamplingParams, column: str):
        self._llm = _loaded(model, engine)
        self._stopped = False
        self._defaults, self._column = defaults, column
        self._lock = threading.Lock()
        self._reader = Reader()
        self._server: Server | None = None

    def __call__(self, chunk: Chunk) -> Done:
        """Answer the lines in order. An error in a line becomes the answer of that line."""
        with self._lock:
            lines = self._reader.lines(chunk)
        answers: list[tuple[bool, bytes, int]] = [(True, b"", 0)] * len(lines)
        plain: dict[int, Plain] = {}
        asked: dict[int, OpenAI] = {}
        for i, line in enumerate(lines):
            if isinstance(line, bytes) and not line.strip():
                continue
            try:
                found = read(chunk.first + i, line, self._defaults, self._column)
            except BadLine as bad:
                answers[i] = False, bad.line, 0
                continue
            if isinstance(found, Plain):
                plain[i] = found
            else:
                asked[i] = found
        if asked:
            with self._lock:
                self._server = server = self._server or Server(self._llm)
            answers_of = server.start(list(asked.values()))
        if plain:
            for i, answer in zip(plain, self._generate(list(plain.values())), strict=True):
                answers[i] = answer
        if asked:
            for i, answer in zip(asked, answers_of.result(), strict=True):
                answers[i] = answer
        said = [answer for answer in answers if answer[1]]
        return Done(
            lines=len(lines),
            results=b"".join(line for good, line, _ in said if good),
            errors=b"".join(line for good, line, _ in said if not good),
            good=sum(good for good, *_ in said),
            bad=sum(not good for good, *_ in said),
            tokens=sum(tokens for *_, tokens in said),
        )

    def stop(self) -> None:
        """Cancel the running jobs: callers that wait for them get an error."""
        self._stopped = True
        self._llm.engine.cancel_all()

    def close(self) -> None:
        """Release the memory."""
        if self._server is not None:
            self._server.close()
        self._llm.close()

    def _generate(self, lines: list[Plain]) -> list[tuple[bool, bytes, int]]:
        """Generate all at once, computing only on the engine's own thread: every thread that uses OpenMP gets a team,
        and where the teams have more threads than there are cores, they sleep between two loops instead of spinning."""
        answers: list[tuple[bool, bytes, int]] = [(True, b"", 0)] * len(lines)
        texts = Texts(self._llm.tokenizer, len(lines))
        jobs: dict[int, tuple[Job, Text | None]] = {}
        for i, (line, ids) in enumerate(zip(lines, self._encoded(lines), strict=True)):
            try:
                jobs[i] = self._job(line, ids, texts.arrays[i])
            except ConfigError as error:
                answers[i] = False, BadLine(line.number, str(error), line.fields).line, 0
        self._run([job for job, _ in jobs.values()])
        found = texts.finish()
        for i, (job, text) in jobs.items():
            if isinstance(job.error, ModelError):  # concerns this line alone
                answers[i] = False, BadLine(lines[i].number, str(job.error), lines[i].fields).line, 0
            elif job.error is not None:
                raise job.error
            else:
                made, reason = found[i] if text is None else text.finish(), str(job.finish_reason)
                answers[i] = True, lines[i].answer(made, reason, job.prompt_length, len(job.tokens)), len(job.tokens)
        return answers

    def _encoded(self, lines: list[Plain]) -> list[list[int] | ConfigError]:
        """Return the ids of each line, or the error of a text."""
        encode = self._llm.tokenizer.encode_many
        texts = [line.prompt for line in lines if isinstance(line.prompt, str)]
        found: Iterator[list[int] | ConfigError]
        try:
            found = iter(encode(texts, special=True))
        except ConfigError:
            found = iter([_tried(encode, text) for text in texts])
        return [next(found) if isinstance(line.prompt, str) else line.prompt for line in lines]

    def _job(self, line: Plain, ids: list[int] | ConfigError, arrays: list[np.ndarray]) -> tuple[Job, Text | None]:
        if isinstance(ids, ConfigError):
            raise ids
        config, params = self._llm.config, line.params
        if len(ids) > config.n_positions:
            most = f"the model's context is {config.n_positions:,}"
            raise ConfigError(f"the prompt has {len(ids):,} tokens, but {most}: shorten it")
        if not ids or min(ids) < 0 or max(ids) >= config.vocab_size:
            raise ConfigError(
                f"the prompt holds no token, or one outside the model's vocabulary of {config.vocab_size:,}"
            )
        params.require_vocab(config.vocab_size)
        limit = min(len(ids) + params.max_tokens, max(config.n_positions, len(ids) + 1))  # the last one needs none
        if params.min_tokens > limit - len(ids):
            params = replace(params, max_tokens=limit - len(ids), min_tokens=limit - len(ids))
        job = Job(Request(ids, params, params.seed or 0, 0, limit), arrays=arrays)
        stops = params.stops
        return job, watched(job, self._llm.tokenizer, config.eos_token_id) if stops else None

    def _run(self, jobs: list[Job]) -> None:
        left, ended = {id(job) for job in jobs}, threading.Event()

        def told(job: Job) -> None:  # called by the engine's thread
            if job.finished:
                left.discard(id(job))
                if not left:
                    ended.set()

        for job in jobs:
            job.notify = functools.partial(told, job)
        if jobs:
            self._llm.start(jobs)
            while not ended.wait(1.0):
                if self._stopped:
                    raise DeviceError("the job was called off")


def _tried(encode: Any, text: str) -> list[int] | ConfigError:
    try:
        return list(encode([text], special=True)[0])
    except ConfigError as error:
        return error


class Server:
    """The app of `warpline serve`, called without HTTP: a line of OpenAI's format gets the same answer."""

    def __init__(self, llm: LLM):
        try:
            from warpline.serve.app import create_app
            from warpline.serve.state import Settings
        except ImportError as error:
            raise ConfigError(f"OpenAI's batch format needs {error.name}: pip install 'warpline[serve]'") from None
        self._app: App = create_app(llm, Settings(max_queue=1 << 20, max_body=1 << 30))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="warpline-batch", daemon=True)
        self._thread.start()
        self._wait(self._attach(llm))

    def start(self, lines: list[OpenAI]) -> Any:
        """Return a future of the answers."""
        return asyncio.run_coroutine_threadsafe(self._all(lines), self._loop)

    def close(self) -> None:
        """Stop the event loop; no request may be running."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _attach(self, llm: LLM) -> None:
        self._app.server.attach(llm, self._loop)

    async def _all(self, lines: list[OpenAI]) -> list[tuple[bool, bytes, int]]:
        return await asyncio.gather(*map(self._one, lines))

    async def _one(self, line: OpenAI) -> tuple[bool, bytes, int]:
        import msgspec

        body = [{"type": "http.request", "body": dumped(line.body), "more_body": False}]
        parts: list[bytes] = []
        status = 500
        ended = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if body:
                return body.pop()
            await ended.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message.get("body", b""))

        scope = {"type": "http", "method": "POST", "path": line.url, "raw_path": line.url.encode(), "headers": _HEADERS}
        try:
            await self._app({**scope, "query_string": b"", "root_path": ""}, receive, send)
        finally:
            ended.set()
        found = msgspec.json.decode(b"".join(parts))
        if status == 503:  # an error of the engine, not of the line
            raise DeviceError(str(found["error"]["message"]))
        return status == 200, line.answer(status, found), _tokens(found)


_HEADERS = [(b"host", b"localhost"), (b"content-type", b"application/json")]


def _tokens(found: Any) -> int:
    return int((found.get("usage") or {}).get("completion_tokens", 0))


class Actor:
    """A worker in the form that Ray Data calls: columns in, columns out."""

    def __init__(self, *arguments: Any):
        self._worker = Worker(*arguments)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        """Answer one chunk per row."""
        found: dict[str, list[Any]] = {name: [] for name in Done._fields}
        for i in range(len(batch["first"])):
            row = {name: batch[name][i] for name in Chunk._fields}
            chunk = Chunk(str(row["path"]), *(int(row[name]) for name in Chunk._fields[1:]))
            for name, value in self._worker(chunk)._asdict().items():
                found[name].append(value)
        return found
