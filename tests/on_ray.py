"""Runs Ray Data and Ray Serve with a tiny model, and prints as JSON what came out (test_ray.py).

python -m tests.on_ray MODEL FOLDER
"""

import argparse
import json
import logging
import os
import signal
import socket
import time
from pathlib import Path

import httpx
import ray
from ray import serve

from jaxprefill.offline import RayPredictor
from jaxprefill.remote.ray_serve import deployment
from tests.tiny import SMALL

TEXTS = [f"number {index} " + "ab" * (index % 7) for index in range(48)]
TEXTS[5] = "too long " * 50
BODY = {"prompt": "hello", "max_tokens": 4, "temperature": 0, "logprobs": 1}
OPTIONS = SMALL | {"prefill_backend": "eager"}


class DyingPredictor(RayPredictor):
    """Is killed once, in the middle of a batch."""

    def __init__(self, folder: str, **options) -> None:
        super().__init__(**options)
        self._folder = Path(folder)

    def __call__(self, batch):
        (self._folder / f"actor-{os.getpid()}").touch()
        if any("number 20 " in text for text in batch["text"]):
            try:
                (self._folder / "died").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
            except FileExistsError:
                pass
        return super().__call__(batch)


def run_data(model: str, folder: Path) -> dict:
    rows = ray.data.from_items([{"id": index, "text": text} for index, text in enumerate(TEXTS)])
    options = {"folder": str(folder), "model": model, "task": "perplexity", **OPTIONS}
    found = rows.repartition(12).map_batches(
        DyingPredictor,
        fn_constructor_kwargs=options,
        compute=ray.data.ActorPoolStrategy(size=2),
        batch_size=4,
    )
    return {
        "rows": sorted(found.take_all(), key=lambda row: row["id"]),
        "has_died": (folder / "died").exists(),
        "num_actors": len(list(folder.glob("actor-*"))),
    }


def run_serve(model: str) -> dict:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(deployment(model, min_replicas=1, max_replicas=2, **OPTIONS))
    url = f"http://127.0.0.1:{port}"
    status = serve.status().applications["default"].deployments["jaxprefill"]
    return {
        "answer": httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).json(),
        "wrong": httpx.post(f"{url}/v1/completions", json={"prompt": [-1]}).status_code,
        "health": httpx.get(f"{url}/health").status_code,
        "states": {state: count for state, count in status.replica_states.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        logging_level=logging.ERROR,
        object_store_memory=100_000_000,
    )
    began = time.monotonic()
    found = {
        "texts": TEXTS,
        "data": run_data(args.model, args.folder),
        "data_s": time.monotonic() - began,
    }
    began = time.monotonic()
    found |= {"serve": run_serve(args.model), "serve_s": time.monotonic() - began}
    serve.shutdown()
    ray.shutdown()
    print("\nFOUND " + json.dumps(found, default=str))


if __name__ == "__main__":
    main()
