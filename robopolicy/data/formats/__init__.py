"""Dataset formats, read and written."""
