"""`LLM`: a model, its tokenizer and an engine behind `generate`, `stream`, `submit` and `score`."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch

from warpline import hardware
from warpline.config import EngineConfig, ModelConfig, SamplingParams
from warpline.engine import executors
from warpline.engine.check.score import Score
from warpline.engine.device import dtype_of, numbered, torch_device
from warpline.engine.engine import Engine
from warpline.engine.handle import Handle, Worker
from warpline.engine.job import Job
from warpline.engine.prefix import share_prefixes
from warpline.engine.prompts import Prompt, as_list, joined, spread
from warpline.engine.request import Request
from warpline.engine.stream import Stream
from warpline.engine.text import Completion, Text, Texts, Timings, TokenLogprob, watched
from warpline.errors import ConfigError, one_of
from warpline.model import cost, weights
from warpline.model.builtin import DEFAULT
from warpline.model.tokenizer import END_OF_TEXT
from warpline.model.weights import Weights, explained_memory

logger = logging.getLogger(__name__)

#: Most sequences at once if `max_batch` is not given, and the share of free memory that their KV cache may take.
MOST_SLOTS = {"cuda": 256, "cpu": 32}
SHARE_OF_MEMORY = {"cuda": 0.5, "cpu": 0.25}


def default_slots(config: ModelConfig, dtype: str, device: str, kv_dtype: str | None = None) -> int:
    """Return how many sequences' KV caches fit into a share of the memory that is free now."""
    kind = device.partition(":")[0]
    free = hardware.free_bytes(device)
    each = config.n_positions * cost.kv_bytes_per_position(config, dtype, kv_dtype)
    fits = MOST_SLOTS[kind] if free is None else int(SHARE_OF_MEMORY[kind] * free) // each - 1  # one is for parking
    return max(1, min(MOST_SLOTS[kind], fits))


class LLM:
    """A GPT-2 model ready to generate. Any number of threads may call it: they share one running batch.

    Args:
        model: What `warpline.model.weights.load` knows: "stories" (inside the package), "random:gpt2", a folder, a
            .safetensors file, or a name on the Hugging Face hub such as "gpt2".

    The other arguments are the fields of `EngineConfig`.

    Examples:
        >>> from warpline import LLM
        >>> llm = LLM("stories", device="cpu", dtype="fp32")
        >>> llm
        LLM('stories', device='cpu', dtype='fp32', executor='cpu')
        >>> llm.config.n_layer
        8
        >>> llm.close()
    """

    def __init__(
        self,
        model: str = DEFAULT,
        *,
        device: str = "auto",
        dtype: str = "auto",
        kv_dtype: str | None = None,
        executor: str = "auto",
        window: int | None = None,
        max_batch: int | None = None,
        threads: int | None = None,
        deterministic: str = "off",
        speculate: str = "off",
        speculative_tokens: int = 3,
        speculative_table: bool = False,
    ):
        asked = EngineConfig(
            device=device, dtype=dtype, kv_dtype=kv_dtype, executor=executor, window=window, max_batch=max_batch,
            threads=threads, deterministic=deterministic, speculate=speculate, speculative_tokens=speculative_tokens,
            speculative_table=speculative_table,
        )  # fmt: skip
        one_of(asked.executor, executors.EXECUTORS, "executor")
        chosen_device = torch_device(asked.device)
        if asked.threads is not None:
            torch.set_num_threads(asked.threads)
        config = weights.read_config(model)
        found = dtype_of(asked.dtype, hardware.describe(str(chosen_device)), weights.stored_dtype(model))
        chosen = executors.resolve(asked.executor, chosen_device, config, found)
        executors.start_compiling(chosen, config, chosen_device, found)
        loaded = weights.load(model, dtype=found, device=str(chosen_device))
        self._assemble(model, loaded, chosen_device, found, chosen, asked)
        if chosen_device.type == "cpu":
            del loaded
            hardware.give_back_freed_memory()  # the executor keeps copies of its own: up to all of the weights

    @classmethod
    def of(
        cls,
        loaded: Weights,
        device: torch.device,
        dtype: str,
        *,
        executor: str = "auto",
        kv_dtype: str | None = None,
        max_batch: int | None = None,
        window: int | None = None,
    ) -> LLM:
        """Return an LLM over weights that are loaded already."""
        made, device = cls.__new__(cls), numbered(device)
        chosen = executors.resolve(executor, device, loaded.config, dtype)
        asked = EngineConfig(kv_dtype=kv_dtype, max_batch=max_batch, window=window)
        made._assemble(loaded.name, loaded, device, dtype, chosen, asked)
        return made

    def _assemble(
        self, model: str, loaded: Weights, device: torch.device, dtype: str, executor: str, asked: EngineConfig
    ) -> None:
        self.model, self.dtype, self.kv_dtype = model, dtype, asked.kv_dtype
        self.device = hardware.describe(str(device))
        if asked.window is not None:
            loaded = replace(loaded, config=replace(loaded.config, window=asked.window))
        with explained_memory(f"running {model} as {dtype}"):
            self.executor = executors.create(executor, loaded, device, dtype, asked)
        self.config, self.folder, self.tokenizer = loaded.config, loaded.folder, loaded.tokenizer()
        count = asked.max_batch or default_slots(self.config, dtype, str(device), asked.kv_dtype)
        self.engine = Engine(self.executor, count, self.config.n_positions + 1, model=model)  # last token needs none
        self.max_batch = self.engine.count
        self._worker = Worker(self.engine)
        self._seeds = random.Random()  # seeded by the system; for requests without a seed

    def __repr__(self) -> str:
        device = str(self.executor.device)
        return f"LLM({self.model!r}, device={device!r}, dtype={self.dtype!r}, executor={self.executor.name!r})"

    def warm_up(self) -> None:
        """Allocate, compile and capture now, so that no request waits for it. A server calls this before it takes
        requests. It takes tens of seconds if every size is new to a GPU, else a few."""
        self.engine.prepare()
        self.generate([0], SamplingParams(max_tokens=2))

    def close(self) -> None:
        """Finish what is running and free the memory."""
        self._worker.close()
        self.engine.close()

    # --- generating ---------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete one or many prompts (texts or token ids): n completions for each, in the order of the prompts.

        Args:
            prompts: A text, the token ids of one prompt, or a list of texts or of lists of ids.
            params: One for all prompts, or one for each; without it the defaults of `SamplingParams`.

        Examples:
            >>> from warpline import LLM, SamplingParams
            >>> llm = LLM("stories", device="cpu", dtype="fp32")
            >>> greedy = SamplingParams(max_tokens=12, temperature=0)
            >>> for completion in llm.generate(["Once upon a time", "The sun was"], greedy):
            ...     print(completion.prompt + completion.text)
            Once upon a time, there was a little girl named Lily. She loved to
            The sun was shining brightly. Little Jack was playing in the garden. He
        """
        many = as_list(prompts)
        if not many:
            raise ConfigError("there is no prompt: give at least one")
        timings = Timings(self.config, self.dtype, self.kv_dtype)
        pairs = self._requests(many, spread(params, len(many)))
        texts = Texts(self.tokenizer, len(pairs))
        jobs = [Job(pair[1], timings=timings, arrays=arrays) for pair, arrays in zip(pairs, texts.arrays, strict=True)]
        stopping = {i: self._watch(job) for i, job in enumerate(jobs) if job.request.params.stops}
        if len(jobs) > 1:
            share_prefixes(jobs)
        self._run(jobs, texts.extend)
        found = texts.finish()
        for i, text in stopping.items():
            found[i] = text.finish()
        return [self._complete(job, given, text) for job, (given, _), text in zip(jobs, pairs, found, strict=True)]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Complete one prompt; iterate over the result for pieces of text as they come.

        A stream that is closed or forgotten ends its sequence. Where the pieces are cut is not promised.

        Examples:
            >>> from warpline import LLM, SamplingParams
            >>> llm = LLM("stories", device="cpu", dtype="fp32")
            >>> stream = llm.stream("Tom had a red", SamplingParams(max_tokens=6, temperature=0))
            >>> "".join(stream)
            ' wagon. He liked to play'
            >>> stream.completion.finish_reason
            'length'
        """
        self._worker.require_open()
        return Stream(self, *self._followed(prompt, params))

    def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> Handle:
        """Begin to complete one prompt and return at once.

        What it returns has `result()` for the whole, is iterated over (`for` or `async for`) for pieces, and `cancel()`
        ends it.

        Examples:
            >>> from warpline import LLM, SamplingParams
            >>> llm = LLM("stories", device="cpu", dtype="fp32")
            >>> handle = llm.submit("Tom had a red", SamplingParams(max_tokens=3, temperature=0))
            >>> handle.result().text
            ' wagon. He'
            >>> handle.finished
            True
            >>> llm.close()
        """
        job, text, given = self._followed(prompt, params)
        handle = Handle(self.engine, job, text, lambda s: self._complete(s, given, text.finish()))
        job.notify = handle.told
        self.start([job])
        return handle

    def start(self, jobs: list[Job]) -> None:
        """Start jobs that the caller has made and reads itself, as a server does."""
        self._worker.require_open()
        if len(jobs) > 1:
            share_prefixes(jobs)
        self.engine.submit(jobs)
        self._worker.wake()

    def score(self, texts: list[str]) -> Score:
        """Return how well the model predicts `texts`: every token and the end of each, with one <|endoftext|> before
        it.

        The tokens go through the executor's own decode steps, so this measures the code that generates.

        Examples:
            >>> from warpline import LLM
            >>> llm = LLM("stories", device="cpu", dtype="fp32")
            >>> usual, odd = llm.score(["Tom had a red ball."]), llm.score(["Ball a red Tom had."])
            >>> usual.tokens, usual.perplexity < odd.perplexity
            (7, True)
        """
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise ConfigError("score takes a list of texts: [text] for one")
        (end,) = self.tokenizer.encode(END_OF_TEXT, special=True)
        params = SamplingParams(temperature=0, ignore_eos=True, logprobs=0)
        jobs = []
        for ids in self.tokenizer.encode_many(texts):
            if len(ids) + 2 > self.config.n_positions:
                most = self.config.n_positions - 2
                raise ConfigError(f"a text has {len(ids):,} tokens, but at most {most:,} can be scored: split it")
            jobs.append(Job(Request([end], params, 0, 0, len(ids) + 2, forced=[*ids, end])))
        self._run(jobs)
        scored = [value for job in jobs for value, _, _ in job.logprobs]
        return Score(-sum(scored), len(scored), sum(map(len, texts)))

    def _run(self, jobs: list[Job], meanwhile: Callable[[], object] = lambda: None) -> None:
        """Drive the engine until these jobs are finished; `meanwhile` is called while the device works."""
        self._worker.require_open()
        self.engine.submit(jobs)
        waiting = list(jobs)

        def done() -> bool:
            while waiting and waiting[-1].finished:
                waiting.pop()
            return not waiting

        try:
            self.engine.run(done, meanwhile)
        finally:
            if not self.engine.idle:  # jobs that a stop text has ended may be running again
                self.engine.cancel(jobs)
        for job in jobs:
            if job.error is not None:
                raise job.error

    def _followed(self, prompt: Prompt, params: SamplingParams | None) -> tuple[Job, Text, str | None]:
        (given, request), *others = self._requests([prompt], spread(params, 1))
        if others:
            raise ConfigError("this gives one completion: use generate for n > 1")
        job = Job(request, followed=True, timings=Timings(self.config, self.dtype, self.kv_dtype))
        return job, self._watch(job), given

    def _watch(self, job: Job) -> Text:
        """Make the job's text as its tokens come."""
        return watched(job, self.tokenizer, self.config.eos_token_id)

    # --- requests -----------------------------------------------------------------------------------------------------

    def _requests(self, prompts: list[Prompt], params: list[SamplingParams]) -> list[tuple[str | None, Request]]:
        """Return a request for each completion, with the prompt's text if it was a text. Raises if one is invalid."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = iter(self.tokenizer.encode_many(texts, special=True) if len(texts) > 1 else map(self._encode, texts))
        many = self._many_checked([next(encoded) if isinstance(p, str) else p for p in prompts])
        found: list[tuple[str | None, Request]] = []
        short: list[tuple[int, int]] = []
        context = self.config.n_positions
        for its in {id(its): its for its in params}.values():  # often one object for all
            its.require_vocab(self.config.vocab_size)
        for prompt, ids, its in zip(prompts, many, params, strict=True):
            limit = len(ids) + its.max_tokens
            if limit > context:
                most = max(context, len(ids) + 1)  # the last token needs no position
                if limit > most:
                    short.append((most - len(ids), its.max_tokens))
                limit = min(limit, most)
            given = prompt if isinstance(prompt, str) else None
            seed = self._seeds.getrandbits(32) if its.seed is None else its.seed
            for sample in range(its.n):
                found.append((given, Request(ids, its, seed, sample, limit)))
        if short:
            self._warn(short)
        return found

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, special=True)

    def _warn(self, short: list[tuple[int, int]]) -> None:
        """Warn, in one line, of prompts that leave less room than was asked for."""
        room, asked = min(short)
        which = f"of {len(short):,} prompts " if len(short) > 1 else ""
        logger.warning(
            "the model's context is %s tokens: %sat most %s of the %s asked for will be generated",
            f"{self.config.n_positions:,}", which, f"{room:,}", f"{asked:,}",
        )  # fmt: skip

    def _many_checked(self, prompts: list[Sequence[int] | np.ndarray | torch.Tensor]) -> list[np.ndarray]:
        """Check all prompts at once, and one by one only if something is wrong. Returns copies."""
        try:
            lengths, flat = [len(prompt) for prompt in prompts], joined(prompts)
        except (TypeError, ValueError, OverflowError):
            return [self._checked(prompt) for prompt in prompts]
        fit = (
            flat.ndim == 1 and flat.dtype.kind in "iu" and min(lengths) > 0 and max(lengths) <= self.config.n_positions
        )
        if not fit or flat.min() < 0 or flat.max() >= self.config.vocab_size:
            return [self._checked(prompt) for prompt in prompts]
        flat = flat.astype(np.int64, copy=False)
        ends = itertools.accumulate(lengths, initial=0)
        return [flat[begin:end] for begin, end in itertools.pairwise(ends)]

    def _checked(self, prompt: Sequence[int] | np.ndarray | torch.Tensor) -> np.ndarray:
        context, vocab = self.config.n_positions, self.config.vocab_size
        try:
            ids = np.array(prompt.numpy() if isinstance(prompt, torch.Tensor) else prompt)
        except (TypeError, ValueError):  # on a GPU, or with rows of different lengths
            ids = np.empty((1, 1))
        if not ids.size:
            raise ConfigError("the prompt is empty: give a text; <|endoftext|> starts from nothing")
        if ids.dtype.kind not in "iu" or ids.ndim != 1:
            raise ConfigError(f"a prompt is a text or token ids in the host's memory, not {str(prompt)[:40]}")
        ids = ids.astype(np.int64, copy=False)
        if ids.min() < 0 or ids.max() >= vocab:
            bad = next(i for i in ids.tolist() if not 0 <= i < vocab)
            raise ConfigError(f"token id {bad} is outside the model's vocabulary of {vocab:,}")
        if len(ids) > context:
            raise ConfigError(f"the prompt has {len(ids):,} tokens, but the model's context is {context:,}: shorten it")
        return ids

    # --- results ------------------------------------------------------------------------------------------------------

    def _complete(self, job: Job, given: str | None, text: str) -> Completion:
        params, request = job.request.params, job.request
        assert job.finish_reason is not None
        assert job.timings is not None
        return Completion(
            text=text,
            token_ids=tuple(job.tokens),
            finish_reason=job.finish_reason,
            logprobs=None if params.logprobs is None else tuple(self._logprobs(job, params.logprobs)),
            seed=request.seed,
            index=request.sample,
            timings=job.timings,
            given=given,
            given_ids=cast(np.ndarray, request.prompt),
            tokenizer=self.tokenizer,
        )

    @staticmethod
    def _logprobs(job: Job, count: int) -> Iterator[TokenLogprob]:
        for token, (logprob, values, tokens) in zip(job.tokens, job.logprobs, strict=False):  # more may come
            top = zip(tokens[:count].tolist(), values[:count].tolist(), strict=True)
            yield TokenLogprob(token_id=token, logprob=logprob, top=tuple(top))
