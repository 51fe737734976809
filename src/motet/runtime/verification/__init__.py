"""The comparison of a distributed run with one process."""
