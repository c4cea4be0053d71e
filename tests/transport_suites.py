"""Suites of the core over a plugin: what test_transport_suites.py and test_transport_failures.py share."""
import functools
import os
import re

import turns
from harness import BUILD, check, good, sh, skip, test

MESSAGES = ["test_p2p", "test_collectives", "test_v_forms"]
FAILURES = ["test_requests", "test_leave", "test_mismatch", "test_threads", "test_stop", "test_agree", "test_groups",
            "test_persistent"]
# To begin costs a rank over libfabric a tenth of a second, and the schedules of deaths are tried over the others.
FEW = {} if os.environ.get("TEST_TORTURE") else {"FAULT_RUNS": "4"}
# The suites that one carrier has passed whole others, and other ways, pass in one case of three, for each commit another.
THIN = {} if {"TEST_WHOLE", "TEST_TORTURE", "TEST_SAMPLE"} & set(os.environ) else \
    {"TEST_SAMPLE": "3", "TEST_SEED": str(turns.number("seed") % 1000 + 1)}
FABRIC = ("fabric:tcp", "fabric:tcp;ofi_rxm")


@functools.cache
def begun_before_main():
    """What has libfabric begun once for all ranks that a suite forks; whole programs begin it anew, in test_fabric_hosts."""
    library = BUILD / "tests" / "fabric_begun.so"
    made = f"{library}.{os.getpid()}.tmp"  # another test may make it at the same time
    good("gcc -std=c11 -D_GNU_SOURCE -O1 -Wall -Wextra -Werror -fPIC -shared -o", made, "tests/fabric_begun.c -lfabric")
    os.replace(made, library)
    return str(library)


@functools.cache
def with_asan():
    """A folder with the libfabric plugin, built to be loaded by programs under ASan."""
    folder = BUILD / "tests" / "asan-plugins"
    folder.mkdir(parents=True, exist_ok=True)
    good("clang -std=c11 -O1 -g1 -fsanitize=address -fno-omit-frame-pointer -fPIC -shared -fvisibility=hidden -I. -o",
         folder / "libddl-fabric.so", "plugins/fabric/fabric.c", timeout=300)
    return str(folder)


def environment(plugin, extra):
    library = f"libddl-{plugin.partition(':')[0]}.so"
    if not (BUILD / library).exists():
        skip(f"{library} is not built; make plugins builds it, where its libraries are")
    return dict(os.environ, DDL_TRANSPORTS=plugin, DDL_PLUGIN_PATH=str(BUILD), **extra)


def suite_over(plugin, suite, extra, but):
    program = BUILD / "tests" / ("asan" if "ASAN_OPTIONS" in extra else "gcc") / suite
    env = environment(plugin, extra)
    if not program.exists():
        skip(f"{program} is not built; tests/run builds it")
    if plugin.startswith("fabric"):
        env["LD_PRELOAD"] = begun_before_main()
    if "ASAN_OPTIONS" in extra:
        env["DDL_PLUGIN_PATH"] = with_asan()
    words = [name for name in good(str(program), "-l").split() if not name.startswith(but)] if but else []
    result = sh(str(program), *words, env=env, timeout=420)
    last = re.findall(r"^(\d+) passed, (\d+) failed", result.stdout, re.M)
    check(result.returncode == 0 and last and int(last[-1][0]) > 0 and last[-1][1] == "0",
          f"{suite} over {plugin} {extra}:\n{result.stdout[-3000:]}")
    print("".join(f"     {line}\n" for line in re.findall(r"^\d+ cases left out .*", result.stdout, re.M)), end="")


def add(plugin, suite, name, extra, but=""):
    """but: without the tests whose names begin so. A name tells the way of a suite that passes by that carrier already: such have turns, one under ASan that of its program;
    not those in memory of ddl_tensor_alloc, of which nothing else passes the whole suite."""
    def run():
        turn = suite if "ASAN_OPTIONS" in extra else run.__name__
        if (name or plugin == "template") and "TEST_LENT" not in extra and not turns.has_come(turn):
            skip(turns.REASON)
        suite_over(plugin, suite, extra, but)
    run.__name__ = f"{suite[5:]}_over_{re.sub('[:;]', '_', plugin)}{name}"
    test(run)
