"""What a prompt position holds: text, or one of the kinds of positions of an image span."""

from __future__ import annotations

from enum import IntEnum


class TokenType(IntEnum):
    """The order of the image types is the published one. All but TEXT count as image (architecture.md 4.15)."""

    TEXT = -1
    START = 0
    IMAGE = 1
    NEWLINE = 2
    END = 3
