"""The OpenAPI document: requests as the pydantic models check them, answers as replies.py writes.

Knows shapes. Does not know the model: what depends on it (ids, lengths) is refused with 400.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from skippy_sched.server.admin import LISTED_DEFAULT, LISTED_MAX
from skippy_sched.server.wire import ChatRequest, CompletionRequest

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_OR_NULL: Schema = {"type": ["string", "null"]}
_NUMBER: Schema = {"type": "number"}
_NUMBER_OR_NULL: Schema = {"type": ["number", "null"]}


def openapi_document() -> Schema:
    """OpenAPI 3.1."""
    schemas: Schema = dict(_ANSWERS)
    for kind in (CompletionRequest, ChatRequest):
        own = _bounds_named(kind.model_json_schema(ref_template="#/components/schemas/{model}"))
        schemas.update(own.pop("$defs", {}))
        schemas[kind.__name__] = own
    return {
        "openapi": "3.1.0",
        "info": {"title": "skippy-sched", "version": version("skippy-sched")},
        "paths": _paths(),
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


#: pydantic leaves a bound behind a validator under its own name.
_BOUNDS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
}


def _bounds_named(value: Any) -> Any:
    if isinstance(value, list):
        return [_bounds_named(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {_BOUNDS.get(key, key): _bounds_named(item) for key, item in value.items()}


def _object(required: dict[str, Schema], **optional: Schema) -> Schema:
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _answer(kind: str, choice: Schema) -> Schema:
    return _object(
        {
            "id": _TEXT,
            "object": {"const": kind},
            "created": _COUNT,
            "model": _TEXT,
            "choices": _list(choice),
            "usage": _ref("Usage"),
        },
        system_fingerprint=_TEXT,
        service_tier=_TEXT,
    )


_FINISH: Schema = {"enum": ["stop", "length", "tool_calls"]}
_CHOICE: Schema = {
    "index": _COUNT,
    "finish_reason": _FINISH,
    "logprobs": {"type": ["object", "null"]},
}
_CARD = _object(
    {"id": _TEXT, "object": {"const": "model"}, "created": _COUNT, "owned_by": _TEXT},
    max_model_len=_COUNT,
)
_LISTED = _object(
    {
        "id": _TEXT,
        "state": _TEXT,
        "why": _TEXT,
        "waits_for": _OR_NULL,
        "queue_position": {"type": ["integer", "null"], "minimum": 1},
        "first_in_queue_waits_for": _OR_NULL,
        "predicted_start_s": _NUMBER_OR_NULL,
        "tenant": _TEXT,
        "priority": {"type": "integer"},
        "arrived": {"type": "string", "format": "date-time"},
        "first_token_s": _NUMBER_OR_NULL,
        "ended_s": _NUMBER_OR_NULL,
        "seconds": {"type": "object", "additionalProperties": _NUMBER},
        "prompt_tokens": _COUNT,
        "cached_tokens": _COUNT,
        "computed_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "completion_tokens_max": _COUNT,
        "chunks": _COUNT,
        "preemptions": _COUNT,
        "restarts": _COUNT,
        "finish_reason": _OR_NULL,
        "error": _OR_NULL,
        "steps_dropped": _COUNT,
    }
)
_STORY: Schema = {
    **_LISTED,
    "properties": {
        **_LISTED["properties"],
        "steps": _list(_object({"at_s": _NUMBER, "what": _TEXT, "tokens": _COUNT})),
    },
    "required": [*_LISTED["required"], "steps"],
}
_PERCENTILES = _object(dict.fromkeys(("p50", "p95", "p99"), _NUMBER_OR_NULL))
_ANSWERS: dict[str, Schema] = {
    "Error": _object(
        {
            "error": _object(
                {"message": _TEXT, "type": _TEXT, "param": _OR_NULL, "code": _OR_NULL},
                n_prompt_tokens=_COUNT,
                n_ctx=_COUNT,
            )
        }
    ),
    "Usage": _object(
        {
            "prompt_tokens": _COUNT,
            "completion_tokens": _COUNT,
            "total_tokens": _COUNT,
            "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
            "completion_tokens_details": _object(
                {"accepted_prediction_tokens": _COUNT, "rejected_prediction_tokens": _COUNT}
            ),
        }
    ),
    "Completion": _answer("text_completion", _object({**_CHOICE, "text": _TEXT})),
    "ChatCompletion": _answer(
        "chat.completion",
        _object(
            {
                **_CHOICE,
                "message": _object(
                    {"role": {"const": "assistant"}, "content": _OR_NULL, "refusal": _OR_NULL}
                ),
            }
        ),
    ),
    "Model": _CARD,
    "Models": _object({"object": {"const": "list"}, "data": _list(_ref("Model"))}),
    "RequestStory": _STORY,
    "RequestStories": _object({"object": {"const": "list"}, "data": _list(_LISTED)}),
    "Live": _object(
        {
            "model": _TEXT,
            "state": _TEXT,
            "at": _NUMBER,
            "began_at": _NUMBER,
            "lanes": _COUNT,
            "running": _list({"type": "object"}),
            "queue": _object(
                {"requests": _COUNT, "tokens": _COUNT, "first": _list({"type": "object"})}
            ),
            "kv": _object(
                {
                    "tokens": _COUNT,
                    "tokens_max": _COUNT,
                    "prefixes": _COUNT,
                    "prefix_tokens": _COUNT,
                }
            ),
            "rates": {"type": ["object", "null"]},
            "latency": _object({"ttft_ms": _PERCENTILES, "itl_ms": _PERCENTILES}),
            "counted": {"type": "object", "additionalProperties": _COUNT},
            "tenants": _list({"type": "object"}),
            "history": _list({"type": "object"}),
            "budget_tokens": _COUNT,
            "iterations": _list({"type": "array"}),
            "decodes": _list(_list(_COUNT)),
            "requests": {"type": "object"},
        }
    ),
    "Status": _object({"status": _TEXT}, reason=_TEXT),
}


def _json(name: str) -> Schema:
    return {"application/json": {"schema": _ref(name)}}


def _response(text: str, content: Schema) -> Schema:
    headers = {"x-request-id": {"required": True, "schema": _TEXT}}
    return {"description": text, "headers": headers, "content": content}


def _errors(*codes: int) -> Schema:
    return {str(code): _response("why not", _json("Error")) for code in codes}


def _generate(request: str, answer: str) -> Schema:
    streamed = {"text/event-stream": {"schema": _object({"data": _TEXT})}}  # of each event
    return {
        "post": {
            "operationId": request,
            "security": [{"key": []}],
            "requestBody": {"required": True, "content": _json(request)},
            "responses": {
                "200": _response("the answer, or its events", {**_json(answer), **streamed}),
                **_errors(400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504),
            },
        }
    }


def _get(name: str, content: Schema, *codes: int, secured: bool = True) -> Schema:
    return {
        "operationId": name,
        **({"security": [{"key": []}]} if secured else {}),
        "responses": {"200": _response("", content), **_errors(*codes)},
    }


def _query(name: str, text: str, schema: Schema) -> Schema:
    return {"name": name, "in": "query", "description": text, "schema": schema}


def _paths() -> Schema:
    name = {"name": "name", "in": "path", "required": True, "schema": _TEXT}
    story = {"name": "id", "in": "path", "required": True, "schema": _TEXT}
    limit = {"type": "integer", "minimum": 1, "maximum": LISTED_MAX, "default": LISTED_DEFAULT}
    ready = _get("ready", _json("Status"), secured=False)
    ready["responses"]["503"] = _response("not now", _json("Status"))
    return {
        "/v1/completions": _generate("CompletionRequest", "Completion"),
        "/v1/chat/completions": _generate("ChatRequest", "ChatCompletion"),
        "/v1/models": {"get": _get("models", _json("Models"), 401, 403, 503)},
        "/v1/models/{name}": {
            "parameters": [name],
            "get": _get("model", _json("Model"), 401, 403, 404, 503),
        },
        "/admin/requests": {
            "parameters": [_query("limit", "requests listed at most", limit)],
            "get": _get("requests", _json("RequestStories"), 400, 401, 403, 503),
        },
        "/admin/requests/{id}": {
            "parameters": [story],
            "get": _get("request", _json("RequestStory"), 401, 403, 404, 503),
        },
        "/admin/live": {
            "parameters": [
                _query("after", "only iterations after this number", _NUMBER),
                _query("since", "only history after this instant", _NUMBER),
            ],
            "get": _get("live", _json("Live"), 400, 401, 403, 503),
        },
        "/metrics": {"get": _get("metrics", {"text/plain": {"schema": _TEXT}}, secured=False)},
        "/health": {"get": _get("health", _json("Status"), secured=False)},
        "/ready": {"get": ready},
    }
