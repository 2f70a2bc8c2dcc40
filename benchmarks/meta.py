"""What a benchmark's JSON says of its run: command, machine, versions and commit."""

import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from jaxprefill import __version__
from jaxprefill.kernels.device import chip_name


def describe_run(module: str) -> dict[str, Any]:
    """Of a CPU's; `module` is the benchmark's own, as `python -m` is given it."""
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


def describe_card() -> dict[str, Any]:
    """The chip of this process, and versions."""
    device = jax.devices()[0]
    return {
        "card": chip_name(),
        "versions": {
            "jax": jax.__version__,
            "jaxlib": version("jaxlib"),
            "platform": device.client.platform_version,
            "python": platform.python_version(),
        },
    }


def commit() -> str:
    """Of the checkout that this file lies in."""
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
