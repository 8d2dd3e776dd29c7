"""Completes the prompts of a file into a file: in this process, or with Ray Data over replicas, with equal results."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warpline.config import SWITCH_SECONDS, EngineConfig, SamplingParams
from warpline.engine.llm import MOST_SLOTS
from warpline.errors import ConfigError, DeviceError, WarplineError
from warpline.model import weights
from warpline.model.builtin import DEFAULT
from warpline.progress import progress
from warpline.scale import cluster
from warpline.scale.files import Chunk, Done, Output, beside, chunks, digest, errors_of, is_parquet, parquet
from warpline.scale.lines import dumped
from warpline.scale.worker import AT_ONCE, Actor, Worker

if TYPE_CHECKING:
    from ray.data import Dataset

logger = logging.getLogger(__name__)

#: Chunks that may be finished ahead of an unfinished one, so that a long text does not stop the others.
AHEAD = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of a job."""

    out: Path
    errors: Path | None  # where the bad lines are; None if there are none
    lines: int
    good: int
    bad: int
    tokens: int  # of all texts
    resumed: int  # lines that an earlier run had finished
    seconds: float  # of this run


def generate(
    data: str | Path | Iterable[Any] | Dataset,
    out: str | Path,
    *,
    model: str = DEFAULT,
    params: SamplingParams | None = None,
    column: str = "prompt",
    replicas: int | str | None = None,
    ray_address: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    kv_dtype: str | None = None,
    executor: str = "auto",
    max_batch: int | None = None,
    threads: int | None = None,
    deterministic: str = "off",
    speculate: str = "off",
    speculative_tokens: int = 3,
    speculative_table: bool = False,
    gpus: float | None = None,
    chunk: int | None = None,
) -> Report:
    """Complete every prompt of a JSONL or Parquet file, of a Ray dataset or of any iterable, and write the results to
    `out`, JSONL or Parquet by its name, in the order of the input.

    A line has a prompt in `column` and perhaps settings of its own; or it is a request of OpenAI's batch format.
    Without a seed of its own its seed is that of `params` plus its position. Bad lines are reported in a file beside
    the results.
    The same call continues a run that was interrupted. With `replicas` (a number, or "auto" for as many as fit) Ray
    does the work, else this process.
    """
    began = time.perf_counter()
    out = Path(out)
    asked = EngineConfig(
        device=device, dtype=dtype, kv_dtype=kv_dtype, executor=executor, max_batch=max_batch, threads=threads,
        deterministic=deterministic, speculate=speculate, speculative_tokens=speculative_tokens,
        speculative_table=speculative_table,
    )  # fmt: skip
    params = _checked(params or SamplingParams())
    count = cluster.replica_count(replicas)
    if replicas is None and ray_address is not None:
        raise ConfigError("an address of Ray's is for replicas: say how many")
    _require_writable(out)
    source = _source(data, out, column)
    config = weights.read_config(model)
    job = {
        "input": digest(source), "model": model, "dtype": dtype, "kv_dtype": kv_dtype, "column": column,
        "chunk": chunk or _chunk(asked), "params": asdict(params), "vocab": config.vocab_size,
    }  # fmt: skip
    with closing(Output(out, job)) as output:
        resumed, size = output.lines, int(output.job["chunk"])
        if resumed:
            logger.warning("%s lines were done before: continuing after them", f"{resumed:,}")
        work = list(chunks(source, size))
        left = work[output.chunks :]
        arguments = (cluster.absolute(model), asdict(asked), params, column)
        with progress("Generating", sum(one.lines for one in left)) as advance:
            by_ray = replicas is not None
            made = _by_ray(left, arguments, count, ray_address, gpus) if by_ray else _here(left, arguments)
            with closing(made):  # replicas and threads end with it in any case
                for done in made:
                    output.commit(done)
                    advance(done.lines)
        output.finish()
    if not isinstance(data, str | Path):
        source.unlink()
    return Report(
        out=out, errors=errors_of(out) if output.bad else None, lines=output.lines, good=output.good, bad=output.bad,
        tokens=output.tokens, resumed=resumed, seconds=time.perf_counter() - began,
    )  # fmt: skip


def _require_writable(out: Path) -> None:
    if is_parquet(out):
        parquet()
    if not out.parent.is_dir():
        raise ConfigError(f"cannot write {out}: there is no folder {out.parent}")
    if out.exists():
        raise ConfigError(f"{out} is there already: a job that is complete is not done again; choose another name")


def _checked(params: SamplingParams) -> SamplingParams:
    if params.n != 1 or params.logprobs is not None:
        raise ConfigError("a line has one text: n and logprobs are for lines of OpenAI's format, each for itself")
    return replace(params, seed=params.seed or 0)


def _chunk(asked: EngineConfig) -> int:
    """Return the lines per chunk: twice as many as run at once, so that a few chunks keep every slot busy."""
    import torch

    on_gpu = asked.device.startswith("cuda") or (asked.device == "auto" and torch.cuda.is_available())
    return 2 * (asked.max_batch or MOST_SLOTS["cuda" if on_gpu else "cpu"])


def _source(data: Any, out: Path, column: str) -> Path:
    """Return the file with the lines. Other data is written to a file first, where a second run finds it again."""
    if isinstance(data, str | Path):
        path = Path(data).resolve()
        if not path.is_file():
            raise ConfigError(f"cannot read {data}: there is no such file")
        return path
    path, writing = beside(out, "input"), beside(out, "input.writing")
    if path.exists():
        logger.warning("the lines are those of the run that was interrupted, in %s", path)
        return path.resolve()
    rows = data.iter_rows() if hasattr(data, "iter_rows") else data
    with writing.open("wb") as file:
        for row in rows:
            file.write(dumped(row if isinstance(row, dict) else {column: row}))
    writing.replace(path)
    return path.resolve()


# --- running --------------------------------------------------------------------------------------------------------


def _here(left: list[Chunk], arguments: tuple[Any, ...]) -> Generator[Done, None, None]:
    """Run in this process: a few chunks at once, which share the engine's running batch."""
    if not left:
        return
    worker = Worker(*arguments)
    coming, todo = deque[Future[Done]](), deque(left)
    pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="warpline-batch")
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)  # the engine's thread must not wait for one that formats lines
    try:
        while coming or todo:
            while todo and len(coming) < AHEAD and sum(not one.done() for one in coming) < AT_ONCE:
                coming.append(pool.submit(worker, todo.popleft()))
            if coming[0].done() or len(coming) >= AHEAD or not todo:
                yield coming.popleft().result()
            else:
                _wait_for_any(coming)
    finally:
        sys.setswitchinterval(before)
        pool.shutdown(wait=False, cancel_futures=True)
        worker.stop()
        pool.shutdown(wait=True)
        worker.close()


def _wait_for_any(coming: Iterable[Future[Done]]) -> None:
    from concurrent.futures import FIRST_COMPLETED, wait

    wait([one for one in coming if not one.done()], return_when=FIRST_COMPLETED)


def _by_ray(
    left: list[Chunk], arguments: tuple[Any, ...], count: int | None, address: str | None, gpus: float | None
) -> Generator[Done, None, None]:
    """Run on actors of Ray Data. An actor that dies is restarted, and its chunks are run again."""
    if not left:
        return
    model, engine, *rest = arguments
    with cluster.connected(address) as ray:
        has = ray.cluster_resources()
        each = cluster.share(engine["device"], engine["threads"], gpus=gpus, replicas=count, has=has)
        many = count or max(1, cluster.most(each, has))
        cluster.require_room(many, each, has)
        device, cores = ("cuda", None) if each.gpus else ("cpu", int(each.cpus))
        engine = engine | {"device": device, "threads": cores}
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        source = ray.data.from_items([one._asdict() for one in left], override_num_blocks=len(left))
        made = source.map_batches(
            Actor,
            batch_size=1,
            fn_constructor_args=(model, engine, *rest),
            compute=ray.data.ActorPoolStrategy(
                size=many,
                max_tasks_in_flight_per_actor=AT_ONCE,
                max_concurrent_calls_per_actor=AT_ONCE,
                enable_true_multi_threading=True,
            ),
            **each.options(),
        )
        try:
            for row in made.iter_rows():
                yield Done(*(row[name] for name in Done._fields))
        except ray.exceptions.RayError as error:
            raise _explained(error) from error


def _explained(error: BaseException) -> WarplineError:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, WarplineError):
            return cause
        cause = cause.__cause__ or getattr(cause, "cause", None)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    ours = [line.partition(": ")[2] for line in lines if line.startswith("warpline.errors.")]
    return DeviceError(f"Ray gave up: {(ours or lines or [type(error).__name__])[-1][:300]}")
