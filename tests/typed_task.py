"""A task whose arguments have every type that a config can express; its annotations are strings."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, NotRequired, TypedDict

import jax
import numpy as np
from regression import init_params, loss_fn, make_arrays

from ftrain.data import ArraySource
from ftrain.hooks import SaveListener
from ftrain.tasks import Task

received: dict[str, object] = {}  # by the last call of `typed`


class Activation(enum.Enum):
    RELU = "relu"
    GELU = "gelu"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass(frozen=True)
class Head:
    width: int = 8
    dropout: float = 0.0
    activation: Activation = Activation.RELU
    sizes: list[int] = dataclasses.field(default_factory=lambda: [4, 2])

    def __post_init__(self):
        if self.width < 1:
            raise ValueError(f"width must be >= 1, got {self.width}")


@dataclasses.dataclass(frozen=True)
class Encoder:
    depth: int
    head: Head = Head(width=16)
    parent: Encoder | None = None


class Span(NamedTuple):
    start: int
    stop: int = 10


class Options(TypedDict):
    rate: float
    note: NotRequired[str]


class Opaque:
    def __init__(self, size: int = 1):
        self.size = size


ENCODER = Encoder(depth=2)
SPAN = Span(1)


def typed(
    encoder: Encoder = ENCODER,
    head: Head | None = None,
    heads: list[Head] = [],  # noqa: B006 - as users write it
    activation: Activation = Activation.GELU,
    level: Level = Level.LOW,
    mode: Literal["fast", "slow"] = "fast",
    weights: dict[str, float] | None = None,
    scales: dict[int, float] | None = None,
    sizes: tuple[int, ...] = (1, 2),
    pair: tuple[int, str] = (1, "a"),
    where: Path | None = None,
    limit: float = float("inf"),
    span: Span = SPAN,
    options: Options | None = None,
    norm: Callable[[jax.Array], jax.Array] | None = None,
    opaque: Opaque | None = None,
    array: np.ndarray | None = None,
    unresolved: NoSuchName | None = None,  # noqa: F821  # pyright: ignore[reportUndefinedVariable] - the case
) -> Task:
    received.clear()
    received.update(locals())
    return Task(init_params, loss_fn, ArraySource(make_arrays()))


class Demanding(SaveListener):
    def __init__(self, place: str):
        self.place = place


def needs_opaque(opaque: Opaque) -> Task:
    return typed(opaque=opaque)


def raising() -> Task:
    raise KeyError("of the task")
