"""schemathesis reads the daemon's own OpenAPI document and tries what it promises."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.generation import GenerationMode
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import positive_data_acceptance

from skippy_sched.server.openapi import openapi_document

#: A document cannot say that fields depend on each other or on the model: valid ones may be
#: refused. Every other promise is checked.
UNSAID = [positive_data_acceptance]

#: Of some requests there is nothing to get wrong.
NO_INPUT = ("/v1/models", "/health", "/ready", "/metrics")
OPERATIONS = [
    (path, method, mode)
    for path, operations in openapi_document()["paths"].items()
    for method in operations
    for mode in GenerationMode
    if method != "parameters" and (mode is GenerationMode.POSITIVE or path not in NO_INPUT)
]

LIMITS = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="session")
def api(url: str) -> BaseSchema:
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


@pytest.mark.parametrize(("path", "method", "mode"), OPERATIONS, ids=str)
def test_no_request_makes_the_daemon_fail_or_break_its_promises(api, path, method, mode):
    operation = api[path][method]
    key = "sk-admin" if path.startswith("/admin") else "sk-test"
    authorization = {"Authorization": f"Bearer {key}"}

    @LIMITS
    @given(case=operation.as_strategy(generation_mode=mode))
    def call(case):
        if isinstance(case.body, dict):
            if isinstance(case.body.get("timeout"), int | float):
                del case.body["timeout"]  # one that passes is 504, as promised: no failure
            if isinstance(case.body.get("max_tokens", 2), int):
                case.body["max_tokens"] = min(case.body.get("max_tokens", 2), 2)
        leaves_key_out = mode is GenerationMode.NEGATIVE and "Authorization" not in case.headers
        headers = {} if leaves_key_out and path.startswith("/admin") else authorization
        case.call_and_validate(headers=headers, excluded_checks=UNSAID)

    call()
