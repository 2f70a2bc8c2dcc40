"""`response_format`: what an answer must look like, as a grammar that the engine follows."""

from typing import Any

from jaxprefill.constraints import json_grammar
from jaxprefill.server.body import wrong
from jaxprefill.server.context import Call


async def grammar_of(call: Call, response_format: dict[str, Any] | None) -> str | None:
    """The grammar of a `response_format`; None: any text. Other calls are not held up by it.

    Raises:
        RequestError: the format is unknown, or its schema cannot be followed.
    """
    kind = None if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return await call.context.off_loop(json_grammar)
    named = response_format.get("json_schema")
    if kind != "json_schema" or not isinstance(named, dict) or named.get("schema") is None:
        rule = (
            '{"type": "text"}, {"type": "json_object"} or '
            '{"type": "json_schema", "json_schema": {"schema": {...}}}'
        )
        raise wrong("response_format", rule, response_format)
    return await call.context.off_loop(lambda: json_grammar(named["schema"]))
