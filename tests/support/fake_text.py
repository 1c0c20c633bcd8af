"""A tokenizer with one token per byte, to go with the fake model."""

from __future__ import annotations

from typing import Any, cast

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from leadline.text.tokenizer import Tokenizer
from tests.support.fake_model import FakeConfig

_NAMED = ("<bos>", "<eos>", "<pad>", "<image>")


def byte_tokenizer() -> tuple[Tokenizer, FakeConfig]:
    """Begin, end, padding and image as ids 0 to 3, then the 256 bytes. No chat control tokens: chat is plain."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = (*_NAMED, *alphabet)
    backend = tokenizers.Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in _NAMED])
    config = FakeConfig(vocab_size=len(names))
    return Tokenizer(backend.to_str(), cast(Any, config)), config
