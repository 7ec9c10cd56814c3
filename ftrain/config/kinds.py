"""Kinds of components: what a config can name, and where plain names are looked up."""

import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import optax

from ftrain import optimizers, schedules, tasks
from ftrain.config.types import parameters, returned_type

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True)
class Kind:
    """A kind of component: its room, and what its functions make."""

    room: ModuleType
    noun: str
    makes: Any  # the annotation of what they return
    is_made: Callable[[Any], bool]  # whether a value is one

    def components(self) -> dict[str, Callable[..., Any]]:
        """The functions of the room that make one, out of arguments that TOML can say."""
        functions = {name: value for name, value in vars(self.room).items() if inspect.isfunction(value)}
        return {
            name: function
            for name, function in functions.items()
            if not name.startswith("_") and returned_type(function) == self.makes and _is_sayable(function)
        }

    def resolve(self, name: str) -> Callable[..., Any]:
        """The function called `name`: "adam" in the room, "optax.adamw" by its module, "package.module:name"."""
        module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
        if not module:
            found = self.components().get(name)
            missing = f"there is no {name!r} in {self.room.__name__}{suggest(name, self.components())}"
        else:
            found = getattr(_import(module, name), attribute, None)
            missing = f"{name!r} is not there: {module} has no function {attribute}"
        if not callable(found):
            raise LookupError(missing)
        if not _has_signature(found):
            raise LookupError(f"{name!r} cannot be used: it does not tell its arguments, so they cannot be checked")
        return found


TASK = Kind(tasks, "an ftrain.tasks.Task", tasks.Task, lambda made: isinstance(made, tasks.Task))
OPTIMIZER = Kind(
    optimizers,
    "an optax.GradientTransformation",
    optax.GradientTransformation,
    lambda made: isinstance(made, optax.GradientTransformation),
)
SCHEDULE = Kind(schedules, "a schedule, a function of the step", schedules.Schedule, callable)


def suggest(wrong: str, valid: Iterable[str]) -> str:
    """The valid name nearest to a wrong one, as the end of a sentence, or all of them if none is near."""
    valid = sorted(valid)
    near = difflib.get_close_matches(wrong, valid, n=1)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; there are {', '.join(valid)}" if valid else ""


def _is_sayable(function: Callable[..., Any]) -> bool:
    return all(parameter.is_plain or not parameter.required for parameter in parameters(function).values())


def _has_signature(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function)
    except (ValueError, TypeError):  # some built-in functions have none
        return False
    return True


def _import(module: str, name: str) -> ModuleType:
    if not _MODULE.fullmatch(module):
        raise LookupError(f"{name!r} is not a name; write package.module:name")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        where = "it is looked for in the working directory and among installed packages"
        raise LookupError(f"{name!r} cannot be imported: {error}; {where}") from error
