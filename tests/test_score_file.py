"""Tables scored over the fake engine: columns, types, nulls, quotes, and rows that are refused."""

import csv
import gzip
import io
import json
import math
import os
import resource
import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pytest

from jaxprefill.cli.main import main
from jaxprefill.cli.score_file import labels_of
from jaxprefill.config import ClassifierConfig
from jaxprefill.errors import ConfigError
from jaxprefill.offline.parquet import ParquetTable
from jaxprefill.offline.window import Window
from tests.fake_engine import FakeEngine
from tests.tiny import tiny_config

TEXTS = ["good", "", 'é, "quoted"\nand longer', "a" * 200, "x"]
# Of the fake engine: a prompt token's logprob is minus its position.
PERPLEXITIES = [math.exp((1 + 2 + 3) / 3), None, math.exp(sum(range(1, 23)) / 22), None, None]


@pytest.fixture
def score(monkeypatch, capsys, tmp_path):
    """`jaxprefill score-file` in a folder of its own: its status and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*argv, engine=None):
        made = engine or FakeEngine()
        monkeypatch.setattr("jaxprefill.cli.offline.EngineProcess", lambda config, **_: made)
        status = main(["score-file", "--text-column", "text", *map(str, argv)])
        assert not made.running
        return status, capsys.readouterr().err

    call.folder = tmp_path
    return call


def csv_text(rows, **dialect) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, **dialect).writerows(rows)
    return text.getvalue()


def close(value):
    return None if value is None else pytest.approx(value, rel=1e-6)


def test_perplexities_of_a_csv_file(score):
    rows = [["id", "text", "n,ote"], *([str(i), text, " "] for i, text in enumerate(TEXTS))]
    (score.folder / "in.csv").write_bytes(b"\xef\xbb\xbf" + csv_text(rows).encode())
    status, said = score("-i", "in.csv", "-o", "out.csv", "--perplexity")
    assert status == 3
    assert "row 4: " in said and "maximum context length" in said
    assert "5 rows, 1 failed in" in said and "1 of the rows had no text" in said
    written = (score.folder / "out.csv").read_bytes()
    assert written.startswith(b"\xef\xbb\xbf") and written.count(b"\r\n") == 6
    header, *found = csv.reader(io.StringIO(written.decode("utf-8-sig"), newline=""))
    assert header == ["id", "text", "n,ote", "perplexity", "num_tokens", "sum_logprob"]
    assert [row[:3] for row in found] == rows[1:]
    assert [float(row[3]) if row[3] else None for row in found] == list(map(close, PERPLEXITIES))
    assert [row[4] for row in found] == ["4", "", "23", "", "1"]


def test_labels_of_json_lines_and_what_stands_there_is_kept_to_the_byte(score):
    lines = [
        '{"text": "good", "n": 1.10, "big": 123456789012345678901234567890}',
        "{ }",
        '{"text":null , "x": "\\u00e9" }',
        '{"text": "bad", "text2": [1,  2]}',
    ]
    with gzip.open(score.folder / "in.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("\n\n".join(lines))
    engine = FakeEngine()
    engine.label_rule = lambda request, label: -1.0 if len(request.prompt_ids) == label else -3.0
    labels = [engine.model.tokenizer.decode([9]), engine.model.tokenizer.decode([10])]
    argv = ["--labels", ",".join(labels), "--template", "Say {text}:\\n", "--prefix", "my_"]
    status, said = score("-i", "in.jsonl.gz", "-o", "out.jsonl.gz", *argv, engine=engine)
    assert status == 0 and "2 of the rows had no text" in said
    with gzip.open(score.folder / "out.jsonl.gz", "rt", encoding="utf-8") as file:
        written = file.read().splitlines()
    for old, new in zip(lines, written, strict=True):
        assert new.startswith(old[:-1].rstrip())
    found = [json.loads(line) for line in written]
    name = "my_prob_" + labels[1]
    assert [row["my_label"] for row in found] == [labels[1], None, None, labels[0]]
    share = 1 / (1 + math.exp(-2.0))
    assert found[0][name] == close(share) and found[1][name] is None
    assert [len(request.prompt_ids) for request in engine.requests] == [10, 9]


def test_embeddings_of_parquet(score):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    kinds = [arrow.string(), arrow.large_string(), arrow.dictionary(arrow.int32(), arrow.string())]
    for kind in kinds:
        schema = arrow.schema(
            [
                arrow.field("when", arrow.timestamp("us", tz="UTC"), nullable=False),
                arrow.field("text", kind),
                arrow.field("price", arrow.decimal128(9, 2), metadata={"unit": "EUR"}),
            ],
            metadata={"about": "prices"},
        )
        count = 600
        texts = [TEXTS[i % 3] if i % 7 else None for i in range(count)]
        table = arrow.table(
            [
                arrow.array(range(count), arrow.int64()).cast(schema.field(0).type),
                arrow.array(texts, arrow.string()).cast(kind),
                arrow.array([None] * count, schema.field(2).type),
            ],
            schema=schema,
        )
        parquet.write_table(table, score.folder / "in.parquet", compression="zstd")
        argv = ("-i", "in.parquet", "-o", "out.parquet", "--embed", "--overwrite")
        status, said = score(*argv)
        assert status == 0, said
        found = parquet.read_table(score.folder / "out.parquet")
        assert found.drop_columns(["embedding"]).equals(table, check_metadata=True)
        assert found.schema.field("embedding").type == arrow.list_(arrow.float32())
        vectors = found.column("embedding").to_pylist()
        size = tiny_config().hidden_size
        for text, vector in zip(texts, vectors, strict=True):
            assert vector == (pytest.approx([size**-0.5] * size) if text else None)
        metadata = parquet.ParquetFile(score.folder / "out.parquet").metadata
        assert metadata.num_row_groups == 1
        assert metadata.row_group(0).column(0).compression == "ZSTD"
    assert not (score.folder / "out.part.parquet").exists()


def test_a_models_own_classifier_names_the_columns(score):
    (score.folder / "in.tsv").write_text('text\tb\n"a\tb"\t"1"\n', encoding="utf-8")
    classifier = ClassifierConfig(labels=("no", "yes"), activation="softmax")
    engine = FakeEngine(classifier=classifier)
    engine.class_rule = lambda request: (0.0, 2.0)
    status, said = score("-i", "in.tsv", "-o", "out.tsv", "--classify", engine=engine)
    assert status == 0, said
    share = 1 / (1 + math.exp(-2.0))
    header, row = csv.reader((score.folder / "out.tsv").read_text().splitlines(), delimiter="\t")
    assert header == ["text", "b", "label", "prob_no", "prob_yes"]
    assert row[:3] == ["a\tb", "1", "yes"] and float(row[4]) == close(share)
    status, said = score("-i", "in.tsv", "-o", "more.tsv", "--classify")
    assert status == 2 and "no classifier of its own" in said


FAULTS = {
    "in.csv": [
        ('te"xt"s\n', 2, "it has 'te\"xt\"s'"),
        ('"text"s\n', 1, "the header of in.csv: line 1 is no CSV"),
        ("other,b\n", 2, "it has 'other', 'b'"),
        ("text,text\n", 2, "has once"),
        ("", 2, "it has none"),
        ("text,perplexity\n", 2, "--prefix"),
        (b"text,\xff\n", 1, "line 1 of in.csv must be UTF-8"),
    ],
    "in.jsonl": [
        ("\n[1]", 1, "row 1 of in.jsonl: line 2 must be a JSON object"),
        ('{"texts": "a"}', 2, "it has 'texts'"),
        ('{"text": "a", "perplexity": 1}', 2, "--prefix"),
        ('{"text": "a"}\n{"text": "a", "perplexity": 1}\n', 2, "row 2 of in.jsonl has"),
    ],
    "in.parquet": [("nonsense", 2, "no Parquet file")],
}


@pytest.mark.parametrize(
    ("name", "text", "status", "words"), [(name, *each) for name in FAULTS for each in FAULTS[name]]
)
def test_faults_of_tables_are_named(score, name, text, status, words):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    path = score.folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    found, said = score("-i", name, "-o", name.replace("in", "out"), "--perplexity")
    assert (found, words in said) == (status, True), said
    assert not (score.folder / name.replace("in", "out")).exists()


# A line, what is written of it in front of the new columns, and what is said: None, it is scored.
JSON_ROWS = [
    (b'{"text": "ab", "x": NaN, "y": [-Infinity, 1.5]}', '"x": null, "y": [null, 1.5]', None),
    (b'{"text": NaN}', '{"text": null', None),
    (b'{"text": "ab", "big": 1e999, "n": 1.10}', '"big": 1e999, "n": 1.10', None),
    (b'{"text": "ab", "big": 1e999, "n": NaN}', '"big": null, "n": null', None),
    (b'{"text": "a", "text": "ab"}', '{"text": "a", "text": "ab"', None),
    (
        b'{"text": "ab", "x": "NaN \\\\ud800 \\ud83d\\ude00"}',
        '"NaN \\\\ud800 \\ud83d\\ude00"',
        None,
    ),
    (b'{"text": "ab", "half": "\\ud800"}', '"half": "?"', None),
    (b'{"text": "ab", "x": "\xff", "\xfe": 1}', '"x": "?", "?": 1', None),
    (b'{"text": "\\ud800", "id": 7}', '{"text": "?", "id": 7', "text must be a text"),
    (b'{"id": 8, "text": "\xed\xa0\x80"}', '{"id": 8, "text": "???"', "text must be a text"),
    (b'{"text": 5}', '{"text": 5', "text must be a text or null, but got 5"),
    (b'{"text": 1e999}', '{"text": 1e999', "text must be a text or null, but "),
    (b"[1]", '{"perplexity"', "must be a JSON object"),
    (b"NaN", '{"perplexity"', "must be a JSON object"),
    (b'{"text": "a"', '{"perplexity"', "must be a JSON object"),
    (b'{"a": ' + b"[" * 10**5, '{"perplexity"', "must be a JSON object"),
    (b'{"text": "' + b"a" * 2000 + b'"}', '{"perplexity"', "must be at most 1000 bytes"),
    (b'{"num_tokens": 1, "text": "a", "b": 1.10}', '{"text":"a","b":1.10', "another --prefix"),
]


def test_json_rows_at_fault_are_written_in_their_places(score, monkeypatch):
    monkeypatch.setattr("jaxprefill.offline.tables._MAX_ROW_BYTES", 1000)
    monkeypatch.setattr("jaxprefill.offline.lines._CHUNK", 5)  # a row each
    Path("in.jsonl").write_bytes(b"\n\n".join(line for line, *_ in JSON_ROWS))
    status, said = score("-i", "in.jsonl", "-o", "out.jsonl", "--perplexity")
    assert status == 3 and f"{len(JSON_ROWS)} rows, 10 failed" in said, said
    found = Path("out.jsonl").read_bytes().splitlines()
    for number, ((_, kept, words), line) in enumerate(zip(JSON_ROWS, found, strict=True), 1):
        fields = msgspec.json.decode(line, type=dict[str, msgspec.Raw])  # strictly JSON
        assert kept in line.decode(), number
        assert f"row {number}: line {2 * number - 1}" in said or not words
        assert (words or "") in said
        scored = 2 if words is None and '"text": null' not in kept else None
        assert msgspec.json.decode(fields["num_tokens"]) == scored, number


CSV_ROWS = [
    (b"ab,\xff", ["ab", b"\xff"], None),
    (b"\xed\xa0\x80,1", [b"\xed\xa0\x80", "1"], "must be UTF-8"),
    (b"1,2,3", ["1", "2"], "must have 2 fields, as the header, got 3"),
    (b"ab", ["ab", ""], "must have 2 fields, as the header, got 1"),
    (b'"a"b,1', ["ab", "1"], "is no CSV"),
    (b"NaN,1e999", ["NaN", "1e999"], None),
    (
        b'"a\nb,1',
        ["a\nb,1\n", ""],
        "is no CSV: unexpected end of data; a quote opened there goes on to line 9",
    ),
]


def test_csv_rows_at_fault_are_written_in_their_places(score):
    lines = [line for line, *_ in CSV_ROWS]
    Path("in.csv").write_bytes(b"\n".join([b"text,b", *lines, b""]))
    status, said = score("-i", "in.csv", "-o", "out.csv", "--perplexity")
    assert status == 3 and f"{len(lines)} rows, 5 failed" in said, said
    text = Path("out.csv").read_text(encoding="utf-8", errors="surrogateescape")
    _, *found = csv.reader(io.StringIO(text, newline=""), strict=True)
    for number, ((_, kept, words), row) in enumerate(zip(CSV_ROWS, found, strict=True), 1):
        wanted = [each if isinstance(each, str) else os.fsdecode(each) for each in kept]
        assert row[:2] == wanted
        assert bool(row[3]) == (words is None)
        assert words is None or f"row {number}: line {number + 1} {words}" in said


def test_parquet_texts_that_are_no_utf8_are_not_scored(score):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for kind in (arrow.string(), arrow.large_string()):
        held = arrow.array([b"ab", b"\xff", None, b"\xed\xa0\x80"]).cast(
            arrow.large_binary() if kind == arrow.large_string() else arrow.binary()
        )
        texts = arrow.Array.from_buffers(kind, 4, held.buffers())
        table = arrow.table({"text": texts, "x": [math.nan, math.inf, None, 1.0]})
        parquet.write_table(table, "in.parquet")
        argv = ("-i", "in.parquet", "-o", "out.parquet", "--perplexity", "--overwrite")
        status, said = score(*argv)
        assert status == 3 and "row 2: the text must be UTF-8" in said and "row 4:" in said
        found = parquet.read_table("out.parquet")
        assert found["num_tokens"].to_pylist() == [2, None, None, None]
        assert found["text"].combine_chunks().cast(held.type).equals(held)
        assert np.array_equal(found["x"], table["x"], equal_nan=True)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("-i", "in.csv", "-o", "out.jsonl", "--embed"), "--output must be a csv file"),
        (("-i", "in.csv", "-o", "in.csv", "--embed"), "--overwrite replaces it"),
        (("-i", "in.csv", "-o", "in.csv", "--embed", "--overwrite"), "another file"),
        (("-i", "in.part.csv", "-o", "in.csv", "--embed", "--overwrite"), "another file"),
        (("-i", "in.csv", "-o", ".", "--format", "csv", "--embed", "--overwrite"), "the folder ."),
        (("-i", "in.csv", "-o", "out.csv"), "required"),
        (("-i", "in.csv", "-o", "out.csv", "--embed", "--template", "a"), "must hold {text}"),
        (("-i", "in.csv", "-o", "out.csv", "--labels", "a,a"), "must differ"),
        (("-i", "in.csv", "-o", "out.csv", "--labels", "a,\udcff"), "--labels must be UTF-8"),
        (
            ("-i", "in.csv", "-o", "o", "--embed", "--template", "\udcff"),
            "--template must be UTF-8",
        ),
        (("-i", "in.csv", "-o", "o", "--embed", "--prefix", "\udcff"), "--prefix must be UTF-8"),
        (("-i", "in.txt", "-o", "out.csv", "--embed"), "must end in"),
        (("-i", "in.csv", "-o", "no/out.csv", "--embed"), "cannot write"),
        (("-i", "-", "-o", "-", "--embed", "--format", "parquet"), "cannot be read from stdin"),
        (("-i", "/dev/null", "-o", "o", "--embed", "--format", "parquet"), "a file, no pipe"),
        (("-i", "in.csv", "-o", "out.parquet.gz", "--embed"), "text also .gz"),
    ],
)
def test_mistakes_are_told(score, argv, words):
    if "parquet" in argv:
        pytest.importorskip("pyarrow")
    for name in ("in.csv", "in.part.csv"):
        (score.folder / name).write_text("text\na\n")
    status, said = score(*argv)
    assert (status, words in said) == (2, True), said
    assert Path("in.part.csv").read_text() == "text\na\n"


def test_what_is_quoted_in_a_csv_file_stays_in_its_row(score):
    rows = [["text", 'a"b'], ["x\ry", " z"], ["\r", "\n"], ["ab", "\r\n,'"]]
    for ending in ("\n", "\r\n"):
        wanted = csv_text(rows, lineterminator="\r\n")[:-2].replace("\r\n", ending) + ending
        Path("in.csv").write_bytes(wanted.encode())
        assert score("-i", "in.csv", "-o", "out.csv", "--perplexity", "--overwrite")[0] == 0
        written = Path("out.csv").read_bytes().decode()
        found = list(csv.reader(io.StringIO(written, newline=""), strict=True))
        assert [row[:2] for row in found] == list(csv.reader(io.StringIO(wanted, newline="")))


def test_an_output_stays_the_pipe_or_the_link_that_it_is(score):
    (score.folder / "in.csv").write_text("text\nab\n")
    os.mkfifo(score.folder / "pipe")
    (score.folder / "real.csv").write_text("old")
    (score.folder / "link.csv").symlink_to("real.csv")
    pipe = os.open(score.folder / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert score("-i", "in.csv", "-o", "pipe", "--format", "csv", "--perplexity")[0] == 0
        piped = os.read(pipe, 1000).decode()
    finally:
        os.close(pipe)
    assert score("-i", "in.csv", "-o", "link.csv", "--perplexity", "--overwrite")[0] == 0
    assert piped == (score.folder / "real.csv").read_text()
    assert piped.startswith("text,perplexity,num_tokens,sum_logprob\nab,")
    assert (score.folder / "link.csv").is_symlink() and (score.folder / "pipe").is_fifo()


@pytest.mark.parametrize("suffix", ["csv", "jsonl.gz", "parquet"])
def test_a_full_disk_is_told(score, suffix):
    name, text = f"in.{suffix}", "".join(map(chr, range(1000, 9000)))
    if suffix == "parquet":
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.table({"text": [text]}), name)
    elif suffix == "csv":
        Path(name).write_text(csv_text([["text"], [text]]), encoding="utf-8")
    else:
        Path(name).write_bytes(gzip.compress(json.dumps({"text": text}).encode()))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        status, said = score("-i", name, "-o", f"out.{suffix}", "--perplexity")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (status, "error: cannot write to out." in said) == (1, True), said
    assert not Path(f"out.{suffix}").exists()


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "jsonl.gz"])
def test_a_large_table_is_not_held(score, suffix):
    """Of 24 MB, less than a third at any time."""
    row, pack = "," + "a" * 2**16 + "\n", gzip.compress if suffix.endswith("gz") else bytes
    if suffix != "csv":
        row = json.dumps({"text": None, "a": "a" * 2**16}) + "\n"
    Path(f"in.{suffix}").write_bytes(pack(("text,a\n" * (suffix == "csv") + row * 384).encode()))
    tracemalloc.start()
    try:
        assert score("-i", f"in.{suffix}", "-o", f"out.{suffix}", "--perplexity")[0] == 0
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


def test_a_large_row_group_is_not_held(score, monkeypatch):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("jaxprefill.offline.parquet._GROUP_BYTES", 2**20)
    pads = [os.urandom(2**12) for _ in range(2**13)]
    table = arrow.table({"text": arrow.nulls(len(pads), arrow.string()), "a": pads})
    parquet.write_table(table, "in.pq", use_dictionary=False)
    read, before, most = ParquetTable.read, arrow.total_allocated_bytes(), 0

    def watched(self):
        nonlocal most
        found = read(self)
        most = max(most, arrow.total_allocated_bytes() - before)
        return found

    monkeypatch.setattr(ParquetTable, "read", watched)
    assert score("-i", "in.pq", "-o", "out.pq", "--perplexity")[0] == 0
    assert 2**20 < most < 2**24  # of 2**25
    assert parquet.read_table("out.pq")["a"].equals(table["a"])


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_rows_weigh_what_stands_beside_their_texts(score, suffix, monkeypatch):
    monkeypatch.setattr(Window.__init__, "__defaults__", (3000,))  # of max_bytes
    columns = {"text": ["ab"] * 40, "a": ["a" * 1000] * 40}
    if suffix == "parquet":
        pytest.importorskip("pyarrow.parquet").write_table(
            pytest.importorskip("pyarrow").table(columns), "in.parquet"
        )
    elif suffix == "csv":
        Path("in.csv").write_text(csv_text([columns, *zip(*columns.values(), strict=True)]))
    else:
        Path("in.jsonl").write_text((json.dumps({"text": "ab", "a": "a" * 1000}) + "\n") * 40)
    engine = FakeEngine()
    argv = ("-i", f"in.{suffix}", "-o", f"out.{suffix}", "--perplexity")
    assert score(*argv, engine=engine)[0] == 0
    assert engine.most_running == 3


def test_labels_keep_their_spaces_and_commas():
    assert labels_of('" a, b"," c"') == [" a, b", " c"]
    for text in ("", "a,,b", "a, b"):
        with pytest.raises(ConfigError, match="--labels"):
            labels_of(text)
