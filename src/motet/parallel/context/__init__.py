"""Context parallelism and packed attention: the distribution of tokens over ranks, and their attention."""
