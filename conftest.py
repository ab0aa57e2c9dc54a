"""Its place, beside the packages, is what puts `docs`, `recipes` and `benchmarks` on the import path of the tests."""
