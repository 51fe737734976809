"""Model families: where transformers keeps their layers, and how many tokens they make."""
