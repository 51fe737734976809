"""Tensor, sequence and context parallelism, sharding, and their collectives."""
