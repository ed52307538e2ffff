"""Parallel graph → Python source. `emit` is the way in."""
