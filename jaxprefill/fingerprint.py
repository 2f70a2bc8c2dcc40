"""What decides whether an executable made by another process may be used by this engine.

Whatever is in doubt is part of it: a fact too many costs a compilation, one too few a wrong result.
"""

import json
from dataclasses import asdict
from typing import Any

import jax

from jaxprefill.compat import program_settings
from jaxprefill.plan import EnginePlan
from jaxprefill.store.machine import cuda, processor, source_digest, version_of, xla_flags


def engine_facts(plan: EnginePlan, *, num_valid: int) -> dict[str, Any]:
    """What all executables of an engine have in common. Ready for JSON.

    Each one's arguments (and so the pool, the slots and the mesh's shares), donation and compiler
    options come on top: `CompileJob.facts`.

    Args:
        plan: all sizes.
        num_valid: ids that may be sampled.
    """
    device = jax.local_devices()[0]
    is_cpu = plan.device.platform == "cpu"
    facts = {
        "model": asdict(plan.model),
        "dtype": plan.dtype.name,
        "attention": str(plan.attention),
        "kernels": plan.share.kernels,
        "page_size": plan.config.page_size,
        "num_valid": num_valid,
        "mesh": {"model": plan.config.tensor_parallel_size},
        "platform": plan.device.platform,
        "device_kind": plan.device.kind,
        "platform_version": device.client.platform_version,
        "versions": {name: version_of(name) for name in ("jax", "jaxlib", "flax", "numpy")},
        "xla_flags": xla_flags(),
        "jax_settings": program_settings(),
        "machine": processor() if is_cpu else cuda(),
        "source": source_digest(),
    }
    return json.loads(json.dumps(facts))  # tuples as the lists that a manifest gives back
