"""Transforms as configs call them: clipping by name, and schedules for the numbers of optax."""

import inspect
from collections.abc import Callable, Collection
from typing import Any

import optax

from ftrain.gradients import as_transform
from ftrain.schedules import Schedule

Factory = Callable[..., optax.GradientTransformation]


def clipping(function: Callable[..., Any]) -> Factory:
    """Return the function that makes a transform from a function that clips gradients."""
    numbers = [
        parameter.replace(annotation=float | Schedule)
        for name, parameter in inspect.signature(function).parameters.items()
        if name.startswith("clip_")
    ]

    def make(**options: Any) -> optax.GradientTransformation:
        return as_transform(function, **options)

    return _with_signature(make, function, numbers)


def with_schedules(factory: Factory, names: Collection[str]) -> Factory:
    """Return `factory`, of optax, with schedules for numbers that it takes only as constants."""
    parameters = inspect.signature(factory).parameters
    injected = optax.inject_hyperparams(factory, static_args=parameters.keys() - {*names})

    def make(**options: Any) -> optax.GradientTransformation:
        return injected(**options)

    scheduled = [
        each.replace(annotation=float | Schedule) if name in names else each
        for name, each in parameters.items()
    ]
    return _with_signature(make, factory, scheduled)


def _with_signature(
    make: Factory, function: Callable[..., Any], parameters: list[inspect.Parameter]
) -> Factory:
    """Give `make` the name and the description of a function, and these parameters."""
    annotated = [each for each in parameters if each.annotation is not each.empty]
    make.__doc__ = function.__doc__
    make.__qualname__ = function.__qualname__
    make.__annotations__ = {each.name: each.annotation for each in annotated}
    vars(make)["__signature__"] = inspect.Signature(parameters)
    return make
