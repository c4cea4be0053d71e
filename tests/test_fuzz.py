"""Each tests/fuzz/fuzz_NAME.c (a libFuzzer target) runs over its corpus/NAME, what was found once included, and then
over new inputs for some seconds. New inputs go to build/fuzz, never to the corpus: what is worth keeping is copied
there by hand. Torture: each target to 10^8 executions in all, on all cores, taken up where it was left.
    tests/run: timeout=600
"""
import concurrent.futures
import os
import shutil
import sys
import time

from harness import BUILD, ROOT, check, main, sh, skip, test

sys.path.insert(0, str(ROOT / "tests" / "fuzz"))
import campaign  # noqa: E402

SECONDS = 4
TORTURE = bool(os.environ.get("TEST_TORTURE"))
TORTURE_RUNS = int(float(os.environ.get("TEST_FUZZ_RUNS", "1e8")))


def ready(name):
    """The compiled target; skips where it cannot be."""
    if not shutil.which("clang"):
        skip("no clang (make deps)")
    target = campaign.Target(name, BUILD / "fuzz")
    trouble = target.compile()
    if "libclang_rt.fuzzer" in trouble and ("cannot find" in trouble or "no such file" in trouble.lower()):
        skip("this clang has no libFuzzer (make deps)")
    check(not trouble, trouble[-3000:])
    return target


def make_test(name):
    def run():
        target = ready(name)
        check(target.corpus.is_dir() and any(target.corpus.iterdir()), f"corpus/{name} is empty: nothing to start from")
        target.failed.mkdir(parents=True, exist_ok=True)
        old = sh(target.program, target.options(), "-runs=0", target.corpus, timeout=120)
        check(old.returncode == 0, f"what was found once is back:\n{old.stdout[-3000:]}")
        before = target.counts()[0]
        trouble = target.piece(SECONDS, -1)
        check(not trouble, trouble[-3000:])
        check(target.counts()[0] > before, "the fuzzer executed nothing")

    run.__name__ = f"fuzz_{name}"
    test(run)


def torture():
    """Prints the executions and findings of each target as they grow."""
    targets = [ready(name) for name in campaign.targets()]
    forever = time.monotonic() + 1e9
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        clean = list(pool.map(lambda t: campaign.campaign(t, TORTURE_RUNS, forever, 60), targets))
    for target in targets:
        print(f"{target.name}: {target.counts()[0]:,} executions, {target.counts()[1]} findings")
    check(all(clean), "findings: " + ", ".join(t.name for t, good in zip(targets, clean) if not good))


for found in campaign.targets():
    make_test(found)
if TORTURE:
    torture.__name__ = f"fuzz_{TORTURE_RUNS:.0e}_executions_each"
    test(torture)


@test
def there_are_fuzz_targets():
    check(len(campaign.targets()) >= 7, "fuzz targets are missing")


@test
def the_cheap_mac_is_for_fuzzers_only():
    """SHA-256 is replaced under the fuzzers' macro; nothing else may define it."""
    hits = sh("grep -rlF FUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION", [ROOT / p for p in ("Makefile", "src", "tools",
                                                                    "examples", "plugins", "bench")]).stdout.split()
    check([h for h in hits if not h.endswith("src/wire/sha256.h")] == [], f"{hits}")
    header = (ROOT / "ddl.h").read_text()
    check("define FUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION" not in header, "ddl.h switches its own MACs off")


main()
