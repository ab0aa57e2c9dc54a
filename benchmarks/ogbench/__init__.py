"""OGBench single-task (Park et al. 2024): play data, and offline learning with published curves."""
