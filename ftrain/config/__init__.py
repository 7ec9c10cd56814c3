"""Configs: TOML tables that call functions, checked before anything is built."""

from ftrain.config.build import build
from ftrain.config.job import Job
from ftrain.config.load import ConfigError, load
from ftrain.config.open_run import open_run
from ftrain.config.plan import Plan, plan
from ftrain.config.run_directory import claim
from ftrain.config.schema import json_schema

__all__ = [
    "ConfigError",
    "Job",
    "Plan",
    "build",
    "claim",
    "json_schema",
    "load",
    "open_run",
    "plan",
]
