"""All measurements of a machine with a GPU, in the order of their value: `python -m benchmarks.gpu`."""
