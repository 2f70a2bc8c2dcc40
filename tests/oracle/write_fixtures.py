"""Writes tests/data/oracle: tiny checkpoints with what transformers computes from them.

Regenerate, with the extra `oracle` installed, from the repository's root:

    python -m tests.oracle.write_fixtures
"""

import json
from itertools import count
from pathlib import Path

import numpy as np

from tests.oracle.cases import CASES, ROPE_CASES, ROPE_POSITIONS, VOCAB, OracleCase
from tests.oracle.transformers_model import (
    greedy,
    make_model,
    prompt_logprobs,
    rotary_table,
    weights,
)

FOLDER = Path(__file__).parents[1] / "data" / "oracle"
NUM_TOKENS = 4


def write_case(case: OracleCase) -> None:
    """One fixture: config, weights as float16, prompts, logprobs, greedy continuations.

    Of the first seed whose greedy choices are clear.
    """
    for seed in count():
        model, rng = make_model(case.hf, seed), np.random.default_rng(seed)
        prompts = [rng.integers(0, VOCAB - 2, length).tolist() for length in case.lengths]
        continued = [greedy(model, ids, NUM_TOKENS) for ids in prompts[: case.num_greedy]]
        if min(margin for _, _, margin in continued) > 0.01:
            break
    config = model.config.to_diff_dict() | {"architectures": [case.architecture]}
    np.savez_compressed(
        FOLDER / f"{case.name}.npz",
        config=np.frombuffer(json.dumps(config).encode(), np.uint8),
        ids=np.concatenate(prompts).astype(np.int16),
        logprobs=np.concatenate([prompt_logprobs(model, ids) for ids in prompts]),
        greedy_ids=np.array([ids for ids, _, _ in continued], np.int16),
        greedy_logprobs=np.array([logprobs for _, logprobs, _ in continued]),
        **{f"w:{name}": value.astype(np.float16) for name, value in weights(model).items()},
    )


def main() -> None:
    """Writes every fixture."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        write_case(case)
    tables = {name: rotary_table(hf, ROPE_POSITIONS) for name, hf in ROPE_CASES.items()}
    np.savez_compressed(FOLDER / "rope.npz", **tables)


if __name__ == "__main__":
    main()
