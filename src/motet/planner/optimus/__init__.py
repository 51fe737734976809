"""Optimus' planner: encoders in the language model's bubbles."""
