"""ONNX Runtime on the CPU, with a graph built for it: its fused attention, K and V passed from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from warpline.bench.methods.base import Converted, Method
from warpline.bench.workloads import Case
from warpline.config import ACTIVATIONS, ModelConfig
from warpline.model.weights import Weights

#: Domain of ONNX Runtime's own operators, and the versions of both operator sets.
_FUSED = "com.microsoft"
_VERSIONS = {"": 17, _FUSED: 1}
#: ONNX nodes for the names in `warpline.config.ACTIVATIONS`: operator and domain.
_ACTIVATIONS = {
    "gelu_tanh": ("FastGelu", _FUSED),
    "gelu": ("Gelu", _FUSED),
    "silu": ("QuickGelu", _FUSED),
    "relu": ("Relu", ""),
    "tanh": ("Tanh", ""),
}


class _Graph:
    """Collects nodes and constants; every method returns the name of what it adds."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self.nodes: list[Any] = []
        self.constants: dict[str, np.ndarray[Any, Any]] = {}

    def node(self, kind: str, *inputs: str, domain: str = "", results: Sequence[str] = (), **attributes: Any) -> str:
        """Add a node; without `results` it has one output with a generated name. Return its first output's name."""
        from onnx import helper

        names = list(results) or [f"{kind}_{len(self.nodes)}"]
        self.nodes.append(helper.make_node(kind, list(inputs), names, domain=domain, **attributes))
        return names[0]

    def constant(self, name: str, *, transposed: bool = False) -> str:
        array = self._tensors[name].numpy()
        self.constants[name] = np.ascontiguousarray(array.T if transposed else array)
        return name

    def linear(self, x: str, name: str) -> str:
        product = self.node("MatMul", x, self.constant(f"{name}.weight", transposed=True))
        return self.node("Add", product, self.constant(f"{name}.bias"))

    def norm(self, x: str, name: str, epsilon: float) -> str:
        parts = (self.constant(f"{name}.weight"), self.constant(f"{name}.bias"))
        return self.node("LayerNormalization", x, *parts, axis=-1, epsilon=epsilon)


def build(weights: Weights, path: Path) -> None:
    """Write the model: ids [B, T], position [T] and each layer's past → token [B] and present."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    config = weights.config
    epsilon, (activation, domain) = config.layer_norm_epsilon, _ACTIVATIONS[ACTIVATIONS[config.activation_function]]
    settings: dict[str, Any] = {"alpha": 1.0} if activation == "QuickGelu" else {}
    graph = _Graph({name: tensor.float().cpu() for name, tensor in weights.tensors.items()})
    wte = graph.constant("wte.weight")
    x = graph.node(
        "Add", graph.node("Gather", wte, "ids"), graph.node("Gather", graph.constant("wpe.weight"), "position")
    )
    for i in range(config.n_layer):
        y = graph.linear(graph.norm(x, f"h.{i}.ln_1", epsilon), f"h.{i}.attn.c_attn")
        parts = (f"q_{i}", f"k_{i}", f"v_{i}")
        graph.node("Split", y, axis=-1, results=parts)
        y = graph.node(
            "MultiHeadAttention",
            *(*parts, "", "", "", f"past_k_{i}", f"past_v_{i}"),
            domain=_FUSED,
            results=(f"attended_{i}", f"present_k_{i}", f"present_v_{i}"),
            num_heads=config.n_head,
            unidirectional=1,
            scale=config.attention_scale(i),
        )
        x = graph.node("Add", x, graph.linear(y, f"h.{i}.attn.c_proj"))
        y = graph.linear(graph.norm(x, f"h.{i}.ln_2", epsilon), f"h.{i}.mlp.c_fc")
        y = graph.node(activation, y, domain=domain, **settings)
        x = graph.node("Add", x, graph.linear(y, f"h.{i}.mlp.c_proj"))
    graph.constants["last"] = np.array(-1)
    x = graph.norm(graph.node("Gather", x, "last", axis=1), "ln_f", epsilon)  # [B, C]
    head = wte if config.tie_word_embeddings else graph.constant("lm_head.weight")
    graph.node("ArgMax", graph.node("Gemm", x, head, transB=1), axis=-1, keepdims=0, results=("token",))

    def values(kind: int, shapes: dict[str, list[str | int]]) -> list[Any]:
        return [helper.make_tensor_value_info(name, kind, shape) for name, shape in shapes.items()]

    def cache(when: str) -> list[Any]:
        shape: list[str | int] = ["batch", config.n_head, when, config.head_size]
        return values(TensorProto.FLOAT, {f"{when}_{name}": shape for name in cache_names(config)})

    inputs = values(TensorProto.INT64, {"ids": ["batch", "length"], "position": ["length"]})
    outputs = values(TensorProto.INT64, {"token": ["batch"]})
    constants = [numpy_helper.from_array(array, name) for name, array in graph.constants.items()]
    model = helper.make_model(
        helper.make_graph(graph.nodes, "gpt2", inputs + cache("past"), outputs + cache("present"), constants),
        opset_imports=[helper.make_opsetid(domain, version) for domain, version in _VERSIONS.items()],
        ir_version=8,
    )
    onnx.save_model(model, path, save_as_external_data=True, location="weights.bin")


def cache_names(config: ModelConfig) -> list[str]:
    """Return the names of K and V of all layers, without "past_" and "present_"."""
    return [f"{kind}_{layer}" for layer in range(config.n_layer) for kind in "kv"]


_built = Converted(lambda weights, folder: build(weights, folder / "model.onnx"))


class OnnxRuntime(Method):
    """ONNX Runtime in float32."""

    title = "ONNX Runtime"
    devices = ("cpu",)
    dtypes = ("fp32",)
    packages = ("onnxruntime", "onnx")

    def __init__(self, weights: Weights, case: Case, device: torch.device):
        super().__init__(weights, case, device)
        import onnxruntime

        path = _built.folder(weights) / "model.onnx"
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self._session: Any = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._caches = cache_names(weights.config)

    def _run(self, ids: Any, position: int, past: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        """Return the tokens [B] after ids [B, T], and K and V for the next step."""
        from onnxruntime import OrtValue

        config = self.weights.config
        if past is None:
            empty = np.zeros((len(ids), config.n_head, 0, config.head_size), np.float32)
            past = {f"past_{name}": OrtValue.ortvalue_from_numpy(empty) for name in self._caches}
        where = np.arange(position, position + ids.shape[1])
        feeds = {name: OrtValue.ortvalue_from_numpy(array) for name, array in (("ids", ids), ("position", where))}
        names = ["token", *(f"present_{name}" for name in self._caches)]
        answer, *present = self._session.run_with_ort_values(names, feeds | past)
        return answer.numpy(), {f"past_{name}": one for name, one in zip(self._caches, present, strict=True)}

    def generate(self, prompts: Tensor, new: int) -> Tensor:
        """Run the prompt, then one step per token."""
        ids, position = prompts.numpy(), 0
        past: dict[str, Any] | None = None
        tokens = []
        for _ in range(new):
            token, past = self._run(ids, position, past)
            position += ids.shape[1]
            ids = token[:, None]
            tokens.append(token)
        return torch.from_numpy(np.stack(tokens, axis=1))

    def close(self) -> None:
        """Release the weights and the session, which holds them."""
        super().close()
        del self._session
