"""What the kernels achieve on a GPU, against what it can do and against others: `python -m benchmarks.gpu`."""
