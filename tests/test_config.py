from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from warpline import EngineConfig, ModelConfig, SamplingParams
from warpline.config import FAMILY
from warpline.errors import ConfigError, ModelError
from warpline.model import parameters


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 1e-40}, "greedy"),
        ({"temperature": "hot"}, "must be a number"),
        ({"top_p": 1e-50}, "top_p"),
        ({"repetition_penalty": 1e-60}, "repetition_penalty"),
        ({"n": 100_000_000}, "at most 10,000"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"min_p": -1}, "min_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty must be between -2 and 2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"logit_bias": {-1: 1.0}}, "token ids, not -1"),
        ({"logit_bias": {"5": 1.0}}, "token ids, not '5'"),
        ({"logit_bias": {5: 101}}, "between -100 and 100"),
        ({"logit_bias": {5: None}}, "between -100 and 100"),
        ({"logit_bias": 7}, "takes token ids and numbers"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "at most 1,024"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ["a", ""]}, "stop"),
        ({"n": 0}, "n must"),
        ({"logprobs": 101}, "logprobs"),
        ({"max_tokens": 5, "max_new_tokens": 6}, "two names"),
    ],
)
def test_sampling_params_are_validated(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**settings)


def test_unknown_settings_are_errors() -> None:
    with pytest.raises(TypeError):
        SamplingParams(temprature=1)  # type: ignore[call-arg]


def test_max_new_tokens_is_max_tokens() -> None:
    assert SamplingParams(max_new_tokens=7).max_tokens == 7
    assert dataclasses.replace(SamplingParams(max_new_tokens=7), n=2).max_tokens == 7


def test_biases_are_in_order_however_they_are_given() -> None:
    given = SamplingParams(logit_bias={9: 1, 3: -2.5})
    assert given.biases == ((3, -2.5), (9, 1.0))
    assert dataclasses.replace(given, n=2).biases == given.biases
    assert hash(given) == hash(SamplingParams(logit_bias=[(3, -2.5), (9, 1.0)]))


def test_stop_takes_one_text_or_many() -> None:
    assert SamplingParams(stop="a").stops == ("a",)
    assert SamplingParams(stop=["a", "b"]).stops == ("a", "b")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "gpu"}, "unknown device 'gpu'"),
        ({"device": "cuda:x"}, "cuda:0"),
        *(
            ({"device": wrong}, "unknown device")
            for wrong in ("cpu:1", "cuda:", "auto:", "cuda:00", "cuda:" + "9" * 20)
        ),
        ({"window": 10**20}, "window"),
        ({"dtype": "fp61"}, "did you mean 'fp16'"),
        ({"kv_dtype": "fp8"}, "unknown kv_dtype 'fp8'"),
        ({"window": 0}, "window"),
        ({"max_batch": 0}, "max_batch"),
    ],
)
def test_engine_config_is_validated(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


def test_model_config_reads_what_it_writes() -> None:
    config = ModelConfig(n_layer=2, n_head=2, n_embd=32, n_inner=100, activation_function="relu", vocab_size=99)
    assert ModelConfig.from_hf(config.to_hf(), "here") == config


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"model_type": "llama"}, "'llama' model, not gpt2"),
        ({}, "'None' model"),
        ({"model_type": "gpt2", "n_embd": 10, "n_head": 3}, "not divisible"),
        ({"model_type": "gpt2", "activation_function": "mish"}, "activation_function"),
        ({"model_type": "gpt2", "n_layer": "12"}, "n_layer"),
        ({"model_type": "gpt2", "activation_function": None}, "activation_function"),
        ({"model_type": "gpt2", "activation_function": ["relu"]}, "activation_function"),
        ({"model_type": "gpt2", "eos_token_id": [50256]}, "eos_token_id must be one token id"),
        ({"model_type": "gpt2", "layer_norm_epsilon": "1e-5"}, "layer_norm_epsilon must be positive"),
        ({"model_type": "gpt2", "tie_word_embeddings": "yes"}, "true or false"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "cross-attention"),
    ],
)
def test_foreign_configs_are_refused(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_hf(raw, "there")


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("distilgpt2", 81_912_576),
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("DialoGPT-small", 124_439_808),
    ],
)
def test_family_has_the_published_sizes(name: str, count: int) -> None:
    assert parameters.count(FAMILY[name][1]) == count
