"""Which module serves which architecture, and reads its config.json."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxprefill.config import ModelConfig
from jaxprefill.errors import CheckpointError
from jaxprefill.models.deepseek_v4.decoder import DeepseekV4
from jaxprefill.models.dense import DenseDecoder
from jaxprefill.models.gemma2 import Gemma2
from jaxprefill.models.gemma3 import Gemma3
from jaxprefill.models.gpt_oss import GptOss
from jaxprefill.models.hf_heads import read_head, with_lm_head
from jaxprefill.models.hf_quantization import read_block_size
from jaxprefill.models.llama import Llama
from jaxprefill.models.mistral import Mistral
from jaxprefill.models.phi3 import Phi3
from jaxprefill.models.qwen2 import Qwen2
from jaxprefill.models.qwen3 import Qwen3
from jaxprefill.models.qwen3_moe import Qwen3Moe

Architecture = DenseDecoder | DeepseekV4
ARCHITECTURES: dict[str, type[Architecture]] = {
    "DeepseekV4ForCausalLM": DeepseekV4,
    "Gemma2ForCausalLM": Gemma2,
    "Gemma3ForCausalLM": Gemma3,
    "GptOssForCausalLM": GptOss,
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Mistral,
    "Phi3ForCausalLM": Phi3,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3MoeForCausalLM": Qwen3Moe,
}


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """The model that a Hugging Face config.json describes.

    Args:
        hf: config.json as transformers 4 or 5 writes it. `architectures` chooses the reader, or
            `model_type` where there is none; readers of other formats pass a mapping like it.

    Raises:
        CheckpointError: the architecture, its RoPE kind, its quantisation or another choice is not
            supported, or a key is missing or wrong; names it and lists what is supported.
    """
    read_block_size(hf)
    named = hf.get("architectures")
    if named is not None and not isinstance(named, (list, tuple)):
        raise CheckpointError(
            f"config.json: architectures must be a list with one name, got {named!r}"
        )
    names = named or [
        name for name, found in ARCHITECTURES.items() if found.model_type == hf.get("model_type")
    ]
    if not names:
        raise _unsupported(f"model_type {hf.get('model_type')!r}")
    found, head = _find(names[0]), read_head(names[0], hf)
    config = found.read_config({**hf, "architectures": [names[0]]})
    return replace(config, has_lm_head=head.has_lm_head, classifier=head.classifier)


def model_class(config: ModelConfig) -> type[Architecture]:
    """The module class of `config.architecture`.

    Raises:
        CheckpointError: it is not supported; lists those that are.
    """
    return _find(config.architecture)


def _find(name: object) -> type[Architecture]:
    """The class of a body, whatever stands on it."""
    found = ARCHITECTURES.get(with_lm_head(name)) if isinstance(name, str) else None
    if found is None:
        raise _unsupported(f"architecture {name!r}")
    return found


def _unsupported(what: str) -> CheckpointError:
    return CheckpointError(
        f"{what} is not supported; supported: {', '.join(ARCHITECTURES)}, and each with Model or "
        "ForSequenceClassification for ForCausalLM"
    )
