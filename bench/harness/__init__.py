"""The harness shared by the benchmark programs: ranks, options, data, checks, timing, tables."""
