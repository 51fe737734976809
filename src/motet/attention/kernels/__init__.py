"""Attention under interval masks on GPUs, in Triton."""
