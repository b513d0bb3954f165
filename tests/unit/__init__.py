"""Tests that need no other process."""
