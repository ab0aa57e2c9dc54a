"""Frames: what whole families of algorithms share, so that each algorithm's own file holds only what is its own."""
