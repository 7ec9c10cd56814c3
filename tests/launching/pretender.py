"""A stand-in for a training process: it follows the protocol, in step with others, without jax.

pretender.py home=DIRECTORY steps=20 pace=0.01 save_every=5 [action=WORD ...]

The processes wait for each other at every step, through files in `home`. The first one "saves" the
step there, and the next attempt resumes from it. `ACTIONS` lists what else it can do.
"""

import atexit
import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ftrain.launching import HUNG, PEER_FAILED, USER_ERROR, parse_faults
from ftrain.launching.reporter import reporter_of_this_process


class Pretender:
    def __init__(self, home: Path, steps: int, pace: float, save_every: int):
        cluster = json.loads(os.environ["FTRAIN_CLUSTER"])
        self.index = cluster["task"]["index"]
        self.count = len(cluster["cluster"]["worker"])
        self.attempt = int(os.environ["FTRAIN_ATTEMPT"])
        self.pipe = int(os.environ["FTRAIN_PROGRESS"])
        self.faults = parse_faults(os.environ.get("FTRAIN_INJECT", "")) if self.attempt == 0 else []
        self.saved = home / "saved"
        self.meeting = home / f"attempt-{self.attempt}"
        self.meeting.mkdir(exist_ok=True)
        (self.meeting / f"pid-{self.index}").write_text(f"{os.getpid()}")
        self.steps, self.pace, self.save_every = steps, pace, save_every
        self.step = int(self.saved.read_text()) if self.saved.exists() else 0
        self.on_step: Callable[[], None] = lambda: None
        signal.signal(signal.SIGTERM, self.ask)

    def tell(self, **fields: object) -> None:
        os.write(self.pipe, (json.dumps(fields) + "\n").encode())

    def ask(self, number: int, _: object) -> None:
        (self.meeting / "stop").write_text(signal.Signals(number).name)

    def run(self) -> None:
        self.tell(busy="starting")
        self.tell(step=self.step, steps=self.steps)
        while self.step < self.steps:
            self.meet()
            if (self.meeting / f"stopping-{self.step}").exists():
                self.save()
                self.tell(stopped=(self.meeting / "stop").read_text())
                return
            time.sleep(self.pace)
            self.step += 1
            self.misbehave()
            self.on_step()
            self.tell(step=self.step, steps=self.steps, loss=1 / self.step)
            if self.step % self.save_every == 0:
                self.save()
        self.tell(done=self.step)

    def meet(self) -> None:
        """Wait until all have reached this step; the last process decides whether to stop there."""
        if (self.meeting / "stop").exists() and self.index == 0:
            (self.meeting / f"stopping-{self.step}").touch()
        (self.meeting / f"{self.step}-{self.index}").touch()
        for other in range(self.count):
            while not (self.meeting / f"{self.step}-{other}").exists():
                self.check_peer(other)
                time.sleep(0.002)

    def check_peer(self, other: int) -> None:
        path = self.meeting / f"pid-{other}"
        if path.exists() and path.read_text() and is_gone(int(path.read_text())):
            self.tell(failed="PeerFailed", message=f"process {other} is gone", because=other)
            sys.exit(PEER_FAILED)

    def save(self) -> None:
        if self.index == 0:
            beside = self.saved.with_name("saving")
            beside.write_text(f"{self.step}")
            beside.replace(self.saved)

    def misbehave(self) -> None:
        for fault in self.faults:
            if fault.rank == self.index and fault.step == self.step:
                match fault.kind:
                    case "kill":
                        os.kill(os.getpid(), signal.SIGKILL)
                    case "freeze":
                        os.kill(os.getpid(), signal.SIGSTOP)
                    case "hang":
                        threading.Event().wait()
                    case "nan":
                        self.tell(failed="NonFiniteError", message="loss is nan", retry=False)
                        sys.exit(1)
                    case "exit":
                        sys.exit(fault.code)


def is_gone(pid: int) -> bool:
    """True if a process has exited; a zombie counts."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def follow_lifeline() -> None:
    def follow() -> None:
        os.read(int(os.environ["FTRAIN_LIFELINE"]), 1)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def raise_grandchildren(pretender: Pretender) -> None:
    """A child and a grandchild, which outlive their parents and ignore signals."""
    program = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "os.fork()\n"
        "open(f'{sys.argv[1]}-{os.getpid()}', 'w').close()\n"
        "time.sleep(600)\n"
    )
    prefix = pretender.meeting / f"grandchild-{pretender.index}"
    subprocess.Popen([sys.executable, "-c", program, str(prefix)])
    while len(list(pretender.meeting.glob(f"{prefix.name}-*"))) < 2:
        time.sleep(0.005)


def flood(pretender: Pretender) -> None:
    for number in range(5_000):
        print(f"{pretender.index}:{number} " + "x" * 60)


def print_oddly(pretender: Pretender) -> None:
    out = sys.stdout.buffer
    out.write(
        b"bad \xff\xfe bytes\n[Gloo] Rank 0 is connected to 1 peer ranks\n\n"
        + b"y" * 200_000
        + b"\n"
    )
    out.write(
        b"E1117 11:28:56.2 9 agent.cc:289] Polled an error from coordination service (this can be\n"
    )
    out.write(b"no newline")
    out.flush()
    print("to stderr", file=sys.stderr, flush=True)


def ignore_sigterm(pretender: Pretender) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def hang_on_sigterm(pretender: Pretender) -> None:
    if pretender.index == 0:
        signal.signal(signal.SIGTERM, lambda *_: threading.Event().wait())


def die_of_sigterm(pretender: Pretender) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def make_a_mistake(pretender: Pretender) -> None:
    print("ftrain: the config is wrong", file=sys.stderr)
    sys.exit(USER_ERROR)


def find_itself_hanging(pretender: Pretender) -> None:
    """The watchdogs of the others fire before the supervisor acts: process 1 hangs."""
    if pretender.attempt == 0 and pretender.index == 1:
        pretender.on_step = lambda: threading.Event().wait() if pretender.step == 3 else None
    elif pretender.attempt == 0:

        def watch() -> None:
            while not (pretender.meeting / f"3-{pretender.index}").exists():
                time.sleep(0.005)
            time.sleep(0.3)
            pretender.tell(failed="Hang", message="no step was finished", retry=True)
            os._exit(HUNG)

        threading.Thread(target=watch, daemon=True).start()


def always_die(pretender: Pretender) -> None:
    if pretender.index == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def always_raise(pretender: Pretender) -> None:
    """At the same step in every attempt."""
    if pretender.index == 0:
        pretender.on_step = lambda: sys.exit(3) if pretender.step == 7 else None


def stay(pretender: Pretender) -> None:
    """Process 0 reports that it is done, but does not exit."""
    if pretender.index == 0 and pretender.attempt == 0:
        pretender.pace = 0.0
        atexit.register(threading.Event().wait)


def report(pretender: Pretender) -> None:
    """As real programs do."""
    reporter_of_this_process()


def dump_on_abort(pretender: Pretender) -> None:
    faulthandler.enable()


def be_busy(pretender: Pretender) -> None:
    """For much longer than the hang timeout."""
    for _ in range(22):
        pretender.tell(busy="compiling")
        time.sleep(0.1)


def lie(pretender: Pretender) -> None:
    """Write lines that are not messages."""
    os.write(
        pretender.pipe,
        b"\xff\n[]\n{}\n" + b"[" * 9000 + b'\n{"step": -1}\n{"step": true}\nnull\n"step"\n',
    )


def keep_talking(pretender: Pretender) -> None:
    """Process 1 reports the same step forever, which is not a sign of life."""

    def talk() -> None:
        while pretender.step == 3:
            pretender.tell(step=pretender.step, steps=pretender.steps)
            time.sleep(0.02)

    if pretender.index == 1 and pretender.attempt == 0:
        pretender.on_step = lambda: talk() if pretender.step == 3 else None


def show_environment(pretender: Pretender) -> None:
    names = sorted(
        name
        for name in os.environ
        if name.startswith("FTRAIN_") or name == "JAX_CUDA_VISIBLE_DEVICES"
    )
    given = {name: os.environ[name] for name in names}
    descriptors = [
        int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")
    ]
    facts = {
        "given": given,
        "descriptors": descriptors,
        "session": os.getsid(0),
        "pid": os.getpid(),
    }
    facts["input"] = os.readlink("/proc/self/fd/0")
    (pretender.meeting / f"facts-{pretender.index}").write_text(json.dumps(facts))


ACTIONS: dict[str, Callable[[Pretender], None]] = {
    action.__name__: action
    for action in (
        raise_grandchildren,
        flood,
        print_oddly,
        ignore_sigterm,
        hang_on_sigterm,
        die_of_sigterm,
        report,
        dump_on_abort,
        be_busy,
        make_a_mistake,
        find_itself_hanging,
        always_die,
        always_raise,
        stay,
        lie,
        keep_talking,
        show_environment,
    )
}


def main() -> None:
    options: dict[str, str] = {"steps": "20", "pace": "0.01", "save_every": "5"}
    actions = []
    for name, _, value in (word.partition("=") for word in sys.argv[1:]):
        if name == "action":
            actions.append(value)
        else:
            options[name] = value
    follow_lifeline()
    pretender = Pretender(
        Path(options["home"]),
        int(options["steps"]),
        float(options["pace"]),
        int(options["save_every"]),
    )
    for action in actions:
        ACTIONS[action](pretender)
    pretender.run()


if __name__ == "__main__":
    main()
