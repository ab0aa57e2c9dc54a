"""Our own MJCF robots and scenes."""
