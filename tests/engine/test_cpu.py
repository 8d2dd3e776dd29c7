"""The cpu executor: torch's tokens in fp32 whatever the settings, and right tokens from smaller weights."""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.conftest import SMALL
from tests.engine.running import news, run, spans
from tests.model.test_stories import held_out
from warpline import LLM, hardware
from warpline.bench.oracle import Oracle
from warpline.config import SamplingParams as Params
from warpline.engine.executors import create
from warpline.engine.executors.cpu.executor import CpuExecutor
from warpline.engine.request import Request
from warpline.errors import ConfigError, DeviceError, ModelError
from warpline.model.export import export
from warpline.model.quantise import FILE, SCALE, Matrix, dequantised, quantise
from warpline.model.weights import Weights, load, stored_dtype

CPU = torch.device("cpu")
GREEDY = Params(temperature=0, ignore_eos=True)


def requests(weights: Weights, lengths: list[int], new: int, params: Params = GREEDY) -> list[Request]:
    rng = random.Random(3)
    vocab = weights.config.vocab_size
    return [
        Request([rng.randrange(vocab) for _ in range(length)], params, 3, i, length + new)
        for i, length in enumerate(lengths)
    ]


def agree(weights: Weights, asked: list[Request]) -> bool:
    return run(CpuExecutor(weights, CPU, "fp32"), asked) == run(create("torch", weights, CPU, "fp32"), asked)


@pytest.mark.parametrize("lengths", [[1], [9], [5, 40, 17], [3] * 5])
def test_fp32_tokens_equal_torchs_with_any_team(lengths: list[int]) -> None:
    weights = load(SMALL)
    asked = requests(weights, lengths, 20)
    expected = run(create("torch", weights, CPU, "fp32"), asked)
    for threads in (1, 2, 3):
        assert run(CpuExecutor(weights, CPU, "fp32", threads=threads), asked) == expected


@pytest.mark.parametrize(
    "params",
    [
        Params(temperature=0.8, ignore_eos=True),
        Params(temperature=1.3, top_p=1.0, min_tokens=10),
        Params(temperature=0.9, top_k=5),
        Params(temperature=2, min_p=0.1),
        Params(temperature=1, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.2),
        Params(temperature=0, repetition_penalty=1.3),
        Params(temperature=0, logprobs=3),
    ],
)
def test_sampling_draws_what_torch_draws(params: Params) -> None:
    weights = load(SMALL)
    assert agree(weights, requests(weights, [8, 20], 30, params))


@pytest.mark.parametrize(
    "model",
    [
        "random:n_layer=2,n_head=3,n_embd=48,n_positions=64,vocab_size=101,n_inner=70",
        "random:n_layer=2,n_head=2,n_embd=32,n_positions=64,vocab_size=99,tie_word_embeddings=false",
        "random:n_layer=2,n_head=2,n_embd=32,n_positions=64,vocab_size=99,scale_attn_by_inverse_layer_idx=true",
        *(
            f"random:n_layer=2,n_head=2,n_embd=32,n_positions=64,vocab_size=99,activation_function={name}"
            for name in ("gelu", "relu", "silu", "tanh")
        ),
    ],
)
def test_other_models(model: str) -> None:
    weights = load(model)
    assert agree(weights, requests(weights, [4, 11], 20))


@pytest.mark.parametrize("window", [1, 5, 40])
def test_window(window: int) -> None:
    weights = load(SMALL)
    weights = replace(weights, config=replace(weights.config, window=window))
    assert agree(weights, requests(weights, [10, 30], 25))


def test_end_of_text_and_limits() -> None:
    weights = load(SMALL)
    free = run(create("torch", weights, CPU, "fp32"), requests(weights, [6], 30))
    weights = replace(weights, config=replace(weights.config, eos_token_id=free[0][9]))
    for params in (Params(temperature=0), Params(temperature=0, min_tokens=20)):
        assert agree(weights, [*requests(weights, [6], 30, params), *requests(weights, [9], 12, params)])


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_precision_is_judged_right(dtype: str) -> None:
    weights = load("stories", dtype=dtype)
    asked = requests(weights, [16, 16], 24)
    new = torch.tensor(run(CpuExecutor(weights, CPU, dtype), asked))
    assert Oracle(weights).judge(torch.tensor([request.prompt for request in asked]), new, dtype).right


def test_int8_follows_its_own_weights_exactly() -> None:
    """Only the rounding of weights loses precision: computed in float32, the rounded weights give the same tokens."""
    small = load(SMALL, dtype="int8")
    asked = requests(small, [12, 5], 25)
    expected = run(create("torch", dequantised(small, torch.float32), CPU, "fp32"), asked)
    assert run(CpuExecutor(small, CPU, "int8"), asked) == expected


def test_int8_predicts_as_well_as_fp32() -> None:
    """From a file, which stores matrices transposed."""
    texts = held_out()[:8]
    plain, small = (LLM(device="cpu", dtype=dtype, executor="cpu").score(texts) for dtype in ("fp32", "int8"))
    assert small.perplexity == pytest.approx(plain.perplexity, rel=0.01)


@given(st.integers(1, 9), st.integers(1, 70), st.floats(1e-6, 1e6))
def test_codes_are_within_half_a_step(rows: int, columns: int, size: float) -> None:
    matrix = size * torch.randn(rows, columns)
    codes, scale = quantise(matrix)
    assert (codes.float() * scale[:, None] - matrix).abs().le(0.5001 * scale[:, None]).all()
    assert codes.abs().amax(dim=1).eq(127).all()


def test_a_row_of_zeros_stays_zero() -> None:
    codes, scale = quantise(torch.zeros(2, 5))
    assert not codes.any()
    assert not scale.any()


def test_a_team_larger_than_the_machine_ends_and_agrees() -> None:
    """Threads without a core sleep; the running ones do all the work."""
    weights = load(SMALL)
    asked = requests(weights, [5, 9], 30)
    expected = run(create("torch", weights, CPU, "fp32"), asked)
    for _ in range(3):
        assert run(CpuExecutor(weights, CPU, "fp32", threads=3 * (os.cpu_count() or 1)), asked) == expected


def test_threads_are_chosen() -> None:
    before = torch.get_num_threads()
    try:
        llm = LLM(SMALL, device="cpu", threads=1)
        assert isinstance(llm.executor, CpuExecutor)
        assert llm.executor.threads == 1
    finally:
        torch.set_num_threads(before)
    with pytest.raises(ConfigError, match="threads must be at least 1, not 0"):
        LLM(SMALL, threads=0)


def test_a_container_s_quota_limits_the_threads(tmp_path: Path) -> None:
    for text, cores in (("150000 100000", 2), ("max 100000", 1 << 16), ("50000 100000", 1), ("", 1 << 16)):
        (tmp_path / "cpu.max").write_text(text)
        assert hardware._quota(tmp_path / "cpu.max") == cores
    assert hardware._quota(tmp_path / "missing") == 1 << 16


def test_int8_models_are_stored_and_read_as_they_are(tmp_path: Path) -> None:
    model = "random:n_layer=2,n_head=3,n_embd=48,n_positions=64,vocab_size=101,tie_word_embeddings=false"
    small = load(model, dtype="int8")
    export(small, tmp_path / "small")
    folder, file = str(tmp_path / "small"), tmp_path / "small" / FILE
    for again in (load(folder, dtype="int8"), load(str(file), dtype="int8")):
        assert again.tensors.keys() == small.tensors.keys()
        assert all(torch.equal(again.tensors[name], value) for name, value in small.tensors.items())
    codes, scale = small.tensors["wte.weight"], small.tensors["wte.weight" + SCALE]
    assert torch.equal(load(folder).tensors["wte.weight"], Matrix(codes, scale).plain())
    assert (stored_dtype(folder), stored_dtype(str(file)), stored_dtype(SMALL)) == ("int8", "int8", None)
    assert LLM(folder, device="cpu").dtype == "int8"
    with pytest.raises(OSError, match=r"model\.safetensors"):  # no other program reads codes as weights
        AutoModelForCausalLM.from_pretrained(folder)
    stored = load_file(file)
    for lost in ("transformer.wte.weight", "transformer.wte.weight.scale"):
        save_file({name: value for name, value in stored.items() if name != lost}, file)
        with pytest.raises(ModelError, match=r"wte\.weight has codes or scales alone: export the model again"):
            load(folder)
    save_file(stored | {"transformer.wte.weight.scale": torch.ones(7)}, file)
    with pytest.raises(ModelError, match="do not fit together"):
        load(folder)
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    (tmp_path / "small" / "config.json").write_text(json.dumps(config | {"quantization_config": {"bits": 4}}))
    with pytest.raises(ModelError, match="a quantisation that is not read here"):
        load(folder)


def test_what_int8_takes_of_memory() -> None:
    """In a process of its own: weights, cache and 300 MB more than torch itself, and no float32 weights. The memory for
    making them is returned."""
    words = (
        "import torch; from warpline import LLM, SamplingParams;"
        "from warpline.hardware import peak_process_bytes as peak;"
        "torch.zeros(1); before = peak(); llm = LLM('random:gpt2', device='cpu', dtype='int8');"
        "llm.generate('Hello there', SamplingParams(temperature=0, max_tokens=20));"
        "now = 1024 * int(next(l for l in open('/proc/self/status') if l.startswith('VmRSS')).split()[1]);"
        "print(peak() - before, now - before)"
    )
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True, timeout=250)
    peak, now = map(int, done.stdout.split())
    weights, cache = 124.4e6 + 4 * 1024 * 768, 2 * 12 * 128 * 768 * 2
    assert peak < weights + cache + 300e6
    assert now < weights + cache + 150e6


def test_a_dropped_executor_lets_its_threads_go() -> None:
    before = threading.active_count()
    executor = CpuExecutor(load(SMALL), CPU, "fp32", threads=4)
    assert threading.active_count() == before + 3
    del executor
    gc.collect()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_it_runs_on_a_cpu_alone() -> None:
    with pytest.raises(DeviceError, match="runs on a CPU"):
        CpuExecutor(load(SMALL), torch.device("cuda:0"), "fp32")


def test_two_runs_give_the_same_bits() -> None:
    weights = load("stories")
    asked = requests(weights, [30], 8)
    found = []
    for threads in (1, 2):
        executor = CpuExecutor(weights, CPU, "fp32", threads=threads)
        slots = executor.allocate(1, 40)
        lanes = slots.admit(asked)
        executor.prefill(slots, spans(slots, lanes))
        executor.decode(slots, lanes, 7)
        found.append(slots)
    assert found[0].tokens.equal(found[1].tokens)
    assert np.array_equal(found[0].cache.k.numpy(), found[1].cache.k.numpy())


def test_what_is_bound_ends_with_the_slots() -> None:
    weights = load(SMALL)
    executor = CpuExecutor(weights, CPU, "fp32")
    slots = executor.allocate(2, 40)
    run(executor, requests(weights, [5, 9], 6), slots)
    assert len(executor._calls) == 1
    gone = weakref.ref(slots)
    del slots
    gc.collect()
    assert gone() is None
    assert not executor._calls


def test_a_call_is_made_once_for_any_lanes() -> None:
    weights = load(SMALL)
    executor = CpuExecutor(weights, CPU, "fp32")
    slots = executor.allocate(4, 60)
    lanes = slots.admit(requests(weights, [5, 9, 1, 30], 20))
    executor.prefill(slots, spans(slots, lanes))
    call = executor._call(slots)
    words = call._words.ctypes.data
    for some in ([0, 1, 2, 3], [2], [3, 1], [1, 3], [0]):
        executor.decode(slots, some, 2)
        assert executor._call(slots) is call
        assert call._words.ctypes.data == words
    assert slots.length[:4].tolist() == [10, 16, 6, 37]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_halted_launch_ends_behind_its_step(threads: int, logprobs: int | None) -> None:
    """The result of the sequence does not depend on the halt."""
    weights = load(SMALL)
    executor = CpuExecutor(weights, CPU, "fp32", threads=threads)
    asked = requests(weights, [4, 9], 20, replace(GREEDY, logprobs=logprobs))
    slots = executor.allocate(2, 60)
    lanes = slots.admit(asked)
    executor.prefill(slots, spans(slots, lanes))
    executor.halt(slots, True)
    executor.decode(slots, lanes, 5)
    found = news(slots, lanes)
    assert [len(tokens) for tokens in found] == [2, 2]  # one from the prompt and one from a step
    executor.halt(slots, False)
    executor.decode(slots, lanes, 18)
    assert [a + b for a, b in zip(found, news(slots, lanes), strict=True)] == run(executor, asked)
