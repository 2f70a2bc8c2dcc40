"""DeepSeek-V4: latent attention over a window and compressed entries, hyper-connections, experts.

Read `modules` (weights and products), `reference` (one request, no cache), then the cached path.
"""
