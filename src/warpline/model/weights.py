"""Loads a model by name as `Weights`: built-in, random, a folder, a file or a hub id.

Checkpoints differ in three ways, which only this module handles: tensor names may begin with "transformer.", matrices
are stored transposed (Conv1D), and some contain buffers that are no parameters.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from warpline import hardware
from warpline.config import FAMILY, ModelConfig
from warpline.errors import ConfigError, DeviceError, ModelError, nearest
from warpline.model import builtin, parameters
from warpline.model.builtin import BUILTIN
from warpline.model.hub import download
from warpline.model.quantise import FILE, SCALE, Matrix, paired, place
from warpline.model.tokenizer import Tokenizer
from warpline.progress import progress

TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8}
#: Random numbers that one generator draws, and tensors that are drawn together and so in memory at once.
_PART, _DRAWN_TOGETHER = 1 << 20, 16
_NOT_PARAMETERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")


@dataclass(frozen=True, slots=True)
class Weights:
    """A model in memory: its config and its parameters under checkpoint names, matrices as [out, in]."""

    name: str
    config: ModelConfig
    tensors: dict[str, Tensor]
    folder: Path | None = None  # where it came from; None without files of its own
    _forms: dict[str, dict[str, Tensor]] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def head(self) -> str:
        """The module whose matrix makes logits: lm_head, or the embedding if it is tied."""
        return "lm_head" if "lm_head.weight" in self.tensors else "wte"

    @property
    def is_quantised(self) -> bool:
        """Whether matrices are int8 codes."""
        return self.tensors["wte.weight"].dtype == torch.int8

    @property
    def activations(self) -> torch.dtype:
        """Dtype of hidden states: that of vectors, since matrices may be codes."""
        return self.tensors["ln_f.weight"].dtype

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.tensors["wte.weight"].device

    def room(self, *shape: int) -> Tensor:
        """Allocate a tensor for activations."""
        return torch.empty(shape, dtype=self.activations, device=self.device)

    def matrix(self, name: str) -> Matrix:
        """Return a parameter as it is stored."""
        return Matrix(self.tensors[name], self.tensors.get(name + SCALE))

    def form(self, name: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return some parameters in another form; `make` makes it the first time."""
        if name not in self._forms:
            with explained_memory(f"a second form of {self.name}'s weights ({name.replace('_', ' ')})"):
                self._forms[name] = make()
        return self._forms[name]

    def tokenizer(self) -> Tokenizer:
        """Return the model's own tokenizer, or GPT-2's if it has none."""
        return Tokenizer.gpt2() if self.folder is None else Tokenizer.from_folder(self.folder)


def load(model: str, *, dtype: str = "fp32", device: str = "cpu") -> Weights:
    """Load `model` as `dtype` onto `device`.

    `model` is a built-in name ("stories"), random weights ("random:gpt2", "random:gpt2-xl,seed=3",
    "random:n_layer=2,n_head=2,n_embd=128"), a folder, a .safetensors file, a family name ("gpt2") or a hub id
    ("owner/name").
    """
    target = torch.device(device)
    with explained_memory(f"loading {model} as {dtype}"):
        weights = _load(model, target, TORCH_DTYPES[dtype])
    if target.type == "cpu":
        hardware.give_back_freed_memory()  # temporaries of a conversion: up to a hundred megabytes, for gpt2 in int8
    return weights


def read_config(model: str) -> ModelConfig:
    """Return the config of what `load` would load, without its weights."""
    if model.startswith("random:"):
        return random_config(model.removeprefix("random:"))[0]
    path = _located(model)
    return _config_beside(path) if path.is_file() else ModelConfig.from_hf(_read_json(path / "config.json"), str(path))


def stored_dtype(model: str) -> str | None:
    """Return "int8" if the model's files hold int8 weights; None otherwise, when any dtype can be converted to."""
    if model.startswith("random:"):
        return None
    path = _located(model)
    return "int8" if path.name.endswith(FILE) or (path / FILE).exists() else None


def _load(model: str, *target: Any) -> Weights:
    if model.startswith("random:"):
        return _random(model, *target)
    path = _located(model)
    return _from_file(path, *target) if path.is_file() else _from_folder(path, model, *target)


def _located(model: str) -> Path:
    """Return the folder or file of a model, downloaded if necessary."""
    if model in BUILTIN:
        return builtin.folder(model)
    try:
        path = Path(model).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # too long a name, an unknown user, a NUL
        raise ModelError(f"'{model[:80]}' is no usable path: {error}") from error
    if is_folder or is_file:
        return path
    if path.suffix in (".safetensors", ".bin") or model.startswith((".", "/", "~")):
        raise ModelError(f"there is no file or folder '{model}': check the path")
    return download(model)


@contextmanager
def explained_memory(what: str) -> Iterator[None]:
    """Turn running out of memory into one line that says what did not fit."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceError(f"the GPU has not enough free memory for {what}: use less, or --device cpu") from error
    except RuntimeError as error:
        if "allocate memory" not in str(error) and "not enough memory" not in str(error):
            raise
        raise DeviceError(f"this machine has not enough memory for {what}: use a smaller model or batch") from error


# --- random ---------------------------------------------------------------------------------------------------------


def random_config(spec: str) -> tuple[ModelConfig, int]:
    """Parse the part after "random:": a family name and/or settings of `ModelConfig`, and a seed."""
    hints = get_type_hints(ModelConfig)
    config, seed = ModelConfig(), 0
    changes: dict[str, Any] = {}
    for i, part in enumerate(filter(None, spec.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            if i or key not in FAMILY:
                known = ", ".join(FAMILY)
                raise ModelError(f"unknown model 'random:{key}'{nearest(key, FAMILY)}; the family is: {known}")
            config = FAMILY[key][1]
        elif key == "seed" and value.isdecimal() and int(value) < 2**63:
            seed = int(value)
        elif key in hints:
            try:
                changes[key] = _parse(value, hints[key])
            except ValueError as error:
                raise ModelError(f"'random:{spec}': {key}={value}: {error}") from error
        else:
            names = ["seed", *(field.name for field in fields(ModelConfig))]
            raise ModelError(f"'random:{spec}': cannot set {part!r}{nearest(key, names)}; settings: {', '.join(names)}")
    try:
        return replace(config, **changes), seed
    except ConfigError as error:
        raise ModelError(f"'random:{spec}': {error}") from error


def _parse(text: str, kind: Any) -> Any:
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError("use true or false")
        return text.lower() == "true"
    if kind is str:
        return text
    return float(text) if kind is float else int(text)


def _random(model: str, device: torch.device, dtype: torch.dtype) -> Weights:
    config, seed = random_config(model.removeprefix("random:"))
    return Weights(model, config, random_tensors(config, seed, device=device, dtype=dtype))


def random_tensors(
    config: ModelConfig, seed: int, *, device: torch.device, dtype: torch.dtype, std: float = 0.02
) -> dict[str, Tensor]:
    """Draw parameters with GPT-2's initialisation, except that no bias or scale is trivial, so that a mistake with one
    shows. Every part of a tensor has its own generator, so that all cores can draw."""

    def draw(part: tuple[int, int, Tensor]) -> None:
        tensor, number, values = part
        own = int(np.random.SeedSequence((seed, tensor, number)).generate_state(1)[0])  # 32 bits: torch uses no more
        values.normal_(0, std, generator=torch.Generator().manual_seed(own))

    tensors: dict[str, Tensor] = {}
    waiting = list(enumerate(parameters.shapes(config).items()))
    with progress("Drawing random weights", parameters.count(config)) as advance, ThreadPoolExecutor() as pool:
        while waiting:
            some, waiting = waiting[:_DRAWN_TOGETHER], waiting[_DRAWN_TOGETHER:]
            drawn = [(number, name, torch.empty(shape)) for number, (name, shape) in some]
            parts = [
                (number, i, part) for number, _, value in drawn for i, part in enumerate(value.view(-1).split(_PART))
            ]
            list(pool.map(draw, parts))
            for _, name, value in drawn:
                if name.endswith(("ln_1.weight", "ln_2.weight", "ln_f.weight")):
                    value += 1
                _place(tensors, name, value, device, dtype)
                advance(value.numel())
    return tensors


# --- files ----------------------------------------------------------------------------------------------------------


def _from_folder(folder: Path, name: str, device: torch.device, dtype: torch.dtype) -> Weights:
    raw = _read_json(folder / "config.json")
    config = ModelConfig.from_hf(raw, str(folder))
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    pickled = folder / "pytorch_model.bin"
    source: Iterator[tuple[str, Tensor | Matrix]]
    if raw.get("quantization_config") is not None:
        raise ModelError(f"{folder} holds weights of a quantisation that is not read here: use plain ones")
    if (folder / FILE).exists():
        source = paired(_safetensors([folder / FILE]))
    elif single.exists():
        source = _safetensors([single])
    elif index.exists():
        source = _safetensors([folder / shard for shard in _shards(index)])
    elif pickled.exists():
        source = _pickled(pickled)
    else:
        wanted = ", ".join(path.name for path in (single, index, pickled))
        raise ModelError(f"{folder} holds no weights: one of {wanted} is needed")
    return Weights(name, config, _collect(source, config, str(folder), device, dtype), folder)


def _shards(index: Path) -> list[str]:
    names = _read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ModelError(f"{index} names no files under 'weight_map': download it again")
    return sorted(set(names.values()))


def _config_beside(path: Path) -> ModelConfig:
    if path.suffix != ".safetensors":
        raise ModelError(f"'{path}' is no .safetensors file: give one, or a folder with config.json and the weights")
    beside = path.parent / "config.json"
    if not beside.exists():
        raise ModelError(f"'{path}' needs its config.json beside it: the number of heads is not in the tensors")
    return ModelConfig.from_hf(_read_json(beside), str(path.parent))


def _from_file(path: Path, device: torch.device, dtype: torch.dtype) -> Weights:
    config, source = _config_beside(path), _safetensors([path])
    is_int8 = path.name.endswith(FILE)
    tensors = _collect(paired(source) if is_int8 else source, config, str(path), device, dtype)
    return Weights(str(path), config, tensors, path.parent)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} holds no {path.name}: it is no Hugging Face model folder") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"cannot read {path}: it holds no JSON object")
    return raw


def _safetensors(paths: list[Path]) -> Iterator[tuple[str, Tensor]]:
    for path in paths:
        with ExitStack() as stack:
            try:
                file = stack.enter_context(safe_open(str(path), framework="pt"))
            except FileNotFoundError:
                raise ModelError(f"{path} is missing: download the model again") from None
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} is truncated or no safetensors file ({error}): download it again") from error
            for name in file.keys():  # noqa: SIM118 - a handle, not a dict
                yield name, file.get_tensor(name)


def _pickled(path: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        # Files from before torch 1.6 are no zip archives and cannot be mapped into memory.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # unpickling raises whatever the file makes it raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"{path} cannot be read safely ({reason}): download it again or use safetensors") from error
    if not isinstance(state, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()
    ):
        raise ModelError(f"{path} holds something other than named tensors: it is no state dict")
    yield from state.items()


def _collect(
    source: Iterator[tuple[str, Tensor | Matrix]],
    config: ModelConfig,
    where: str,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Return the tensors under canonical names and layouts; raise if some are missing, unknown or misshaped."""
    shapes = parameters.shapes(config)
    tensors: dict[str, Tensor] = {}
    seen: set[str] = set()
    problems: list[str] = []
    with progress("Loading weights", parameters.count(config)) as advance:
        for stored_name, stored in source:
            name = stored_name.removeprefix("transformer.")
            if _NOT_PARAMETERS.fullmatch(name) or (name == "lm_head.weight" and config.tie_word_embeddings):
                continue
            if name not in shapes:
                problems.append(f"unknown tensor {stored_name}")
                continue
            seen.add(name)
            transposed = name.endswith(parameters.CONV1D) and not isinstance(stored, Matrix)
            expected = shapes[name][::-1] if transposed else shapes[name]
            if tuple(stored.shape) != expected:
                problems.append(f"{stored_name} is {_shape(stored.shape)}, expected {_shape(expected)}")
            elif isinstance(stored, Matrix):
                _place(tensors, name, stored, device, dtype)
            elif not stored.is_floating_point():
                problems.append(f"{stored_name} is {stored.dtype}, not floating point")
            else:
                _place(tensors, name, stored.t() if transposed else stored, device, dtype)
            advance(stored.numel())
    problems += [f"missing tensor {name}" for name in shapes if name not in seen]
    if problems:
        more = f", and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ModelError(f"{where} does not fit its config.json: {'; '.join(problems[:5])}{more}")
    return tensors


def _place(
    tensors: dict[str, Tensor], name: str, value: Tensor | Matrix, device: torch.device, dtype: torch.dtype
) -> None:
    """Store a new contiguous tensor, whatever the source's layout, dtype or mapping; int8 has codes and scales."""
    if dtype != torch.int8:
        plain = value.plain() if isinstance(value, Matrix) else value
        tensors[name] = torch.empty(plain.shape, device=device, dtype=dtype).copy_(plain)
    else:
        place(tensors, name, value, device)


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def checkpoint(weights: Weights) -> dict[str, Tensor]:
    """Return the tensors as a checkpoint stores them: "transformer." in front, matrices transposed except in int8."""
    result: dict[str, Tensor] = {}
    for name, value in weights.tensors.items():
        stored = value.t() if name.endswith(parameters.CONV1D) and value.dtype != torch.int8 else value
        prefix = "" if name.startswith("lm_head.") else "transformer."
        result[prefix + name] = stored.contiguous()
    return result
