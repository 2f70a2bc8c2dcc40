"""What every option came to in a plan, and why, where the user left it open."""

from typing import Any, NamedTuple

from jaxprefill.plan import EnginePlan


class Resolved(NamedTuple):
    """An option's value in the engine; `why` says what made it other than what was asked."""

    value: Any
    why: str


def resolved_options(plan: EnginePlan) -> dict[str, Resolved]:
    """The options whose value the plan decides or changes."""
    config, kind = plan.config, f"default of a {plan.device.platform}"
    page = config.page_size
    whole_pages = f"whole pages of {page}"
    context_why = whole_pages if config.prefill_max_context else "the whole context"
    if config.prefill_max_context and plan.path == "eager":
        context_why = "ignored, as prefill_backend is eager"
    ladders = {"auto": kind, "default": kind, "upstream": "SGLang's ladder"}
    named = config.prefill_buckets
    ladder_why = ladders[named] if isinstance(named, str) else "cut at chunked_prefill_size"
    pool = kind if plan.device.platform == "cpu" else "what memory_fraction leaves beside weights"
    return {
        "dtype": Resolved(plan.dtype.name, f"the fastest on this {plan.device.platform}"),
        "quantization": Resolved(plan.model.quantization or "none", "as the model's files have it"),
        "context_length": Resolved(plan.context_length, "the model's limit"),
        "kv_cache_tokens": Resolved(
            plan.num_pages * page,
            pool if config.kv_cache_tokens is None else whole_pages,
        ),
        "max_running_requests": Resolved(plan.max_running, kind),
        "chunked_prefill_size": Resolved(plan.chunked_prefill_size, "the last bucket"),
        "prefill_backend": Resolved(plan.path, plan.path_why),
        "prefill_buckets": Resolved(plan.ladder.buckets, plan.ladder_origin or ladder_why),
        "full_prefill_max_req": Resolved(plan.ladder.num_slots, "max_running_requests"),
        "prefill_max_context": Resolved(plan.ladder.max_contexts, context_why),
        "attention_backend": Resolved(
            str(plan.attention), "the first that can serve the model, or measured to be faster"
        ),
    }
