"""Connects to Ray, and is the only module that starts it; every way in which Ray can be missing is a clear error."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warpline import hardware
from warpline.errors import ConfigError, DeviceError

#: Ray's settings for a cluster that we start; variables that the environment has already keep their values.
#: HAProxy forwards to the replicas' own HTTP servers, which costs 0.5 ms instead of the 4 ms of the proxy in Python.
#: The app then runs in that server's event loop, and a replica that ends waits 2 s, not 30, until HAProxy knows it.
#: Ray would run workers with a niceness of 15: behind everything else on the machine.
LOCAL_SETTINGS = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_worker_niceness": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
#: Bytes of a local cluster's object store: only prompts and texts pass through it.
OBJECT_STORE = 256 << 20
#: Seconds within which the head of a cluster must accept a connection.
CONNECT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Share:
    """What each replica gets of the machine."""

    cpus: float
    gpus: float

    def options(self) -> dict[str, float]:
        """Return the share as options of a Ray actor."""
        return {"num_cpus": self.cpus, "num_gpus": self.gpus}


def require_ray(*, serve: bool = False) -> Any:
    """Return the module `ray`; raise if it, or the part that is needed, is not installed."""
    for name, value in LOCAL_SETTINGS.items():  # Ray reads them when it is imported
        os.environ.setdefault(name, value)
    try:
        import ray

        if serve:
            from ray import serve as _
        else:
            from ray import data as _  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"replicas need Ray ({error.name} is missing): pip install 'warpline[ray]'") from None
    return ray


@contextmanager
def connected(address: str | None, *, serve: bool = False, cpus: float | None = None) -> Iterator[Any]:
    """Yield Ray, connected to the cluster at `address` ("auto" finds one on this machine), or to a local one with
    `cpus` cores (None: all) that ends with the block. A connection that the caller already has is kept."""
    ray = require_ray(serve=serve)
    if ray.is_initialized():
        if address is not None:
            raise ConfigError("this process has a connection to Ray already: leave the address out")
        yield ray
        return
    quiet: dict[str, Any] = {
        "logging_level": logging.ERROR,
        "log_to_driver": logging.getLogger("warpline").isEnabledFor(logging.DEBUG),
        "namespace": "warpline",
    }
    if address is not None:
        _require_reachable(address)
    try:
        if address is None:
            with _group_of_its_own():
                ray.init(
                    address="local", include_dashboard=False, _node_ip_address="127.0.0.1", **quiet,
                    object_store_memory=OBJECT_STORE, num_cpus=None if cpus is None else max(1, round(cpus)),
                )  # fmt: skip
        else:
            ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0][:200]
        where = (
            "a local Ray cluster could not be started" if address is None else f"no Ray cluster answers at {address}"
        )
        raise ConfigError(f"{where}: {said}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def _group_of_its_own() -> Iterator[None]:
    """Start child processes outside of our process group: a terminal sends Ctrl-C to a whole group, and replicas would
    end before they have drained."""
    ours = os.getpgrp()
    with subprocess.Popen(["sleep", "3600"], process_group=0) as other:  # a group exists as long as it has a member
        try:
            with contextlib.suppress(PermissionError):  # a session leader cannot leave its group; it has no terminal's
                os.setpgid(0, other.pid)
            yield
        finally:
            with contextlib.suppress(PermissionError):
                os.setpgid(0, ours)
            other.kill()


def _require_reachable(address: str) -> None:
    """Raise soon if no cluster answers: Ray itself tries for a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address in ("auto", "local") or not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"no Ray cluster answers at {address} ({reason.lower()}): start one with 'ray start --head', or leave "
            "--ray-address out"
        ) from error


def answers(head: str) -> bool:
    """Whether the head of a cluster answers. Ray itself tries for a minute, and then ends the process."""
    host, _, port = head.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def here() -> dict[str, float]:
    """Return the resources of this machine under Ray's names."""
    import torch

    return {"CPU": float(hardware.threads()), "GPU": float(torch.cuda.device_count())}


def share(
    device: str, threads: int | None, *, gpus: float | None, replicas: int | None, has: dict[str, float]
) -> Share:
    """Return the share of each of `replicas` (None: as many as fit) in a cluster with the resources `has`."""
    on_gpu = device.startswith("cuda") or (device == "auto" and has.get("GPU", 0) > 0)
    if gpus is not None and not on_gpu and gpus > 0:
        raise DeviceError(f"gpus={gpus:g} needs a GPU, and the replicas' device is a CPU: leave it out")
    if on_gpu:
        each = 1.0 if gpus is None else gpus
        if each <= 0:
            raise ConfigError(f"gpus must be above 0, not {each:g}")
        return Share(cpus=float(threads or 1), gpus=each)
    cores = max(1, int(has.get("CPU", hardware.threads())))
    return Share(cpus=float(threads or max(1, cores // (replicas or cores))), gpus=0.0)


def most(each: Share, has: dict[str, float]) -> int:
    """Return the number of replicas that fit."""
    fits = [
        has.get("CPU", 0.0) / each.cpus if each.cpus else None,
        has.get("GPU", 0.0) / each.gpus if each.gpus else None,
    ]
    return int(min(number for number in fits if number is not None) + 1e-9)


def require_room(replicas: int, each: Share, has: dict[str, float]) -> None:
    """Raise if the replicas do not fit: Ray would wait forever."""
    for name, one in (("GPU", each.gpus), ("CPU", each.cpus)):
        wanted, there = replicas * one, has.get(name, 0.0)
        if wanted > there + 1e-9:
            need = f"{replicas} replica(s) of {one:g} {name}(s) need {wanted:g}"
            raise DeviceError(f"{need}, and the cluster has {there:g}: take fewer --replicas, or more machines")


def replica_count(asked: int | str | None) -> int | None:
    """Return the number of replicas; None if Ray chooses."""
    if asked is None or asked == "auto":
        return None
    if not str(asked).isdigit() or not 0 < int(asked) <= 10_000:
        raise ConfigError(f"--replicas takes a number, or auto, not '{asked}'")
    return int(asked)


def absolute(model: str) -> str:
    """Return a path as absolute: replicas may have another working directory."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model
