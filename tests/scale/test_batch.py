"""Files in, files out, in one process: formats, bad lines, interruption, and texts that are independent of the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from warpline import LLM, SamplingParams
from warpline.errors import ConfigError, DeviceError
from warpline.scale import batch
from warpline.scale.batch import generate
from warpline.scale.files import Chunk, Done, Output, Reader, chunks
from warpline.scale.worker import AT_ONCE, Worker

MODEL = "random:n_layer=2,n_head=2,n_embd=32,n_positions=64"
ENGINE: dict[str, Any] = {"model": MODEL, "device": "cpu", "dtype": "fp32", "threads": 1, "max_batch": 4}
PARAMS = SamplingParams(max_tokens=6, temperature=1.0, ignore_eos=True)


def rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def written(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return written(tmp_path / "in.jsonl", [{"prompt": f"number {i % 7}", "id": i} for i in range(50)])


def test_texts_are_those_of_the_library(prompts: Path, tmp_path: Path) -> None:
    done = generate(prompts, tmp_path / "out.jsonl", params=PARAMS, **ENGINE)
    assert (done.good, done.bad, done.errors, done.resumed, done.tokens) == (50, 0, None, 0, 300)
    found = rows(done.out)
    assert [row["id"] for row in found] == list(range(50))
    assert [row["line"] for row in found] == list(range(1, 51))
    llm = LLM(**ENGINE)
    for row in found[::7]:
        params = SamplingParams(max_tokens=6, temperature=1.0, ignore_eos=True, seed=row["seed"])
        assert llm.generate(row["prompt"], params)[0].text == row["completion"]
    assert len({row["completion"] for row in found if row["prompt"] == "number 0"}) > 1  # each line has its own seed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize("size", [1, 3, 64])
def test_texts_do_not_depend_on_the_chunks(prompts: Path, tmp_path: Path, size: int) -> None:
    usual = generate(prompts, tmp_path / "usual.jsonl", params=PARAMS, **ENGINE)
    other = generate(prompts, tmp_path / "other.jsonl", params=PARAMS, chunk=size, **ENGINE)
    assert usual.out.read_bytes() == other.out.read_bytes()


def test_bad_lines_are_beside_the_results(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    good = json.dumps({"prompt": "fine"})
    long, surrogate = json.dumps({"prompt": "x " * 100}), json.dumps({"prompt": "\ud800"})
    bad = ["{", json.dumps({"prompt": ""}), long, json.dumps({"prompt": [10**6]}), surrogate]
    path.write_text("\n".join([good, *bad, "", good]))  # and no newline at the end
    done = generate(path, tmp_path / "out.jsonl", params=PARAMS, **ENGINE)
    assert (done.lines, done.good, done.bad) == (8, 2, 5)
    assert [row["line"] for row in rows(done.out)] == [1, 8]
    assert done.errors == tmp_path / "out.errors.jsonl"
    said = rows(done.errors)
    assert [row["line"] for row in said] == [2, 3, 4, 5, 6]
    assert "context is 64" in said[2]["error"]
    assert "vocabulary" in said[3]["error"]


def test_a_limit_beyond_the_context_is_what_fits(tmp_path: Path) -> None:
    path = written(tmp_path / "in.jsonl", [{"prompt": "one two three", "max_tokens": 5000, "min_tokens": 100}])
    (row,) = rows(generate(path, tmp_path / "out.jsonl", params=PARAMS, **ENGINE).out)
    assert row["prompt_tokens"] + row["completion_tokens"] == 64


def test_openai_lines_get_the_servers_answers(tmp_path: Path) -> None:
    def asked(name: str, url: str, **body: Any) -> dict[str, Any]:
        return {"custom_id": name, "method": "POST", "url": url, "body": body}

    lines = [
        asked("a", "/v1/completions", prompt="A frog", max_tokens=4, seed=5, n=2, logprobs=1),
        {"prompt": "plain"},
        asked("b", "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], max_tokens=4),
        asked("c", "/v1/completions", prompt="A frog", temperature=-2),
        asked("d", "/v1/completions", prompt="A frog", model="another"),
        asked("e", "/v1/completions", prompt="A frog", max_tokens=4, temperature=0),
    ]
    done = generate(written(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl", params=PARAMS, **ENGINE)
    found = rows(done.out)
    assert [row.get("custom_id") for row in found] == ["a", None, "b", "e"]
    first = found[0]["response"]["body"]
    assert first["object"] == "text_completion"
    assert [choice["index"] for choice in first["choices"]] == [0, 1]
    assert first["usage"]["completion_tokens"] == 8
    assert found[2]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert done.errors is not None
    assert [(row["custom_id"], row["response"]["status_code"]) for row in rows(done.errors)] == [("c", 400), ("d", 404)]
    llm = LLM(**ENGINE)
    greedy = llm.generate("A frog", SamplingParams(max_tokens=4, temperature=0))[0].text
    assert found[3]["response"]["body"]["choices"][0]["text"] == greedy


def test_parquet_in_and_out(tmp_path: Path, prompts: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(rows(prompts))
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet", row_group_size=17)
    assert [chunk[1:] for chunk in chunks(tmp_path / "in.parquet", 10)][:3] == [
        (1, 10, 0, 0),
        (11, 7, 10, 0),
        (18, 10, 0, 1),
    ]
    done = generate(tmp_path / "in.parquet", tmp_path / "out.parquet", params=PARAMS, chunk=10, **ENGINE)
    lines = generate(prompts, tmp_path / "out.jsonl", params=PARAMS, **ENGINE)
    assert pyarrow.parquet.read_table(done.out).to_pylist() == rows(lines.out)
    mixed = written(tmp_path / "mixed.jsonl", [{"prompt": "a", "x": 1}, {"prompt": "b", "x": 1.5, "y": "z"}])
    made = generate(mixed, tmp_path / "m.parquet", params=PARAMS, **ENGINE)
    found = pyarrow.parquet.read_table(made.out).to_pylist()
    assert [(row["x"], row["y"]) for row in found] == [(1.0, None), (1.5, "z")]
    clash = written(tmp_path / "clash.jsonl", [{"prompt": "a", "x": 1}, {"prompt": "b", "x": "one"}])
    with pytest.raises(ConfigError, match=r"fit no table .*: they are in .*clash.parquet.partial; write JSONL"):
        generate(clash, tmp_path / "clash.parquet", params=PARAMS, **ENGINE)
    (tmp_path / "not.parquet").write_text("nothing")
    with pytest.raises(ConfigError, match=r"cannot read .* as Parquet"):
        generate(tmp_path / "not.parquet", tmp_path / "x.jsonl", params=PARAMS, **ENGINE)


def test_iterables_are_taken_as_they_are(tmp_path: Path) -> None:
    done = generate((f"text {i}" for i in range(9)), tmp_path / "out.jsonl", params=PARAMS, **ENGINE)
    assert [row["prompt"] for row in rows(done.out)] == [f"text {i}" for i in range(9)]
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_run_goes_on_where_it_stood(prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Nothing is lost or done twice, whatever was written after the last commit."""
    whole = generate(prompts, tmp_path / "whole.jsonl", params=PARAMS, chunk=6, **ENGINE)
    commit, seen = Output.commit, 0

    def breaking(self: Output, done: Done) -> None:
        nonlocal seen
        if seen == at:
            raise Interrupted
        commit(self, done)
        seen += 1

    monkeypatch.setattr(Output, "commit", breaking)
    out = tmp_path / "out.jsonl"
    with pytest.raises(Interrupted):
        generate(prompts, out, params=PARAMS, chunk=6, **ENGINE)
    monkeypatch.undo()
    assert not out.exists()
    partial, progress = tmp_path / "out.jsonl.partial", tmp_path / "out.jsonl.progress"
    with partial.open("ab") as file:
        file.write(b'{"half of a li')
    with progress.open("ab") as file:
        file.write(b'{"chunks": 9')
    worked: list[Chunk] = []
    call = Worker.__call__

    def noted(self: Worker, chunk: Chunk) -> Done:
        worked.append(chunk)
        return call(self, chunk)

    monkeypatch.setattr(Worker, "__call__", noted)
    done = generate(prompts, out, params=PARAMS, chunk=12, **ENGINE)  # the chunks are those of the first run
    assert done.resumed == 6 * at
    assert sum(chunk.lines for chunk in worked) == 50 - 6 * at
    assert out.read_bytes() == whole.out.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "whole.jsonl"]


def test_another_job_is_not_gone_on_with(prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Output.commit

    def breaking(most: int) -> Any:
        def broken(self: Output, done: Done) -> None:
            if self.chunks == most:
                raise Interrupted
            commit(self, done)

        return broken

    for most, params in ((0, SamplingParams(max_tokens=3)), (1, PARAMS)):  # the first run finishes nothing
        with monkeypatch.context() as patch:
            patch.setattr(Output, "commit", breaking(most))
            with pytest.raises(Interrupted):
                generate(prompts, tmp_path / "out.jsonl", params=params, **ENGINE)
    with pytest.raises(ConfigError, match=r"out.jsonl.progress is of a job with another params"):
        generate(prompts, tmp_path / "out.jsonl", **ENGINE)
    with prompts.open("a") as file:
        file.write('"more"\n')
    with pytest.raises(ConfigError, match="another input"):
        generate(prompts, tmp_path / "out.jsonl", params=PARAMS, **ENGINE)


def test_two_runs_do_not_write_one_file(prompts: Path, tmp_path: Path) -> None:
    job = {"chunk": 1}
    first = Output(tmp_path / "out.jsonl", job)
    with pytest.raises(ConfigError, match="another process is writing"):
        Output(tmp_path / "out.jsonl", job)
    first.close()
    Output(tmp_path / "out.jsonl", job).close()
    generate(prompts, tmp_path / "done.jsonl", params=PARAMS, **ENGINE)
    with pytest.raises(ConfigError, match="is there already"):
        generate(prompts, tmp_path / "done.jsonl", params=PARAMS, **ENGINE)


def test_an_engine_that_fails_ends_the_job_and_not_the_lines(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise DeviceError("the GPU is gone")

    with monkeypatch.context() as patch:
        patch.setattr(LLM, "start", broken)
        with pytest.raises(DeviceError, match="the GPU is gone"):
            generate(prompts, tmp_path / "out.jsonl", params=PARAMS, **ENGINE)
    assert generate(prompts, tmp_path / "out.jsonl", params=PARAMS, **ENGINE).good == 50


def test_a_command_that_answers_no_line_fails(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_text("Once upon a time\nA frog\n")
    command = [sys.executable, "-m", "warpline", "batch", str(path), str(tmp_path / "out.jsonl"), "--model", MODEL]
    done = subprocess.run([*command, "--device", "cpu"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "2 lines could not be answered" in done.stderr


def test_a_killed_command_goes_on(tmp_path: Path) -> None:
    """SIGKILL, then the same command: the result is as without an interruption."""
    path = written(tmp_path / "in.jsonl", [{"prompt": f"number {i}"} for i in range(600)])
    options = ["--model", MODEL, "--device", "cpu", "--threads", "1", "--max-tokens", "30", "--max-batch", "4"]

    def command(out: Path) -> list[str]:
        return [sys.executable, "-m", "warpline", "batch", str(path), str(out), "--ignore-eos", *options]

    out = tmp_path / "out.jsonl"
    process = subprocess.Popen(command(out), stderr=subprocess.DEVNULL, env=dict(os.environ))
    progress, end = tmp_path / "out.jsonl.progress", time.monotonic() + 60
    while process.poll() is None and not (progress.exists() and len(progress.read_bytes().splitlines()) > 3):
        assert time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists(), "it was quicker than the test"
    again = subprocess.run(command(out), capture_output=True, text=True, timeout=120, check=True)
    assert "lines were done before" in again.stderr
    assert "600 texts" in again.stderr
    assert "could not be answered" not in again.stderr
    whole = generate(path, tmp_path / "whole.jsonl", params=SamplingParams(max_tokens=30, ignore_eos=True), **ENGINE)
    assert out.read_bytes() == whole.out.read_bytes()
    refused = subprocess.run(command(out), capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"error: {out} is there already")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"data": "nowhere.jsonl"}, "there is no such file"),
        ({"out": "no/folder/out.jsonl"}, "there is no folder"),
        ({"replicas": "many"}, "a number, or auto"),
        ({"replicas": 0}, "a number, or auto"),
        ({"ray_address": "10.0.0.1:6379"}, "say how many"),
        ({"params": SamplingParams(n=2)}, "a line has one text"),
    ],
)
def test_refusals(prompts: Path, tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    asked = {"data": prompts, "out": tmp_path / "out.jsonl", **ENGINE, **changes}
    with pytest.raises(ConfigError, match=why):
        generate(asked.pop("data"), asked.pop("out"), **asked)


def test_without_ray_replicas_are_refused_in_one_line(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"replicas need Ray \(ray is missing\): pip install 'warpline\[ray\]'"):
        generate(prompts, tmp_path / "out.jsonl", replicas=2, params=PARAMS, **ENGINE)


def test_a_file_that_another_machine_does_not_have() -> None:
    with pytest.raises(DeviceError, match=r"cannot read /nowhere/in.jsonl on .*where every node finds it"):
        Reader().lines(Chunk("/nowhere/in.jsonl", 1, 1, 0, -1))


def test_the_window_of_chunks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow chunk keeps the others from running ahead without limit."""
    begun: list[int] = []

    class Slow:
        def __call__(self, chunk: Chunk) -> Done:
            begun.append(chunk.first)
            time.sleep(1.0 if chunk.first == 1 else 0)
            return Done(1, b"", b"", 1, 0, 0)

        def stop(self) -> None: ...
        def close(self) -> None: ...

    monkeypatch.setattr(batch, "Worker", lambda *_: Slow())
    made = batch._here([Chunk("", i, 1, 0, -1) for i in range(1, 200)], ())
    next(made)
    assert len(begun) <= batch.AHEAD + AT_ONCE
    assert len(list(made)) == 198
