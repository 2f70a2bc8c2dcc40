"""GET /openapi.json: the routes of an application, and the fields of their bodies.

Types and defaults come from the bodies' structs. What a struct leaves open, and the limits that
are checked later, stand here by the field's name; a field of one name means the same everywhere.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from jaxprefill import __version__
from jaxprefill.request import MAX_TOP_LOGPROBS
from jaxprefill.server.admin import AbortBody
from jaxprefill.server.auth import is_open_path
from jaxprefill.server.context import ServerContext
from jaxprefill.server.health import json_response
from jaxprefill.server.route import JsonRoute

Schema = dict[str, Any]
_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT: Schema = {"type": "string", "minLength": 1}
_PROMPTS: Schema = {
    "anyOf": [
        _TEXT,
        _IDS,
        {"type": "array", "items": _TEXT, "minItems": 1},
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}
_MESSAGE: Schema = {
    "type": "object",
    "properties": {"role": {"type": "string"}, "content": {}},
    "required": ["role"],
}
_COUNT: Schema = {"minimum": 0, "maximum": MAX_TOP_LOGPROBS}
_FIELDS: dict[str, Schema] = {
    "prompt": _PROMPTS,
    "input": _PROMPTS,
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
    "input_ids": {"anyOf": [_IDS, {"type": "array", "items": _IDS, "minItems": 1}]},
    "text": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}]},
    "items": _PROMPTS,
    "documents": {
        "anyOf": [
            _TEXT,
            {"type": "array", "items": {"type": ["string", "object"]}, "minItems": 1},
        ]
    },
    "tokens": {"type": "array"},
    "label_token_ids": _IDS,
    "labels": {"type": "array", "items": _TEXT, "minItems": 1},
    "encoding_format": {"enum": ["float", "base64"]},
    "dimensions": {"minimum": 1},
    "top_n": {"minimum": 1},
    "max_tokens": {"minimum": 0},
    "max_completion_tokens": {"minimum": 1},
    "temperature": {"minimum": 0, "maximum": 100},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1},
    "min_p": {"minimum": 0, "maximum": 1},
    "n": {"minimum": 1, "maximum": 1024},
    "min_tokens": {"minimum": 0},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 10},
    "top_logprobs": _COUNT,
    "rid": {"maxLength": 256, "pattern": "^[!-~]*$"},
    "request_id": {"maxLength": 256, "pattern": "^[!-~]*$"},
}
_REQUIRED = ("prompt", "input", "messages", "tokens")
_CHOICES = ("TokenizeBody",)  # one of its fields is required, and texts may be empty
_STATUSES = {
    400: "The body breaks a rule, which the message names.",
    401: "The server asks for an API key.",
    403: "The server was started without what this needs.",
    404: "There is no such model.",
    405: "Another method is asked for.",
    408: "The request took longer than the server allows.",
    409: "A request of this id runs, or a recording does.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    429: "The queue is full; Retry-After says when to come again.",
    500: "The server is at fault.",
    503: "The server is starting or shutting down; Retry-After says when to come again.",
}
_SUMMARIES = {
    "/health": "Whether requests are taken; asks nobody.",
    "/ready": "The same as /health.",
    "/ping": "The same as /health.",
    "/v1/models": "The names that the model goes by.",
    "/v1/models/{name}": "One of them.",
    "/metrics": "Prometheus metrics.",
    "/get_server_info": "The same as /server_info.",
}
_REFERENCE = "#/components/schemas/{name}"


def openapi_route(routes: Sequence[BaseRoute], context: ServerContext) -> Route:
    """The route that shows the document of these, with the model's names once they are known."""
    found = [route for route in routes if isinstance(route, Route)]

    async def openapi(_: HttpRequest) -> Response:
        names = context.names if context.client.is_ready else ()
        return json_response(document(found, names))

    return Route("/openapi.json", openapi)


def document(routes: Sequence[Route], names: Sequence[str] = ()) -> Schema:
    """An OpenAPI 3.1 document; `names` are those of the model."""
    kinds = {kind for route in routes if (kind := _body_kind(route)) is not None}
    _, schemas = msgspec.json.schema_components(
        sorted(kinds, key=lambda kind: kind.__name__), ref_template=_REFERENCE
    )
    for kind_name, schema in schemas.items():
        if kind_name not in _CHOICES:
            _narrow(schema)
        _allow_nulls(schema)
        if names and "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"enum": [*names, None]}
    schemas["Error"] = _error_schema()
    paths: dict[str, Schema] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        operations = {
            method.lower(): _operation(route, path, method)
            for method in sorted(route.methods or ())
            if method in ("GET", "POST")
        }
        paths.setdefault(path, {}).update(operations)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "jaxprefill",
            "version": __version__,
            "description": "Fields that are not listed are ignored; null means absent.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _body_kind(route: Route) -> type[msgspec.Struct] | None:
    if route.methods is None or "POST" not in route.methods:
        return None
    if isinstance(route.endpoint, JsonRoute):
        return route.endpoint.kind
    return AbortBody if route.path == "/abort_request" else None


def _operation(route: Route, path: str, method: str) -> Schema:
    kind = _body_kind(route) if method == "POST" else None
    is_answer = isinstance(route.endpoint, JsonRoute)
    found: Schema = {
        "operationId": f"{method.lower()}{path.translate(_SEPARATORS)}",
        "summary": _SUMMARIES.get(path) or _summary(route.endpoint),
        "responses": _responses(path, has_stream=kind is not None and _can_stream(kind)),
        "security": [] if is_open_path(path) else [{}, {"key": []}],
    }
    if "{name}" in path:
        name = {"name": "name", "in": "path", "required": True, "schema": _TEXT}
        found["parameters"] = [name]
    if kind is not None:
        reference = {"$ref": _REFERENCE.format(name=kind.__name__)}
        found["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": reference}},
        }
    if is_answer:
        found["tags"] = ["model"]
    return found


_SEPARATORS = str.maketrans({"/": "_", "{": None, "}": None, ".": "_"})


def _summary(endpoint: Any) -> str:
    """The first line of the handler's docstring."""
    described = endpoint.summary if isinstance(endpoint, JsonRoute) else endpoint.__doc__
    return (described or "").strip().partition("\n")[0]


def _can_stream(kind: type[msgspec.Struct]) -> bool:
    return "stream" in kind.__struct_fields__


def _responses(path: str, *, has_stream: bool) -> Schema:
    kind = "text/plain" if path == "/metrics" else "application/json"
    content: Schema = {kind: {"schema": {} if kind == "application/json" else {"type": "string"}}}
    if has_stream:
        event = {"type": "object", "properties": {"data": {"type": "string"}}}
        content["text/event-stream"] = {"schema": event}
    found: Schema = {"200": {"description": "The answer.", "content": content}}
    reference = {"$ref": _REFERENCE.format(name="Error")}
    is_state = path in ("/health", "/ready", "/ping")
    for status, description in _STATUSES.items():
        schema = {} if is_state else reference
        body = {"application/json": {"schema": schema}}
        found[str(status)] = {"description": description, "content": body}
    return found


def _narrow(schema: Schema) -> None:
    """Adds what the struct's types do not tell."""
    properties: dict[str, Schema] = schema.get("properties", {})
    for name in properties.keys() & _FIELDS.keys():
        own = properties[name]
        if name in _REQUIRED:
            own.pop("default", None)
        options: list[Schema] = own.get("anyOf", [own])
        for option in options:
            if option.get("type") != "null":
                option.update(_FIELDS[name])
    required = [name for name in _REQUIRED if name in properties]
    if required:
        schema["required"] = sorted({*schema.get("required", []), *required})


def _allow_nulls(schema: Schema) -> None:
    """Null means absent, whatever the type."""
    for name, own in schema.get("properties", {}).items():
        if name not in schema.get("required", []):
            _allow_null(own)


def _allow_null(schema: Schema) -> None:
    if schema.get("default", ...) is None:
        schema.pop("default")
    null: Schema = {"type": "null"}
    if "anyOf" in schema:
        schema["anyOf"] += [null] if null not in schema["anyOf"] else []
    elif "type" in schema:
        schema["type"] = [schema["type"], "null"]
    elif "$ref" in schema:
        schema["anyOf"] = [{"$ref": schema.pop("$ref")}, null]


def _error_schema() -> Schema:
    text_or_null = {"type": ["string", "null"]}
    inner = {
        "type": "object",
        "properties": {
            "message": {"type": "string"},
            "type": {"type": "string"},
            "param": text_or_null,
            "code": text_or_null,
        },
        "required": ["message", "type", "param", "code"],
    }
    return {"type": "object", "properties": {"error": inner}, "required": ["error"]}
