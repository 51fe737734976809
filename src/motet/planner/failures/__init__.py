"""Predictions of training under a trace of failures."""
