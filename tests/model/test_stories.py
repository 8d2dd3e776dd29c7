"""The embedded model: it exists, it is small, its texts are unchanged, and other libraries can read it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from safetensors import SafetensorError

from tests.conftest import make_weights
from warpline import LLM, SamplingParams
from warpline.config import ModelConfig
from warpline.errors import ModelError
from warpline.model import builtin, cost
from warpline.model.export import export
from warpline.model.weights import Weights, load

DATA = Path(__file__).parents[1] / "data"
GREEDY = SamplingParams(temperature=0, max_tokens=300)
#: Nats per token of the held-out stories in fp32, to all digits that agree between machines.
NATS_PER_TOKEN = 1.25340
#: Rounding moves a logit by about ten half-units of the dtype; over 4,409 tokens the errors average out to a tenth.
TOLERANCE = {"fp32": 1e-5, "fp16": 2**-11, "bf16": 2**-8}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(device="cpu")


def golden() -> dict[str, list[int]]:
    """Greedy continuations in which every choice was clear by at least 0.01, far above fp32 rounding."""
    loaded: dict[str, list[int]] = json.loads((DATA / "golden_stories.json").read_text())
    return loaded


def held_out() -> list[str]:
    return [json.loads(line) for line in (DATA / "held_out_stories.jsonl").read_text().splitlines()]


def test_it_is_what_was_promised() -> None:
    config = builtin.config("stories")
    assert config.vocab_size == 50257
    assert config.head_size == 64
    assert config.tie_word_embeddings
    assert config.n_positions >= 512
    assert config.activation_function == "gelu_new"
    size = sum(path.stat().st_size for path in builtin.folder("stories").iterdir())
    assert size <= 40e6
    assert size >= cost.weight_bytes(config, "fp16")


@pytest.mark.alone
def test_it_loads_in_under_a_second(slowness: float) -> None:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        load("stories")
        times.append(time.perf_counter() - start)
    assert min(times) < slowness


@pytest.mark.parametrize("prompt", golden())
def test_golden_continuations(llm: LLM, prompt: str) -> None:
    (completion,) = llm.generate(prompt, GREEDY)
    assert list(completion.token_ids) == golden()[prompt]
    assert completion.finish_reason == "stop"


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_perplexity(dtype: str) -> None:
    assert LLM(device="cpu", dtype=dtype).score(held_out()).nats_per_token == pytest.approx(
        NATS_PER_TOKEN, rel=TOLERANCE[dtype]
    )


def test_stories_end_by_themselves(llm: LLM) -> None:
    prompts = [
        "Once upon a time",
        "The cat",
        "Ben found a big box.",
        "One cold night, a wolf",
        '"Help!" said the mouse.',
    ]
    sampled = llm.generate(prompts * 4, SamplingParams(max_tokens=400, seed=5))
    assert sum(completion.finish_reason == "stop" for completion in sampled) > 15


def test_transformers_reads_the_export(llm: LLM, tmp_path: Path) -> None:
    folder = tmp_path / "stories"
    names = {path.name for path in export(load("stories", dtype="fp16"), folder)}
    assert {"config.json", "model.safetensors", "tokenizer.json", "vocab.json", "merges.txt"} <= names
    model = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for prompt, expected in golden().items():
        inputs = tokenizer(prompt, return_tensors="pt")
        assert inputs["input_ids"][0].tolist() == llm.tokenizer.encode(prompt)
        output = model.generate(**inputs, max_new_tokens=300, do_sample=False, pad_token_id=50256)
        assert output[0, inputs["input_ids"].shape[1] :].tolist() == expected
        assert tokenizer.decode(expected, skip_special_tokens=True) == llm.tokenizer.decode(expected)
    again = load(str(folder))
    for name, value in load("stories").tensors.items():
        assert torch.equal(again.tensors[name], value)


def test_export_keeps_another_tokenizer(tmp_path: Path, save_folder: Callable[[Weights], Path]) -> None:
    vocab = {word: i for i, word in enumerate(["[UNK]", "hello", "world", "##ly"])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    folder = save_folder(make_weights(ModelConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=4)))
    backend.save(str(folder / "tokenizer.json"))
    export(load(str(folder)), tmp_path / "copy")
    assert load(str(tmp_path / "copy")).tokenizer().encode("hello worldly") == [1, 2, 3]
    assert not (tmp_path / "copy" / "tokenizer_config.json").exists()


def test_export_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(ModelError, match="not empty"):
        export(load("random:n_layer=1,n_head=1,n_embd=8"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]
    with pytest.raises(ModelError, match=r"cannot write|not empty"):
        export(load("random:n_layer=1,n_head=1,n_embd=8"), tmp_path / "precious.txt" / "below")


def test_failed_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("warpline.model.export.save_file", full)
    with pytest.raises(ModelError, match="No space left"):
        export(load("random:n_layer=1,n_head=1,n_embd=8"), tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
