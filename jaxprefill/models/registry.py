"""Which module serves which architecture name."""

from jaxprefill.config import ModelConfig
from jaxprefill.errors import CheckpointError
from jaxprefill.models.llama import Llama

ARCHITECTURES: dict[str, type[Llama]] = {"LlamaForCausalLM": Llama}


def model_class(config: ModelConfig) -> type[Llama]:
    """The module class of `config.architecture`.

    Raises:
        CheckpointError: it is not supported; lists those that are.
    """
    if config.architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"architecture {config.architecture!r} is not supported; "
            f"supported: {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[config.architecture]
