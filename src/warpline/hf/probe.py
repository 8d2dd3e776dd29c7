"""Checks whether a model's parts are what we expect, and whether the patched model computes the same."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from warpline.config import ROUNDING
from warpline.errors import ConfigError
from warpline.hf.gate import DTYPES

#: Roundings allowed for a logit: each layer adds about four like a random walk; and roundings of the last result.
WALK, LAST = 24, 4
#: In half precision the sums inside a product are kept in float32, in float32 they round too: this many times as much
#: is allowed. With the weights of stories the original is 1.5e-5 away from float64, of which a factor of 1 explains
#: 1.4e-5.
SUMS = 4


def version() -> str:
    """Return the version of the installed transformers."""
    import transformers

    return str(transformers.__version__)


def unknown(what: str) -> ConfigError:
    """Return the error for internals of transformers that have changed."""
    return ConfigError(
        f"transformers {version()} has {what}, which Warpline does not know: leave that part out "
        "(attention=False, mlp=False, layernorm=False, generate=False) or use transformers 4.57 to 5.23"
    )


def base_of(model: Any) -> Any:
    """Return the GPT2Model inside a model with or without a head."""
    from transformers import GPT2PreTrainedModel

    if not isinstance(model, GPT2PreTrainedModel):
        raise ConfigError(f"{type(model).__name__} is no GPT-2 of transformers: Warpline patches GPT-2 models only")
    base = getattr(model, "transformer", model)
    for name in ("wte", "wpe", "h", "ln_f"):
        if not hasattr(base, name):
            raise unknown(f"a GPT-2 without {name}")
    for block in base.h:
        for name in ("ln_1", "attn", "ln_2", "mlp"):
            if not hasattr(block, name):
                raise unknown(f"a GPT-2 block without {name}")
    return base


def is_foreign(module: nn.Module, kind: type) -> str | None:
    """Return why a part is not the one of transformers, if something else has replaced it; None if it is."""
    if type(module) is not kind:
        return f"it is a {type(module).__name__}, not a {kind.__name__}"
    if "forward" in module.__dict__:
        return "its forward has been replaced by something else"
    return None


def check_mlp(mlp: nn.Module) -> str | None:
    """Return why the MLP must stay, or None; raise for an MLP of unknown form."""
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
    from transformers.pytorch_utils import Conv1D

    foreign = is_foreign(mlp, GPT2MLP)
    if foreign is not None:
        return foreign
    if list(inspect.signature(GPT2MLP.forward).parameters) != ["self", "hidden_states"]:
        raise unknown(f"GPT2MLP.forward{inspect.signature(GPT2MLP.forward)}")
    if dict(mlp.named_children()).keys() != {"c_fc", "c_proj", "act", "dropout"}:
        raise unknown(f"a GPT2MLP of {', '.join(name for name, _ in mlp.named_children())}")
    for name in ("c_fc", "c_proj"):
        foreign = is_foreign(getattr(mlp, name), Conv1D)
        if foreign is not None:
            return f"{name}: {foreign}"
    x = torch.linspace(-8, 8, 257)
    act: Any = mlp.act
    if (act(x) - F.gelu(x, approximate="tanh")).abs().max() > 1e-5:
        return f"our kernels know GELU's tanh form only, not {type(act).__name__}"
    return None


def check_layernorm(norm: nn.Module) -> str | None:
    """Return why the LayerNorm must stay, or None."""
    foreign = is_foreign(norm, nn.LayerNorm)
    if foreign is not None:
        return foreign
    assert isinstance(norm, nn.LayerNorm)
    if len(norm.normalized_shape) != 1 or norm.weight is None or norm.bias is None:
        return "it has no weight or bias, or normalises more than the last dimension"
    return None


def check_attention(attn: nn.Module, config: Any) -> str | None:
    """Return why the attention must stay, or None; raise for internals of unknown form."""
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

    foreign = is_foreign(attn, GPT2Attention)
    if foreign is not None:
        return foreign
    for name in ("config", "is_cross_attention", "layer_idx", "head_dim"):
        if not hasattr(attn, name):
            raise unknown(f"a GPT2Attention without {name}")
    if not hasattr(config, "_attn_implementation_internal"):
        raise unknown("configs without _attn_implementation_internal")
    if "_attn_implementation" not in inspect.getsource(GPT2Attention.forward):
        raise unknown("a GPT2Attention that does not ask its config for the attention function")
    if config._attn_implementation != "sdpa":
        name = config._attn_implementation
        return (
            f"the model uses {name} attention, with masks of its own: call model.set_attn_implementation('sdpa') first"
        )
    if getattr(config, "sliding_window", None) or not getattr(config, "is_causal", True):
        return "the config asks for a sliding window or for attention that is not causal"
    return None


@dataclass(frozen=True, slots=True)
class Seen:
    """Logits (or, without a head, hidden states) of the probe, without padding."""

    values: Tensor

    def difference(self, other: Seen) -> float:
        """Return the largest difference, infinite if it is not finite."""
        moved = (self.values - other.values).abs().max()
        return float(moved) if bool(moved.isfinite()) else float("inf")

    @property
    def spread(self) -> float:
        """Standard deviation of the values of a position, averaged."""
        return float(self.values.std(dim=-1).mean())

    def allowed(self, dtype: torch.dtype, layers: int) -> float:
        """Return the largest difference that rounding explains."""
        walked = WALK * math.sqrt(4 * layers) * self.spread
        most = ROUNDING[DTYPES[dtype]] * (walked + LAST * float(self.values.abs().max()))
        most *= SUMS if dtype == torch.float32 else 1
        return min(most, self.spread / 2)  # half the spread is too much for any rounding


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Set eval mode and disable gradients inside the block; restore each module's mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def look(model: Any, base: Any) -> Seen:
    """Run the probe: a prompt, one more token after its cache, and a batch with a padded row."""
    some, context = base.wte.weight, base.wpe.weight.shape[0]
    rows, length = 2, min(context - 1, 256 if some.is_cuda else 24)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(base.wte.weight.shape[0], (rows, length + 1), generator=generator).to(some.device)
    mask = torch.ones_like(ids[:, :-1])
    mask[0, : length // 3] = 0
    with at_rest(model):  # independent of the config's return_dict
        first = model(input_ids=ids[:, :-1], use_cache=True, return_dict=True)
        second = model(input_ids=ids[:, -1:], past_key_values=first.past_key_values, use_cache=True, return_dict=True)
        padded = model(input_ids=ids[:, :-1], attention_mask=mask, use_cache=False, return_dict=True)
    parts = [_values(first), _values(second), _values(padded)[mask.bool()]]
    return Seen(torch.cat([part.float().flatten(0, -2) for part in parts]))


def _values(output: Any) -> Tensor:
    values = getattr(output, "logits", None)
    result = output.last_hidden_state if values is None else values
    assert isinstance(result, Tensor)
    return result


def judge(model: Any, runner: Any) -> float:
    """Return how far the engine's worst choice of a few tokens is below the likeliest of the model's own logits."""
    from warpline.config import SamplingParams
    from warpline.engine.request import Request

    context, vocabulary = model.config.n_positions, model.config.vocab_size
    given, new = max(1, min(12, context // 2)), max(1, min(8, context // 4))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary, (2, given), generator=generator)
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    tokens = runner.run([Request(row, params, 0, i, given + new) for i, row in enumerate(ids.tolist())])
    chosen = torch.tensor(tokens, device=model.device)
    text = torch.cat((ids.to(model.device), chosen), dim=1)
    logits = model(input_ids=text[:, :-1], use_cache=False, return_dict=True).logits[:, given - 1 :].float()
    deficit = logits.amax(dim=-1) - logits.gather(-1, chosen[..., None])[..., 0]
    worst = deficit.max()
    return float(worst) if bool(worst.isfinite()) else float("inf")
