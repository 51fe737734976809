"""The store that nodes agree through, and its failover."""
