"""The compilation cache: what XLA compiled once, it need not compile again in the next process."""

import os
from pathlib import Path
from typing import Any

import jax


def use_compilation_cache() -> None:
    """Keep compiled programs in the user's cache directory, unless jax was told where to keep them, or not to."""
    settings: Any = (
        jax.config
    )  # jax defines its attributes at run time, where a type checker cannot see them
    if settings.jax_compilation_cache_dir is not None or not settings.jax_enable_compilation_cache:
        return
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    jax.config.update("jax_compilation_cache_dir", str(caches / "ftrain" / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
