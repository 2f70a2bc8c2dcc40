"""Device functions that know no model: attention, and the one place that looks at the chip.

Letters in array shapes, everywhere in the package:
T tokens of a bucket (padding included), R request slots, N query tiles, P pages of the pool
(all layers), S tokens a page, W pages a page-table row, H query heads, K KV heads, G = H / K,
D head dim, E hidden size, V vocabulary.
"""
