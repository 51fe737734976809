"""Datasets, preparation of samples and the loader of global batches."""
