"""Benchmark programs in the manner of nccl-tests. See bench/README.md."""
