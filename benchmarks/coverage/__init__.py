"""Which models are paged, and what of them: `python -m benchmarks.coverage` runs all cases, writes docs/coverage.md."""
