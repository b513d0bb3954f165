"""Tests whose ranks are processes on this host."""
