"""Pooling of token pairs in torch."""

from torch import Tensor

from leadline.ops.reference.scalar import scalar


def pool_pairs(c_N2C: Tensor, g_N2C: Tensor) -> Tensor:
    # The softmax of two values, 1 / (1 + exp(other - own)), in functions whose results do not depend on neighbours.
    weight_N2C = (g_N2C.flip(1) - g_N2C).exp_().add_(scalar(1.0)).reciprocal_()
    c_N2C = c_N2C * weight_N2C
    return c_N2C[:, 0] + c_N2C[:, 1]
