"""The image tower and the aligner: patches of one image in, rows of the text model's width out.

Dimensions: N patches, D text width, H heads, C head width. The tower's own width has no letter in the project's table;
it is `hidden_size` of `vision_config`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from leadline.config.model import ModelConfig, VisionConfig
from leadline.config.token_types import TokenType
from leadline.errors import ConfigError
from leadline.ops.norm import rms_norm

_NORM_EPS = 1e-6  # of the tower alone; the text model uses rms_norm_eps


class Weights(Protocol):
    """The part of a weight source that the tower needs."""

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class _Block:
    norm1: torch.Tensor
    wqkv: _Linear
    wo: _Linear
    norm2: torch.Tensor
    w1: _Linear
    w2: _Linear


class VisionTower:
    """Tower and aligner of one model; takes its tensors (`vision.*`, `aligner.*`) from `weights`.

    Every operation takes and gives bf16; norms, rotation and softmax run in fp32 inside. Each image is computed on its
    own, so its rows do not depend on other images.
    Source: architecture.md 4.15, inference/vision.py.
    """

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        if config.vision is None:
            raise ConfigError("vision_config: expected an object, got none; this model does not read images")
        self.vision: VisionConfig = config.vision

        def linear(name: str, bias: bool = True) -> _Linear:
            return _Linear(weights.tensor(f"{name}.weight"), weights.tensor(f"{name}.bias") if bias else None)

        self._embed = linear("vision.patch_embed.proj")
        self._blocks = [
            _Block(
                norm1=weights.tensor(f"{block}.norm1.weight", torch.float32),
                wqkv=linear(f"{block}.attn.wqkv"),
                wo=linear(f"{block}.attn.wo"),
                norm2=weights.tensor(f"{block}.norm2.weight", torch.float32),
                w1=linear(f"{block}.mlp.w1", bias=False),
                w2=linear(f"{block}.mlp.w2", bias=False),
            )
            for block in (f"vision.blocks.{i}" for i in range(self.vision.num_hidden_layers))
        ]
        self._norm = weights.tensor("vision.norm.weight", torch.float32)
        self._align1 = linear("aligner.w1")
        self._align2 = linear("aligner.w2")

    def encode(self, patches_ND: torch.Tensor, grid_h: int, grid_w: int) -> torch.Tensor:
        """Rows of one image for its IMAGE positions.

        Args:
            patches_ND: [grid_h * grid_w, 3 * p * p] bf16, patches in reading order.
            grid_h, grid_w: rows and columns of patches, each at least 1.
        Returns: [ceil(grid_h / r) * ceil(grid_w / r), D] bf16 with r = downsample_ratio, blocks in reading order.
        """
        return self.align(self.features(patches_ND, grid_h, grid_w), grid_h, grid_w)

    def features(self, patches_ND: torch.Tensor, grid_h: int, grid_w: int) -> torch.Tensor:
        """The tower alone: [grid_h * grid_w, hidden_size] bf16. Arguments as in `encode`."""
        assert patches_ND.shape == (grid_h * grid_w, 3 * self.vision.patch_size**2)
        cos, sin = _grid_rotation(grid_h, grid_w, self.vision, patches_ND.device)
        x = self._embed(patches_ND)
        for block in self._blocks:
            x = x + block.wo(self._attend(block.wqkv(rms_norm(x, block.norm1, _NORM_EPS)), cos, sin))
            gate, up = block.w1(rms_norm(x, block.norm2, _NORM_EPS)).chunk(2, dim=-1)
            x = x + block.w2(F.silu(gate) * up)
        return rms_norm(x, self._norm, _NORM_EPS)

    def align(self, features: torch.Tensor, grid_h: int, grid_w: int) -> torch.Tensor:
        """The aligner alone: features [grid_h * grid_w, hidden_size] bf16 to rows [image tokens, D] bf16.

        Each row sees a square of r x r patches; the grid is zero-padded to the right and below.
        """
        r = self.vision.downsample_ratio
        grid = features.view(grid_h, grid_w, -1).permute(2, 0, 1)
        grid = F.pad(grid, (0, -grid_w % r, 0, -grid_h % r))
        channels, height, width = grid.shape
        squares = grid.view(channels, height // r, r, width // r, r).permute(1, 3, 0, 2, 4)
        return self._align2(F.gelu(self._align1(squares.reshape(-1, channels * r * r))))

    def _attend(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Full bidirectional attention over one image. qkv: [N, 3 * hidden_size], three contiguous thirds.

        The operands are bf16 values in fp32, so that the probabilities are not rounded to bf16.
        """
        heads = self.vision.num_attention_heads
        q_HNC, k_HNC, v_HNC = qkv.float().view(qkv.shape[0], 3, heads, -1).permute(1, 2, 0, 3)
        q_HNC, k_HNC = _rotate(q_HNC, cos, sin), _rotate(k_HNC, cos, sin)
        out_HNC = F.scaled_dot_product_attention(q_HNC[None], k_HNC[None], v_HNC[None])[0]
        return out_HNC.bfloat16().transpose(0, 1).reshape(qkv.shape[0], -1)


def span_rows(
    aligned: torch.Tensor,
    token_types: torch.Tensor,
    image_start: torch.Tensor,
    image_newline: torch.Tensor,
    image_end: torch.Tensor,
) -> torch.Tensor:
    """Embeddings of all positions of the image spans in a run of prompt positions.

    Args:
        aligned: [n_IMAGE, D] bf16, aligner rows of all images in prompt order.
        token_types: [n] int64, `TokenType` of each position; text positions are left out of the result.
        image_start, image_newline, image_end: [D] bf16, learned.
    Returns: [positions that are not text, D] bf16, in order.
    Edge cases: only text: [0, D].
    """
    span_types = token_types[token_types != TokenType.TEXT]
    is_image = span_types == TokenType.IMAGE
    learned = torch.stack([image_start, aligned.new_zeros(image_start.shape), image_newline, image_end])
    rows = learned[span_types]
    rows[is_image] = aligned
    return rows


def _grid_rotation(
    grid_h: int, grid_w: int, vision: VisionConfig, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, [N, C / 2] f32: the first half of the pairs turns with the row, the second with the column."""
    head_dim = vision.hidden_size // vision.num_attention_heads
    quarter = torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=device)
    frequencies = 1.0 / vision.rope_theta ** (quarter / (head_dim // 2))
    rows = torch.arange(grid_h, device=device).float()[:, None] * frequencies
    columns = torch.arange(grid_w, device=device).float()[:, None] * frequencies
    angles = torch.cat([rows.repeat_interleave(grid_w, 0), columns.repeat(grid_h, 1)], dim=1)
    return angles.cos(), angles.sin()


def _rotate(x_HNC: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the channel pairs (i, i + C / 2) in fp32, rounded to bf16 and widened again."""
    low, high = x_HNC.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).bfloat16().float()
