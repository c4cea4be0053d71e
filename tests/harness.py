"""What test.h is for C, for tests in Python: one line per test, the last line "N passed, N failed, N skipped".

    from harness import test, check, skip, sh, main
    @test
    def header_compiles(): check(sh("gcc ...").returncode == 0)
    main()
"""
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import traceback

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = pathlib.Path(os.environ.get("TEST_BUILD", ROOT / "build"))
WARNINGS = "-Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror".split()
_tests = []


class Skipped(Exception):
    pass


def test(function):
    _tests.append(function)
    return function


def skip(reason):
    raise Skipped(reason)


def check(condition, text="check failed"):
    if not condition:
        raise AssertionError(text)


def sh(*command, timeout=120, cwd=ROOT, **options):
    """Runs a command, its output captured as text. Strings are split into words; lists and paths are taken as they are."""
    words = []
    for part in command:
        words += part.split() if isinstance(part, str) else map(str, part) if isinstance(part, list) else [str(part)]
    return subprocess.run(words, cwd=cwd, timeout=timeout, text=True, errors="replace", stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, **options)


def good(*command, **options):
    """The output of a command that must succeed."""
    result = sh(*command, **options)
    check(result.returncode == 0, f"{command} ended with {result.returncode}:\n{result.stdout[-3000:]}")
    return result.stdout


def scratch():
    return tempfile.TemporaryDirectory(prefix="ddl-test-")


def _run(function):
    start = time.monotonic()
    try:
        function()
        print(f"ok   {function.__name__} ({time.monotonic() - start:.2f} s)")
        return "passed"
    except Skipped as reason:
        print(f"skip {function.__name__}: {reason}")
        return "skipped"
    except AssertionError as error:
        print(f"FAIL {function.__name__}: {error}")
    except Exception:
        print(f"FAIL {function.__name__}:\n{traceback.format_exc()}")
    return "failed"


def main():
    wanted = sys.argv[1:]
    results = [_run(f) for f in _tests if not wanted or any(w in f.__name__ for w in wanted)]
    print("%d passed, %d failed, %d skipped" % tuple(results.count(r) for r in ("passed", "failed", "skipped")))
    sys.exit(1 if "failed" in results or not results else 0)
