"""Checks whether a change alters the code on the GPU: compiles the kernels of another revision and of the present
files, and compares their instructions: `python -m tools.machine_code HEAD~1` names the programs that differ. No GPU
is needed.

A renamed variable must change nothing. Then tunables that a sweep found for the old code are right for the new code:
with `--keep-choices` rows of results/*/tune.jsonl that were valid there are made valid here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import struct
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools import tuning
from warpline.kernels.catalog import CATALOG
from warpline.kernels.compile import compile_many, header_digest
from warpline.kernels.decode_plan import Extents
from warpline.kernels.ladder import LADDERS
from warpline.kernels.persistent import DecodeProgram
from warpline.kernels.spec import Variant

ROOT = Path(__file__).parents[1]
ARCHS = ("sm_75", "sm_90")
_HASHES = "--hashes"


def variants() -> set[tuple[Variant, str]]:
    """Return for each kernel a benchmark shape and an odd one, on the oldest and a newer arch, and there as the graph
    executor launches it too; and every rung."""
    found = set()
    for spec in CATALOG.values():
        for dims in (*spec.bench_dims[:1], *spec.test_dims[1:2]):
            for dtype in spec.dtypes:
                archs = [arch for arch in ARCHS if spec.runs_on(dtype, arch)]
                found |= {(Variant.of(spec, dtype, dims, arch), arch) for arch in archs}
                found |= {(Variant.of(spec, dtype, dims, arch, overlapping=True), arch) for arch in archs}
    for ladder in LADDERS.values():
        for rung in ladder.rungs:
            archs = [arch for arch in ARCHS if rung.spec.runs_on(rung.dtype, arch)]
            allowed = [(ladder.odd_dims[0], arch) for arch in archs if rung.allows(rung.dims(ladder.odd_dims[0]), arch)]
            found |= {(rung.compiled_as(dims, arch), arch) for dims, arch in allowed}
    return found


def decoders() -> list[tuple[DecodeProgram, str]]:
    """Return programs of the persistent kernel that use each of its features at least once."""
    gpt2 = Extents("fp16", 768, 3072, 12, 12, 50257, rows=1, blocks=132, arch="sm_90")
    small = Extents("fp16", 512, 2048, 8, 4, 8192, rows=1, blocks=40, arch="sm_75")
    changes: list[dict[str, Any]] = [
        {}, {"dtype": "fp32"}, {"dtype": "bf16", "rows": 4}, {"filters": True}, {"logits": True, "rows": 2},
        {"filters": True, "rows": 8}, {"coded": True}, {"coded": True, "filters": True, "rows": 4},
        {"invariant": True, "rows": 8}, {"whole": True, "rows": 2}, {"observed": True}, {"stamped_tokens": 2},
    ]  # fmt: skip
    found = [replace(gpt2, **change) for change in changes] + [small, replace(small, filters=True, rows=4)]
    return [(DecodeProgram(extents), extents.arch) for extents in found]


def instructions(cubin: bytes) -> bytes:
    """Return the code in an ELF file, without names and source positions."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    start = sections[names][4]

    def name(section: tuple[int, ...]) -> str:
        at = start + section[0]
        return cubin[at : cubin.index(b"\0", at)].decode()

    code = [(name(s), cubin[s[4] : s[4] + s[5]]) for s in sections if name(s).startswith(".text")]
    return b"".join(text for _, text in sorted(code))


def hashes() -> dict[str, str]:
    """Return a digest for each program, by a label of its settings."""
    found: dict[str, str] = {}
    for variant in compile_many(list(variants())):
        program = variant.program
        constants = " ".join(f"{name}={value}" for name, value in (*program.constants, *program.tunables))
        launched = " overlapping" if program.overlapping else ""
        label = f"{program.entry} {program.dtype} {constants} {variant.arch}{launched}"
        found[label] = hashlib.sha256(instructions(variant.code)).hexdigest()[:16]
    for decoder in compile_many(decoders()):
        found[str(decoder.program.extents)] = hashlib.sha256(instructions(decoder.code)).hexdigest()[:16]
    return found


def digests() -> dict[str, str]:
    """Return the digest of each op's header, by which a stored choice identifies its code."""
    return {name: header_digest(spec.header) for name, spec in CATALOG.items()}


def keep_choices(before: dict[str, str], kernels: set[str]) -> int:
    """Make rows of these kernels' sweeps that are valid for `before` valid for the present code; return how many."""
    after, count = digests(), 0
    for path in sorted((ROOT / "results").glob("*/tune.jsonl")):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for row in rows:
            name = row["kernel"]
            if name in kernels and row["digest"] == before[name] != after[name]:
                row["digest"], count = after[name], count + 1
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    tuning.ship()
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", default="HEAD")
    parser.add_argument("--keep-choices", action="store_true")
    parser.add_argument(_HASHES, action="store_true", help="print this tree's digests and compare nothing")
    asked = parser.parse_args()
    if asked.hashes:
        print(json.dumps({"programs": hashes(), "digests": digests()}))
        return
    with tempfile.TemporaryDirectory(prefix="revision-") as folder:
        archive = subprocess.run(["git", "archive", asked.revision, "src"], cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        environment = {**os.environ, "PYTHONPATH": f"{folder}/src:{ROOT}"}
        command = [sys.executable, "-m", "tools.machine_code", _HASHES]
        printed = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, check=True).stdout
    old = json.loads(printed)
    before, after = old["programs"], hashes()
    both = sorted(before.keys() & after.keys())
    differ = [label for label in both if before[label] != after[label]]
    lone = sorted(before.keys() ^ after.keys())
    for label in differ:
        print(f"differs  {label}")
    for label in lone:
        print(f"only in one of them  {label}")
    print(f"{len(both) - len(differ)} of {len(both)} programs have the same instructions as in {asked.revision}")
    if asked.keep_choices:
        other = {label.split()[0].removeprefix("warpline_") for label in (*differ, *lone)}
        same = {name for name in old["digests"] if name in CATALOG and name not in other}
        print(f"{keep_choices(old['digests'], same)} rows of sweeps are valid here as well")
    sys.exit(bool(differ or lone))


if __name__ == "__main__":
    main()
