"""The command line as its users see it, bad input included."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Run
from tests.conftest import SMALL, make_weights
from warpline import __version__
from warpline.config import FAMILY, ModelConfig
from warpline.kernels.catalog import CATALOG
from warpline.model.builtin import BUILTIN
from warpline.model.weights import Weights

COMMAND = [sys.executable, "-m", "warpline"]


def shell(*arguments: str, stdin: bytes = b"", timeout: float = 120) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*COMMAND, *arguments], input=stdin, capture_output=True, timeout=timeout, check=False)


@pytest.mark.alone
def test_help_answers_quickly(slowness: float) -> None:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        done = shell("--help")
        times.append(time.perf_counter() - start)
        assert done.returncode == 0
        assert b"generate" in done.stdout
    assert min(times) < 0.5 * slowness


@pytest.mark.parametrize("command", ["serve", "batch"])
def test_help_keeps_the_names_of_extras(run: Run, command: str) -> None:
    """The library that prints help reads brackets as markup."""
    code, out, _ = run(command, "--help")
    assert code == 0
    assert "[ray]" in out


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"warpline {__version__}\n", "")


def test_generate(run: Run) -> None:
    code, out, err = run("generate", "Hello", "--model", SMALL, "--max-new-tokens", "8", "--seed", "1")
    assert code == 0
    assert out.startswith("Hello")
    assert len(out) > len("Hello\n")
    for part in ("8 new, ", "tok/s", "GB/s", "prompt 1 in ", "fp32, cpu"):
        assert part in err
    assert err.count("\n") == 1
    again = run("generate", "Hello", "--model", SMALL, "--max-new-tokens", "8", "--seed", "1", "--no-stream")
    assert again[:2] == (0, out)


def test_json(run: Run) -> None:
    settings = ("--model", SMALL, "--max-new-tokens", "6", "--temperature", "0")
    code, out, err = run("generate", "Hello there", *settings, "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    wanted = (
        "text token_ids prompt_tokens new_tokens seconds tokens_per_second finish_reason model executor dtype device"
    )
    assert set(wanted.split()) <= result.keys()
    assert (result["prompt_tokens"], result["new_tokens"], len(result["token_ids"])) == (2, 6, 6)
    assert (result["finish_reason"], result["executor"], result["dtype"]) == ("length", "cpu", "fp32")
    assert out.count("\n") == 1
    code, out, _ = run("generate", "Hello there", *settings, "--json", "--n", "2")
    assert len(json.loads(out)["completions"]) == 2


def test_several_completions(run: Run) -> None:
    code, out, _ = run("generate", "Hello", "--model", SMALL, "--max-new-tokens", "4", "-n", "3")
    assert code == 0
    many = json.loads(run("generate", "Hello", "--model", SMALL, "--max-new-tokens", "4", "-n", "40", "--json")[1])
    assert many["tokens_per_second"] == pytest.approx(many["new_tokens"] / many["seconds"], rel=1e-3)
    assert [line for line in out.splitlines() if line.startswith("---")] == [f"--- {i} of 3 ---" for i in (1, 2, 3)]


def test_stop_window_and_file(run: Run, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Grüße aus dem Wald")
    code, out, _ = run("generate", "--file", str(prompt), "--model", SMALL, "--max-new-tokens", "5", "--window", "3")
    assert code == 0
    assert out.startswith("Grüße aus dem Wald")
    stopped = ("--model", SMALL, "--seed", "1", "--max-new-tokens", "30", "--stop", "e", "--stop", "a", "--json")
    result = json.loads(run("generate", "Hello", *stopped)[1])
    assert result["finish_reason"] == "stop"
    assert not {"e", "a"} & set(result["text"])


def test_beyond_the_context_is_said(run: Run) -> None:
    code, out, err = run("generate", "Hello", "--model", SMALL, "--max-new-tokens", "500", "--json")
    assert code == 0
    assert json.loads(out)["new_tokens"] == 95
    assert json.loads(out)["finish_reason"] == "length"
    assert err == "note: the model's context is 96 tokens: at most 95 of the 500 asked for will be generated\n"


BAD_INPUT = [
    (["generate", "Hi", "--model", "gtp2"], "did you mean 'gpt2'"),
    (["generate", "Hi", "--model", "./no/such/folder"], "check the path"),
    (["generate", "Hi", "--model", "gpt2"], "cannot download"),
    (["generate", ""], "is empty"),
    (["generate", "word " * 200, "--model", SMALL], "the model's context is 96: shorten it"),
    (["generate", "Hi", "--model", SMALL, "--max-new-tokens", "0"], "--max-new-tokens must be"),
    (["generate", "Hi", "--max-new-tokens", "many"], "'--max-new-tokens'"),
    (["generate", "Hi", "--temperature", "-1"], "--temperature must be ≥ 0"),
    (["generate", "Hi", "--top-p", "0"], r"--top-p must be in (0, 1]"),
    (["generate", "Hi", "--top-p", "1.5"], r"--top-p must be in (0, 1]"),
    (["generate", "Hi", "--dtype", "fp8"], "unknown dtype 'fp8'"),
    (["generate", "Hi", "--device", "tpu"], "unknown device 'tpu'"),
    (["generate", "Hi", "--executor", "magic"], "unknown executor 'magic'"),
    (["generate", "Hi", "--window", "0"], "window"),
    (["generate", "Hi", "--stop", ""], "stop"),
    (["generate", "Hi", "--file", "x.txt"], "given twice"),
    (["generate", "--file", "no-such-file.txt"], "cannot read no-such-file.txt"),
    (["generate", "Hi", "--no-such-option"], "--no-such-option"),
    (["generate", "Hi", "there"], "there"),
    (["genrate", "Hi"], "genrate"),
    (["generate", "Hi", "--device", "cuda:"], "unknown device 'cuda:'"),
    (["generate", "Hi", "--window", "99999999999999999999"], "window"),
    (["generate", "Hi", "--n", "100000000"], "at most 10,000"),
    (["generate", "Hi", "--temperature", "1e-40"], "greedy"),
    (["generate", "Hi", "--model", "~nosuchuser/x"], "no usable path"),
    (["export", "random:n_embd=2000000000,n_head=2,n_layer=1", "never-made"], "not enough memory"),
    (["export", "random:n_layer=1,n_head=1,n_embd=8,window=3", "never-made"], "sliding window"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT, ids=[" ".join(a)[:40] for a, _ in BAD_INPUT])
def test_bad_input_gets_one_line(run: Run, arguments: list[str], message: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_broken_models(run: Run, save_folder: Callable[[Weights], Path]) -> None:
    folder = save_folder(make_weights(ModelConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=300)))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    code, _, err = run("generate", "Hi", "--model", str(folder))
    assert code == 2
    assert "truncated" in err
    (folder / "config.json").write_text('{"model_type": "bert"}')
    code, _, err = run("generate", "Hi", "--model", str(folder))
    assert code == 2
    assert "'bert' model, not gpt2" in err


def test_without_a_command_the_help_is_shown(run: Run) -> None:
    code, out, err = run()
    assert code == 2
    assert "generate" in out + err
    assert "error:" not in out + err


def test_output_that_cannot_be_written() -> None:
    words = " ".join([*COMMAND, "generate", "Hi", "--max-new-tokens", "3", "--model", f"'{SMALL}'"])

    def with_shell(redirection: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(["bash", "-c", f"{words} {redirection}"], capture_output=True, timeout=60, check=False)

    full, closed, silent = with_shell("> /dev/full"), with_shell(">&-"), with_shell("2>&-")
    assert (full.returncode, closed.returncode, silent.returncode) == (2, 2, 0)
    assert b"no space is left" in full.stderr
    assert b"standard output is closed" in closed.stderr
    assert b"Traceback" not in full.stderr + closed.stderr
    ascii_only = with_shell("").stdout
    assert ascii_only.startswith(b"Hi")


def test_terminal_that_knows_only_ascii() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    arguments = [*COMMAND, "generate", "Grüße", "--max-new-tokens", "2", "--model", SMALL]
    done = subprocess.run(arguments, capture_output=True, timeout=60, check=False, env=environment)
    assert done.returncode == 0
    assert done.stdout.startswith(b"Gr??e")


def test_debug_shows_the_traceback() -> None:
    done = shell("generate", "", "--debug")
    assert done.returncode == 1
    assert b"Traceback" in done.stderr
    assert b"is empty" in done.stderr


def test_standard_input() -> None:
    settings = ["--model", SMALL, "--max-new-tokens", "3", "--json"]
    done = shell("generate", *settings, stdin="Grüße\n".encode())
    assert done.returncode == 0
    assert json.loads(done.stdout)["prompt_tokens"] == 4
    assert json.loads(shell("generate", "-", *settings, stdin=b"Hi").stdout)["prompt_tokens"] == 1
    for raw, message in (
        (b"caf\xe9", b"standard input is not UTF-8 (byte 3)"),
        (b"", b"is empty"),
        (b"\n", b"is empty"),
    ):
        done = shell("generate", *settings, stdin=raw)
        assert done.returncode == 2
        assert message in done.stderr
        assert done.stderr.count(b"\n") == 1


def start(*arguments: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)


ENDLESS = ("generate", "Hello", "--model", "random:n_layer=8,n_head=8,n_embd=256,n_positions=20000")


def test_interrupt_stops_cleanly() -> None:
    process = start(*ENDLESS, "--max-new-tokens", "19000")
    assert process.stdout is not None
    assert process.stdout.read(40)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert b"stopped" in err


def test_closed_pipe_is_quiet() -> None:
    process = start(*ENDLESS, "--max-new-tokens", "19000")
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        assert process.stdout.read(40)
        process.stdout.close()
        assert process.wait(timeout=60) == 141
        assert process.stderr.read() == b""


def test_the_default_model_writes_a_story(run: Run) -> None:
    code, out, err = run("generate", "The little dog", "--temperature", "0")
    assert code == 0
    assert out.startswith("The little dog wanted to play the drums.")
    assert "stories fp32, cpu" in err


def test_export(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("export", "random:n_layer=1,n_head=1,n_embd=8,n_positions=16", str(tmp_path / "new"))
    assert code == 0
    assert "model.safetensors" in out
    code, _, err = run("export", "random:n_layer=1,n_head=1,n_embd=8,n_positions=16", str(tmp_path / "new"))
    assert (code, err.count("\n")) == (2, 1)
    assert "not empty" in err
    assert run("generate", "Hi", "--model", str(tmp_path / "new"), "--max-new-tokens", "3")[0] == 0
    assert "unknown dtype" in run("export", "stories", str(tmp_path / "other"), "--dtype", "int3")[2]


def test_models(run: Run) -> None:
    code, out, _ = run("models")
    assert code == 0
    assert all(name in out for name in (*BUILTIN, *FAMILY))
    rows = {row["name"]: row for row in json.loads(run("models", "--json")[1])}
    assert rows["gpt2"]["parameters"] == 124_439_808
    assert rows["gpt2"]["bytes_per_token"]["fp16"] / 1e6 == pytest.approx(247.3, abs=0.1)


def test_kernels(run: Run) -> None:
    code, out, _ = run("kernels")
    assert code == 0
    assert "layernorm" in out
    assert [row["name"] for row in json.loads(run("kernels", "--json")[1])] == list(CATALOG)
    code, out, _ = run("kernels", "compile", "layernorm", "--arch", "sm_75,sm_90", "--dtype", "fp16", "--json")
    rows = json.loads(out)
    assert code == 0
    assert {row["arch"] for row in rows} == {"sm_75", "sm_90"}
    assert all(row["spill_bytes"] == 0 and row["registers"] > 0 for row in rows)
    for arguments, message in (
        (("compile", "layernrm"), "did you mean 'layernorm'"),
        (("compile", "--arch", "sm_91"), "did you mean 'sm_90'"),
        (("compile", "--dtype", "int4"), "unknown dtype"),
        (("bogus",), "bogus"),
    ):
        code, _, err = run("kernels", *arguments)
        assert (code, err.count("\n")) == (2, 1)
        assert message in err
    if not torch.cuda.is_available():
        code, _, err = run("kernels", "bench")
        assert code == 2
        assert "needs a CUDA GPU" in err


def test_doctor(run: Run) -> None:
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    for word in ("CPU", "GPU", "torch", "NVRTC", "driver", "cache"):
        assert word in out
    assert "of gpt2 fp32" in out
    report = json.loads(run("doctor", "--json")[1])
    assert all(1 <= counts["gpt2-xl fp32"] <= counts["gpt2 fp32"] for counts in report["slots"][:1])
    assert report["devices"][0]["measured_bandwidth"] > 0
    assert report["software"]["warpline"] == __version__
    _, _, err = run("generate", "Hello", "--model", SMALL, "--max-new-tokens", "4")
    assert re.search(r"[\d.]+ of [\d,]+ GB/s", err)


@pytest.mark.parametrize(
    ("given", "ours"), [("float32", "fp32"), ("float16", "fp16"), ("half", "fp16"), ("bfloat16", "bf16")]
)
def test_names_of_others_are_known(run: Run, given: str, ours: str) -> None:
    code, out, _ = run("generate", "Hello", "--model", SMALL, "--max-tokens", "3", "--dtype", given, "--json")
    assert code == 0
    assert (json.loads(out)["dtype"], json.loads(out)["new_tokens"]) == (ours, 3)
