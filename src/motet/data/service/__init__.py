"""Preparation of samples in other processes and on other machines."""
