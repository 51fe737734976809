"""The only estimator of seconds and bytes, and the profiler that measures them."""
