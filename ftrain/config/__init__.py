"""Configs: TOML tables that call functions, checked before anything is built."""

from ftrain.config.build import Job as Job
from ftrain.config.build import build as build
from ftrain.config.load import ConfigError as ConfigError
from ftrain.config.load import load as load
from ftrain.config.plan import Plan as Plan
from ftrain.config.plan import plan as plan
from ftrain.config.run_directory import claim as claim
from ftrain.config.schema import json_schema as json_schema
