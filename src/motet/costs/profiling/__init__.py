"""Measures layers, kernels and links on real devices."""
