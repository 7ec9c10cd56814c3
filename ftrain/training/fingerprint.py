"""Fingerprints: whether a function of arrays computes the same as in another process."""

import dataclasses
import enum
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

_LARGE = 1024  # elements; of larger constants only the shape counts
_PASSED_THROUGH = ("sharding_constraint", "device_put", "copy", "copy_p", "optimization_barrier")
_INLINED = ("jit", "pjit", "closed_call", "core_call")
_IGNORED = frozenset(  # parameters that do not change the result
    {
        *(
            "name",
            "debug_info",
            "metadata",
            "weak_type",
            "cost_estimate",
            "resource_env",
            "compiler_options_kvs",
        ),
        *(
            "mesh",
            "ctx_mesh",
            "context_mesh",
            "sharding",
            "shardings",
            "in_shardings",
            "out_shardings",
            "out_sharding",
        ),
        *(
            "layout",
            "in_layouts",
            "out_layouts",
            "donated_invars",
            "keep_unused",
            "inline",
            "unroll",
        ),
        *("prevent_cse", "policy", "differentiated"),
    }
)
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+|0x[0-9a-fA-F]{6,}")


def fingerprint(
    function: Callable[..., Any], *arguments: Any, outputs: int | None = None
) -> str | None:
    """Return a digest of what `function` computes, or of the first `outputs` leaves of its result.

    Only shapes and dtypes of the arguments matter. The digest depends on the operations, their
    constants and the data flow; not on names, addresses, line numbers, devices, or the order of
    independent operations. So it is the same for the same code in any process. None if the function
    cannot be traced.
    """
    try:
        closed = jax.make_jaxpr(function)(*arguments)
        return fingerprint_jaxpr(closed, outputs)
    except Exception:  # noqa: BLE001 - the error is raised again where the function is called
        return None


def fingerprint_jaxpr(closed: ClosedJaxpr, outputs: int | None = None) -> str:
    """Return a digest of a traced function, or of its first `outputs` results."""
    inputs = [
        _hash("input", number, _aval(variable))
        for number, variable in enumerate(closed.jaxpr.invars)
    ]
    results = _Digest().results(closed.jaxpr, closed.consts, inputs)
    return _hash(*results[:outputs]).hex()


class _Digest:
    """Hashes of the values in a jaxpr: of the operation, and of the hashes of its inputs."""

    def __init__(self) -> None:
        # Of inner jaxprs by id; they are kept alive, so that ids stay unique.
        self._known: dict[int, tuple[Any, bytes]] = {}

    def results(self, jaxpr: Jaxpr, consts: Iterable[Any], inputs: Iterable[bytes]) -> list[bytes]:
        """Return the hashes of the results, given those of the inputs."""
        values: dict[Any, bytes] = dict(zip(jaxpr.constvars, map(_array, consts), strict=True))
        values |= dict(zip(jaxpr.invars, inputs, strict=True))

        def read(variable: Any) -> bytes:
            return _array(variable.val) if isinstance(variable, Literal) else values[variable]

        for equation in jaxpr.eqns:
            given = [read(variable) for variable in equation.invars]
            values |= dict(zip(equation.outvars, self._apply(equation, given), strict=True))
        return [read(variable) for variable in jaxpr.outvars]

    def _apply(self, equation: Any, given: list[bytes]) -> list[bytes]:
        name = equation.primitive.name
        inner = equation.params.get("jaxpr")
        if name in _PASSED_THROUGH and len(given) == len(equation.outvars):
            return given
        if name in _INLINED and isinstance(inner, ClosedJaxpr):
            return self.results(inner.jaxpr, inner.consts, given)
        params = {key: value for key, value in equation.params.items() if key not in _IGNORED}
        own = _hash(name, self._plain(params), *given)
        return [
            _hash(own, number, _aval(variable)) for number, variable in enumerate(equation.outvars)
        ]

    def _inner(self, jaxpr: Any) -> bytes:
        if id(jaxpr) not in self._known:
            is_closed = isinstance(jaxpr, ClosedJaxpr)
            inner: Jaxpr = jaxpr.jaxpr if is_closed else jaxpr
            consts = jaxpr.consts if is_closed else [variable.aval for variable in inner.constvars]
            inputs = [
                _hash("input", number, _aval(variable))
                for number, variable in enumerate(inner.invars)
            ]
            self._known[id(jaxpr)] = jaxpr, _hash(*self.results(inner, consts, inputs))
        return self._known[id(jaxpr)][1]

    def _plain(self, value: Any) -> Any:
        """Convert a parameter of an operation to something with a reproducible `repr`."""
        if isinstance(value, (ClosedJaxpr, Jaxpr)):
            return self._inner(value).hex()
        if value is None or isinstance(value, (bool, int, float, complex)):
            return repr(value)
        if isinstance(value, str):
            return _ADDRESS.sub("", value)
        if isinstance(value, enum.Enum):
            return f"{type(value).__name__}.{value.name}"
        if isinstance(value, (np.ndarray, np.generic, jax.Array)):
            return _array(value).hex()
        if isinstance(value, np.dtype):
            return str(value)
        if isinstance(value, Mapping):
            return sorted(
                (str(key), self._plain(each)) for key, each in value.items() if key not in _IGNORED
            )
        if isinstance(value, (set, frozenset)):
            return sorted(repr(self._plain(each)) for each in value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return [type(value).__name__, *(self._plain(each) for each in value)]
        if isinstance(value, (tuple, list)):
            return [self._plain(each) for each in value]
        if callable(value):  # its address would differ
            return getattr(value, "__qualname__", type(value).__qualname__)
        if dataclasses.is_dataclass(value):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return [type(value).__name__, self._plain(fields)]
        text = str(value)
        return type(value).__name__ if _ADDRESS.search(text) else text


def _array(value: Any) -> bytes:
    """Return the hash of a constant: of its value if it is small, else of its shape."""
    if not isinstance(value, (np.ndarray, np.generic, jax.Array, bool, int, float, complex)):
        return _hash(
            type(value).__name__, getattr(value, "shape", ""), str(getattr(value, "dtype", ""))
        )
    if isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    if np.size(value) > _LARGE:
        return _hash("constant", np.shape(value), str(getattr(value, "dtype", "")))
    array = np.asarray(value)
    return _hash("constant", array.shape, str(array.dtype), array.tobytes())


def _aval(variable: Any) -> str:
    aval = variable.aval
    return f"{getattr(aval, 'dtype', '')}{getattr(aval, 'shape', '')}"


def _hash(*parts: Any) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()
