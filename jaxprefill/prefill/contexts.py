"""Which max contexts the prefill executables are compiled for. Integers; imports no jax.

A max context M bounds page tables and whatever else a shape sizes by context. A batch whose longest
context is M runs in its executable, one of M + 1 in the next larger, or falls back. No number that
is computed depends on M.
"""

import logging

from jaxprefill.errors import ConfigError

logger = logging.getLogger(__name__)


def resolve_max_contexts(
    asked: tuple[int, ...], *, page_size: int, model_context: int, context: int, is_used: bool
) -> tuple[int, ...]:
    """The max contexts of the ladder; without any the whole context is the only one.

    Args:
        asked: positive counts in any order; each is rounded up to a page (SGLang PR 36534).
        page_size: tokens of a page.
        model_context: the longest context of the model.
        context: the longest that is served, and so the width of the longest page table.
        is_used: whether there are prefill executables at all; if not, a warning says so.

    Raises:
        ConfigError: a rounded value exceeds the model's context, or the one that is served.
    """
    if asked and not is_used:
        logger.warning(
            "prefill_max_context %s is ignored: prefill_backend is eager, which runs any context",
            ",".join(map(str, asked)),
        )
    if not asked or not is_used:
        return (context,)
    rounded = {value: -(-value // page_size) * page_size for value in asked}
    for value, pages in rounded.items():
        if pages != value:
            logger.info("prefill_max_context %d is rounded up to whole pages: %d", value, pages)
        if pages > context:
            _refuse(value, pages, page_size, model_context, context)
    found = tuple(sorted(set(rounded.values())))
    logger.info(
        "prefill executables hold contexts up to %s; each is part of a shape's key, and longer "
        "ones fall back",
        ", ".join(map(str, found)),
    )
    return found


def _refuse(value: int, pages: int, page_size: int, model_context: int, context: int) -> None:
    limit = f"the model's context of {model_context}"
    if pages <= model_context:
        limit = f"context_length, {context}, the width of the longest page table"
    rounding = f" ({pages} in whole pages of {page_size})" if pages != value else ""
    largest = context // page_size * page_size
    remedy = f"give at most {largest}, or leave it out" if largest else "leave it out"
    raise ConfigError(
        f"prefill_max_context must be at most {limit}, got {value}{rounding}; {remedy} to take "
        "every context"
    )
