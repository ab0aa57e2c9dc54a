"""Learning algorithms, one file per method."""
