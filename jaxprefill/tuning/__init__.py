"""Which ladder of buckets pays on this machine: measured costs, an exact choice, and its record.

In reading order: costs, ladder, lengths, search (host only), chosen, measure.
"""
