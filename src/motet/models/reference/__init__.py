"""The same model in one process, against which distributed results are compared."""
