"""From the reference's names of optimizers to our functions."""

import re
from collections.abc import Callable
from typing import Any

from ftrain import optimizers


def function_named(name: str) -> Callable[..., Any]:
    """`ProximalAdagrad` is `ftrain.optimizers.proximal_adagrad`."""
    words = re.findall(r"[A-Z]+(?=[A-Z][a-z]|$)|[A-Z][a-z]+", name.replace("RMSProp", "Rmsprop"))
    return getattr(optimizers, "_".join(word.lower() for word in words))
