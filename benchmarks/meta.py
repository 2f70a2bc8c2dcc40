"""What a CPU benchmark's JSON says of its run: command, machine and versions."""

import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import jax

from jaxprefill import __version__


def describe_run(module: str) -> dict[str, Any]:
    """`module` is the benchmark's own, as `python -m` is given it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    arguments = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return {
        "command": " ".join(["python", "-m", module, *arguments]),
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "versions": {
            "jaxprefill": __version__,
            "jax": jax.__version__,
            "python": platform.python_version(),
        },
        "date": time.strftime("%Y-%m-%d"),
    }
