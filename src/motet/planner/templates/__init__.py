"""Oobleck's pipeline templates."""
