"""The graph of modules, and everything that makes or computes a part of it."""
