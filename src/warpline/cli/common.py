"""Shared by several verbs: lists on the command line, common options, and verbs with verbs of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from warpline.errors import ConfigError, one_of

if TYPE_CHECKING:
    from warpline.kernels.spec import KernelSpec


#: Names of dtypes in transformers and vLLM, and ours.
_DTYPE_NAMES = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}


def our_name(dtype: str) -> str:
    """Return our name of a dtype, which may have one of torch's names."""
    return _DTYPE_NAMES.get(dtype, dtype)


#: Options that several verbs have.
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens with this total probability.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1 makes tokens already in the text less likely.")]
PresencePenalty = Annotated[float, typer.Option(help="-2 to 2: lowers the logits of tokens in the completion.")]
FrequencyPenalty = Annotated[float, typer.Option(help="-2 to 2: the same, once for each occurrence.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text.")]
#: Options for lengths have these names in all verbs, besides those a verb had before.
NEW_TOKENS, PROMPT_TOKENS = "--new-tokens", "--prompt-tokens"
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")]
Dtype = Annotated[str, typer.Option(help="auto, fp32, fp16, bf16 (or torch's names), or int8.", callback=our_name)]
KvDtype = Annotated[
    str | None,
    typer.Option(help="int8 stores keys and values as one-byte codes, on a GPU; default: in the dtype."),
]
Speculate = Annotated[
    str, typer.Option(help="ngram drafts further tokens, on a CPU: the same text, sooner where it repeats.")
]
SpeculativeTokens = Annotated[int, typer.Option(help="Most drafts per sequence and pass.")]
SpeculativeTable = Annotated[
    bool, typer.Option("--speculative-table", help="Draft from earlier texts too; they stay in the cache folder.")
]

Deterministic = Annotated[
    str, typer.Option(help="off, or batch: no sequence's bits depend on what runs beside it (docs/determinism.md).")
]


@contextmanager
def as_options(**renamed: str) -> Iterator[None]:
    """Name the options in errors about settings: max_tokens becomes --max-new-tokens."""
    try:
        yield
    except ConfigError as error:
        name, _, rest = str(error).partition(" ")
        if not name.isidentifier() or not rest.startswith("must"):
            raise
        raise ConfigError(f"{renamed.get(name, '--' + name.replace('_', '-'))} {rest}") from error


class DefaultGroup(TyperGroup):
    """Commands with a default that runs if none is named: `warpline bench` besides `warpline bench serve`."""

    DEFAULT = "run"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the default command's name unless another one is named."""
        named = bool(args) and args[0] in self.commands
        return super().parse_args(ctx, args if named else [self.DEFAULT, *args])


def listed(text: str | None) -> list[str]:
    """Split a text at commas."""
    return [part.strip() for part in text.split(",") if part.strip()] if text else []


def read_key(path: Path | None) -> str | None:
    """Read an API key from a file; None without a file."""
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def chosen(text: str | None, choices: Iterable[str], what: str) -> list[str]:
    """Split a text at commas; each part must be one of `choices`."""
    return [one_of(part, list(choices), what) for part in listed(text)]


def chosen_kernels(names: list[str] | None) -> list[KernelSpec]:
    """Return the named kernels of the catalog, or all."""
    from warpline.kernels.catalog import CATALOG, find

    return [find(name) for name in names] if names else list(CATALOG.values())
