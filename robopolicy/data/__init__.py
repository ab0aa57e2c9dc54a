"""Episodes, statistics, chunks, and dataset formats."""
