"""Kinds of components: what a config can name, and where plain names are looked up."""

import difflib
import importlib
import inspect
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import optax

from ftrain import gradients, hooks, optimizers, schedules, tasks
from ftrain.config.forms import Made, show_type
from ftrain.config.types import parameters, returned_type
from ftrain.training import Hook

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True)
class Kind:
    """A kind of component: its room, and what its functions make. Without a room only full names are known."""

    room: ModuleType | None
    noun: str
    makes: Any  # the annotation of what they return
    is_made: Callable[[Any], bool]  # whether a value is one
    takes_functions: bool = False  # whether an argument may be a function, which a config names
    hidden: frozenset[str] = (
        frozenset()
    )  # what cannot be named, because a config says it in another way
    more: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # of other rooms
    adapt: Callable[[Any], Any] = lambda made: made  # what becomes of a value that is nearly one

    def components(self) -> dict[str, Callable[..., Any]]:
        """The functions and classes of the room that make one, out of arguments that a config can say."""
        names = {} if self.room is None else vars(self.room)
        known = {
            name: value
            for name, value in names.items()
            if name not in self.hidden and self._makes_one(value) and self._is_sayable(value)
        }
        return known | dict(self.more)

    def _makes_one(self, value: Any) -> bool:
        if inspect.isclass(self.makes) and inspect.isclass(value):
            return issubclass(value, self.makes) and value is not self.makes
        if not inspect.isfunction(value):
            return False
        returned = returned_type(value)
        is_subclass = (
            inspect.isclass(self.makes)
            and inspect.isclass(returned)
            and issubclass(returned, self.makes)
        )
        return is_subclass or returned == self.makes

    def _is_sayable(self, function: Callable[..., Any]) -> bool:
        needed = [parameter for parameter in parameters(function).values() if parameter.required]
        return all(
            each.is_sayable or (self.takes_functions and each.takes_function) for each in needed
        )

    def resolve(self, name: str) -> Callable[..., Any]:
        """The function called `name`: "adam" in the room, "optax.adamw" by its module, "package.module:name"."""
        if ":" in name or "." in name:
            return _with_signature(find(name), name)
        if self.room is None:
            raise LookupError(f"{name!r} is not a full name; write package.module:name")
        found = self.components().get(name)
        if found is None:
            raise LookupError(
                f"there is no {name!r} in {self.room.__name__}{suggest(name, self.components())}"
            )
        return found


TASK = Kind(tasks, "an ftrain.tasks.Task", tasks.Task, lambda made: isinstance(made, tasks.Task))
OPTIMIZER = Kind(
    optimizers,
    "an optax.GradientTransformation",
    optax.GradientTransformation,
    lambda made: isinstance(made, optax.GradientTransformation),
    hidden=frozenset({"sync_replicas"}),  # it has a table
    more={"guard": gradients.guard, "loss_scaling": gradients.loss_scaling},
    adapt=lambda made: (
        made.gradient_transformation() if isinstance(made, optax.MultiSteps) else made
    ),
)
HOOK = Kind(
    hooks,
    "an ftrain.Hook",
    Hook,
    lambda made: isinstance(made, Hook),
    takes_functions=True,
    # The first four have tables, and faults are an option of `ftrain launch`.
    hidden=frozenset({"CheckpointSaver", "Evaluator", "Logging", "SummarySaver", "Faults"}),
)
SCHEDULE = Kind(schedules, "a schedule, a function of the step", schedules.Schedule, callable)
FUNCTION = Kind(schedules, "a function", schedules.Schedule, callable)
UNKNOWN = Kind(  # for an argument without an annotation
    schedules,
    "a value",
    schedules.Schedule,
    lambda made: True,
    more=OPTIMIZER.components(),
    adapt=OPTIMIZER.adapt,
)


def kind_of(made: Made) -> Kind:
    """The kind of component that can stand where a form asks for what only a call makes."""
    if made.role != "instance":
        return {"optimizer": OPTIMIZER, "schedule": SCHEDULE, "function": FUNCTION}[made.role]
    return instances_of(made.annotation)


def instances_of(annotation: Any) -> Kind:
    """Any function or class that makes an instance of a class."""
    cls = typing.get_origin(annotation) or annotation

    def is_made(made: Any) -> bool:
        try:
            return isinstance(made, cls)
        except TypeError:  # a protocol that cannot be checked
            return True

    return Kind(None, f"an instance of {show_type(annotation)}", cls, is_made)


def suggest(wrong: str, valid: Iterable[str]) -> str:
    """The valid name nearest to a wrong one, as the end of a sentence, or all of them if none is near."""
    valid = sorted(valid)
    near = difflib.get_close_matches(wrong, valid, n=1)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; there are {', '.join(valid)}" if valid else ""


def find(name: str) -> Callable[..., Any]:
    """The function that "package.module:name" or "package.module.name" stands for; LookupError if there is none."""
    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    found: Any = _import(module, name)
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            near = difflib.get_close_matches(part, dir(found), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise LookupError(
                f"{name!r} is missing: {module} has no function {attribute}{hint}"
            ) from None
        except Exception as error:  # of a module that imports some of its names late
            raise LookupError(
                f"{name!r} cannot be imported: {type(error).__name__}: {error}"
            ) from error
    if not callable(found):
        raise LookupError(f"{name!r} is no function or class, it is {found!r:.60}")
    return found


def _with_signature(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    try:
        inspect.signature(function)
    except (ValueError, TypeError):  # some built-in functions have none
        message = (
            f"{name!r} cannot be used: it does not tell its arguments, so they cannot be checked"
        )
        raise LookupError(message) from None
    return function


def _import(module: str, name: str) -> ModuleType:
    if not _MODULE.fullmatch(module):
        raise LookupError(f"{name!r} is not a name; write package.module:name")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        where = "it is looked for in the working directory and among installed packages"
        raise LookupError(f"{name!r} cannot be imported: {error}; {where}") from error
    except (Exception, SystemExit) as error:  # of the user's own code
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise LookupError(f"{name!r} cannot be imported: {what}") from error
