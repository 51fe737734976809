"""Encoder families, encoders of the user's own, and the tokens that encoders make."""
