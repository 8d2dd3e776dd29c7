"""The persistent executor: the torch executor's tokens in fp32, right tokens in half precision, and it always ends."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.conftest import SMALL, watch_steps
from warpline import LLM
from warpline.bench.oracle import Oracle
from warpline.config import EngineConfig
from warpline.config import SamplingParams as Params
from warpline.engine.crossing import FAULT, NOT_FINITE
from warpline.engine.executors import Executor, create
from warpline.engine.executors.persistent.executor import PersistentExecutor
from warpline.engine.request import Request, Span
from warpline.engine.slots import Slots
from warpline.errors import ConfigError, DeviceError
from warpline.model.weights import Weights, load

GPU = torch.device("cuda:0")
GREEDY = Params(temperature=0, max_tokens=1000, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def full_fp32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def requests(weights: Weights, lengths: list[int], new: int, params: Params = GREEDY, seed: int = 3) -> list[Request]:
    rng = random.Random(seed)
    vocab = weights.config.vocab_size
    return [
        Request([rng.randrange(vocab) for _ in range(length)], params, seed, i, length + new)
        for i, length in enumerate(lengths)
    ]


def run(executor: Executor, asked: list[Request], chunk: int = 1000, slots: Slots | None = None) -> list[list[int]]:
    """Return prompts and new tokens of each request, in unordered slots unless some are given."""
    count = len(asked)
    slots = slots or executor.allocate(count + 3, max(request.limit for request in asked))
    spare = slots.admit(asked[:1] * min(3, slots.free - count))  # admitted and released, so that slots are mixed up
    for slot in spare:
        slots.release(slot)
    lanes = slots.admit(asked)
    executor.prefill(slots, [Span(s, 0, len(r.prompt), (s,)) for s, r in zip(lanes, asked, strict=True)])
    left = max(request.limit - len(request.prompt) for request in asked) - 1
    while left > 0:
        executor.decode(slots, lanes, min(chunk, left))
        left -= chunk
    news = slots.report(lanes, slots.capacity).wait()
    if news.flags.any() and news.flags[0] & FAULT:
        slots.fault.zero_()
        raise executor.fault()
    assert not (news.flags & NOT_FINITE).any()
    for slot in lanes:
        slots.release(slot)
    return [[*r.prompt, *row[:n].tolist()] for r, row, n in zip(asked, news.tokens, news.counts, strict=True)]


def agree(weights: Weights, asked: list[Request]) -> bool:
    """Whether torch generates the same tokens."""
    expected = run(create("torch", weights, GPU, "fp32"), asked)
    return run(PersistentExecutor(weights, GPU, "fp32"), asked) == expected


@pytest.mark.parametrize("lengths", [[1], [9], [5, 40, 17], [3, 3, 3, 3, 3], list(range(1, 9)), [60]])
def test_fp32_tokens_equal_torchs(lengths: list[int]) -> None:
    weights = load(SMALL, device="cuda")
    asked = requests(weights, lengths, 24)
    expected = run(create("torch", weights, GPU, "fp32"), asked)
    ours = PersistentExecutor(weights, GPU, "fp32")
    found = run(ours, asked)
    assert found == expected
    assert run(ours, asked, chunk=5) == expected


@pytest.mark.parametrize(
    ("model", "lengths", "new"),
    [
        ("random:gpt2", [16], 100),
        ("random:gpt2", [900], 120),
        ("random:gpt2", [7, 300, 80], 60),
        ("random:gpt2", [600] * 4, 30),
        ("stories", [20, 5], 200),
        ("random:n_layer=3,n_head=3,n_embd=144,n_positions=128,vocab_size=777,n_inner=400", [20], 50),
        ("random:n_layer=2,n_head=25,n_embd=1600,n_positions=256", [20, 130], 40),
        ("random:n_layer=2,n_head=2,n_embd=32,n_positions=64,vocab_size=50", [4], 40),
        ("random:n_layer=2,n_head=2,n_embd=256,n_positions=300,vocab_size=500", [250], 40),
    ],
)
def test_fp32_tokens_of_other_models(model: str, lengths: list[int], new: int) -> None:
    weights = load(model, device="cuda")
    asked = requests(weights, lengths, new)
    assert run(PersistentExecutor(weights, GPU, "fp32"), asked) == run(create("torch", weights, GPU, "fp32"), asked)


@pytest.mark.parametrize("window", [1, 5, 40, 200])
def test_window(window: int) -> None:
    weights = load("random:n_layer=2,n_head=2,n_embd=128,n_positions=256,vocab_size=300", device="cuda")
    weights = replace(weights, config=replace(weights.config, window=window))
    asked = requests(weights, [30, 120], 60)
    assert run(PersistentExecutor(weights, GPU, "fp32"), asked) == run(create("torch", weights, GPU, "fp32"), asked)


@pytest.mark.parametrize("lengths", [[1], [9], [200], [5, 90], [5, 40, 17], [30 * i + 1 for i in range(8)]])
@pytest.mark.parametrize("model", ["random:gpt2", "random:n_layer=3,n_head=3,n_embd=192,n_positions=512"])
def test_contexts_in_parts(model: str, lengths: list[int]) -> None:
    """The same tokens with any number of context parts, and equal to the bit from run to run."""
    weights = load(model, device="cuda")
    ours = PersistentExecutor(weights, GPU, "fp32")
    asked = requests(weights, lengths[: ours.extents.most_rows], 40)
    expected = run(create("torch", weights, GPU, "fp32"), asked)
    assert run(ours, asked) == expected
    ours.set_up(EngineConfig(deterministic="batch"), model)
    assert run(ours, asked) == expected
    half = PersistentExecutor(load(model, dtype="fp16", device="cuda"), GPU, "fp16")
    assert run(half, asked) == run(half, asked, chunk=7)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize(
    ("model", "batch", "prompt"),
    [
        *(("random:gpt2", batch, prompt) for batch, prompt in ((1, 16), (1, 700), (2, 100), (8, 64))),
        *(
            (f"random:n_layer=2,n_head={heads},n_embd={64 * heads}", batch, 60)
            for heads in (16, 20, 25)
            for batch in (1, 4)
        ),
    ],
)
def test_half_precision_is_judged_right(model: str, dtype: str, batch: int, prompt: int) -> None:
    weights = load(model, dtype=dtype, device="cuda")
    asked = requests(weights, [prompt] * batch, 40)
    executor = PersistentExecutor(weights, GPU, dtype)
    found = run(executor, asked)
    ids = torch.tensor(found, device=GPU)
    assert Oracle(weights).judge(ids[:, :prompt], ids[:, prompt:], dtype).right
    assert run(executor, asked) == found  # equal to the bit, or the tokens would diverge sooner or later


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int8"])
def test_turing_path(dtype: str) -> None:
    """Compiled as PTX for compute_75, which has neither asynchronous copies nor bf16, and run on this GPU."""
    weights = load("random:n_layer=3,n_head=4,n_embd=256,n_positions=256", dtype=dtype, device="cuda")
    asked = requests(weights, [20, 90], 40)
    turing = run(PersistentExecutor(weights, GPU, dtype, arch="compute_75"), asked)
    assert turing == run(PersistentExecutor(weights, GPU, dtype), asked)


@pytest.mark.parametrize(
    "params",
    [
        Params(temperature=0.8, ignore_eos=True),
        Params(temperature=0.8, top_p=1, ignore_eos=True),
        Params(temperature=1, top_p=1, min_tokens=10),
        Params(temperature=1.3, ignore_eos=True, min_tokens=10),
        Params(temperature=0.9, top_p=0.95),
        Params(temperature=0.2, top_k=5),
        Params(temperature=2, min_p=0.1),
        Params(temperature=1, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.2),
        Params(temperature=0, repetition_penalty=1.3),
        Params(temperature=0, repetition_penalty=1.3, logprobs=3),
        Params(temperature=0, presence_penalty=1.5, frequency_penalty=0.5),
        Params(temperature=0, presence_penalty=1.5, frequency_penalty=0.5, logprobs=1),
        Params(temperature=1, top_p=0.9, frequency_penalty=-1, logit_bias={0: 3.0, 7: -100.0, 20: 5.0}),
        Params(temperature=0.7, ignore_eos=True, logit_bias={3: 100.0}),
    ],
)
def test_sampling_draws_what_torch_draws(params: Params) -> None:
    """The noise is the same, so the tokens are the same in fp32."""
    weights = load(SMALL, device="cuda")
    assert agree(weights, requests(weights, [8, 20], 40, params))


@pytest.mark.parametrize("arch", [None, "compute_75"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_the_screened_head_finds_what_all_logits_say(dtype: str, arch: str | None) -> None:
    """Heads with little information in their codes: rows that are equal, huge, tiny, or hardly different. A request for
    log-probabilities gets a program that computes all logits."""
    if arch == "compute_75" and dtype == "bf16":
        pytest.skip("Turing has no bf16")
    model = "random:n_layer=2,n_head=3,n_embd=144,n_positions=128,vocab_size=3001"
    for seed in range(3):
        weights = load(model, dtype=dtype, device="cuda")
        head = weights.tensors["wte.weight"]
        head[40:60] = head[39]  # of equal ones the first
        head[100:600] = head[99] * (1 + 2**-9 * torch.randn(500, 1, device=GPU, dtype=head.dtype))
        head[700 + seed] *= 30
        head[800:900] = torch.finfo(head.dtype).smallest_normal / 4
        head[900:1000] = 0
        executor = PersistentExecutor(weights, GPU, dtype, arch=arch)
        for lengths in ([12], [5, 9, 30], [3 + i for i in range(executor.extents.most_rows)]):
            greedy, logged = (replace(GREEDY, logprobs=n) for n in (None, 1))
            asked = [requests(weights, lengths, 60, params, seed) for params in (greedy, logged)]
            assert run(executor, asked[0]) == run(executor, asked[1])


def test_a_head_that_is_no_number_is_noticed() -> None:
    weights = load(SMALL, dtype="fp16", device="cuda")
    weights.tensors["wte.weight"][5, 3] = float("nan")
    executor = PersistentExecutor(weights, GPU, "fp16")
    slots = executor.allocate(1, 64)
    lanes = slots.admit(requests(weights, [9], 20))
    weights.tensors["wte.weight"][5, 3] = 0  # the prompt has its own code path
    executor.prefill(slots, [Span(lanes[0], 0, 9, (lanes[0],))])
    weights.tensors["wte.weight"][5, 3] = float("nan")
    executor.decode(slots, lanes, 3)
    assert (slots.report(lanes, 8).wait().flags & NOT_FINITE).all()


@pytest.mark.parametrize(
    ("model", "counts"),
    [("random:gpt2", (4, 3, 1)), ("stories", (8, 2)), ("random:n_layer=2,n_head=2,n_embd=128,n_positions=128", (8, 5))],
)
def test_every_row_has_its_own_filters(model: str, counts: tuple[int, ...]) -> None:
    weights = load(model, device="cuda")
    settings = [
        Params(temperature=0),
        Params(temperature=0.8, top_p=0.9),
        Params(temperature=1.2, top_k=1),
        Params(temperature=1, top_k=5_000, top_p=0.999),
        Params(temperature=1.5, ignore_eos=True),
        Params(temperature=0, repetition_penalty=1.5, presence_penalty=0.4, logit_bias={1: 2.0}),
        Params(temperature=0.05, top_k=300, repetition_penalty=0.9),
        Params(temperature=1, top_p=1e-6, min_p=0.5),
    ]
    for count in counts:
        rows = [requests(weights, [5 + 7 * i], 60, params)[0] for i, params in enumerate(settings)]
        for first in range(0, 8, count):
            assert agree(weights, rows[first : first + count])


def test_end_of_text_ends_rows_on_the_device() -> None:
    weights = load(SMALL, device="cuda")
    torchs = create("torch", weights, GPU, "fp32")
    prompt = requests(weights, [6], 40)[0].prompt
    free = run(torchs, [Request(prompt, GREEDY, 0, 0, 46)])
    weights = replace(weights, config=replace(weights.config, eos_token_id=free[0][15]))
    for params in (Params(temperature=0), Params(temperature=0, min_tokens=20)):
        asked = [Request(prompt, params, 0, 0, 46), *requests(weights, [9], 40, params)]
        assert agree(weights, asked)


def test_forced_tokens_are_scored() -> None:
    texts = ["Once upon a time there was a dog.", "The little robot"]
    ours = LLM("stories", device="cuda", dtype="fp32", executor="persistent").score(texts)
    theirs = LLM("stories", device="cuda", dtype="fp32", executor="torch").score(texts)
    assert ours.nats_per_token == pytest.approx(theirs.nats_per_token, rel=1e-5)


def test_more_prompts_than_fit_take_turns() -> None:
    llm = LLM(SMALL, device="cuda", dtype="fp32", executor="persistent")
    params = Params(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [[i, i + 1] for i in range(19)]
    many = [c.token_ids for c in llm.generate(prompts, params)]
    assert many == [llm.generate(prompt, params)[0].token_ids for prompt in prompts]


@pytest.mark.parametrize("model", [SMALL, "random:n_layer=3,n_head=3,n_embd=192,n_positions=96"])
def test_a_launch_without_progress_ends_itself(model: str) -> None:
    weights = load(model, device="cuda")
    executor = PersistentExecutor(weights, GPU, "fp32")
    asked = requests(weights, [9], 24)
    expected = run(executor, asked)
    executor.patience = 1e-9
    with pytest.raises(DeviceError, match="no progress"):
        run(executor, asked)
    executor.patience = 10.0
    assert run(executor, asked) == expected


def test_what_it_cannot_run_it_refuses() -> None:
    weights = load(SMALL, device="cuda")
    with pytest.raises(ConfigError, match="8 sequences"):
        run(PersistentExecutor(weights, GPU, "fp32"), requests(weights, [3] * 9, 5))
    relu = replace(weights, config=replace(weights.config, activation_function="relu"))
    with pytest.raises(ConfigError, match="relu"):
        PersistentExecutor(relu, GPU, "fp32")
    odd = load("random:n_layer=1,n_head=2,n_embd=24,n_positions=16,vocab_size=50", device="cuda")
    with pytest.raises(ConfigError, match="multiples of 16"):
        PersistentExecutor(odd, GPU, "fp32")


def test_a_text_that_nobody_follows_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it may end early or not; a stream gives the same text in several launches."""
    llm = LLM("stories", device="cuda", executor="persistent")
    launched = watch_steps(llm.executor, monkeypatch)
    params = Params(temperature=0, max_tokens=100)
    (whole,) = llm.generate("Once upon a time", params)
    assert len(launched) == 1
    assert whole.timings.decode_steps == len(whole.token_ids) - 1
    assert "".join(llm.stream("Once upon a time", params)) == whole.text
    assert len(launched) > 4
