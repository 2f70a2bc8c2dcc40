"""Ray Data and Ray Serve over a tiny model: its numbers, whoever dies, and no row lost."""

import json
import math
import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jaxprefill import SamplingParams
from jaxprefill.errors import ConfigError
from jaxprefill.offline import RayPredictor
from tests.folders import write_folder
from tests.tiny import TinyCheckpoint

ROOT = Path(__file__).parent.parent
LIMIT_S = 600


class Held(RayPredictor):
    """Over an engine that runs already."""

    def __init__(self, monkeypatch, engine, **options):
        monkeypatch.setattr("jaxprefill.offline.ray_data.Engine", lambda *_, **__: engine)
        super().__init__(**options)


def batch(*texts: str) -> dict[str, np.ndarray]:
    return {"text": np.array(texts, object), "id": np.arange(len(texts))}


def test_every_task_adds_its_columns_and_keeps_the_others(engine, monkeypatch):
    texts = ["hello", "abc", "a"]
    greedy = {"temperature": 0, "max_tokens": 3}
    found = Held(monkeypatch, engine, params=greedy)(batch(*texts))
    assert list(found) == ["text", "id", "generated", "error"]
    assert found["id"].tolist() == [0, 1, 2] and found["error"].tolist() == [None] * 3
    wanted = engine.generate(texts, SamplingParams(**greedy))
    assert found["generated"].tolist() == [one.text for one in wanted]
    found = Held(monkeypatch, engine, task="perplexity")(batch(*texts))
    for value, size, logprobs in zip(
        found["perplexity"], found["num_tokens"], engine.logprobs(texts), strict=True
    ):
        assert size == len(logprobs)
        mean = np.mean(logprobs[1:]) if size > 1 else math.nan
        np.testing.assert_allclose(value, np.exp(-mean), rtol=1e-5)
    found = Held(monkeypatch, engine, task="embed")(batch(*texts))
    np.testing.assert_allclose(found["embedding"], engine.embed(texts), atol=1e-6)
    found = Held(monkeypatch, engine, task="label", labels=["x", "y"])(batch(*texts))
    scores = np.array(engine.score("", texts, [ord("x") - 33, ord("y") - 33]))
    assert found["label"].tolist() == ["xy"[row.argmax()] for row in scores]
    np.testing.assert_allclose(found["label_scores"], scores, atol=1e-6)


def test_a_row_at_fault_keeps_its_place_and_says_why(engine, monkeypatch):
    found = Held(monkeypatch, engine, task="embed")(batch("hello", "", "abc"))
    assert [value is None for value in found["embedding"]] == [False, True, False]
    assert [value is None for value in found["error"]] == [True, False, True]
    assert "at least one token" in found["error"][1]
    found = Held(monkeypatch, engine, task="perplexity")(batch(None, "abc", math.nan, "a"))
    assert [value is None for value in found["perplexity"]] == [True, False, True, False]
    assert found["error"].tolist() == [(why := "the text must not be null"), None, why, None]
    assert Held(monkeypatch, engine, task="embed")(batch(None))["embedding"].tolist() == [None]


def test_the_models_own_classifier_labels_rows(monkeypatch):
    shares = np.array([[0.25, 0.75], [0.9, 0.1]], np.float32)
    engine = SimpleNamespace(labels=("no", "yes"), classify=lambda texts: shares[: len(texts)])
    found = Held(monkeypatch, engine, task="classify")(batch("a", "b"))
    assert found["label"].tolist() == ["yes", "no"] and found["error"].tolist() == [None, None]
    np.testing.assert_array_equal(found["label_scores"], shares)


def test_a_deployment_scales_by_what_its_engine_runs_at_once(monkeypatch):
    made = {}
    fake = SimpleNamespace(ingress=lambda: lambda replica: replica)
    fake.deployment = lambda replica: SimpleNamespace(
        options=lambda **options: made.update(options) or SimpleNamespace(bind=lambda *given: given)
    )
    monkeypatch.setitem(sys.modules, "ray.serve", fake)
    monkeypatch.delitem(sys.modules, "jaxprefill.remote.ray_serve", raising=False)
    module = import_module("jaxprefill.remote.ray_serve")
    monkeypatch.delitem(sys.modules, "jaxprefill.remote.ray_serve")  # others take the real one
    config, settings = module.deployment(max_replicas=3, settings={"api_key": ("k",)})
    assert (config.model, settings.api_key) == ("demo", ("k",))
    scaling = {"min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 32}
    assert made["autoscaling_config"] == scaling and made["max_ongoing_requests"] == 64
    module.deployment(num_gpus=1)
    assert made["max_ongoing_requests"] == 256 and made["ray_actor_options"] == {"num_gpus": 1}
    module.deployment(max_running_requests=2)
    assert made["autoscaling_config"]["target_ongoing_requests"] == 4
    with pytest.raises(ConfigError, match="max_runing"):
        module.deployment(max_runing_requests=2)
    with pytest.raises(ConfigError, match="settings has the unknown key api_kee"):
        module.deployment(settings={"api_kee": ("k",)})


@pytest.mark.parametrize(
    "options", [{"task": "guess"}, {"task": "label"}, {"task": "embed", "labels": ["x"]}]
)
def test_tasks_and_labels_are_checked_before_an_engine_starts(options):
    with pytest.raises(ConfigError, match=r"(task|labels) must be"):
        RayPredictor(**options)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ray")
    model = write_folder(folder / "model", TinyCheckpoint())
    ran = subprocess.run(
        [sys.executable, "-m", "tests.on_ray", str(model), str(folder)],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.split("FOUND ")[-1])


needs_ray = pytest.mark.skipif(not find_spec("ray"), reason="needs pip install -e '.[ray]'")


@needs_ray
@pytest.mark.slow
def test_a_worker_killed_in_the_middle_loses_no_row(found, engine):
    data, texts = found["data"], found["texts"]
    assert data["has_died"] and data["num_actors"] >= 3  # two, and one in the place of one
    assert [row["id"] for row in data["rows"]] == list(range(48))
    for row, text in zip(data["rows"], texts, strict=True):
        assert row["text"] == text
        if row["id"] == 5:
            assert row["perplexity"] is None and "maximum context length" in row["error"]
            continue
        assert row["error"] is None
        logprobs = engine.logprobs([engine.tokenizer.encode(text)])[0]
        assert row["num_tokens"] in (len(logprobs), len(logprobs) + 1)


@needs_ray
@pytest.mark.slow
def test_a_replica_of_serve_answers_as_the_server_does(found):
    told = found["serve"]
    assert (told["wrong"], told["health"]) == (400, 200)
    assert told["answer"]["usage"]["completion_tokens"] == 4
    assert len(told["answer"]["choices"][0]["logprobs"]["token_logprobs"]) == 4
    assert told["states"] == {"RUNNING": 1}
