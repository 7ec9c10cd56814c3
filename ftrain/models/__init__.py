"""Models of flax, equinox and haiku as pure functions: parameters, model state, `apply`."""

from ftrain.models.equinox import equinox
from ftrain.models.haiku import haiku
from ftrain.models.linen import linen
from ftrain.models.model import Model
from ftrain.models.nnx import nnx

__all__ = [
    "Model",
    "equinox",
    "haiku",
    "linen",
    "nnx",
]
