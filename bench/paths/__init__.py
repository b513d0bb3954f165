"""Paths that are timed: moecomm, the baselines, the ceilings, and the variants of a layer."""
