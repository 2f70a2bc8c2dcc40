"""Phi-3 and Phi-4-mini: fused projections in the checkpoint, longrope, partial rotation."""

from collections.abc import Mapping
from typing import Any

from jaxprefill.config import ModelConfig
from jaxprefill.models.decoder import Fused
from jaxprefill.models.dense import DenseDecoder
from jaxprefill.models.hf_config import read_dense
from jaxprefill.models.hf_values import HfValues

_DEFAULTS = {
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}


class Phi3(DenseDecoder):
    """No biases; a sliding window in all layers where config.json gives one."""

    model_type = "phi3"

    @staticmethod
    def read_config(hf: Mapping[str, Any]) -> ModelConfig:
        """See `DenseDecoder.read_config`. Old files say "yarn" for what is longrope."""
        values = dict(hf)
        for name in ("rope_scaling", "rope_parameters"):
            rope = values.get(name)
            if isinstance(rope, Mapping) and "yarn" in (rope.get("type"), rope.get("rope_type")):
                values[name] = {**rope, "type": "longrope", "rope_type": "longrope"}
        return read_dense(HfValues(values, _DEFAULTS), sliding_from=0, is_partly_rotated=True)

    @classmethod
    def layer_sources(cls, config: ModelConfig, name: str) -> dict[str, Fused]:
        """See `DenseDecoder.layer_sources`."""
        found = super().layer_sources(config, name)
        names = {"qkv": f"{name}.self_attn.qkv_proj", "gate_up": f"{name}.mlp.gate_up_proj"}
        fused = {path: Fused((f"{names[path]}.weight",), found[path].rows) for path in names}
        return found | fused
