"""Metadata of samples, and which samples make up each microbatch."""
