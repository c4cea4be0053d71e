"""What tests of failures in Python share: the rank that is hurt."""
import os

from harness import BUILD, ROOT, good


def fault_rank():
    """tests/fault_rank.c, built once."""
    target, library, source = BUILD / "tests" / "fault_rank", BUILD / "libddl.a", ROOT / "tests" / "fault_rank.c"
    good("make -s", f"B={BUILD}", library, timeout=300)
    if not target.exists() or target.stat().st_mtime < max(f.stat().st_mtime for f in (source, library)):
        target.parent.mkdir(parents=True, exist_ok=True)
        made = f"{target}.{os.getpid()}.tmp"  # another test may make it at the same time
        good("gcc -std=c11 -Wall -Wextra -Werror -g", "-o", made, f"-I{ROOT}", source, library, "-lpthread -ldl")
        os.replace(made, target)
    return target
