"""What routes that take messages give the model's chat template beside them."""

from typing import Any, Protocol

from jaxprefill.errors import RequestError
from jaxprefill.server.body import wrong


class TemplateFields(Protocol):
    """The fields of a body with `messages`, which the tokenizer checks."""

    messages: Any
    add_generation_prompt: bool | None
    continue_final_message: bool
    chat_template: str | None
    chat_template_kwargs: dict[str, Any]
    tools: list[Any]
    tool_choice: Any
    documents: list[Any]


def template_options(body: TemplateFields) -> dict[str, Any]:
    """The template's variables.

    Raises:
        RequestError: a template is sent along, or a call is demanded.
    """
    if body.chat_template is not None:
        raise RequestError(
            "chat_template must be left out: the model's own is used; use chat_template_kwargs, "
            "or send a plain prompt",
            param="chat_template",
        )
    if body.tool_choice not in (None, "none", "auto"):
        raise wrong("tool_choice", "none or auto: no call can be demanded", body.tool_choice)
    options: dict[str, Any] = {
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
    }
    if body.tools and body.tool_choice != "none":
        options["tools"] = body.tools
    if body.documents:
        options["documents"] = body.documents
    return options | body.chat_template_kwargs
