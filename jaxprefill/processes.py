"""Several processes that run one engine: what must be alike in all of them is compared once."""

import hashlib

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxprefill.errors import ConfigError


def check_agreement(words: str) -> None:
    """Compares `words` among the processes of `jax.distributed`; one alone agrees.

    Every process must call it at the same point.

    Raises:
        ConfigError: in every process, when one brings other words than the first.
    """
    if jax.process_count() == 1:
        return
    digest = np.frombuffer(hashlib.sha256(words.encode()).digest(), np.uint32)
    digests = np.asarray(multihost_utils.process_allgather(digest))
    others = np.flatnonzero((digests != digests[0]).any(axis=1)).tolist()
    if others:
        raise ConfigError(
            "all processes that run one engine must be given the same model and the same options, "
            f"but processes {others} differ from process 0; process {jax.process_index()} has "
            f"{words}; if just the pages differ, set kv_cache_tokens"
        )
