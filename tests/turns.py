"""turns: what repeats in another build, or over another carrier, what is shown elsewhere too, has its turn in every second
run, on average: drawn anew for each commit. `tests/run --whole`, and tests/run with names, leave nothing out."""
import hashlib
import os
import subprocess
import time

REASON = "its turn is in another run (tests/run --whole: all)"


def begin(root):
    """From here on, and in the programs that are started, half is left out."""
    try:
        commit = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    except OSError:
        commit = ""
    os.environ.setdefault("TEST_TURN", commit or time.strftime("%F"))


def number(name):
    """Drawn by lot for this run."""
    return int.from_bytes(hashlib.sha256(f"{os.environ.get('TEST_TURN', '')} {name}".encode()).digest()[:4], "big")


def has_come(name, other=False):
    """other: of two of one name one has its turn each time."""
    return os.environ.get("TEST_TURN", "") == "" or number(name) % 2 == (1 if other else 0)
