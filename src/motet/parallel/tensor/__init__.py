"""Tensor and sequence parallelism: cuts of weights and the collectives between the shares."""
