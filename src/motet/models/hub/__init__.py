"""Loads models from the hub's formats and exports models to them."""
