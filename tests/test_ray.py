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
    size = engine.plan.model.hidden_size
    for task, name, width in (("embed", "embedding", size), ("label", "label_scores", 2)):
        made = Held(monkeypatch, engine, task=task, labels=["x", "y"] if task == "label" else [])
        found = made(batch("hello", "", "abc"))
        assert found[name].shape == (3, width) and found[name].dtype == np.float32  # as ever
        assert np.isnan(found[name]).any(axis=1).tolist() == [False, True, False]
        assert [value is None for value in found["error"]] == [True, False, True]
    assert "at least one token" in found["error"][1]
    found = Held(monkeypatch, engine, task="perplexity")(batch(None, "abc", math.nan, "a"))
    assert [value is None for value in found["perplexity"]] == [True, False, True, False]
    assert found["error"].tolist() == [(why := "the text must not be null"), None, why, None]
    assert np.isnan(Held(monkeypatch, engine, task="embed")(batch(None))["embedding"]).all()


def test_batches_and_their_columns_are_checked(engine, monkeypatch):
    made = Held(monkeypatch, engine, task="perplexity", column="body")
    with pytest.raises(ConfigError, match="column must be one of text, id, got 'body'"):
        made(batch("hello"))
    with pytest.raises(ConfigError, match="batch_format must be numpy"):
        made(["hello"])
    rows = batch("hello") | {"error": np.array(["kept"], object)}
    with pytest.raises(ConfigError, match="the rows have error already; choose another prefix"):
        Held(monkeypatch, engine, task="perplexity")(rows)
    found = Held(monkeypatch, engine, task="perplexity", prefix="x_")(rows)
    assert list(found) == ["text", "id", "error", "x_perplexity", "x_num_tokens", "x_error"]
    assert found["error"].tolist() == ["kept"]
    for labels in (["x", ""], ["xa", "xb"]):
        with pytest.raises(ConfigError, match="labels must differ in their first tokens"):
            Held(monkeypatch, engine, task="label", labels=labels)


def test_the_models_own_classifier_labels_rows(monkeypatch):
    shares = np.array([[0.25, 0.75], [0.9, 0.1]], np.float32)
    engine = SimpleNamespace(labels=("no", "yes"), classify=lambda texts: shares[: len(texts)])
    engine.plan = SimpleNamespace(model=SimpleNamespace(hidden_size=4))
    found = Held(monkeypatch, engine, task="classify")(batch("a", "b"))
    assert found["label"].tolist() == ["yes", "no"] and found["error"].tolist() == [None, None]
    np.testing.assert_array_equal(found["label_scores"], shares)


def test_a_deployment_scales_by_what_its_engine_runs_at_once(monkeypatch):
    made = {}
    fields = ("min_replicas", "max_replicas", "target_ongoing_requests", "upscale_delay_s")
    config = SimpleNamespace(AutoscalingConfig=SimpleNamespace(model_fields=fields))
    fake = SimpleNamespace(ingress=lambda: lambda replica: replica, config=config)
    fake.deployment = lambda replica: SimpleNamespace(
        options=lambda **options: made.update(options) or SimpleNamespace(bind=lambda *given: given)
    )
    monkeypatch.setitem(sys.modules, "ray.serve", fake)
    monkeypatch.delitem(sys.modules, "jaxprefill.remote.ray_serve", raising=False)
    module = import_module("jaxprefill.remote.ray_serve")
    monkeypatch.delitem(sys.modules, "jaxprefill.remote.ray_serve")  # others take the real one
    config, settings = module.deployment(
        max_replicas=3, settings={"api_key": ("k",), "drain_timeout": 7}
    )
    assert (config.model, settings.api_key) == ("demo", ("k",))
    scaling = {"min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 32}
    assert made["autoscaling_config"] == scaling and made["max_ongoing_requests"] == 64
    assert made["graceful_shutdown_timeout_s"] == 7
    module.deployment(num_gpus=1)
    assert made["max_ongoing_requests"] == 256 and made["ray_actor_options"] == {"num_gpus": 1}
    module.deployment(max_running_requests=2)
    assert made["autoscaling_config"]["target_ongoing_requests"] == 4
    module.deployment(min_replicas=2, autoscaling={"upscale_delay_s": 3})
    assert made["autoscaling_config"]["max_replicas"] == 2
    assert made["autoscaling_config"]["upscale_delay_s"] == 3
    for wrong, said in (
        ({"max_runing_requests": 2}, "max_runing"),
        ({"settings": {"api_kee": ("k",)}}, "settings has the unknown key api_kee"),
        ({"settings": {"port": 80}}, "settings has the unknown key port"),
        ({"autoscaling": {"upscale_delay": 3}}, "autoscaling has the unknown key upscale_delay;"),
        ({"min_replicas": 3, "max_replicas": 2}, "got min_replicas 3 and max_replicas 2"),
        ({"min_replicas": 0, "max_replicas": 0}, "that at least 1"),
        ({"num_gpus": 1, "tensor_parallel_size": 2}, "num_gpus must be 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            module.deployment(**wrong)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"task": "guess"}, "task must be one of"),
        ({"task": "label"}, "labels must be named"),
        ({"task": "embed", "labels": ["x"]}, "labels must be named"),
        ({"task": "embed", "params": {"max_tokens": 3}}, "params must be given for the task gen"),
        ({"params": {"max_token": 3}}, "params has the unknown key max_token; the keys are"),
    ],
)
def test_tasks_labels_and_params_are_checked_before_an_engine_starts(options, said):
    with pytest.raises(ConfigError, match=said):
        RayPredictor(**options)


def run_on_ray(folder: Path, what: str) -> dict:
    """What `tests.on_ray` found; it leaves no process behind."""
    model = write_folder(folder / "model", TinyCheckpoint())
    ran = subprocess.run(
        [sys.executable, "-m", "tests.on_ray", what, str(model), str(folder)],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(ran.stdout.split("FOUND ")[-1])
    assert [pid for pid in found["processes"] if Path(f"/proc/{pid}").exists()] == []
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_on_ray(tmp_path_factory.mktemp("ray"), "all")


needs_ray = pytest.mark.skipif(not find_spec("ray"), reason="needs pip install -e '.[ray]'")


@needs_ray
@pytest.mark.slow
def test_a_worker_killed_in_the_middle_loses_no_row(found, engine):
    data, texts = found["data"], found["texts"]
    assert data["has_died"] and data["num_actors"] >= 3  # two, and one in the place of one
    assert [row["id"] for row in data["rows"]] == list(range(48))
    assert data["vectors"] == [[48, 48], [5]]  # rows written; those at fault
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
    assert told["streamed"] == told["answer"]["choices"][0]["text"] and len(told["chunks"]) > 2
    assert told["chunks"][-1] == "[DONE]" and found["processes"]


@needs_ray
@pytest.mark.long
def test_replicas_come_with_load_are_replaced_and_go_again(tmp_path):
    told = run_on_ray(tmp_path, "load")
    assert "/nonexistent" in told["refused"] and "CheckpointError" in told["refused"]
    assert told["most"] == 2 and told["replaced"] and told["least"] == 1
    assert told["ok"] > 20 and told["failed"] <= told["in_flight"]  # those of the one that died
    assert set(told["statuses"]) <= {200, 500, 503}
