"""Files of a batch. Input: JSONL or Parquet, split into chunks that can be read one by one. Output: lines in the order
of the input, committed chunk by chunk, so that an interrupted job can continue."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from warpline.errors import ConfigError, DeviceError

#: Bytes at the beginning and at the end of a file that identify it, together with its size.
KNOWN_BY = 1 << 16
#: Lines per block when a Parquet file is written.
BLOCK = 8192


class Chunk(NamedTuple):
    """Some lines, or rows, that are processed together."""

    path: str
    first: int  # number of its first line, from 1
    lines: int
    place: int  # the byte where it begins, or the row in its group
    group: int  # -1 for JSONL


class Done(NamedTuple):
    """The results of a chunk: lines for the output, and lines for the errors."""

    lines: int
    results: bytes
    errors: bytes
    good: int
    bad: int
    tokens: int


def is_parquet(path: Path) -> bool:
    """Whether a file is Parquet, by its name."""
    return path.suffix.lower() in (".parquet", ".pq")


def parquet() -> Any:
    """Return the module that reads and writes Parquet."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise ConfigError("Parquet files need pyarrow: pip install 'warpline[parquet]'") from None
    return pyarrow.parquet


def chunks(path: Path, size: int) -> Iterator[Chunk]:
    """Yield the whole file as chunks of `size` lines."""
    if is_parquet(path):
        first = 1
        with _parquet_file(path) as file:
            for group in range(file.metadata.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                for place in range(0, rows, size):
                    count = min(size, rows - place)
                    yield Chunk(str(path), first, count, place, group)
                    first += count
        return
    with path.open("rb") as file:
        first = 1
        while True:
            place = file.tell()
            count = sum(1 for _ in itertools.islice(iter(file.readline, b""), size))
            if not count:
                return
            yield Chunk(str(path), first, count, place, -1)
            first += count


class Reader:
    """Reads the lines of chunks. Of a Parquet file it keeps the last row group in memory."""

    def __init__(self) -> None:
        self._kept: tuple[str, int, Any] | None = None

    def lines(self, chunk: Chunk) -> list[bytes | dict[str, Any]]:
        """Return the lines of one chunk."""
        if chunk.group < 0:
            try:
                with open(chunk.path, "rb") as file:
                    file.seek(chunk.place)
                    return list(itertools.islice(iter(file.readline, b""), chunk.lines))
            except OSError as error:
                where = f"{chunk.path} on {socket.gethostname()}"
                raise DeviceError(
                    f"cannot read {where} ({error.strerror}): put it where every node finds it by this name"
                ) from error
        kept = self._kept
        if kept is None or kept[:2] != (chunk.path, chunk.group):
            with _parquet_file(Path(chunk.path)) as file:
                kept = self._kept = chunk.path, chunk.group, file.read_row_group(chunk.group)
        rows: list[bytes | dict[str, Any]] = kept[2].slice(chunk.place, chunk.lines).to_pylist()
        return rows


def _parquet_file(path: Path) -> Any:
    import pyarrow

    try:
        return parquet().ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"cannot read {path} as Parquet: {str(error).splitlines()[0]}") from error


def digest(path: Path) -> str:
    """Return a digest that identifies a file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        begin = file.read(KNOWN_BY)
        file.seek(max(0, size - KNOWN_BY))
        content = begin + file.read()
    return hashlib.sha256(str(size).encode() + b" " + content).hexdigest()[:32]


def beside(out: Path, what: str) -> Path:
    """Return the path of a file that belongs to an output."""
    return out.with_name(f"{out.name}.{what}")


def errors_of(out: Path) -> Path:
    """Return the path of the file that reports the bad lines of a job."""
    return out.with_name(f"{out.stem}.errors.jsonl")


class Output:
    """The results of a job. Until it is complete they are in OUT.partial; OUT.progress says how much of that is valid.
    Whatever follows is cut off when the job continues, and computed again."""

    def __init__(self, out: Path, job: dict[str, Any]):
        self.out = out
        self.errors = errors_of(out)
        self.chunks = self.lines = self.good = self.bad = self.tokens = 0
        self._partial, self._errors = beside(out, "partial"), beside(out, "errors.partial")
        self._progress = beside(out, "progress")
        if out.exists():
            raise ConfigError(f"{out} is there already: a job that is complete is not done again; choose another name")
        try:
            self._journal: BinaryIO = open(self._progress, "a+b")  # noqa: SIM115 - closed by close
        except OSError as error:
            raise ConfigError(f"cannot write {self._progress}: {error.strerror or error}") from error
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._journal.close()
            raise ConfigError(f"another process is writing {out}: wait for it, or choose another name") from None
        try:
            self.job, kept = self._begin(job)
            self._files = [self._opened(self._partial, kept[0]), self._opened(self._errors, kept[1])]
        except BaseException:
            self._journal.close()
            raise

    def _begin(self, job: dict[str, Any]) -> tuple[dict[str, Any], tuple[int, int]]:
        job = json.loads(json.dumps(job))  # as JSON stores it: tuples become lists
        self._journal.seek(0)
        known: list[dict[str, Any]] = []
        whole = 0
        for line in self._journal:
            if not line.endswith(b"\n"):
                break
            known.append(json.loads(line))
            whole += len(line)
        begun, last = (known[0], known[-1]) if known else ({}, {})
        other = [name for name in job if name != "chunk" and begun.get(name) != job[name]]
        if not known or (other and len(known) == 1):  # a journal of another job without results is replaced
            self._journal.truncate(0)
            self._note(job)
            return job, (0, 0)
        self._journal.truncate(whole)
        if other:
            raise ConfigError(
                f"{self._progress} is of a job with another {other[0]}: run that to its end, or remove it to begin anew"
            )
        if len(known) > 1:
            self.chunks, self.lines, self.good, self.bad, self.tokens = (
                last[name] for name in ("chunks", "lines", "good", "bad", "tokens")
            )
        return begun, (last.get("results", 0), last.get("errors", 0))

    @staticmethod
    def _opened(path: Path, size: int) -> BinaryIO:
        file = open(path, "a+b")  # noqa: SIM115 - closed by close
        if os.fstat(file.fileno()).st_size < size:
            file.close()
            raise ConfigError(f"{path} has lost lines that were done: remove it and the .progress file to begin anew")
        file.truncate(size)
        return file

    def _note(self, what: dict[str, Any]) -> None:
        self._journal.write(json.dumps(what).encode() + b"\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())

    def commit(self, done: Done) -> None:
        """Append the next chunk, in the order of the input."""
        sizes = []
        for file, lines in zip(self._files, (done.results, done.errors), strict=True):
            if lines:
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
            sizes.append(file.seek(0, os.SEEK_END))
        self.chunks += 1
        self.lines += done.lines
        self.good += done.good
        self.bad += done.bad
        self.tokens += done.tokens
        self._note({
            "chunks": self.chunks, "lines": self.lines, "good": self.good, "bad": self.bad, "tokens": self.tokens,
            "results": sizes[0], "errors": sizes[1],
        })  # fmt: skip

    def finish(self) -> None:
        """Give the files their final names after the last chunk."""
        for file in self._files:
            file.close()
        if is_parquet(self.out):
            made = beside(self.out, "writing")
            _write_parquet(self._partial, made)
            made.replace(self.out)
            self._partial.unlink()
        else:
            self._partial.replace(self.out)
        if self.bad:
            self._errors.replace(self.errors)
        else:
            self._errors.unlink()
        self._progress.unlink()
        self.close()

    def close(self) -> None:
        """Close the files; what was committed is kept for the next run."""
        for file in (*self._files, self._journal):
            with contextlib.suppress(ValueError):  # closed already
                file.close()


def _write_parquet(source: Path, made: Path) -> None:
    import pyarrow

    parquet()

    def blocks() -> Iterator[list[dict[str, Any]]]:
        with source.open("rb") as file:
            while lines := list(itertools.islice(file, BLOCK)):
                rows = [json.loads(line) for line in lines]
                names = dict.fromkeys(name for row in rows for name in row)  # a table has the columns of its first row
                yield [{name: row.get(name) for name in names} for row in rows]

    try:
        # Fields may differ from line to line; numbers may be integers or not.
        schemas = {pyarrow.Table.from_pylist(block).schema for block in blocks()}
        schema = pyarrow.unify_schemas(list(schemas), promote_options="permissive") if schemas else pyarrow.schema([])
        with parquet().ParquetWriter(made, schema) as writer:
            for block in blocks():
                writer.write_table(pyarrow.Table.from_pylist(block, schema=schema))
    except pyarrow.ArrowException as error:
        said = str(error).splitlines()[0]
        raise ConfigError(f"the results fit no table ({said}): they are in {source}; write JSONL instead") from error
