"""compiled: whether a program has to be compiled again. Compilers write what they read beside it (-MD -MF)."""
import os


def flags(target):
    """What the compiler is told besides."""
    return ["-MD", "-MF", f"{target}.d"]


def is_fresh(target, command, folder, linked=()):
    """Was the target made by this command, in that folder, and is it newer than all that it was made from?"""
    depfile, how = target.with_name(target.name + ".d"), target.with_name(target.name + ".how")
    if not target.exists() or not depfile.exists() or not how.exists() or how.read_text() != command:
        return False
    words = depfile.read_text().replace("\\\n", " ").split(":", 1)[1].split()
    made = target.stat().st_mtime
    return all(os.path.exists(w) and os.path.getmtime(w) <= made for w in (os.path.join(folder, w) for w in [*words, *linked]))


def note(target, command):
    """It was made by this command."""
    target.with_name(target.name + ".how").write_text(command)
