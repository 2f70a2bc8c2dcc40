"""What prefill asks of an architecture; knows none of them."""

from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int32, Shaped

from jaxprefill.cache.spec import CacheSpec
from jaxprefill.config import ModelConfig
from jaxprefill.kernels.attention import AttentionSpec, RaggedBatch
from jaxprefill.kernels.attention.api import Attend

# One array for each pool of the model's CacheSpec, in its order.
Pools = tuple[Shaped[Array, "_ _ _ _ _"], ...]  # [parts, K, P, S, D]

TensorIndex = tuple[int | slice, ...]  # where in a stored tensor; (): the whole


class LayerInputs(NamedTuple):
    """What every layer of a pass reads besides hidden state and cache.

    Attributes:
        num_tokens: the real ones, which come first.
        ids: token ids, those of tokens sampled on the device included.
        tile_offsets: 0 to tile_q - 1: where a tile's tokens lie behind its first; its length is
            what a layer of its own attention needs to know.
    """

    rotary: Float[Array, "tables T half"]
    batch: RaggedBatch
    num_tokens: Int32[Array, ""]
    ids: Int32[Array, " T"]
    tile_offsets: Int32[Array, " q"]


class Fused(NamedTuple):
    """A parameter made of checkpoint tensors, concatenated or stacked along the first axis.

    Attributes:
        rows: first-axis length of each part: of each tensor, or of the parts of a single one that
            the checkpoint holds already concatenated; none where there is just one part.
        below: where its numbers are indices: what each must be less than.
    """

    sources: tuple[str, ...]
    rows: tuple[int, ...] = ()
    is_stacked: bool = False
    below: int | None = None


def row_size(config: ModelConfig) -> int:
    """Numbers of a token's row between layers: all its residual streams, side by side."""
    return config.hidden_size * (1 if config.latent is None else config.latent.num_streams)


def rotary_tables(config: ModelConfig) -> int:
    """Tables of `Decoder.rotary`: cosine and sine, for each kind of rotation."""
    return 2 if config.latent is None and config.sliding_rope is None else 4


def layer_rotations(config: ModelConfig) -> tuple[int, ...]:
    """Which pair of `Decoder.rotary`'s tables each layer reads.

    Layers with a window may have one of their own, and so may those with compressed entries.
    """
    if config.latent is not None:
        return tuple(int(kind != "sliding") for kind in config.latent.layer_kinds)
    has_two = config.sliding_rope is not None
    return tuple(int(has_two and window is not None) for window in config.windows)


def layer_specs(config: ModelConfig) -> tuple[AttentionSpec, ...]:
    """What each layer asks of attention."""
    return tuple(
        AttentionSpec(window, config.attention_soft_cap, config.has_sinks)
        for window in config.windows
    )


def attention_specs(config: ModelConfig) -> tuple[AttentionSpec, ...]:
    """What the layers ask of attention, each spec once, in the order of the layers."""
    return tuple(dict.fromkeys(layer_specs(config)))


@runtime_checkable
class DecoderLayer(Protocol):
    """One transformer layer."""

    def __call__(
        self,
        hidden: Float[Array, "T row"],
        pools: Pools,
        norms: Float[Array, "own E"],
        layer: Int32[Array, ""],
        inputs: LayerInputs,
        attend: Attend,
    ) -> tuple[Float[Array, "T row"], Pools]:
        """Hidden state after the layer, and the pools with its entries written."""
        ...


@runtime_checkable
class Decoder(Protocol):
    """A decoder-only transformer whose layers can be run one by one.

    `norms` packs all norm weights: `config.norms_per_layer` rows a layer, and the final one.
    """

    config: ModelConfig

    def embed(self, ids: Int32[Array, " T"]) -> Float[Array, "T row"]:
        """Token embeddings, float32: the residual stream stays in float32."""
        ...

    def rotary(self, positions: Int32[Array, " T"]) -> Float[Array, "tables T half"]:
        """The rotary table of these positions."""
        ...

    def final_norm(self, hidden: Float[Array, "T row"]) -> Float[Array, "T E"]:
        """What the LM head multiplies."""
        ...

    @staticmethod
    def cache_spec(config: ModelConfig) -> CacheSpec:
        """What the layers keep per token."""
        ...

    @classmethod
    def sources(cls, config: ModelConfig) -> dict[str, Fused]:
        """Parameter path -> the checkpoint tensors it is made of; every tensor appears once."""
        ...

    @classmethod
    def parts_of(cls, name: str, shape: tuple[int, ...]) -> dict[str, TensorIndex]:
        """The tensors that one stored under this name holds; none if nothing needs it.

        By the names that `sources` has, though perhaps without `model.` in front.
        """
        ...
