"""Every error that leadline raises on purpose.

    LeadlineError
    ├── ConfigError        a configuration file: unknown, missing or contradictory keys, an impossible layer plan
    ├── CheckpointError    a checkpoint folder: missing shard, truncated file, wrong dtype, missing or extra tensor
    ├── RequestError       what one request asked for
    │   ├── PromptError    token ids, empty prompts, prompts beyond the context
    │   ├── ImageError     an image that cannot be read or does not fit
    │   └── SamplingError  sampling values out of range or contradictory
    ├── CapacityError      pages, slots or memory: says what was needed, what is free and which option helps
    │   └── QueueFullError the waiting line is full: try again later
    ├── OperatorError      an operator's operands, or a named implementation that cannot run here
    ├── NumericsError      a step produced NaN or infinite logits for a request
    ├── EngineError        a step failed, a deadline passed, or the engine has stopped
    ├── ServerError        a server that a command talks to: not reachable, refuses, or breaks off
    └── VerificationError  a recorded run that this machine does not reproduce

A message names the thing, what was expected, what came and what to do about it. Commands print it as one line and exit
with status 1. `assert` is kept for invariants of our own that no input can break.
"""


class LeadlineError(Exception):
    """Base of all errors raised on purpose; `except LeadlineError` is what a caller needs."""


class ConfigError(LeadlineError):
    """A configuration is unreadable, incomplete or contradicts itself."""


class CheckpointError(LeadlineError):
    """A checkpoint folder does not hold what its configuration promises."""


class RequestError(LeadlineError):
    """A single request cannot be served as asked."""


class PromptError(RequestError):
    """The prompt is empty, holds an unknown id or exceeds the context."""


class ImageError(RequestError):
    """An image is unreadable or cannot be placed in the prompt."""


class SamplingError(RequestError):
    """Sampling values are out of range or contradict each other."""


class CapacityError(LeadlineError):
    """Pages, slots or memory ran out."""


class QueueFullError(CapacityError):
    """Too many sequences wait already. retry_after: seconds after which another try makes sense."""

    retry_after: float = 1.0


class EngineError(LeadlineError):
    """A step failed for a reason of its own, a deadline passed, or the engine has stopped."""


class OperatorError(LeadlineError):
    """Operands do not meet an operator's contract, or a named implementation cannot run here."""


class NumericsError(LeadlineError):
    """A step produced NaN or infinite logits; the request it belongs to ends, others go on."""


class VerificationError(LeadlineError):
    """A recorded run is not reproduced within the stated tolerances."""


class ServerError(LeadlineError):
    """A server that a command talks to is not reachable, refuses, or breaks off."""
