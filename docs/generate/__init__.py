"""Generates docs/map.md and docs/api.md from the sources; `make docs` runs it."""
