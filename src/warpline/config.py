"""All settings: the model's shape, how to sample, how to run. Frozen and validated on construction."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from warpline.errors import ConfigError, ModelError, one_of

#: Storage types and their bytes per element.
DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
#: Bytes per weight by dtype (int8 has codes, and a scale for each row); then the dtypes of KV cache and activations.
WEIGHT_BYTES = {**DTYPE_BYTES, "int8": 1}
KV_DTYPES = {**{dtype: dtype for dtype in DTYPE_BYTES}, "int8": "fp16"}
ACTIVATION_DTYPES = {**KV_DTYPES, "int8": "fp32"}
#: Other dtypes of the KV cache: codes, with scales (model/kv_cache.py).
KV_CODES = ("int8",)
#: Half a unit in the last place of each dtype.
ROUNDING = {"fp32": 2**-24, "fp16": 2**-11, "bf16": 2**-8}
DEVICES = ("auto", "cpu", "cuda")
#: "batch": a row's bits do not depend on the other rows (docs/determinism.md).
DETERMINISTIC = ("off", "batch")
#: Source of draft tokens: none, or n-grams of the text and of earlier ones (docs/cpu.md).
SPECULATE = ("off", "ngram")
MOST_SPECULATIVE_TOKENS = 7
#: Activation names of Hugging Face configs, and the function each means.
ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}


def _require(condition: bool, message: str, *values: object) -> None:
    """Raise unless the condition holds. Only then is the message formatted: servers validate every request."""
    if not condition:
        raise ConfigError(message.format(*values) if values else message)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _require_window(window: object) -> None:
    fits = isinstance(window, int) and _is_int(window) and 0 < window < 2**31
    _require(window is None or fits, f"window must be a positive number of positions, not {window!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a GPT-2. Field names are those of the checkpoints' config.json.

    Args:
        vocab_size: Tokens that the model knows.
        n_positions: Positions of its context, prompt and new tokens together.
        n_embd: Width of the residual row.
        n_layer: Layers.
        n_head: Heads of attention in a layer; they divide `n_embd`.
        n_inner: Width of the MLP; None is four times `n_embd`.
        activation_function: Of the MLP, by its Hugging Face name.
        layer_norm_epsilon: What LayerNorm adds to the variance.
        scale_attn_weights: Whether scores are divided by the square root of a head's width.
        scale_attn_by_inverse_layer_idx: Whether they are divided by the number of the layer (from 1) as well.
        tie_word_embeddings: Whether the LM head is the token embedding.
        eos_token_id: The token that ends a text; None if there is none.

    Examples:
        >>> from warpline import ModelConfig
        >>> small = ModelConfig(n_layer=2, n_embd=64, n_head=4)
        >>> small.inner, small.head_size
        (256, 16)
        >>> ModelConfig(n_embd=64, n_head=5)
        Traceback (most recent call last):
        warpline.errors.ConfigError: n_embd 64 is not divisible by n_head 5
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    tie_word_embeddings: bool = True
    eos_token_id: int | None = 50256
    #: A position sees itself and the `window - 1` positions before it; None sees all.
    window: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "inner"):
            value = getattr(self, name)
            _require(_is_int(value) and value > 0, f"{name} must be a positive whole number, not {value!r}")
        _require(self.n_embd % self.n_head == 0, f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}")
        eos = self.eos_token_id
        _require(eos is None or _is_int(eos), f"eos_token_id must be one token id or null, not {eos!r}")
        for name in ("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "tie_word_embeddings"):
            _require(
                isinstance(getattr(self, name), bool), f"{name} must be true or false, not {getattr(self, name)!r}"
            )
        if self.eos_token_id is not None and not 0 <= self.eos_token_id < self.vocab_size:
            # Small test models keep GPT-2's default id beyond their vocabulary: it can never be drawn.
            object.__setattr__(self, "eos_token_id", None)
        epsilon = self.layer_norm_epsilon
        _require(_is_number(epsilon) and epsilon > 0, f"layer_norm_epsilon must be positive, not {epsilon!r}")
        one_of(str(self.activation_function), ACTIVATIONS, "activation_function")
        _require_window(self.window)

    @property
    def inner(self) -> int:
        """Width of the MLP."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    @property
    def eos_number(self) -> int:
        """Id of the end of text for kernels; -1, which no token has, if there is none."""
        return -1 if self.eos_token_id is None else self.eos_token_id

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.n_embd // self.n_head

    def attention_scale(self, layer: int) -> float:
        """Return the factor of the scores of `layer`."""
        scale = 1 / math.sqrt(self.head_size) if self.scale_attn_weights else 1.0
        return scale / (layer + 1) if self.scale_attn_by_inverse_layer_idx else scale

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], source: str) -> ModelConfig:
        """Read a Hugging Face config.json; `source` names it in errors."""
        kind = raw.get("model_type")
        if kind != "gpt2":
            raise ModelError(f"{source} is a '{kind}' model, not gpt2: Warpline runs GPT-2-architecture models only")
        if raw.get("add_cross_attention"):
            raise ModelError(f"{source} has cross-attention layers, which Warpline does not run")
        names = [name for name in cls.__dataclass_fields__ if name != "window"]
        try:
            return cls(**{name: raw[name] for name in names if name in raw})
        except (ConfigError, TypeError) as error:
            raise ModelError(f"{source}: config.json: {error}") from error

    def to_hf(self) -> dict[str, Any]:
        """Return the config.json that `transformers` reads as this model."""
        names = [name for name in self.__dataclass_fields__ if name != "window"]
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            **{name: getattr(self, name) for name in names},
            "bos_token_id": self.eos_token_id,
        }


def _gpt2(n_layer: int, n_embd: int, n_head: int) -> ModelConfig:
    return ModelConfig(n_layer=n_layer, n_embd=n_embd, n_head=n_head)


#: The published family: name → (hub id, shape).
FAMILY: dict[str, tuple[str, ModelConfig]] = {
    "distilgpt2": ("distilbert/distilgpt2", _gpt2(6, 768, 12)),
    "gpt2": ("openai-community/gpt2", _gpt2(12, 768, 12)),
    "gpt2-medium": ("openai-community/gpt2-medium", _gpt2(24, 1024, 16)),
    "gpt2-large": ("openai-community/gpt2-large", _gpt2(36, 1280, 20)),
    "gpt2-xl": ("openai-community/gpt2-xl", _gpt2(48, 1600, 25)),
    "DialoGPT-small": ("microsoft/DialoGPT-small", _gpt2(12, 768, 12)),
    "DialoGPT-medium": ("microsoft/DialoGPT-medium", _gpt2(24, 1024, 16)),
    "DialoGPT-large": ("microsoft/DialoGPT-large", _gpt2(36, 1280, 20)),
}


#: Seconds after which a thread that runs Python yields to another one, set where the engine's thread shares the
#: interpreter: by default a thread with frequent short work would wait 5 ms each time.
SWITCH_SECONDS = 1e-4

#: Upper limits that no sensible request exceeds; a typing mistake raises an error instead of filling the memory.
MOST = {"max_tokens": 2**31 - 1, "min_tokens": 2**31 - 1, "top_k": 2**31 - 1, "n": 10_000}
#: Most tokens of a logit_bias.
MOST_BIASES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn, and when to stop.

    The order is repetition_penalty, then presence_penalty, frequency_penalty and logit_bias, min_tokens, temperature,
    top_k, top_p, min_p, as in `transformers` for those that it has.

    Args:
        max_tokens: New tokens at most; the context may leave room for fewer.
        min_tokens: New tokens before the end of text may come.
        ignore_eos: Whether the end of text is a token like any other.

    Examples:
        >>> from warpline import LLM, SamplingParams
        >>> llm = LLM("stories", device="cpu", dtype="fp32")
        >>> greedy = SamplingParams(max_tokens=30, temperature=0, stop=["."])
        >>> llm.generate("Once upon a time", greedy)[0].text
        ', there was a little girl named Lily'
        >>> drawn = SamplingParams(max_tokens=8, temperature=0.8, seed=5)
        >>> one, two = (llm.generate("A frog", drawn)[0].text for _ in range(2))
        >>> one == two
        True
    """

    max_tokens: int = 256
    min_tokens: int = 0
    #: 0 is greedy: always the likeliest token.
    temperature: float = 0.8
    #: Keep the k likeliest tokens; 0 keeps all.
    top_k: int = 0
    #: Keep the smallest set of tokens that holds this probability.
    top_p: float = 0.95
    #: Keep tokens at least this likely relative to the likeliest.
    min_p: float = 0.0
    #: Above 1, tokens already in the text become less likely.
    repetition_penalty: float = 1.0
    #: As in OpenAI's API: subtracted once from the logits of tokens that the completion already has.
    presence_penalty: float = 0.0
    #: As in OpenAI's API: subtracted from a token's logit for each time that the completion has it.
    frequency_penalty: float = 0.0
    #: Added to the logits of these token ids.
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    #: The same seed gives the same text; None draws a new one.
    seed: int | None = None
    #: Texts that end the completion; they are not part of it.
    stop: Sequence[str] | str = ()
    ignore_eos: bool = False
    #: Completions per prompt.
    n: int = 1
    #: Return the log-probability of each token and of this many likeliest ones; None returns nothing.
    logprobs: int | None = None
    #: Another name for max_tokens.
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None:
            default = SamplingParams.__dataclass_fields__["max_tokens"].default
            _require(
                self.max_tokens in (default, self.max_new_tokens),
                "max_tokens and max_new_tokens are two names of one setting: give one of them",
            )
            object.__setattr__(self, "max_tokens", self.max_new_tokens)
            object.__setattr__(self, "max_new_tokens", None)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        for name, least in (("max_tokens", 1), ("min_tokens", 0), ("top_k", 0), ("n", 1)):
            value, most = getattr(self, name), MOST[name]
            fits = _is_int(value) and least <= value <= most
            _require(fits, "{} must be a whole number ≥ {} (and at most {:,}), not {!r}", name, least, most, value)
        _require(self.min_tokens <= self.max_tokens, "min_tokens {} exceeds max_tokens", self.min_tokens)
        object.__setattr__(self, "logit_bias", _checked_biases(self.logit_bias) if self.logit_bias != () else ())
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            _require(_is_number(getattr(self, name)), "{} must be a number, not {!r}", name, getattr(self, name))
        # The device computes with float32: settings that would vanish or overflow there are refused here.
        temperature, top_p, penalty = self.temperature, self.top_p, self.repetition_penalty
        _require(temperature >= 0, "temperature must be ≥ 0 (0 is greedy), not {}", temperature)
        fits = temperature == 0 or 1e-3 <= temperature <= 1e3
        _require(fits, "temperature must be 0 (greedy) or between 0.001 and 1000, not {}", temperature)
        _require(0 < top_p <= 1, "top_p must be in (0, 1], not {}", top_p)
        _require(top_p >= 1e-6, "top_p must be at least 0.000001, not {}: temperature 0 is greedy", top_p)
        _require(0 <= self.min_p <= 1, "min_p must be in [0, 1], not {}", self.min_p)
        _require(1e-3 <= penalty <= 1e3, "repetition_penalty must be between 0.001 and 1000, not {}", penalty)
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2 <= getattr(self, name) <= 2, "{} must be between -2 and 2, not {}", name, getattr(self, name))
        seed, logprobs = self.seed, self.logprobs
        fits = seed is None or (_is_int(seed) and 0 <= seed < 2**64)
        _require(fits, "seed must be a whole number in [0, 2^64), not {!r}", seed)
        _require(all(isinstance(text, str) and text for text in stop), "stop takes texts, none of them empty")
        fits = logprobs is None or (_is_int(logprobs) and 0 <= logprobs <= 100)
        _require(fits, "logprobs must be between 0 and 100, not {!r}", logprobs)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop texts, always as a tuple."""
        return tuple(self.stop)

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """Token ids and what is added to their logits, in order of the ids."""
        return cast(tuple[tuple[int, float], ...], self.logit_bias)

    def require_vocab(self, size: int) -> None:
        """Raise if a bias is for a token that the model does not have."""
        if self.biases and self.biases[-1][0] >= size:  # sorted by id
            raise ConfigError(f"logit_bias has token id {self.biases[-1][0]}, outside of the model's vocabulary")

    @property
    def adjusts_tokens(self) -> bool:
        """Whether it changes logits of single tokens."""
        return bool(self.presence_penalty or self.frequency_penalty or self.logit_bias)


def _checked_biases(given: Mapping[int, float] | Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    try:
        biases = dict(given)
    except (TypeError, ValueError):
        raise ConfigError(f"logit_bias takes token ids and numbers, as in {{50256: -100}}, not {given!r}") from None
    _require(len(biases) <= MOST_BIASES, "logit_bias has {:,} tokens, and at most {:,} fit", len(biases), MOST_BIASES)
    for token, bias in biases.items():
        _require(_is_int(token) and token >= 0, "logit_bias takes token ids, not {!r}", token)
        fits = _is_number(bias) and -100 <= bias <= 100
        _require(fits, "logit_bias must be between -100 and 100, not {!r}", bias)
    return tuple(sorted((int(token), float(bias)) for token, bias in biases.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Where and how to run. "auto" picks what is best on this machine and reports it.

    `LLM` takes the same fields as keywords.

    Args:
        device: "auto", "cpu", "cuda", or "cuda:1" and so on.
        dtype: How weights are stored: "auto", "fp32", "fp16", "bf16" or "int8".
        executor: "auto"; "cpu" on a CPU; "persistent", "graph" or "kernels" on a GPU; "torch" on both.

    Examples:
        >>> from warpline import EngineConfig
        >>> EngineConfig(dtype="int8", threads=2).dtype
        'int8'
        >>> EngineConfig(threads=0)
        Traceback (most recent call last):
        warpline.errors.ConfigError: threads must be at least 1, not 0
    """

    device: str = "auto"
    dtype: str = "auto"
    #: "int8" stores keys and values as codes of one byte; None stores them in the dtype of activations.
    kv_dtype: str | None = None
    executor: str = "auto"
    #: Attend to this many positions only; None keeps the model's own setting.
    window: int | None = None
    #: Sequences that run at once; more wait. None takes what fits into free memory.
    max_batch: int | None = None
    #: Threads on a CPU; None takes as many as torch does, at most one per core.
    threads: int | None = None
    #: "batch": a sequence's text depends neither on the batch nor on how its prompt is split.
    deterministic: str = "off"
    #: "ngram": several tokens per pass where drafts are right; the text stays the same.
    speculate: str = "off"
    #: Most drafts of a sequence in a pass.
    speculative_tokens: int = 3
    #: Whether drafts also come from earlier texts, by a table in the cache folder.
    speculative_table: bool = False

    def __post_init__(self) -> None:
        one_of(self.deterministic, DETERMINISTIC, "deterministic")
        one_of(self.speculate, SPECULATE, "speculate")
        drafts, limit = self.speculative_tokens, MOST_SPECULATIVE_TOKENS
        fits = _is_int(drafts) and 1 <= drafts <= limit
        _require(fits, f"speculative_tokens must be a whole number from 1 to {limit}, not {drafts!r}")
        table = self.speculative_table
        _require(isinstance(table, bool), f"speculative_table must be true or false, not {table!r}")
        _require(not table or self.speculate != "off", "speculative_table needs speculate='ngram'")
        if not re.fullmatch(r"cuda:(0|[1-9]\d?)", self.device):
            one_of(self.device, (*DEVICES, "cuda:0"), "device")
        one_of(self.dtype, ("auto", *WEIGHT_BYTES), "dtype")
        if self.kv_dtype is not None:
            one_of(self.kv_dtype, KV_CODES, "kv_dtype")
        _require_window(self.window)
        most = self.max_batch
        _require(most is None or (_is_int(most) and most > 0), f"max_batch must be at least 1, not {most}")
        threads = self.threads
        _require(threads is None or (_is_int(threads) and threads > 0), f"threads must be at least 1, not {threads}")
