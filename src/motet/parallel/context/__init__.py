"""Context parallelism and packed attention: who holds which tokens, and how their attention is computed."""
