"""Learning algorithms, one file each, all in the same order."""
