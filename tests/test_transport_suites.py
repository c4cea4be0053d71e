"""tests/run: timeout=3000

The plugins are real transports: the suites of messages, collectives and failures pass over each, with nothing of TCP in
use; over shared memory also with plans in place of native collectives, where no rank may read another's memory, and where all
that ranks write for each other goes past the caches."""
import functools
import os
import re

from harness import BUILD, check, good, main, sh, skip, test

MESSAGES = ["test_p2p", "test_collectives", "test_v_forms", "test_requests", "test_leave"]
FAILURES = ["test_mismatch", "test_threads", "test_stop", "test_agree", "test_groups", "test_persistent"]
CASES = [("template", suite, "", {}) for suite in MESSAGES]
CASES += [("shm", suite, "", {}) for suite in MESSAGES + FAILURES]
CASES += [("shm", "test_overlap", "", {}), ("shm", "test_overlap", "_by_plans", {"DDL_ALGO": "ring"})]
CASES += [("shm", "test_collectives", "_by_plans", {"DDL_ALGO": "ring"})]
CASES += [("shm", suite, "_in_tensor_memory", {"TEST_LENT": "1"}) for suite in ("test_collectives", "test_mismatch")]
CASES += [("shm", suite, "_to_distant_cores", {"DDL_SHM_DISTANT_NS": "0"}) for suite in ("test_p2p", "test_collectives")]
CASES += [("shm", "test_p2p", "_in_streams", {"DDL_SHM_CMA": "0", "DDL_SHM_RING_BYTES": "16K"})]
# To begin costs a rank over libfabric a tenth of a second, and the schedules of deaths are tried over the others.
FEW = {} if os.environ.get("TEST_TORTURE") else {"FAULT_RUNS": "4"}
CASES += [(plugin, suite, "", FEW) for plugin in ("fabric:tcp", "fabric:tcp;ofi_rxm") for suite in MESSAGES + FAILURES]
# What EFA demands, as far as tcp does it: messages that overtake each other, and memory that is registered.
FORCED = {"DDL_FABRIC_FORCE_UNORDERED": "1", "DDL_FABRIC_FORCE_NO_INJECT": "1", "DDL_FABRIC_FORCE_NO_WAIT": "1", **FEW}
CASES += [("fabric:tcp", "test_p2p", "_forced", {"DDL_FABRIC_FORCE_MR": "allocated", **FORCED}),
          ("fabric:tcp", "test_collectives", "_forced", {"DDL_FABRIC_FORCE_MR": "local,allocated", **FORCED})]


@functools.cache
def begun_before_main():
    """What has libfabric begun once for all ranks that a suite forks; whole programs begin it anew, in test_fabric_hosts."""
    library = BUILD / "tests" / "fabric_begun.so"
    good("gcc -std=c11 -D_GNU_SOURCE -O1 -Wall -Wextra -Werror -fPIC -shared -o", library, "tests/fabric_begun.c -lfabric")
    return str(library)


def environment(plugin, extra):
    library = f"libddl-{plugin.partition(':')[0]}.so"
    if not (BUILD / library).exists():
        skip(f"{library} is not built; make plugins builds it, where its libraries are")
    return dict(os.environ, DDL_TRANSPORTS=plugin, DDL_PLUGIN_PATH=str(BUILD), **extra)


def suite_over(plugin, suite, extra):
    program = BUILD / "tests" / "gcc" / suite
    env = environment(plugin, extra)
    if not program.exists():
        skip(f"{program} is not built; tests/run builds it")
    if plugin.startswith("fabric"):
        env["LD_PRELOAD"] = begun_before_main()
    result = sh(str(program), env=env, timeout=420)
    last = re.findall(r"^(\d+) passed, (\d+) failed", result.stdout, re.M)
    check(result.returncode == 0 and last and int(last[-1][0]) > 0 and last[-1][1] == "0",
          f"{suite} over {plugin} {extra}:\n{result.stdout[-3000:]}")


def add(plugin, suite, name, extra):
    def run():
        suite_over(plugin, suite, extra)
    run.__name__ = f"{suite[5:]}_over_{re.sub('[:;]', '_', plugin)}{name}"
    test(run)


for case in CASES:
    add(*case)


def carries(plugin):
    info = BUILD / "ddl-info"
    env = environment(plugin, {})
    if not info.exists() or not (BUILD / "ddlrun").exists():
        skip("ddl-info and ddlrun are not built")
    text = good(str(BUILD / "ddlrun"), "-n 2 --no-prefix", str(info), env=env)
    check(re.search(rf"^ +1 +0 +\d+ +{plugin.partition(':')[0]} ", text, re.M), f"the link is not by {plugin}:\n{text}")
    return text


@test
def it_is_the_template_that_carries():
    carries("template")


@test
def it_is_shared_memory_that_carries():
    carries("shm")


@test
def it_is_libfabric_that_carries():
    check("its own connections are used, without ofi_rxm" in carries("fabric:tcp"), "ofi_rxm is used")


@test
def it_is_ofi_rxm_where_that_is_named():
    text = carries("fabric:tcp;ofi_rxm")
    check(re.search(r"^ +fabric: tcp;ofi_rxm on .* is taken$", text, re.M) and "without ofi_rxm" not in text,
          f"it is not by ofi_rxm:\n{text}")


main()
