"""RMSNorm in torch."""

from torch import Tensor

from leadline.ops.reference.scalar import inverse_rms


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float()
    return (y * inverse_rms(y, eps)).mul_(weight).bfloat16()
