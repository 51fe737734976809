"""What is known of model families: where transformers keeps their layers, and how many tokens they make."""
