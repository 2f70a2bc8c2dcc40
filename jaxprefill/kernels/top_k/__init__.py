"""The best of many scored entries, whose scores are never all there at once."""

from jaxprefill.kernels.top_k.pallas_triton import (
    ChoiceTiles,
    EntryPages,
    choose_entries,
    lacks_choose_entries,
)

__all__ = ["ChoiceTiles", "EntryPages", "choose_entries", "lacks_choose_entries"]
