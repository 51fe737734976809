"""What `make gpu` runs on a machine with GPUs: each step by itself, with a time limit of its own."""
