"""Gemma 3, text alone: five layers with a window to one without, each kind rotated in its way."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from jaxprefill.config import ModelConfig
from jaxprefill.errors import CheckpointError
from jaxprefill.models.dense import DenseDecoder
from jaxprefill.models.gemma2 import GEMMA_DEFAULTS, GEMMA_NORMS, read_gemma
from jaxprefill.models.hf_rope import read_rope
from jaxprefill.models.hf_values import HfValues

_DEFAULTS = GEMMA_DEFAULTS | {
    "max_position_embeddings": 131072,
    "sliding_window_pattern": 6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}


class Gemma3(DenseDecoder):
    """Gemma 2 with normed heads of q and k in the place of soft caps."""

    model_type = "gemma3_text"
    norm_names = GEMMA_NORMS

    @staticmethod
    def read_config(hf: Mapping[str, Any]) -> ModelConfig:
        """See `DenseDecoder.read_config`."""
        values = {**_DEFAULTS, **hf, "attn_logit_softcapping": None}  # a key of no effect
        full, sliding = _split_rope(values)
        given = HfValues(values)
        every = given.integer("sliding_window_pattern")
        config = read_gemma(full, every=every, has_qk_norm=True)
        limit = given.integer("max_position_embeddings")  # already stretched
        config = replace(config, context_length=limit)
        if config.sliding_window is None or config.sliding_window >= limit:
            raise CheckpointError(
                "config.json: some layers must have a sliding_window below max_position_embeddings "
                f"({limit}), got {values['sliding_window']!r}"
            )
        rope = read_rope(HfValues(sliding), head_dim=config.head_dim, is_partial=False)
        return replace(config, sliding_rope=rope)


def _split_rope(hf: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config as layers without a window read it, and as those with one do."""
    given = hf.get("rope_parameters")
    plain = {"rope_scaling": None, "rope_parameters": None}
    if isinstance(given, Mapping) and "full_attention" in given:
        by_type = cast(Mapping[str, Any], given)
        kinds = (by_type["full_attention"], by_type.get("sliding_attention"))
        full, sliding = ({**hf, **plain, "rope_parameters": kind} for kind in kinds)
        return full, {**sliding, "rope_theta": hf["rope_local_base_freq"]}
    return hf, {**hf, **plain, "rope_theta": hf["rope_local_base_freq"]}
