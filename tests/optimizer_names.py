"""Map the names of TensorFlow 1's optimizers to functions of ftrain."""

import re
from collections.abc import Callable
from typing import Any

from ftrain import optimizers


def function_named(name: str) -> Callable[..., Any]:
    """Return `ftrain.optimizers.proximal_adagrad` for `ProximalAdagrad`, and so on."""
    words = re.findall(r"[A-Z]+(?=[A-Z][a-z]|$)|[A-Z][a-z]+", name.replace("RMSProp", "Rmsprop"))
    return getattr(optimizers, "_".join(word.lower() for word in words))
