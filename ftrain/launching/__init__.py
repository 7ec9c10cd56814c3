"""Launching: a supervisor of processes on one machine, and its protocol; without jax."""

from ftrain.launching.faults import Fault, parse_faults
from ftrain.launching.output import Screen
from ftrain.launching.protocol import (
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
from ftrain.launching.supervisor import LaunchSpec, supervise

__all__ = [
    "HUNG",
    "PEER_FAILED",
    "TRANSIENT",
    "USER_ERROR",
    "Done",
    "Failed",
    "Fault",
    "LaunchSpec",
    "Message",
    "Progress",
    "Screen",
    "Stopped",
    "decode",
    "encode",
    "parse_faults",
    "supervise",
]
