"""Writes tests/data/oracle: tiny checkpoints with what transformers computes from them.

Regenerate, with the extra `oracle` installed, from the repository's root:

    python -m tests.oracle.write_fixtures
"""

import json
from itertools import count
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from tests.oracle.cases import (
    CASES,
    CLASSIFIERS,
    PADDING,
    ROPE_CASES,
    ROPE_POSITIONS,
    VOCAB,
    OracleCase,
)
from tests.oracle.transformers_model import (
    class_logits,
    greedy,
    hidden_rows,
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
    write(
        case,
        model,
        ids=np.concatenate(prompts).astype(np.int16),
        logprobs=np.concatenate([prompt_logprobs(model, ids) for ids in prompts]),
        greedy_ids=np.array([ids for ids, _, _ in continued], np.int16),
        greedy_logprobs=np.array([logprobs for _, logprobs, _ in continued]),
    )


def write_classifier(case: OracleCase) -> None:
    """One fixture: as `write_case`, with class logits, last and mean hidden rows.

    The last prompt ends in padding tokens.
    """
    model, rng = make_model(case.hf, 0), np.random.default_rng(0)
    prompts = [rng.integers(1, VOCAB - 2, length).tolist() for length in case.lengths]
    prompts[-1][-3:] = [PADDING] * 3
    rows = [hidden_rows(model, ids) for ids in prompts]
    write(
        case,
        model,
        ids=np.concatenate(prompts).astype(np.int16),
        class_logits=np.stack([class_logits(model, ids) for ids in prompts]),
        last=np.stack([each[-1] for each in rows]),
        mean=np.stack([each.mean(axis=0) for each in rows]),
    )


def write(case: OracleCase, model: PreTrainedModel, **found: np.ndarray) -> None:
    """The file of a case: the model beside what was found."""
    config = model.config.to_diff_dict() | {"architectures": [case.architecture]}
    np.savez_compressed(
        FOLDER / f"{case.name}.npz",
        config=np.frombuffer(json.dumps(config).encode(), np.uint8),
        **found,
        **{f"w:{name}": value.astype(np.float16) for name, value in weights(model).items()},
    )


def main() -> None:
    """Writes every fixture."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        write_case(case)
    for case in CLASSIFIERS:
        write_classifier(case)
    tables = {name: rotary_table(hf, ROPE_POSITIONS) for name, hf in ROPE_CASES.items()}
    np.savez_compressed(FOLDER / "rope.npz", **tables)


if __name__ == "__main__":
    main()
