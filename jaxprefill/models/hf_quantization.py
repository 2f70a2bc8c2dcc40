"""The quantisation that a config.json states, where it can be undone. Imports no jax."""

from collections.abc import Mapping
from typing import Any

from jaxprefill.errors import CheckpointError
from jaxprefill.models.hf_values import HfValues

MXFP4_BLOCK = (1, 32)
_WHERE = "config.json: quantization_config"
_ONLY = {
    "fmt": (None, "e4m3"),
    "scale_fmt": (None, "float", "ue8m0"),
    "expert_dtype": (None, "fp8", "fp4"),
}


def read_block_size(hf: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns that share a scale; None where no weights are quantised.

    Raises:
        CheckpointError: they are quantised in another way.
    """
    given = HfValues(hf).mapping("quantization_config")
    if not given:
        return None
    if given.get("quant_method") == "mxfp4":
        return MXFP4_BLOCK
    if given.get("quant_method") != "fp8" or given.get("weight_block_size") is None:
        raise CheckpointError(
            f"{_WHERE} must have quant_method mxfp4, or fp8 and a weight_block_size, got "
            f"{given.get('quant_method')!r} and {given.get('weight_block_size')!r}: other "
            "quantised weights in safetensors are not supported; use the model's unquantised "
            "weights or a GGUF file"
        )
    stated = {"expert_dtype": hf.get("expert_dtype")} | given
    for name, allowed in _ONLY.items():
        if stated.get(name) not in allowed:
            raise CheckpointError(
                f"{_WHERE}: {name} must be one of {', '.join(map(str, allowed[1:]))}, got "
                f"{stated[name]!r}; use other weights of the model"
            )
    size = given["weight_block_size"]
    if not isinstance(size, (list, tuple)) or len(size) != 2:
        raise CheckpointError(f"{_WHERE}: weight_block_size must be two integers, got {size!r}")
    sides = HfValues({"rows": size[0], "columns": size[1]}, where=f"{_WHERE}.weight_block_size")
    return sides.integer("rows"), sides.integer("columns")
