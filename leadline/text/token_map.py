"""Engram's compressed vocabulary: token ids whose texts look alike share one compressed id.

The map is derived from the tokenizer alone and is not stored anywhere. For the released vocabulary it takes about
half a second.
"""

from __future__ import annotations

import torch
from tokenizers import Regex, normalizers

from leadline.config.model import ModelConfig
from leadline.errors import ConfigError
from leadline.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_LONE_SPACE = "\ue000"  # private use: carries a text of one space through the strip

# The Rust normalisers define the published map; Python's own lower-casing and stripping differ (final sigma, spacing
# marks, U+001C..U+001F).
_NORMALISE = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
        normalizers.Strip(),
        normalizers.Replace(_LONE_SPACE, " "),
    ]
)


def token_map(tokenizer: Tokenizer, config: ModelConfig) -> torch.Tensor:
    """Compressed id of every token id.

    key(id) = the raw token string if the id's text is not whole UTF-8, else the normalised text, else (when that is
    empty) the text itself. Equal keys share an id; ids count up in order of first appearance.

    Returns: [vocab_size] int64, values 0 .. engram_compressed_vocab_size - 1, each used.
    Raises:
        ConfigError: the number of compressed ids differs from `engram_compressed_vocab_size`; hash rows would then
            point at unrelated table rows.
    Source: architecture.md 4.11, checked against Appendix A.
    """
    compressed_of: dict[str, int] = {}
    compressed = []
    for token_id, text in enumerate(tokenizer.decode_each(range(tokenizer.vocab_size))):
        if _REPLACEMENT in text:
            key = tokenizer.token_of(token_id)
        else:
            key = _NORMALISE.normalize_str(text) or text
        compressed.append(compressed_of.setdefault(key, len(compressed_of)))
    if len(compressed_of) != config.engram_compressed_vocab_size:
        raise ConfigError(
            f"engram_compressed_vocab_size: expected {config.engram_compressed_vocab_size} (config.json), got "
            f"{len(compressed_of)} from tokenizer.json; the two files belong to different checkpoints"
        )
    return torch.tensor(compressed, dtype=torch.int64)
