"""DeepSeek V4.1 inference. `LLM` loads on first use, so that `import leadline` needs neither torch nor time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    if name != "LLM":
        raise AttributeError(f"module 'leadline' has no attribute {name!r}")
    from leadline.llm import LLM

    return LLM
