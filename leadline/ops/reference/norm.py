"""RMSNorm in torch."""

from torch import Tensor

from leadline.ops.reference.scalar import scalar


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float()
    n = y.square().mean(-1, True).add_(scalar(eps)).rsqrt_()
    return (y * n).mul_(weight).bfloat16()
