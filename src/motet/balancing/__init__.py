"""Policies that cut a global batch into microbatches."""
