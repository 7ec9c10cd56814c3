"""Functions that a config can name: how names are looked up, and what signatures accept."""

import dataclasses
import functools
import importlib
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import optax

from ftrain import gradients, hooks, optimizers, schedules, tasks
from ftrain.config.forms import (
    Form,
    Made,
    alternatives,
    form_of,
    is_expressible,
    is_record,
    show_type,
)
from ftrain.config.transforms import clipping
from ftrain.suggestions import suggest
from ftrain.training import Hook, Trigger

# The keys of a config for an argument `when: Trigger`, and their types.
TIMING = {"every_steps": int, "every_secs": float, "at_steps": list[int], "first_steps": int}
_MISSING = inspect.Parameter.empty
_MODULE_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True)
class Parameter:
    """One key of a table: an argument of the function that the table calls."""

    name: str
    annotation: Any
    default: Any = _MISSING

    @property
    def required(self) -> bool:
        """True if there is no default."""
        return self.default is _MISSING

    @functools.cached_property
    def form(self) -> Form:
        """The TOML values that this key accepts."""
        return form_of(self.annotation)

    @property
    def is_expressible(self) -> bool:
        """True if TOML can express a value without naming a function of the user."""
        return is_expressible(self.form)

    @property
    def takes_function(self) -> bool:
        """True if this key accepts the name of a function, "package.module:name"."""
        return any(isinstance(form, Made) and form.is_function for form in alternatives(self.form))


def parameters(
    function: Callable[..., Any], given: frozenset[str] = frozenset()
) -> dict[str, Parameter]:
    """Return the arguments of `function` that a config may set: all but those that are `given`.

    `*args` with an annotation is one of them, as an array: `optax.chain` takes `args = [...]`.
    """
    if typing.is_typeddict(function):
        return _entries(function)
    hints = _hints(function)
    found: list[Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in given or parameter.kind is parameter.VAR_KEYWORD:
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            found += [Parameter(name, list[hints[name]], None)] if name in hints else []
        elif hints.get(name) is Trigger:
            default = _timing_of(parameter.default)
            found += [Parameter(key, kind, default.get(key)) for key, kind in TIMING.items()]
        else:
            found.append(Parameter(name, hints.get(name, Any), _default(function, parameter)))
    return {parameter.name: parameter for parameter in found}


def _entries(cls: Any) -> dict[str, Parameter]:
    """Return the keys of a TypedDict.

    Its own __optional_keys__ miss NotRequired where annotations are strings.
    """
    found: dict[str, Parameter] = {}
    for name, hint in _class_hints(cls, include_extras=True).items():
        origin = typing.get_origin(hint)
        is_optional = origin is typing.NotRequired or (
            origin is not typing.Required and name in cls.__optional_keys__
        )
        found[name] = Parameter(name, hint, None if is_optional else _MISSING)
    return found


def as_positional(
    function: Callable[..., Any], arguments: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return positional and keyword arguments; with `*args`, those before it go by position."""
    signature = (
        [] if typing.is_typeddict(function) else inspect.signature(function).parameters.values()
    )
    star = next((each.name for each in signature if each.kind is each.VAR_POSITIONAL), None)
    if star is None or star not in arguments:
        return [], dict(arguments)
    named = dict(arguments)
    positional: list[Any] = []
    for parameter in signature:
        if parameter.name == star:
            return [*positional, *named.pop(star)], named
        positional.append(named.pop(parameter.name, parameter.default))
    raise AssertionError(f"{star} is a parameter")


def takes_trigger(function: Callable[..., Any]) -> bool:
    """True for a function with an argument `when: Trigger`."""
    return _hints(function).get("when") is Trigger


def returned_type(function: Callable[..., Any]) -> Any:
    """Return the annotation of what a function returns, or None."""
    return _hints(function).get("return")


def _timing_of(trigger: Any) -> dict[str, Any]:
    """Return the keys of a default trigger; none if keys cannot express it."""
    steps = getattr(trigger, "steps", None)
    secs = getattr(trigger, "secs", None)
    return {"every_steps": steps, "every_secs": secs} if isinstance(steps or 0, int) else {}


def _default(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """Return the default of an argument; of a dataclass field, the result of its factory."""
    fields = getattr(function, "__dataclass_fields__", {}) if inspect.isclass(function) else {}
    factory = getattr(fields.get(parameter.name), "default_factory", None)
    if not callable(factory) or parameter.default is _MISSING:
        return parameter.default
    try:
        return factory()
    except Exception:  # noqa: BLE001 - of the user's factory; the class calls it again
        return parameter.default


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a function or a class, with strings resolved."""
    if inspect.isclass(function):
        own = _resolved(function.__init__)
        return own | _class_hints(function) if is_record(function) else own
    target = inspect.unwrap(function.func if isinstance(function, functools.partial) else function)
    is_instance = not hasattr(target, "__annotations__") and not inspect.isbuiltin(target)
    return _resolved(type(target).__call__ if is_instance else target)


def _class_hints(cls: type, *, include_extras: bool = False) -> dict[str, Any]:
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        module = sys.modules.get(base.__module__)
        names = {} if module is None else vars(module)
        hints |= _look_up(
            inspect.get_annotations(base),
            {**names, cls.__name__: cls, base.__name__: base},
            include_extras,
        )
    return hints


def _resolved(target: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(target)
    except Exception:  # noqa: BLE001 - one string may be any text; resolve the others
        return _look_up(getattr(target, "__annotations__", {}), getattr(target, "__globals__", {}))


def _look_up(
    written: Mapping[str, Any], names: Mapping[str, Any], include_extras: bool = False
) -> dict[str, Any]:
    """Resolve each annotation by itself; leave out those that only a type checker knows."""
    hints: dict[str, Any] = {}
    for name, hint in written.items():
        holder = types.SimpleNamespace(__annotations__={name: hint})
        try:
            hints |= typing.get_type_hints(holder, dict(names), include_extras=include_extras)
        except Exception:  # noqa: BLE001 - a string may be any text
            continue
    return hints


@dataclass(frozen=True)
class Kind:
    """A kind of component, such as optimizers: where plain names are looked up, what they return.

    Without a room, only full names are known.
    """

    room: ModuleType | None
    noun: str
    makes: Any  # the annotation of what the functions return
    is_made: Callable[[Any], bool]  # True for a component of this kind
    takes_functions: bool = False  # True if an argument may be the name of a function
    hidden: frozenset[str] = frozenset()  # names for which a config has another way
    others: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # from other rooms
    adapt: Callable[[Any], Any] = lambda made: made  # converts a result that is nearly one

    def components(self) -> dict[str, Callable[..., Any]]:
        """Return the functions and classes of this kind whose arguments TOML can express."""
        names = {} if self.room is None else vars(self.room)
        known = {
            name: value
            for name, value in names.items()
            if name not in self.hidden and self._makes_one(value) and self._is_expressible(value)
        }
        return known | dict(self.others)

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

    def _is_expressible(self, function: Callable[..., Any]) -> bool:
        needed = [parameter for parameter in parameters(function).values() if parameter.required]
        return all(
            each.is_expressible or (self.takes_functions and each.takes_function) for each in needed
        )

    def resolve(self, name: str) -> Callable[..., Any]:
        """Return the function of a name: "adam", "optax.adamw" or "package.module:name".

        Raises LookupError if there is none.
        """
        if ":" in name or "." in name:
            return _with_signature(find(name), name)
        if self.room is None:
            raise LookupError(f"{name!r} is not a full name; write package.module:name")
        found = self.components().get(name)
        if found is None:
            hint = suggest_or_list(name, self.components())
            raise LookupError(f"there is no {name!r} in {self.room.__name__}{hint}")
        return found


def _as_transform(made: Any) -> Any:
    """Convert `optax.MultiSteps`; its own method would drop arguments of `update`."""
    if not isinstance(made, optax.MultiSteps):
        return made
    return optax.GradientTransformationExtraArgs(
        made.init,
        made.update,  # pyright: ignore[reportArgumentType] - optax's type is for any state
    )


TASK = Kind(tasks, "an ftrain.tasks.Task", tasks.Task, lambda made: isinstance(made, tasks.Task))
OPTIMIZER = Kind(
    optimizers,
    "an optax.GradientTransformation",
    optax.GradientTransformation,
    lambda made: isinstance(made, optax.GradientTransformation),
    hidden=frozenset({"sync_replicas", "groups"}),  # they have their own tables
    others={"guard": gradients.guard, "loss_scaling": gradients.loss_scaling},
    adapt=_as_transform,
)
# An entry of a chain: an optimizer, or a change of the gradients for those after it.
TRANSFORM = dataclasses.replace(
    OPTIMIZER,
    others={
        **OPTIMIZER.others,
        "densify": gradients.densify,
        **{
            each.__name__: clipping(each)
            for each in (
                gradients.clip_by_average_norm,
                gradients.clip_by_global_norm,
                gradients.clip_by_norm,
                gradients.clip_by_value,
            )
        },
    },
)
HOOK = Kind(
    hooks,
    "an ftrain.Hook",
    Hook,
    lambda made: isinstance(made, Hook),
    takes_functions=True,
    # The first four have their own tables, and faults are an option of `ftrain launch`.
    hidden=frozenset({"CheckpointSaver", "Evaluator", "Logging", "SummarySaver", "Faults"}),
)
SCHEDULE = Kind(schedules, "a schedule, a function of the step", schedules.Schedule, callable)
FUNCTION = Kind(schedules, "a function", schedules.Schedule, callable)
UNKNOWN = Kind(  # for an argument without an annotation
    schedules,
    "a value",
    schedules.Schedule,
    lambda made: True,
    others=OPTIMIZER.components(),
    adapt=OPTIMIZER.adapt,
)


def kind_of(made: Made) -> Kind:
    """Return the kind of component that a form accepts."""
    if made.role != "instance":
        return {"optimizer": OPTIMIZER, "schedule": SCHEDULE, "function": FUNCTION}[made.role]
    return instances_of(made.annotation)


def instances_of(annotation: Any) -> Kind:
    """Return the kind of all functions and classes that make an instance of a class."""
    cls = typing.get_origin(annotation) or annotation

    def is_made(made: Any) -> bool:
        try:
            return isinstance(made, cls)
        except TypeError:  # a protocol that cannot be checked
            return True

    return Kind(None, f"an instance of {show_type(annotation)}", cls, is_made)


def suggest_or_list(wrong: str, valid: Iterable[str]) -> str:
    """Return the end of an error message: the nearest valid name, or all if none is near."""
    valid = sorted(valid)
    everything = f"; there are {', '.join(valid)}" if valid else ""
    return suggest(wrong, valid) or everything


def find(name: str) -> Callable[..., Any]:
    """Return the function named "package.module:name" or "package.module.name".

    Raises LookupError if there is none.
    """
    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    found: Any = _import(module, name)
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            hint = suggest(part, dir(found))
            raise LookupError(
                f"{name!r} is missing: {module} has no function {attribute}{hint}"
            ) from None
        except Exception as error:  # from a module that imports some of its names late
            raise LookupError(
                f"{name!r} cannot be imported: {type(error).__name__}: {error}"
            ) from error
    if not callable(found):
        raise LookupError(f"{name!r} is not a function or class, it is {found!r:.60}")
    return found


def _with_signature(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    try:
        inspect.signature(function)
    except (ValueError, TypeError):  # some built-in functions have none
        raise LookupError(
            f"{name!r} cannot be used: it has no signature to check arguments against"
        ) from None
    return function


def _import(module: str, name: str) -> ModuleType:
    if not _MODULE_NAME.fullmatch(module):
        raise LookupError(f"{name!r} is not a valid name; write package.module:name")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        where = "searched in the working directory and the installed packages"
        raise LookupError(f"{name!r} cannot be imported: {error}; {where}") from error
    except (Exception, SystemExit) as error:  # from the user's code
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise LookupError(f"{name!r} cannot be imported: {what}") from error
