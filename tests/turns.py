"""turns: what repeats in another build, or over another carrier, what is shown elsewhere too, has its turn in every third
run, on average: drawn anew for each commit. `tests/run --whole`, and tests/run with names, leave nothing out."""
import hashlib
import os
import subprocess
import time

REASON = "its turn is in another run (tests/run --whole: all)"


def begin(root):
    """From here on, and in the programs that are started, two thirds are left out."""
    try:
        commit = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    except OSError:
        commit = ""
    os.environ.setdefault("TEST_TURN", commit or time.strftime("%F"))


def number(name):
    """Drawn by lot for this run."""
    return int.from_bytes(hashlib.sha256(f"{os.environ.get('TEST_TURN', '')} {name}".encode()).digest()[:4], "big")


def has_come(name, which=0, of=3):
    """of: so many take turns, and those of one name (which: 0, 1, ...) never at once."""
    return os.environ.get("TEST_TURN", "") == "" or number(name) % of == which
