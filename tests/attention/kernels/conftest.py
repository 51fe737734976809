"""What needs a GPU is collected where there is one, and nowhere else: a test that is skipped reads as done."""

import torch

collect_ignore = [] if torch.cuda.is_available() else ["test_flash_on_gpu.py"]
