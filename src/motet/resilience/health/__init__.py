"""Health checks of a node before it takes part in a training."""
