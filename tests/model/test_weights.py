from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.conftest import make_weights
from warpline.config import FAMILY, ModelConfig
from warpline.errors import ModelError
from warpline.model import parameters, weights
from warpline.model.hub import download
from warpline.model.weights import Weights, checkpoint, load, random_config

CONFIG = ModelConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=300, n_positions=20)
SaveFolder = Callable[[Weights], Path]


def assert_same(loaded: Weights, expected: Weights) -> None:
    assert loaded.config == expected.config
    assert loaded.tensors.keys() == expected.tensors.keys()
    for name, value in expected.tensors.items():
        assert torch.equal(loaded.tensors[name], value), name
        assert loaded.tensors[name].is_contiguous()


@pytest.fixture
def saved(save_folder: SaveFolder) -> tuple[Weights, Path]:
    expected = make_weights(CONFIG)
    return expected, save_folder(expected)


def test_folder_and_file(saved: tuple[Weights, Path]) -> None:
    expected, folder = saved
    assert_same(load(str(folder)), expected)
    assert_same(load(str(folder / "model.safetensors")), expected)


def test_names_without_prefix_and_with_buffers(saved: tuple[Weights, Path]) -> None:
    """OpenAI's own checkpoint has no "transformer." but contains the causal mask of every layer."""
    expected, folder = saved
    tensors = {name.removeprefix("transformer."): value for name, value in checkpoint(expected).items()}
    tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 20, 20) for i in range(2)}
    tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    assert_same(load(str(folder)), expected)


def test_sharded(saved: tuple[Weights, Path]) -> None:
    expected, folder = saved
    tensors = list(checkpoint(expected).items())
    (folder / "model.safetensors").unlink()
    shards = {"model-1.safetensors": dict(tensors[:9]), "model-2.safetensors": dict(tensors[9:])}
    for name, part in shards.items():
        save_file(part, folder / name)
    index = {"weight_map": {key: name for name, part in shards.items() for key in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_same(load(str(folder)), expected)
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-2\.safetensors is missing"):
        load(str(folder))


def test_pickled(saved: tuple[Weights, Path]) -> None:
    expected, folder = saved
    (folder / "model.safetensors").unlink()
    torch.save(checkpoint(expected), folder / "pytorch_model.bin")
    assert_same(load(str(folder)), expected)


def test_pickled_before_torch_had_zip_files(saved: tuple[Weights, Path]) -> None:
    expected, folder = saved
    (folder / "model.safetensors").unlink()
    torch.save(checkpoint(expected), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert_same(load(str(folder)), expected)


@pytest.mark.parametrize("content", [[1, 2], {"wte.weight": [1.0]}, {3: torch.zeros(1)}])
def test_pickle_of_something_else(saved: tuple[Weights, Path], content: Any) -> None:
    _, folder = saved
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="no state dict"):
        load(str(folder))


@pytest.mark.parametrize("weight_map", ["null", "[]", '{"a": 5}', "7"])
def test_broken_index(saved: tuple[Weights, Path], weight_map: str) -> None:
    _, folder = saved
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {weight_map}}}')
    with pytest.raises(ModelError, match="weight_map"):
        load(str(folder))


def test_pickle_with_code_is_refused(saved: tuple[Weights, Path]) -> None:
    _, folder = saved
    (folder / "model.safetensors").unlink()
    torch.save({"wte.weight": Bomb()}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot be read safely"):
        load(str(folder))
    assert not Bomb.exploded


class Bomb:
    exploded = False

    def __reduce__(self) -> tuple[Any, ...]:
        return (setattr, (Bomb, "exploded", True))


def test_folder_written_by_transformers(tmp_path: Path) -> None:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=300))
    model.save_pretrained(tmp_path)
    loaded = load(str(tmp_path))
    assert torch.equal(loaded.tensors["h.1.mlp.c_fc.weight"], model.transformer.h[1].mlp.c_fc.weight.T)
    assert torch.equal(loaded.tensors["wte.weight"], model.lm_head.weight)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_dtype_is_converted_while_loading(saved: tuple[Weights, Path], dtype: str) -> None:
    expected, folder = saved
    loaded = load(str(folder), dtype=dtype)
    for name, value in expected.tensors.items():
        assert torch.equal(loaded.tensors[name], value.to(weights.TORCH_DTYPES[dtype]))


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_missing_extra_and_misshaped_tensors_are_named(saved: tuple[Weights, Path]) -> None:
    _, folder = saved

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["transformer.h.1.ln_2.bias"]
        tensors["score.weight"] = torch.zeros(2, 32)
        tensors["transformer.h.0.mlp.c_fc.weight"] = torch.zeros(32, 99)
        tensors["transformer.h.1.mlp.c_fc.weight"] = torch.zeros(3, 4, 5)
        tensors["transformer.ln_f.bias"] = torch.zeros(32, dtype=torch.int8)

    change(folder, edit)
    with pytest.raises(ModelError) as caught:
        load(str(folder))
    message = str(caught.value)
    assert "missing tensor h.1.ln_2.bias" in message
    assert "unknown tensor score.weight" in message
    assert "transformer.h.0.mlp.c_fc.weight is 32×99, expected 32×128" in message
    assert "transformer.h.1.mlp.c_fc.weight is 3×4×5, expected 32×128" in message
    assert "transformer.ln_f.bias is torch.int8" in message
    assert "missing tensor h.0.mlp.c_fc.weight" not in message


def test_broken_files(saved: tuple[Weights, Path]) -> None:
    _, folder = saved
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for broken in (whole[: len(whole) // 2], whole[:4], b"", b"\xff" * 500):
        path.write_bytes(broken)
        with pytest.raises(ModelError, match="truncated or no safetensors file"):
            load(str(folder))
    path.unlink()
    with pytest.raises(ModelError, match="holds no weights"):
        load(str(folder))
    (folder / "config.json").write_text("{oops")
    with pytest.raises(ModelError, match=r"cannot read .*config\.json"):
        load(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match="no Hugging Face model folder"):
        load(str(folder))


def test_file_without_config(saved: tuple[Weights, Path], tmp_path: Path) -> None:
    _, folder = saved
    lonely = tmp_path / "lonely.safetensors"
    lonely.write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match=r"needs its config\.json"):
        load(str(lonely))
    other = tmp_path / "model.gguf"
    other.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"no \.safetensors file"):
        load(str(other))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "no file or folder"),
        ("nowhere.safetensors", "no file or folder"),
        ("gtp2", r"did you mean 'gpt2'"),
        ("random:gtp2", r"did you mean 'gpt2'"),
        ("random:seed=99999999999999999999999", "cannot set"),
        ("~nosuchuser/model", "no usable path"),
        ("x" * 5000, "no usable path"),
        ("random:n_layers=2", "did you mean 'n_layer'"),
        ("random:n_layer=two", "n_layer=two"),
        ("random:n_head=5", "not divisible"),
        ("random:tie_word_embeddings=maybe", "true or false"),
    ],
)
def test_wrong_names(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(name)


def test_random_specifications() -> None:
    assert random_config("gpt2-xl,seed=3") == (FAMILY["gpt2-xl"][1], 3)
    config, seed = random_config("n_layer=2,n_head=2,n_embd=128,window=7,tie_word_embeddings=false")
    assert (config.n_layer, config.n_head, config.n_embd, config.window, seed) == (2, 2, 128, 7, 0)
    assert not config.tie_word_embeddings
    assert random_config("")[0] == FAMILY["gpt2"][1]


def test_random_weights_follow_from_the_seed() -> None:
    spec = "random:n_layer=1,n_head=1,n_embd=16,vocab_size=50"
    first, again, other = load(spec), load(spec), load(f"{spec},seed=1")
    assert_same(again, first)
    assert not torch.equal(first.tensors["wte.weight"], other.tensors["wte.weight"])
    assert first.tensors.keys() == parameters.shapes(first.config).keys()
    assert first.tensors["ln_f.weight"].mean() == pytest.approx(1, abs=0.1)


# --- the hub client, with a local hub -----------------------------------------------------------------------------


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's protocol that its client needs to download one model."""

    folder: Path
    served: list[str]
    commit = "0123456789abcdef0123456789abcdef01234567"

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        file = self.folder / name
        if path.startswith("/api/models/owner/tiny/tree/"):
            files = sorted(self.folder.iterdir())
            tree = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": f.name} for f in files]
            self.reply(json.dumps(tree).encode(), with_body)
        elif path.startswith("/api/models/owner/tiny"):
            names = [{"rfilename": entry.name} for entry in sorted(self.folder.iterdir())]
            self.reply(json.dumps({"id": "owner/tiny", "sha": self.commit, "siblings": names}).encode(), with_body)
        elif path.startswith("/owner/tiny/resolve/") and file.exists():
            if with_body:
                self.served.append(name)
            self.reply(file.read_bytes(), with_body)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def reply(self, body: bytes, with_body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.send_header("ETag", f'"{abs(hash(body)):x}"')
        self.send_header("X-Repo-Commit", self.commit)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(saved: tuple[Weights, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[Hub]]:
    handler = type("TinyHub", (Hub,), {"folder": saved[1], "served": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    real = huggingface_hub.snapshot_download

    def local(repo: str, **options: Any) -> str:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        return str(real(repo, endpoint=endpoint, cache_dir=tmp_path / "hub", **options))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", local)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    download.cache_clear()
    yield handler
    download.cache_clear()
    server.shutdown()
    server.server_close()


def test_hub_download(hub: type[Hub], saved: tuple[Weights, Path]) -> None:
    torch.save({}, saved[1] / "pytorch_model.bin")
    assert_same(load("owner/tiny"), saved[0])
    assert "pytorch_model.bin" not in hub.served  # safetensors are enough


def test_hub_download_of_an_old_repository(hub: type[Hub], saved: tuple[Weights, Path]) -> None:
    expected, folder = saved
    (folder / "model.safetensors").unlink()
    torch.save(checkpoint(expected), folder / "pytorch_model.bin")
    assert_same(load("owner/tiny"), expected)


def test_hub_without_the_model(hub: type[Hub]) -> None:
    with pytest.raises(ModelError, match="cannot download 'owner/other'"):
        load("owner/other")


def test_offline_is_one_clear_line() -> None:
    with pytest.raises(ModelError) as caught:
        load("gpt2")
    assert "cannot download 'openai-community/gpt2'" in str(caught.value)
    assert "local folder" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_random_tensors_differ_and_scales_are_near_one() -> None:
    tensors = load("random:n_layer=2,n_head=2,n_embd=64,n_positions=64,vocab_size=64").tensors
    firsts = {name: tuple(value.flatten()[:8].tolist()) for name, value in tensors.items()}
    assert len(set(firsts.values())) == len(firsts)
    for name, value in tensors.items():
        is_scale = "ln_" in name and name.endswith(".weight")
        assert float(value.mean()) == pytest.approx(1.0 if is_scale else 0.0, abs=0.02), name
