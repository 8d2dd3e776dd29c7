"""Small GPT-2 models and their inputs, for the tests that transformers has for every model."""

from __future__ import annotations

import unittest
from typing import Any

import torch
import transformers

from tools.hf_suite import loading

KINDS = (
    "GPT2Model", "GPT2LMHeadModel", "GPT2DoubleHeadsModel", "GPT2ForQuestionAnswering", "GPT2ForSequenceClassification",
    "GPT2ForTokenClassification",
)  # fmt: skip


class Sizes:
    """The model tester in transformers' sense; the attributes have the names that its tests use."""

    batch_size, seq_length, num_choices, num_labels = 5, 9, 3, 3
    num_hidden_layers, num_attention_heads, hidden_size, vocab_size = 2, 4, 32, 97
    is_training = True
    causal_lm_class = transformers.GPT2LMHeadModel

    def get_config(self) -> Any:
        """Return a small config. Special tokens are the last ids, so that random ids contain none."""
        last = self.vocab_size - 1
        return transformers.GPT2Config(
            vocab_size=self.vocab_size, n_embd=self.hidden_size, n_layer=self.num_hidden_layers,
            n_head=self.num_attention_heads, n_positions=128, bos_token_id=last, eos_token_id=last, pad_token_id=last,
            num_labels=self.num_labels,
        )  # fmt: skip

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        """Return a batch in which two rows have padding on the left."""
        from transformers.testing_utils import torch_device

        ids = torch.randint(self.vocab_size - 1, (self.batch_size, self.seq_length))
        mask = torch.ones_like(ids)
        mask[0, :4] = mask[1, :1] = 0
        inputs = {"input_ids": ids, "attention_mask": mask}
        return self.get_config(), {name: value.to(torch_device) for name, value in inputs.items()}


def case() -> type[unittest.TestCase]:
    """Return the class with all tests: transformers' own for GPT-2 if the folder has it, else those for every model,
    with the sizes above."""
    theirs = loading.module("models.gpt2.test_modeling_gpt2") if loading.module("models") else None
    if theirs is not None:
        found: type[unittest.TestCase] = theirs.GPT2ModelTest
        return found
    common: Any = loading.module("test_modeling_common")
    training: Any = loading.module("test_training_mixin")
    mixins = [common.ModelTesterMixin, common.GenerationTesterMixin]
    mixins += [training.TrainingTesterMixin] if training else []

    def prepare(self: Any, inputs: dict[str, Any], kind: type, return_labels: bool = False) -> dict[str, Any]:
        """Prepare the inputs; with labels, the double-heads model needs several choices per row and the end of each."""
        prepared: dict[str, Any] = common.ModelTesterMixin._prepare_for_class(self, inputs, kind, return_labels)
        if kind is transformers.GPT2DoubleHeadsModel and return_labels:
            rows, length = (Sizes.batch_size, Sizes.num_choices), Sizes.seq_length
            device = inputs["input_ids"].device
            for name in ("input_ids", "attention_mask"):
                prepared[name] = prepared[name][:, None].expand(*rows, -1).contiguous()
            prepared["labels"] = torch.zeros(*rows, length, dtype=torch.long, device=device)
            prepared["mc_labels"] = torch.zeros(rows[0], dtype=torch.long, device=device)
            prepared["mc_token_ids"] = torch.full(rows, length - 1, device=device)
        return prepared

    body = {
        "all_model_classes": tuple(getattr(transformers, kind) for kind in KINDS),
        "model_tester": Sizes(),
        "_prepare_for_class": prepare,
        "test_all_params_have_gradient": False,  # the head for choices has a loss of its own, which is not in `loss`
    }
    return type("GPT2", (*mixins, unittest.TestCase), body)
