"""GET /health, /ready, /ping, /health_generate and /v1/models: what is there, and is it well."""

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from jaxprefill.request import SamplingParams
from jaxprefill.server import replies
from jaxprefill.server.api_error import ApiError, unavailable
from jaxprefill.server.context import Call, ServerContext
from jaxprefill.server.fields import BaseBody
from jaxprefill.server.route import JsonRoute


def health_routes(context: ServerContext) -> list[Route]:
    """Routes that never wait for the engine, but for the one that says so."""

    async def health(_: HttpRequest) -> Response:
        if context.is_serving:
            return json_response({"status": "ok"})
        status = "draining" if context.is_draining else "starting"
        return json_response({"status": status}, status=503, headers={"Retry-After": "5"})

    async def list_models(_: HttpRequest) -> Response:
        return json_response({"object": "list", "data": _models(context)})

    async def one_model(request: HttpRequest) -> Response:
        name = request.path_params["name"]
        for model in _models(context):
            if model["id"] == name:
                return json_response(model)
        message = f"model must be {' or '.join(map(repr, context.names))}, got {name!r:.120}"
        raise ApiError(404, message, param="model", code="model_not_found")

    generate = JsonRoute(context, BaseBody, _generate_one)
    return [
        Route("/health", health),
        Route("/ready", health),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/health_generate", generate, methods=["GET"]),
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", one_model),
    ]


def json_response(
    value: Any, *, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A reply of a route that takes no body."""
    body = replies.encode(value)
    return Response(body, status, headers=headers, media_type="application/json")


def _models(context: ServerContext) -> list[dict[str, Any]]:
    if not context.client.is_ready:
        raise unavailable("the engine is starting; try again in a while")
    model = context.client.model
    return [
        {
            "id": name,
            "object": "model",
            "created": model.started_at,
            "owned_by": "jaxprefill",
            "root": model.root,
            "parent": None,
            "max_model_len": model.context_length,
        }
        for name in context.names
    ]


async def _generate_one(call: Call, _: BaseBody) -> dict[str, str]:
    """Runs one token through the engine; of a model without an LM head, one hidden row."""
    params = SamplingParams(max_tokens=int(call.model.config.has_lm_head), temperature=0)
    await call.run(await call.requests([[0]], params))
    return {"status": "ok"}
