"""Small models with random weights and any layer plan that the configuration allows."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from functools import lru_cache

import torch

from leadline.checkpoint.random_model import random_tensors
from leadline.checkpoint.source import WeightSource
from leadline.config.engram import primes_from
from leadline.config.model import ModelConfig
from leadline.model.model import Model
from tests.model.driver import MODELS

BASE = json.loads((MODELS / "everything" / "config.json").read_text())


@dataclass(frozen=True)
class Shape:
    """Layer kinds: "-" window only, "1" and "2" owner of rows of this ratio, "i" selects for itself, "r" reuses."""

    kinds: str
    has_candidates: bool
    engram: tuple[int, ...]
    targets: tuple[int, ...]  # layers that feed the drafter; none: no drafter
    window: int
    topk: int
    experts: int
    seed: int
    ngram: int = BASE["text_config"]["engram_max_ngram_size"]
    stages: int = 1  # of the drafter
    loud_tokens: int = 0  # the head knows only so many tokens, so that drafts are right now and then; 0 = all
    context: int = BASE["text_config"]["max_position_embeddings"]


@lru_cache(maxsize=64)
def model_of(shape: Shape) -> Model:
    owners = [layer for layer, kind in enumerate(shape.kinds) if kind in "12"]
    ratios, ratio = [], 0
    for kind in shape.kinds:
        ratio = int(kind) if kind in "12" else ratio
        ratios.append(0 if kind == "-" else ratio)
    stages = shape.stages * bool(shape.targets)
    text_config = BASE["text_config"]
    primes = primes_from(text_config["engram_vocab_size"])
    columns = (shape.ngram - 1) * text_config["engram_n_heads"]
    text_config = text_config | {
        "num_hidden_layers": len(shape.kinds),
        "num_nextn_predict_layers": stages,
        "compress_ratios": ratios + [0] * stages,
        "kv_source_layer_ids": owners,
        "index_source_layer_ids": [layer for layer, kind in enumerate(shape.kinds) if kind in "12i"],
        "candidate_source_layer_id": owners[-1] if owners and shape.has_candidates else -1,
        "engram_layer_ids": list(shape.engram),
        "engram_max_ngram_size": shape.ngram,
        "engram_num_embeddings": [sum(itertools.islice(primes, columns)) for _ in shape.engram],
        "dspark_target_layer_ids": list(shape.targets),
        "sliding_window": shape.window,
        "index_topk": shape.topk,
        "num_experts_per_tok": shape.experts,
        "max_position_embeddings": shape.context,
    }
    top = {key: value for key, value in BASE.items() if key != "vision_config"}  # image rows come from the test
    config = ModelConfig.from_dict(top | {"text_config": text_config})
    tensors = random_tensors(config, shape.seed)
    if shape.loud_tokens:
        for name in tensors:
            if name.endswith("head.weight"):  # that of the model, and the one that corrects drafts
                tensors[name][shape.loud_tokens :] = 0
    compressed_ids = torch.arange(config.vocab_size) % config.engram_compressed_vocab_size
    with torch.inference_mode():
        source = WeightSource(tensors, config, weights="dense")
        return Model(config, source, compressed_ids if shape.engram else None)
