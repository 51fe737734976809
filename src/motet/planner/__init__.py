"""Planners: from a planning problem to a plan."""
