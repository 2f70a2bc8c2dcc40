"""KV memory: pages are handed out on the host, the pool lives on the device."""
