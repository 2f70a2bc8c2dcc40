"""A two-layer random Llama with a byte-level tokenizer: compiles in a second, and is not trivial:
weights are large enough that attention is peaked and greedy choices have margins."""

from contextlib import contextmanager
from unittest import mock

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxprefill import engine as engine_module
from jaxprefill.config import ModelConfig, RopeConfig
from jaxprefill.engine import Engine
from jaxprefill.models.llama import Llama
from jaxprefill.tokenizer import Tokenizer

VOCAB = 272  # 256 bytes, a few special ids, and rows that no token has
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<a>"


def tiny_config(**changes) -> ModelConfig:
    sizes = dict(
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB,
        hidden_size=48,
        mlp_size=80,
        num_layers=2,
        num_q_heads=6,
        num_kv_heads=2,
        head_dim=16,
        context_length=160,
        norm_eps=2**-17,  # a float32, as GGUF files store it
        rope=RopeConfig(theta=1e4),
        is_embedding_tied=True,
    )
    return ModelConfig(**(sizes | changes))


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>", "<bos>"])
    return Tokenizer(backend, eos_ids=(256,), bos_id=257, chat_template=TEMPLATE)


class TinyCheckpoint:
    """Random weights under Hugging Face names."""

    name = "tiny"

    def __init__(self, seed: int = 0, scale: float = 2.0, **changes):
        self.config = tiny_config(**changes)
        self.tokenizer = byte_tokenizer()
        rng = np.random.default_rng(seed)
        self.tensors = {
            name: self._random(rng, name, scale)
            for fused in Llama.sources(self.config).values()
            for name in fused.sources
        }

    def _random(self, rng, name: str, scale: float) -> np.ndarray:
        shape = self._made_shape(name)
        if len(shape) == 1:
            return rng.uniform(0.5, 1.5, shape).astype(np.float32)
        return (rng.normal(size=shape) * scale * shape[1] ** -0.5).astype(np.float32)

    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def _made_shape(self, name: str) -> tuple[int, ...]:
        c = self.config
        attended, keys = c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            return (c.vocab_size, c.hidden_size)
        if name.endswith("norm.weight"):
            return (c.hidden_size,)
        part, kind = name.split(".")[-2:]
        if part == "score":
            return (len(c.classifier.labels), c.hidden_size)
        shape = {
            "q_proj": (attended, c.hidden_size),
            "k_proj": (keys, c.hidden_size),
            "v_proj": (keys, c.hidden_size),
            "o_proj": (c.hidden_size, attended),
            "gate_proj": (c.mlp_size, c.hidden_size),
            "up_proj": (c.mlp_size, c.hidden_size),
            "down_proj": (c.hidden_size, c.mlp_size),
        }[part]
        return shape[:1] if kind == "bias" else shape

    def read(self, name: str) -> np.ndarray:
        return self.tensors[name]


class TensorsCheckpoint:
    """Given tensors behind the byte-level tokenizer."""

    name = "tensors"

    def __init__(self, config: ModelConfig, tensors: dict[str, np.ndarray]):
        self.config = config
        self.tensors = tensors
        self.tokenizer = byte_tokenizer()

    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def read(self, name: str) -> np.ndarray:
        return self.tensors[name]


SMALL = dict(
    prefill_buckets=(8, 32),
    max_running_requests=4,
    kv_cache_tokens=640,
    page_size=8,
    dtype="float32",
    seed=0,
)


@contextmanager
def tiny_engine(checkpoint=None, **options):
    """An Engine over a tiny checkpoint, small shapes unless told otherwise.

    What others load from a store is of the same model; of any other JAX's own cache has the heads.
    """
    held = checkpoint or TinyCheckpoint()
    stored = {"store": held.config == tiny_config()}
    with mock.patch.object(engine_module, "open_checkpoint", lambda model: held):
        made = Engine("tiny", **(SMALL | stored | options))
    with made:
        yield made
