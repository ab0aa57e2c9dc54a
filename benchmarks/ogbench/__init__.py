"""OGBench single-task (Park et al. 2025): play data, and offline-to-online learning beside published numbers."""
