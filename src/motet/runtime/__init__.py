"""Runs plans on torch.distributed."""
