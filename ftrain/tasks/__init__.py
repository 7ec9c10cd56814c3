"""Tasks: what the shipped configs train."""

from ftrain.tasks.digits import digits as digits
from ftrain.tasks.source_lm import source_lm as source_lm
from ftrain.tasks.task import Task as Task
