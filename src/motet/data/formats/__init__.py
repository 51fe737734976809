"""Readers of data formats, one file each."""
