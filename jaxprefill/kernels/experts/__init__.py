"""Products of sorted tokens with their experts' weights."""

from jaxprefill.kernels.experts.blocks import ExpertBlocks, block_rows, combine, plan_blocks
from jaxprefill.kernels.experts.pallas_triton import (
    ExpertWeights,
    Gate,
    GroupedExperts,
    lacks_grouped_experts,
)

__all__ = [
    "ExpertBlocks",
    "ExpertWeights",
    "Gate",
    "GroupedExperts",
    "block_rows",
    "combine",
    "lacks_grouped_experts",
    "plan_blocks",
]
