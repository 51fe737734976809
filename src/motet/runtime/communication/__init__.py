"""Messages, reductions and agreements between ranks, and what limits their time."""
