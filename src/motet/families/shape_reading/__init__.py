"""Shapes of modules, read from models on the meta device or from shape cards."""
