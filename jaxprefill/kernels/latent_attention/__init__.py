"""Attention of many heads over one latent a token, which is key and value of all of them."""

from jaxprefill.kernels.latent_attention.pallas_triton import (
    LatentKeys,
    LatentTiles,
    attend_latent,
    choose_latent_tiles,
    lacks_attend_latent,
    most_keys,
)

__all__ = [
    "LatentKeys",
    "LatentTiles",
    "attend_latent",
    "choose_latent_tiles",
    "lacks_attend_latent",
    "most_keys",
]
