"""DistMM's planner for contrastive towers."""
