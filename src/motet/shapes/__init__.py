"""Shapes of layers, from configurations alone."""
