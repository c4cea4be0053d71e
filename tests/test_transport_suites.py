"""tests/run: timeout=3000

The plugins are real transports: the suites of messages and collectives pass over each, with nothing of TCP in use; over
shared memory also with plans in place of native collectives, where no rank may read another's memory, and where all that ranks
write for each other goes past the caches. The suites of failures, which mostly wait: test_transport_failures.py."""
import re

from harness import BUILD, check, good, main, skip, test
from transport_suites import FABRIC, FEW, MESSAGES, THIN, add, environment

CASES = [("template", suite, "", THIN) for suite in MESSAGES + ["test_requests", "test_leave"]]
CASES += [("shm", suite, "", {}) for suite in MESSAGES]
CASES += [("shm", "test_overlap", "", {}), ("shm", "test_overlap", "_by_plans", {"DDL_ALGO": "ring"})]
CASES += [("shm", "test_collectives", "_by_plans", {"DDL_ALGO": "ring", **THIN})]
CASES += [("shm", suite, "_in_tensor_memory", {"TEST_LENT": "1"}) for suite in ("test_collectives", "test_mismatch")]
CASES += [("shm", suite, "_to_distant_cores", {"DDL_SHM_DISTANT_NS": "0", **THIN}) for suite in ("test_p2p", "test_collectives")]
CASES += [("shm", "test_p2p", "_in_streams", {"DDL_SHM_CMA": "0", "DDL_SHM_RING_BYTES": "16K"})]
CASES += [(plugin, suite, "", FEW if plugin == "fabric:tcp" else {**FEW, **THIN}) for plugin in FABRIC for suite in MESSAGES]
CASES += [("fabric:tcp", "test_p2p", "_under_asan", {"ASAN_OPTIONS": "detect_stack_use_after_return=1", **FEW})]
# What EFA demands, as far as tcp does it: messages that overtake each other, among them the words about what is read from registered
# memory and recalled, and completions that never come of a peer that is gone. Without an adapter a read needs the help of the peer's process,
# which two tests of p2p let compute while a receive gives up: the link is closed then (docs/design.md).
FORCED = {"DDL_FABRIC_FORCE_UNORDERED": "1", "DDL_FABRIC_FORCE_NO_INJECT": "1", "DDL_FABRIC_FORCE_NO_WAIT": "1", **FEW, **THIN}
CASES += [("fabric:tcp", "test_p2p", "_forced", {"DDL_FABRIC_FORCE_MR": "allocated", **FORCED}),
          ("fabric:tcp", "test_collectives", "_forced", {"DDL_FABRIC_FORCE_MR": "local,allocated", **FORCED})]
AS_EFA = {"DDL_FABRIC_FORCE_UNORDERED": "1", "DDL_FABRIC_FORCE_MR": "local", "DDL_FABRIC_FORCE_DROPS": "1", **FEW, **THIN}
CASES += [("fabric:tcp", "test_p2p", "_as_efa", AS_EFA, "a_deadline_while_a_message_is_half_way"),
          ("fabric:tcp", "test_requests", "_as_efa", AS_EFA), ("fabric:tcp", "test_leave", "_as_efa", AS_EFA)]
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
