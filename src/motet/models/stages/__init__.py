"""Pipeline stages made of unmodified transformers modules."""
