"""The description is valid, and what it allows is answered without a server error."""

from __future__ import annotations

import os
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.specs.openapi import checks

from tests.serve.live import Live, Standin, serving
from warpline.serve.protocol import ChatRequest, CompletionRequest, decode
from warpline.serve.routes import routes
from warpline.serve.state import State

#: More cases if there is time: SCHEMATHESIS_CASES=10000.
CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
CASES = int(os.environ.get("SCHEMATHESIS_CASES", "150"))


@pytest.fixture(scope="module")
def quick() -> Any:
    with serving(Standin(slots=16, pause=0.0, chunk=64)) as live:
        yield live
        live.wait_until_empty()


def test_every_path_is_described(quick: Live) -> None:
    _, said, _ = quick.request("/openapi.json")
    assert said["openapi"].startswith("3.1")
    served = {route.path.replace(":path", "") for route in routes(State(quick.state.settings))}
    assert set(said["paths"]) == served
    for kind in (CompletionRequest, ChatRequest):
        assert set(said["components"]["schemas"][kind.__name__]["properties"]) == set(kind.__struct_fields__)


def test_readable(quick: Live) -> None:
    _, text, _ = quick.request("/docs")
    for name in CompletionRequest.__struct_fields__:
        assert f"<code>{name}</code>" in text


def test_defaults_are_accepted() -> None:
    asked = decode(b'{"prompt": "x", "n": null, "stop": null, "logit_bias": null, "stream": null}', CompletionRequest)
    assert asked.n is None


def test_no_case_ends_in_a_mistake(quick: Live) -> None:
    """Cases by schemathesis: no 5xx, no hang, answers as described."""
    schema = schemathesis.openapi.from_url(f"{quick.url}/openapi.json")
    schema.config.base_url = quick.url
    operations: list[Any] = [found.ok() for found in schema.get_all_operations()]  # type: ignore[union-attr]
    assert {operation.path for operation in operations} >= {"/v1/completions", "/v1/chat/completions", "/tokenize"}
    tried = 0
    for operation in operations:
        tried += _try(operation, max(3, CASES // 4 if operation.method == "post" else CASES // 40))
    assert tried > CASES * 0.9


def _try(operation: Any, examples: int) -> int:
    tried = 0

    @settings(
        max_examples=examples, database=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation.as_strategy())
    def run(case: Any) -> None:
        nonlocal tried
        tried += 1
        answer = case.call(timeout=20)
        assert answer.status_code < 500, answer.text
        case.validate_response(answer, checks=CHECKS)

    run()
    return tried
