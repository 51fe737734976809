"""Masks as intervals, their work, and their distribution over ranks."""
