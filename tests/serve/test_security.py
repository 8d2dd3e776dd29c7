"""Which requests are allowed, and what answers do not reveal."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

import pytest

from tests.serve.live import Live, Standin, serving
from warpline.errors import ConfigError
from warpline.serve.state import Settings, public_name

PATHS = (
    "/",
    "/docs",
    "/openapi.json",
    "/metrics",
    "/version",
    "/v1/models",
    "/v1/completions",
    "/nothing",
    "/tokenize",
)


@pytest.fixture(scope="module")
def guarded() -> Iterator[Live]:
    settings = Settings(
        api_keys=("first-key", "second-key"), cors_origins=("https://page.example",), allowed_hosts=("127.0.0.1",)
    )
    with serving(Standin(), settings) as live:
        yield live


@pytest.mark.parametrize("path", PATHS)
def test_everything_but_health_needs_a_key(guarded: Live, path: str) -> None:
    status, said, headers = guarded.request(path)
    assert status == 401
    assert said["error"]["code"] == "invalid_api_key"
    assert "Bearer" in headers["www-authenticate"]
    for wrong in ("Bearer first-kez", "Bearer", "Bearer first-key2", "first-key", "Basic !", "Bearer ünï"):
        assert guarded.request(path, headers={"authorization": wrong.encode().decode("latin-1")})[0] == 401
    for right in ("Bearer second-key", "bearer first-key", "Basic " + base64.b64encode(b"me:first-key").decode()):
        assert guarded.request(path, headers={"authorization": right})[0] in (200, 404, 405)


def test_health_needs_none(guarded: Live) -> None:
    assert guarded.request("/health")[0] == 200


def test_other_hosts_are_refused(guarded: Live) -> None:
    """A page with a name that was pointed at this machine (DNS rebinding) uses that name for the server."""
    assert guarded.request("/health", headers={"host": "evil.example"})[0] == 421
    assert guarded.request("/health", headers={"host": "127.0.0.1:80"})[0] == 200


def test_other_pages_are_refused(guarded: Live) -> None:
    key = {"authorization": "Bearer first-key"}
    ask = {"prompt": "x", "max_tokens": 1}
    host = f"127.0.0.1:{guarded.port}"
    for origin, status in (
        (f"http://{host}", 200),
        ("https://page.example", 200),
        ("https://evil.example", 403),
        ("null", 403),
    ):
        assert guarded.request("/v1/completions", ask, {**key, "origin": origin})[0] == status
    _, _, headers = guarded.request("/v1/completions", ask, {**key, "origin": "https://page.example"})
    assert headers["access-control-allow-origin"] == "https://page.example"


def test_cors_is_off_by_default() -> None:
    with serving(Standin()) as live:
        _, _, headers = live.request("/v1/models", headers={"origin": "https://page.example"})
        assert "access-control-allow-origin" not in headers


def test_pages_are_strict(guarded: Live) -> None:
    for path in ("/", "/docs"):
        status, text, headers = guarded.request(path, headers={"authorization": "Bearer first-key"})
        assert status == 200
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http://" not in text.replace("http://www.w3.org", "")
        assert headers["x-content-type-options"] == "nosniff"


def test_no_path_of_the_machine_is_told(guarded: Live) -> None:
    key = {"authorization": "Bearer first-key"}
    for path in (*PATHS, "/health"):
        _, said, headers = guarded.request(path, headers=key)
        assert "/some/where" not in json.dumps(said) + str(headers)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("stories", "stories"),
        ("/a/b/c", "c"),
        ("./x/y/", "y"),
        ("random:gpt2", "random:gpt2"),
        ("a/b", "a/b"),
        ("/", "model"),
    ],
)
def test_public_names(model: str, name: str) -> None:
    assert public_name(model) == name


def test_settings_that_make_no_sense() -> None:
    for named in ({"max_queue": -1}, {"max_body": 3}, {"api_keys": ("",)}, {"api_keys": ("ü",)}):
        with pytest.raises(ConfigError):
            Settings(**named)
