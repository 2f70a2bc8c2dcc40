"""An engine in a process of its own: what is said over the socket, and the two who say it."""
