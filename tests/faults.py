"""What tests of failures in Python share: the rank that is hurt, and a port."""
import socket

from harness import BUILD, ROOT, good


def fault_rank():
    """tests/fault_rank.c, built once."""
    target, library, source = BUILD / "tests" / "fault_rank", BUILD / "libddl.a", ROOT / "tests" / "fault_rank.c"
    good("make -s", f"B={BUILD}", library, timeout=300)
    if not target.exists() or target.stat().st_mtime < max(f.stat().st_mtime for f in (source, library)):
        target.parent.mkdir(parents=True, exist_ok=True)
        good("gcc -std=c11 -Wall -Wextra -Werror -g", "-o", target, f"-I{ROOT}", source, library, "-lpthread -ldl")
    return target


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
