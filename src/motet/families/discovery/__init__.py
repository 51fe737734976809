"""The parts of models of transformers, found in their modules."""
