"""Backends made of others: each kind of layer is served by the part that it is routed to.

What such a backend can do follows from its parts (`capabilities.combined`); nobody lists it again.
"""

from dataclasses import replace

from jaxprefill.errors import ConfigError
from jaxprefill.kernels.attention.api import Attend, AttentionBackend
from jaxprefill.kernels.attention.capabilities import AttentionSpec, combined
from jaxprefill.kernels.attention.tiles import TileShape


def hybrid(sliding: AttentionBackend, full: AttentionBackend) -> AttentionBackend:
    """Layers with a sliding window go to one backend, the others to another.

    Both work through one tile list, so one of them must take any.

    Raises:
        ConfigError: neither takes the other's tiles.
    """
    if sliding is full:
        return full
    name = f"{sliding.name}+{full.name}"
    planner = full if sliding.capabilities.takes_any_tiles else sliding
    follower = sliding if planner is full else full
    if not follower.capabilities.takes_any_tiles:
        raise ConfigError(
            f"attention_backend {name!r} must hold a backend that takes any tiles, such as xla"
        )

    def make(shape: TileShape, spec: AttentionSpec) -> Attend:
        part = full if spec.window is None else sliding
        return part.make(shape, spec)

    both = combined(sliding.capabilities, full.capabilities)
    return AttentionBackend(
        name=name,
        # Windows are asked of one part alone.
        capabilities=replace(both, has_window=sliding.capabilities.has_window),
        tile_shape=planner.tile_shape,
        make=make,
    )
