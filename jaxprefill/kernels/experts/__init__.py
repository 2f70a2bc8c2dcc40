"""Products of sorted tokens with their experts' weights."""

from jaxprefill.kernels.experts.blocks import ExpertBlocks, block_rows, combine, plan_blocks
from jaxprefill.kernels.experts.pallas_triton import (
    ExpertTiles,
    ExpertWeights,
    Gate,
    GroupedExperts,
    choose_tiles,
    lacks_grouped_experts,
)

__all__ = [
    "ExpertBlocks",
    "ExpertTiles",
    "ExpertWeights",
    "Gate",
    "GroupedExperts",
    "block_rows",
    "choose_tiles",
    "combine",
    "lacks_grouped_experts",
    "plan_blocks",
]
