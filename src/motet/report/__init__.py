"""Pictures and texts about plans, timelines and data."""
