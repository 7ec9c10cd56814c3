"""Names: from the name of a component in a config to the function it calls."""

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ftrain.config.types import parameters, returned_type


@dataclass(frozen=True)
class Kind:
    """A kind of component: what its functions make, and the room where plain names are looked up."""

    room: ModuleType
    makes: Any

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
        found = getattr(_import(module, name), attribute, None) if module else self.components().get(name)
        if callable(found):
            return found
        if module:
            raise LookupError(f"{name!r} is not there: {module} has no function {attribute}")
        raise LookupError(f"there is no {name!r} in {self.room.__name__}{suggest(name, self.components())}")


def suggest(wrong: str, valid: Iterable[str]) -> str:
    """The valid name nearest to a wrong one, as the end of a sentence, or all of them if none is near."""
    valid = sorted(valid)
    near = difflib.get_close_matches(wrong, valid, n=1)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; there are {', '.join(valid)}" if valid else ""


def _is_sayable(function: Callable[..., Any]) -> bool:
    return all(parameter.is_plain or not parameter.required for parameter in parameters(function).values())


def _import(module: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise LookupError(f"{name!r} cannot be imported: {error}") from error
    except (ValueError, TypeError):  # an empty or relative module name
        raise LookupError(f"{name!r} is not a name; write package.module:name") from None
