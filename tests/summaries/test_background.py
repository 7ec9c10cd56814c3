"""The thread that writes for a run: nothing is lost, and Ctrl-C at any time does not hang it."""

import subprocess
import sys

from command import environment

PROGRAM = """
import random, signal
from ftrain.coordination import Coordinator
from ftrain.summaries.background import BackgroundWriter

class Writer:
    steps = []
    def write(self, step, values): self.steps.append(step)
    def close(self): print("closed")

signal.alarm(200)  # a hang ends the process
writer = Writer()
background = BackgroundWriter([writer], Coordinator())
chance = random.Random(0)
written = []
signal.signal(signal.SIGALRM, signal.default_int_handler)
for _ in range(400):
    try:
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, 5e-4))
        while True:
            background.write(len(written), {})
            written.append(None)
    except KeyboardInterrupt:
        pass
signal.signal(signal.SIGALRM, signal.SIG_DFL)
signal.alarm(200)
background.flush()
known = len(writer.steps)
assert known >= len(written) and writer.steps == sorted(writer.steps), (known, len(written))
background.close()
"""


def test_interrupts_at_any_moment_do_not_make_closing_hang():
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr
