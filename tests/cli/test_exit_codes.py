import importlib

import pytest

from ftrain.cli.exit_codes import CODES, exit_code


@pytest.mark.parametrize("path", CODES)
def test_every_named_class_is_an_exception_of_that_path(path):
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    assert issubclass(found, Exception)
    assert f"{found.__module__}.{found.__name__}" == path
    assert exit_code(found.__new__(found)) == CODES[path]
