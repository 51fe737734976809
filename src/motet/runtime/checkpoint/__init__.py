"""Checkpoints: their folder, writing beside the training, and loading under another plan."""
