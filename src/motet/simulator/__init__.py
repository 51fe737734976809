"""Predicts an iteration on a virtual clock."""
