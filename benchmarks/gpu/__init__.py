"""Everything that needs a GPU, in one command: `make gpu`."""

import motet  # noqa: F401 (before transformers: it makes torchvision's wheels importable without CUDA)
