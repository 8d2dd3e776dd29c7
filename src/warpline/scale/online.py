"""The server as a Ray Serve application: replicas behind one address, each with its own model."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from warpline.config import EngineConfig
from warpline.engine.llm import MOST_SLOTS
from warpline.errors import ConfigError, DeviceError, WarplineError
from warpline.model import weights
from warpline.model.builtin import DEFAULT
from warpline.scale import cluster
from warpline.scale.cluster import Share
from warpline.scale.replica import Replica
from warpline.serve.run import LOOPBACK, bound, is_loopback
from warpline.serve.state import Settings

logger = logging.getLogger(__name__)

#: Name of the application and of its deployment in Ray Serve.
NAME = "warpline"
#: Requests that Ray passes to a replica beyond its slots and its queue: these get the replica's own 429.
MARGIN = 256
#: Ray adds a replica when this share of the slots is in use on average, so that it is ready before requests queue.
BUSY = 0.75
#: Seconds of high or low load before Ray adds or removes one. A replica takes seconds to load, and is cheap to keep.
UPSCALE, DOWNSCALE = 5.0, 120.0
#: Seconds between two checks of the cluster while all is well.
LOOK = 5.0
#: Seconds between two of Ray's health checks of a replica, and seconds that an answer may take.
HEALTH_PERIOD, HEALTH_TIMEOUT = 5.0, 30.0


def deployment(
    model: str = DEFAULT,
    *,
    replicas: int | tuple[int, int] = 1,
    device: str = "auto",
    dtype: str = "auto",
    kv_dtype: str | None = None,
    executor: str = "auto",
    max_batch: int | None = None,
    threads: int | None = None,
    deterministic: str = "off",
    gpus: float | None = None,
    settings: Settings | None = None,
    drain_seconds: float = 30.0,
) -> Any:
    """Return a Ray Serve application for `serve.run`: the ASGI app of `warpline serve`, `replicas` times.

    `replicas` is a number, or the least and the most, between which Ray chooses by the number of open requests. Each
    has one GPU, or the share `gpus` of one, or `threads` CPU cores (1 if not given).
    """
    asked = EngineConfig(
        device=device, dtype=dtype, kv_dtype=kv_dtype, executor=executor, max_batch=max_batch, threads=threads,
        deterministic=deterministic,
    )  # fmt: skip
    ray = cluster.require_ray(serve=True)
    has = ray.cluster_resources() if ray.is_initialized() else cluster.here()
    least = replicas if isinstance(replicas, int) else replicas[0]
    each = cluster.share(device, threads, gpus=gpus, replicas=least, has=has)
    return _application(model, asdict(asked), settings or Settings(), replicas, each, drain_seconds)


def _application(
    model: str, engine: dict[str, Any], settings: Settings, replicas: int | tuple[int, int], each: Share, drain: float
) -> Any:
    from ray import serve
    from ray.serve.config import AutoscalingConfig, BackpressureConfig

    # A replica sees only its own GPU, as the first one.
    device, cores = ("cuda", None) if each.gpus else ("cpu", int(each.cpus))
    engine = engine | {"device": device, "threads": cores}
    slots = engine["max_batch"] or MOST_SLOTS[device]
    named: dict[str, Any] = {}
    if isinstance(replicas, int):
        _require(replicas > 0, f"replicas must be at least 1, not {replicas}")
        named["num_replicas"] = replicas
    else:
        least, most = replicas
        _require(0 < least <= most, f"replicas from {least} to {most}: the least is at least 1, the most no less")
        named["autoscaling_config"] = AutoscalingConfig(
            min_replicas=least, max_replicas=most, target_ongoing_requests=max(1.0, BUSY * slots),
            upscale_delay_s=UPSCALE, downscale_delay_s=DOWNSCALE,
        )  # fmt: skip
    made = serve.deployment(
        serve.ingress()(Replica),
        name=NAME,
        ray_actor_options=each.options(),
        max_ongoing_requests=slots + settings.max_queue + MARGIN,
        max_queued_requests=MARGIN,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
        health_check_period_s=HEALTH_PERIOD,
        health_check_timeout_s=HEALTH_TIMEOUT,
        graceful_shutdown_timeout_s=drain,
        logging_config={"log_level": "WARNING", "enable_access_log": False},
        **named,
    )
    return made.bind(cluster.absolute(model), engine, settings)


def build(arguments: Mapping[str, Any]) -> Any:
    """Build the application for a config file of Ray Serve: `import_path: warpline.scale.online:build`, with the
    arguments of `deployment` under `args`. There `replicas` may be a list of two, and `settings` holds the server's
    settings."""
    named = dict(arguments)
    found = dict(named.pop("settings", {}))
    for name in ("api_keys", "cors_origins", "allowed_hosts"):
        if name in found:
            found[name] = tuple(found[name])
    if isinstance(named.get("replicas"), list):
        named["replicas"] = tuple(named["replicas"])
    try:
        return deployment(**named, settings=Settings(**found))
    except TypeError as error:
        raise ConfigError(f"args of the config file: {error}") from None


def serve(
    model: str,
    settings: Settings,
    engine: dict[str, Any],
    *,
    replicas: str,
    address: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    shutdown_timeout: float = 30.0,
    ready: Callable[[str, str], None] | None = None,
) -> None:
    """Serve until a signal comes, then drain. `ready` is called with the URL and a description of the replicas."""
    count = cluster.replica_count(replicas)
    if address is None:
        weights.read_config(model)  # a missing model is an error now, in one line
        if is_loopback(host) and not settings.allowed_hosts:
            settings = replace(settings, allowed_hosts=(*LOOPBACK, host.lower()))
    if port == 0 or address is None:
        with bound(host, port) as probe:  # raises a clear error if the port is taken
            port = probe.getsockname()[1]
    with cluster.connected(address, serve=True) as ray:
        from ray import serve as ray_serve
        from ray.serve.config import HTTPOptions

        has = ray.cluster_resources()
        each = cluster.share(engine["device"], engine["threads"], gpus=None, replicas=count, has=has)
        most = cluster.most(each, has)
        cluster.require_room(count or 1, each, has)
        span = count if count is not None else (1, most)
        app = _application(model, engine, settings, span, each, shutdown_timeout)
        stop, alive, head = threading.Event(), True, ray.get_runtime_context().gcs_address
        before = {one: signal.signal(one, lambda *_: stop.set()) for one in (signal.SIGINT, signal.SIGTERM)}
        try:
            logging.getLogger("ray.serve").setLevel(logging.WARNING)
            ray_serve.start(http_options=HTTPOptions(host=host, port=port, keep_alive_timeout_s=30))
            target = ray_serve.RunTarget(target=app, name=NAME, route_prefix="/")
            ray_serve.run_many([target], wait_for_applications_running=False)  # we wait below, to see messages
            _wait_until_running(ray_serve, stop)
            if not stop.is_set():
                many = f"{count} replica(s)" if count is not None else f"1 to {most} replicas"
                if ready is not None:
                    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
                    ready(url, f"{many} of {each.gpus:g} GPU" if each.gpus else f"{many} of {each.cpus:g} CPU(s)")
                while not stop.wait(LOOK):
                    alive = cluster.answers(head)
                    if not alive:
                        raise DeviceError("the Ray cluster has died, and the replicas with it: start anew")
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)
            if alive and address is None:
                ray_serve.shutdown()
            elif alive:
                ray_serve.delete(NAME)


def _wait_until_running(ray_serve: Any, stop: threading.Event) -> None:
    """Wait until the replicas run; raise what one of them has raised."""
    while not stop.wait(0.1):
        found = ray_serve.status().applications.get(NAME)
        if found is None or found.status in ("NOT_STARTED", "DEPLOYING"):
            failures = [] if found is None else [one.message for one in found.deployments.values()]
            for message in failures:
                if "Error" in message and "failed" in message.lower():
                    raise _explained(message)
            continue
        if found.status == "RUNNING":
            return
        raise _explained("\n".join([found.message, *[one.message for one in found.deployments.values()]]))


def _explained(message: str) -> WarplineError:
    """Return the error in a replica's traceback that says what to do."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    ours = [line.partition(": ")[2] for line in lines if line.startswith("warpline.errors.")]
    last = next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "no reason is known")
    return DeviceError(f"the replicas did not start: {(ours or [last])[-1][:300]}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
