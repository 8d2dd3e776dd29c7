"""`LLM`: weights, tokenizer, state and executor behind two calls, `generate` and `stream`."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import cast

import torch

from warpline import hardware
from warpline.config import EngineConfig, SamplingParams
from warpline.engine import executor as executors
from warpline.engine.score import Score
from warpline.engine.sequence import Completion, Timings, TokenLogprob
from warpline.engine.sequence import Sequence as Row
from warpline.engine.state import Progress, Request, State, room_for
from warpline.errors import ConfigError, DeviceError, ModelError, one_of
from warpline.model import cost, weights
from warpline.model.builtin import DEFAULT
from warpline.model.tokenizer import END_OF_TEXT
from warpline.model.weights import explained_memory

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]

#: Tokens of the first chunk behind a prompt's own.
FIRST_CHUNK = 4


class LLM:
    """A GPT-2 ready to write.

    `model` is anything `warpline.model.weights.load` knows: "stories", "random:gpt2", a folder, a .safetensors file,
    a hub id. The keywords are those of `EngineConfig`.
    """

    def __init__(
        self,
        model: str = DEFAULT,
        *,
        device: str = "auto",
        dtype: str = "auto",
        executor: str = "auto",
        window: int | None = None,
        max_batch: int = 32,
        threads: int | None = None,
    ):
        asked = EngineConfig(
            device=device, dtype=dtype, executor=executor, window=window, max_batch=max_batch, threads=threads
        )
        one_of(asked.executor, executors.EXECUTORS, "executor")
        self.device = hardware.describe(_torch_device(asked.device))
        torch_device = torch.device(_torch_device(asked.device))
        if asked.threads is not None:
            torch.set_num_threads(asked.threads)
        self.model, config = model, weights.read_config(model)
        self.dtype = _dtype(asked.dtype, self.device, weights.stored_dtype(model))
        chosen = executors.choose(asked.executor, torch_device, config, self.dtype)
        executors.begin(chosen, config, torch_device, self.dtype)
        loaded = weights.load(model, dtype=self.dtype, device=str(torch_device))
        if asked.window is not None:
            loaded = replace(loaded, config=replace(loaded.config, window=asked.window))
        with explained_memory(f"running {model} as {self.dtype}"):
            self.executor = executors.create(chosen, loaded, torch_device, self.dtype)
        self.config = loaded.config
        self.tokenizer = loaded.tokenizer()
        self.max_batch = min(asked.max_batch, self.executor.most_rows or asked.max_batch)
        self._idle: State | None = None

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete one or many prompts (texts or token ids): n completions for each, in the order of the prompts."""
        many = _as_list(prompts)
        if not many:
            raise ConfigError("there is no prompt: give at least one")
        pairs = zip(many, _spread(params, len(many)), strict=True)
        return self._run([row for prompt, its in pairs for row in self._rows(prompt, its)])

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Complete one prompt; iterate over the result for pieces of text as they come."""
        params = params or SamplingParams()
        if params.n != 1:
            raise ConfigError("stream gives one completion: use generate for n > 1")
        return Stream(Batch(self, self._rows(prompt, params)))

    def score(self, texts: list[str]) -> Score:
        """How well the model predicts `texts`: every token and the end of each, seen from one <|endoftext|> before it.

        The tokens go through the executor's own decode steps, so this measures what generates.
        """
        (end,) = self.tokenizer.encode(END_OF_TEXT, special=True)
        params = SamplingParams(temperature=0, ignore_eos=True, logprobs=0)
        rows = []
        for ids in self.tokenizer.encode_many(texts):
            if len(ids) + 2 > self.config.n_positions:
                most = self.config.n_positions - 2
                raise ConfigError(f"a text has {len(ids):,} tokens, but at most {most:,} can be scored: split it")
            request = Request([end], params, 0, 0, len(ids) + 2, forced=[*ids, end])
            rows.append(Row("", request, self.tokenizer, None))
        scored = [entry.logprob for c in self._run(rows) for entry in c.logprobs or ()]
        return Score(-sum(scored), len(scored), sum(map(len, texts)))

    def _run(self, rows: list[Row]) -> list[Completion]:
        results: list[Completion] = []
        for first in range(0, len(rows), self.max_batch):
            batch = Batch(self, rows[first : first + self.max_batch])
            for _ in batch.run(followed=False):
                pass
            results += batch.completions()
        return results

    def _rows(self, prompt: Prompt, params: SamplingParams) -> list[Row]:
        if isinstance(prompt, str):
            text, ids = prompt, self.tokenizer.encode(prompt, special=True)
        else:
            ids = [int(i) for i in prompt]
            text = self.tokenizer.decode(ids, special=True)
        config, context = self.config, self.config.n_positions
        if not ids:
            raise ConfigError("the prompt is empty: give a text; <|endoftext|> starts from nothing")
        if not all(0 <= i < config.vocab_size for i in ids):
            bad = next(i for i in ids if not 0 <= i < config.vocab_size)
            raise ConfigError(f"token id {bad} is outside the model's vocabulary of {config.vocab_size:,}")
        if len(ids) >= context:
            raise ConfigError(
                f"the prompt has {len(ids):,} tokens, but the model's context is {context:,} and at least one must "
                f"stay free: shorten the prompt to {context - 1:,} tokens"
            )
        limit = len(ids) + params.max_tokens
        if limit > context:
            logger.warning(
                "the model's context is %s tokens: at most %s of the %s asked for will be generated",
                f"{context:,}", f"{context - len(ids):,}", f"{params.max_tokens:,}",
            )  # fmt: skip
            limit = context
        seed = secrets.randbits(32) if params.seed is None else params.seed
        requests = [Request(ids, params, seed, sample, limit) for sample in range(params.n)]
        return [Row(text, request, self.tokenizer, config.eos_token_id) for request in requests]

    def _borrow(self, rows: int, capacity: int) -> State:
        """A state that fits: the idle one, or a larger one that takes its place and serves both kinds of request."""
        state, self._idle = self._idle, None
        if state is not None and state.fits(rows, capacity):
            return state
        rows, capacity = room_for(self.config, rows, capacity, state)
        del state  # before the new one is allocated
        with explained_memory(f"a KV cache of {rows} × {capacity} positions"):
            return self.executor.allocate(rows, capacity)

    def _give_back(self, state: State) -> None:
        self._idle = state


class Batch:
    """Rows that are generated together."""

    def __init__(self, llm: LLM, rows: list[Row]):
        self.llm, self.rows = llm, rows
        self.prefill_seconds = self.decode_seconds = 0.0
        self.decode_steps = 0

    def run(self, *, followed: bool = True) -> Generator[None, None, None]:
        """Generate; control returns after every chunk, when the rows have taken in their new tokens. Chunks are small
        at first, so that text is seen early, unless nobody reads along; then there may be only one."""
        executor = self.llm.executor
        requests = [row.request for row in self.rows]
        followed |= any(request.params.stop for request in requests)  # stop texts are the host's to find
        state = self.llm._borrow(len(requests), max(request.limit for request in requests))
        try:
            with _explained(f"generating {len(requests)} sequences"):
                state.begin(requests)
                start = time.perf_counter()
                executor.prefill(state)
                self._take(state)
                self.prefill_seconds = time.perf_counter() - start
                yield
                size = FIRST_CHUNK
                while left := [row.request.limit - row.length for row in self.rows if row.finish_reason is None]:
                    start, before = time.perf_counter(), [row.length for row in self.rows]
                    if followed:
                        steps = min(size, executor.chunk, max(left))
                        size = min(2 * size, executor.chunk)
                    else:
                        steps = executor.at_once(state, max(left))
                    executor.decode(state, steps)
                    self._take(state)
                    self.decode_steps += max(row.length - then for row, then in zip(self.rows, before, strict=True))
                    self.decode_seconds += time.perf_counter() - start
                    yield
        finally:
            self.llm._give_back(state)

    def _take(self, state: State) -> None:
        first = min(row.length for row in self.rows if row.finish_reason is None)
        seen = state.read(first)
        self.llm.executor.check()
        if seen.broken.any():
            raise ModelError(
                f"{self.llm.model} computed logits that are no numbers: its weights are damaged, or {self.llm.dtype} "
                "overflowed; try --dtype fp32"
            )
        ended: list[int] = []
        for i, row in enumerate(self.rows):
            if row.finish_reason is not None:
                continue
            for place in range(row.length, int(seen.length[i])):
                row.push(int(seen.tokens[i, place - first]))
                if row.request.params.logprobs is not None:
                    row.logprobs.append(_logprob(seen, i, place, row.request.params.logprobs))
                if row.finish_reason is not None:
                    ended.append(i)
                    break
        state.finish(ended)

    def completions(self) -> list[Completion]:
        """The results, once every row has ended."""
        llm, lengths = self.llm, [len(row.request.prompt) for row in self.rows]
        moved = cost.decode_bytes(llm.config, llm.dtype, lengths=lengths, steps=self.decode_steps)
        timings = Timings(self.prefill_seconds, self.decode_seconds, self.decode_steps, moved)
        return [row.completion(timings) for row in self.rows]


class Stream:
    """Pieces of text while they are written; `completion` holds the whole once it is finished."""

    def __init__(self, batch: Batch):
        self._batch = batch
        self._pieces = self._run()
        self.completion: Completion | None = None

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Stop early."""
        self._pieces.close()

    def _run(self) -> Generator[str, None, None]:
        (row,) = self._batch.rows
        with contextlib.closing(self._batch.run()) as chunks:  # a stream that is dropped gives its state back
            for _ in chunks:
                if piece := row.release():
                    yield piece
        (self.completion,) = self._batch.completions()


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Too little memory, or a GPU that failed, in one line."""
    with explained_memory(what):
        try:
            yield
        except RuntimeError as error:
            if "CUDA error" not in str(error):
                raise
            reason = str(error).splitlines()[0]
            raise DeviceError(
                f"the GPU failed while {what} ({reason}), and this process cannot use it any more: start a new one"
            ) from error


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _spread(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ConfigError(f"{count} prompts came with {len(params)} SamplingParams: give one, or one for each")
    return list(params)


def _logprob(seen: Progress, row: int, place: int, count: int) -> TokenLogprob:
    assert seen.logprob is not None
    assert seen.top_logprob is not None
    assert seen.top_token is not None
    at = place - seen.first
    top = zip(seen.top_token[row, at, :count], seen.top_logprob[row, at, :count], strict=True)
    return TokenLogprob(
        token_id=int(seen.tokens[row, at]),
        logprob=float(seen.logprob[row, at]),
        top=tuple((int(token), float(value)) for token, value in top),
    )


def _torch_device(device: str) -> str:
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _dtype(asked: str, device: hardware.Device, stored: str | None) -> str:
    if asked == "auto":
        return "fp16" if device.kind == "cuda" else stored or "fp32"
    if not device.supports(asked):
        raise DeviceError(
            f"{device.name} ({device.arch}) cannot compute in {asked}, which needs sm_80: use fp16 or fp32"
        )
    return asked
