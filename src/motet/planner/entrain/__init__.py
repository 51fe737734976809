"""Entrain's planner: degrees from the work of a typical batch."""
