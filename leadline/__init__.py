"""DeepSeek V4.1 inference. Public names load on first use, so that `import leadline` needs neither torch nor time."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leadline.config.sampling import SamplingParams
    from leadline.errors import (
        CapacityError,
        CheckpointError,
        ConfigError,
        ImageError,
        LeadlineError,
        NumericsError,
        OperatorError,
        PromptError,
        RequestError,
        SamplingError,
        VerificationError,
    )
    from leadline.llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "ImageError",
    "LeadlineError",
    "NumericsError",
    "OperatorError",
    "PromptError",
    "RequestError",
    "SamplingError",
    "SamplingParams",
    "VerificationError",
]

_MODULES = {"LLM": "leadline.llm", "SamplingParams": "leadline.config.sampling"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'leadline' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES.get(name, "leadline.errors")), name)
