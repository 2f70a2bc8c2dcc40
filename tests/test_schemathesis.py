"""The server does what its own description says, whatever is sent."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_engine import FakeEngine
from tests.live import live

TOOL = shutil.which("schemathesis", path=Path(sys.executable).parent)
# That valid bodies are accepted cannot be said in a schema: a prompt may be too long, an id not in
# the vocabulary, and one field may rule out another.
LEFT_OUT = "positive_data_acceptance"


@pytest.mark.slow
@pytest.mark.skipif(TOOL is None, reason="needs schemathesis (extra test)")
def test_schemathesis_finds_nothing(tmp_path):
    with live(FakeEngine(), profile_dir="profiles", api_key=("key",)) as url:
        command = [TOOL, "run", f"{url}/openapi.json", "--header=Authorization: Bearer key"]
        command += ["--phases=fuzzing,coverage", "--max-examples=5", "--seed=1", "--no-color"]
        command += [f"--exclude-checks={LEFT_OUT}", "--generation-database=none"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
