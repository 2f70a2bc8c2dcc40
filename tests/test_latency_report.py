"""Reports of the latency benchmark that several runs make together."""

import json

from benchmarks.report import add_run


def row(tokens, path, wall_ms):
    sizes = {"shape": "tiny", "tokens": tokens, "requests": 1, "prefix": 0}
    return sizes | {"path": path, "wall_ms": wall_ms}


def test_a_run_replaces_what_it_measured_and_each_row_says_which_run_it_is_from(tmp_path):
    kept = tmp_path / "found.json"
    first = {"commit": "old", "date": "2026-01-01", "ladder": {"executables": 3}}
    kept.write_text(
        json.dumps({"meta": first, "rows": [row(16, "full", 9.0), row(32, "torch full", 5.0)]})
    )
    report = add_run(kept, {"commit": "new"}, [row(16, "full", 8.0), row(64, "full", 7.0)])
    found = [(one["tokens"], one["wall_ms"], one["run"]) for one in report["rows"]]
    assert found == [(16, 8.0, 1), (64, 7.0, 1), (32, 5.0, 0)], "the peer's rows come last"
    assert [run["commit"] for run in report["meta"]["runs"]] == ["old", "new"]
    assert report["meta"]["commit"] == "new" and report["meta"]["ladder"] == {"executables": 3}
    kept.write_text(json.dumps(report))
    again = add_run(kept, {"commit": "third"}, [row(32, "torch full", 4.0)])
    assert [one["run"] for one in again["rows"]] == [1, 1, 2]
    assert add_run(None, {"commit": "new"}, [])["meta"]["runs"][0]["commit"] == "new"
