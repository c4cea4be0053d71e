"""tests/run: timeout=2000 waits=yes

Over shared memory and libfabric as over TCP: ranks that leave, die, stop or call something else are told apart, requests,
groups and threads do what they promise."""
from harness import main
from transport_suites import FABRIC, FAILURES, FEW, add

for plugin, extra in [("shm", {}), *((plugin, FEW) for plugin in FABRIC)]:
    for suite in FAILURES:
        add(plugin, suite, "", extra)

main()
