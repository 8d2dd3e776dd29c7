"""`warpline.scale.generate` with replicas in Ray Data: the same results, and nothing lost when one is killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ray.conftest import ENGINE
from warpline import SamplingParams
from warpline.errors import ConfigError, DeviceError
from warpline.scale import cluster
from warpline.scale.batch import generate

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[Any]:
    """Connect to a cluster with room for three replicas, whatever the machine has."""
    with cluster.connected(None, cpus=4) as found:
        yield found


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("in") / "in.jsonl"
    body = {"prompt": "A frog", "max_tokens": 4, "temperature": 0}
    asked = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    lines: list[Any] = [{"prompt": f"number {i}"} for i in range(160)]
    lines[7], lines[90] = asked, {"prompt": ""}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def alone(prompts: Path) -> list[Any]:
    """Return what one process writes."""
    return comparable(generate(prompts, prompts.parent / "alone.jsonl", params=PARAMS, threads=1, **ENGINE).out)


def comparable(path: Path) -> list[Any]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    for row in found:
        if "response" in row:
            row["response"]["body"] = row["response"]["body"]["choices"]
    return found


@pytest.mark.parametrize("count", [1, 2, 3])
def test_texts_do_not_depend_on_the_replicas(prompts: Path, tmp_path: Path, alone: list[Any], count: int) -> None:
    done = generate(prompts, tmp_path / "out.jsonl", params=PARAMS, replicas=count, threads=1, **ENGINE)
    assert comparable(done.out) == alone
    assert (done.good, done.bad) == (159, 1)


def test_a_killed_replica_loses_nothing(prompts: Path, tmp_path: Path, alone: list[Any]) -> None:
    killed: list[int] = []

    def kill() -> None:
        end = time.monotonic() + 60
        while not killed and time.monotonic() < end:
            progress = tmp_path / "out.jsonl.progress"
            if progress.exists() and len(progress.read_bytes().splitlines()) > 2:
                found = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
                actors = [line.split(None, 1) for line in found.splitlines() if "ray::MapWorker" in line]
                for pid, _ in actors[:1]:
                    os.kill(int(pid), signal.SIGKILL)
                    killed.append(int(pid))
            time.sleep(0.02)

    thread = threading.Thread(target=kill)
    thread.start()
    slow = SamplingParams(max_tokens=400, ignore_eos=True)
    done = generate(prompts, tmp_path / "out.jsonl", params=slow, replicas=2, threads=1, **ENGINE)
    thread.join()
    assert killed, "it was quicker than the test"
    assert [row.get("line") for row in comparable(done.out)] == [row.get("line") for row in alone]
    whole = generate(prompts, tmp_path / "whole.jsonl", params=slow, replicas=1, threads=1, **ENGINE)
    assert comparable(done.out) == comparable(whole.out)


def test_datasets(ray: Any, tmp_path: Path) -> None:
    dataset = ray.data.from_items([{"prompt": f"number {i}", "id": i} for i in range(20)])
    done = generate(dataset, tmp_path / "out.parquet", params=PARAMS, replicas=1, threads=1, **ENGINE)
    found = ray.data.read_parquet(str(done.out)).take_all()
    assert sorted(row["id"] for row in found) == list(range(20))


def test_refusals(prompts: Path, tmp_path: Path) -> None:
    def refused(**changes: Any) -> None:
        asked: dict[str, Any] = {"replicas": 1, "params": PARAMS, **ENGINE, **changes}
        generate(prompts, tmp_path / "out.jsonl", **asked)

    with pytest.raises(DeviceError, match=r"2 replica\(s\) of 1 GPU\(s\) need 2, and the cluster has 0"):
        refused(replicas=2, device="cuda")
    with pytest.raises(DeviceError, match=r"9 replica\(s\) of 1 CPU\(s\) need 9, and the cluster has 4"):
        refused(replicas=9, threads=1)
    with pytest.raises(DeviceError, match="leave it out"):
        refused(gpus=0.5)
    with pytest.raises(ConfigError, match="has a connection to Ray already"):
        refused(ray_address="auto")


def test_an_address_where_nothing_is() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(ConfigError, match=rf"no Ray cluster answers at 127.0.0.1:{port} \(connection refused\)"):
        cluster._require_reachable(f"127.0.0.1:{port}")
