"""Run a launcher of several processes (accelerate, torchrun) so that signals and exit codes mean what they say.

torchrun ends with exit code 1 whatever happened. Here the code is 2 for a mistake of the user and 128 + n for a run
that signal n stopped. A first signal is passed on, so that the run can save; a second one ends all processes at once.

Example::

    python -m tinyvae.training.launch accelerate launch --num_processes 8 -m tinyvae train h100
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tinyvae.terminal import outlive_readers
from tinyvae.training.guards import SignalWatch


def run_launcher(command: list[str]) -> int:
    """Run a command to its end; return the exit code of the run."""
    outlive_readers()
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "exit_note"  # a rank that ends early writes its exit code and the reason there
        watch = SignalWatch(pass_on=lambda number: launcher.send_signal(number))
        try:
            launcher = subprocess.Popen(
                command,
                env={**os.environ, "TINYVAE_EXIT_NOTE": str(note)},
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a signal from the keyboard must not arrive twice
            )
        except OSError as fault:
            watch.close()
            advice = "install it, or activate the environment that has it"
            print(f"tinyvae: error: {command[0]} cannot be started ({fault.strerror}); {advice}.", file=sys.stderr)
            return 2
        watch.hold()
        code = launcher.wait()
        watch.close()
        said, _, reason = note.read_text().partition("\n") if note.is_file() else ("", "", "")
        noted = int(said or 0)  # nothing, also where a rank was killed just before it wrote
    if noted == 2:
        print(f"tinyvae: error: {reason.strip()}", file=sys.stderr)  # again: torchrun's own words hide the first time
        return 2
    stopped_by = watch.received or max(0, noted - 128)
    if stopped_by and code != 0:
        print(f"stopped by {signal.Signals(stopped_by).name}; go on with --resume latest", file=sys.stderr)
        return 128 + stopped_by
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(run_launcher(sys.argv[1:]))
