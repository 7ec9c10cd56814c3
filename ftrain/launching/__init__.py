"""Launching: a supervisor of processes on one machine, and the contract that it has with them. No jax in here."""

from ftrain.launching.contract import (
    HUNG,
    PEER_FAILED,
    TRANSIENT,
    USER_ERROR,
    Done,
    Failed,
    Message,
    Progress,
    Stopped,
    decode,
    encode,
)
from ftrain.launching.faults import Fault, parse_faults
from ftrain.launching.screen import Screen
from ftrain.launching.supervisor import Job, supervise

__all__ = [
    "HUNG",
    "PEER_FAILED",
    "TRANSIENT",
    "USER_ERROR",
    "Done",
    "Failed",
    "Fault",
    "Job",
    "Message",
    "Progress",
    "Screen",
    "Stopped",
    "decode",
    "encode",
    "parse_faults",
    "supervise",
]
