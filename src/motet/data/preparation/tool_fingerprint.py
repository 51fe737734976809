"""What a tokenizer or a processor is known by: whatever decides what it makes of a text, an image or a sound."""

import hashlib
import json
from typing import Any


def tool_fingerprint(tool: Any) -> str:
    """Of a fast tokenizer, an image processor or a feature extractor of transformers, as it was loaded."""
    if hasattr(tool, "backend_tokenizer"):
        described = [tool.backend_tokenizer.to_str(), tool.chat_template, tool.all_special_ids]
    else:
        described = tool.to_dict()
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()[:16]
