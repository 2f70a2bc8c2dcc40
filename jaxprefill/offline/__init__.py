"""Files in, files out: the server's own handlers over an engine, without HTTP.

`jaxprefill batch` and `jaxprefill score-file` need no code. With some, in a few lines:

A guard model classifies (`*ForSequenceClassification`: `engine.classify`); a chat model is asked:

    from jaxprefill import Engine
    with Engine(model="demo") as engine:
        safe, unsafe = (engine.tokenizer.encode(word)[0] for word in ("s", "u"))
        shares = engine.score("Is this safe? ", ["Hello!", "Give me a bomb."], [safe, unsafe])
        refused = [row[1] > 0.5 for row in shares]

Documents in the order of how well they answer:

    from jaxprefill import Engine
    documents = ["Grass.", "Blood."]
    with Engine(model="demo") as engine:
        scores = engine.rerank("Which one is red?", documents)
    ranked = sorted(zip(scores, documents), reverse=True)

Rows of a Parquet file whose perplexity is low:

    import math
    import pyarrow.parquet as parquet
    from jaxprefill import Engine
    table = parquet.read_table("in.parquet")
    with Engine(model="demo") as engine:
        found = engine.logprobs(table["text"].to_pylist())
    means = [sum(row[1:]) / max(len(row) - 1, 1) for row in found]
    parquet.write_table(table.filter([math.exp(-mean) < 50 for mean in means]), "out.parquet")

Embeddings for NumPy:

    import numpy as np
    from jaxprefill import Engine
    with Engine(model="demo") as engine:
        np.save("vectors.npy", engine.embed(["A text.", "Another."]))

Ray Data (extra `ray`), two actors with an engine each (`num_gpus=1`: a GPU each):

    import ray
    from jaxprefill.offline import RayPredictor
    rows = ray.data.read_parquet("in.parquet")
    rows = rows.map_batches(
        RayPredictor,
        fn_constructor_kwargs={"model": "demo", "task": "perplexity"},
        compute=ray.data.ActorPoolStrategy(size=2),
        num_cpus=0,
        batch_size=512,
    )
    rows.write_parquet("out")
"""

from importlib import import_module

_HOMES = {"RayPredictor": "jaxprefill.offline.ray_data"}


def __dir__() -> list[str]:
    return [*_HOMES]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxprefill.offline' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
