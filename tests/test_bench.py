"""The benchmark's protocol catches a library that is wrong, and compare's floors say what they should."""
import importlib.machinery
import importlib.util
import os
import pathlib
import platform
import re
import subprocess
import sys
import time
import types

from harness import BUILD, ROOT, WARNINGS, check, good, main, scratch, sh, skip, test

# A library of two ranks and one operation: broadcast through a mapped file. FAKE=short leaves out the last element,
# FAKE=stale delivers what the first round delivered.
FAKE = r"""
#define _GNU_SOURCE
#include "measure.h"
static float *box;
static const char *mode;
static uint32_t *bell;
static int meet(void *state) {
    (void)state;
    uint32_t turn = (__atomic_add_fetch(bell, 1, __ATOMIC_SEQ_CST) + 1) / 2 * 2;
    while (__atomic_load_n(bell, __ATOMIC_SEQ_CST) < turn) {
        sched_yield();
    }
    return 0;
}
static int run(void *state, bench_op op, float *in, float *out, size_t count) {
    static int rounds;
    (void)in;
    size_t bytes = (strcmp(mode, "short") == 0 ? count - 1 : count) * sizeof(float);
    int root = *(int *)state == 0;
    int keep = strcmp(mode, "stale") == 0 && rounds++ > 0;
    if (op != BENCH_BROADCAST) {
        return -1;
    }
    if (root && !keep) {
        memcpy(box, out, bytes);
    }
    meet(NULL);
    if (!root) {
        memcpy(out, box, bytes);
    }
    return meet(NULL);
}
int main(int argc, char **argv) {
    int rank = atoi(getenv("RANK"));
    int fd = open(getenv("FAKE_BOX"), O_RDWR);
    mode = getenv("FAKE");
    bell = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    box = (float *)(bell + 16);
    bench_peer peer = {rank, 2, &rank, meet, run, NULL, NULL};
    return bench_main(&peer, argc, argv);
}
"""


def run_fake(folder, mode, *arguments):
    """(status, stdout, stderr) of two ranks of the fake library."""
    for name in ("box", "shared"):
        with open(pathlib.Path(folder, name), "wb") as file:
            file.truncate(1 << 20)
    environment = {**os.environ, "FAKE": mode, "FAKE_BOX": f"{folder}/box", "DDL_BENCH_SHARED": f"{folder}/shared"}
    ranks = [subprocess.Popen([f"{folder}/fake", *arguments], env={**environment, "RANK": str(r)}, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE) for r in range(2)]
    try:
        texts = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return max(rank.returncode for rank in ranks), texts[0][0] + texts[1][0], texts[0][1] + texts[1][1]


def build_fake(folder, compiler="gcc", flags=("-std=c11",)):
    source = pathlib.Path(folder, "fake.c")
    source.write_text(FAKE)
    good(compiler, *flags, WARNINGS, "-O2", "-I", ROOT / "bench/peers", source, "-o", f"{folder}/fake")


@test
def a_right_library_is_measured():
    with scratch() as folder:
        build_fake(folder)
        status, out, err = run_fake(folder, "right", "broadcast", "8", "4096", "100000")
        check(status == 0, err)
        rows = [line.split() for line in out.splitlines()]
        check([row[:3] for row in rows] == [["broadcast", "2", n] for n in ("8", "4096", "100000")], out)
        check(all(0 < float(row[4]) <= float(row[3]) for row in rows), out)


@test
def a_wrong_library_is_caught():
    with scratch() as folder:
        build_fake(folder)
        for mode in ("short", "stale"):
            status, out, err = run_fake(folder, mode, "broadcast", "4096")
            check(status != 0 and "the oracle" in err and not out, f"{mode}: {status}\n{out}\n{err}")


@test
def the_protocol_compiles_as_cpp():
    with scratch() as folder:
        source = pathlib.Path(folder, "a.cc")
        source.write_text('#include "measure.h"\nint main(int c, char **v) { return bench_main(nullptr, c, v); }\n')
        good("g++ -std=c++17", WARNINGS, "-I", ROOT / "bench/peers", "-c", source, "-o", f"{folder}/a.o")


def load_bench(name):
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / "bench" / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    sys.path.insert(0, str(ROOT / "bench"))  # as when it is started
    loader.exec_module(module)
    return module


def load_compare():
    return load_bench("compare")


def results_of(compare, ours, theirs, size=8):
    results = compare.Results()
    for value in ours:
        results.add("all_reduce", 2, "ddl", [(size, (value, value))])
    for value in theirs:
        results.add("all_reduce", 2, "openmpi", [(size, (value, value))])
    return results


@test
def floors_hold_ratios_of_medians():
    compare = load_compare()
    floors = [("ddl", "openmpi", "*", 0, 0, 1000, 1.0), ("ddl", "openmpi", "all_reduce", 2, 0, 8, 2.0),
              ("ddl", "openmpi", "all_reduce", 4, 0, 8, 99.0), ("ddl", "gloo", "*", 0, 0, 1000, 9.0)]
    missed, held = compare.check_floors(results_of(compare, [10, 11, 900], [22, 23, 1]), floors)
    check((missed, held) == ([], 1), f"22 / 11 reaches 2: {missed}")
    missed, held = compare.check_floors(results_of(compare, [10, 12, 12], [22, 23, 1]), floors)
    check(len(missed) == 1 and "1.83" in missed[0] and held == 1, f"22 / 12 does not reach 2: {missed}")
    check(compare.check_floors(results_of(compare, [10], [1], size=2000), floors) == ([], 0), "outside of all floors")
    check(compare.check_floors(results_of(compare, [], [1]), floors) == ([], 0), "nothing to compare with")


@test
def floors_hold_for_each_column_of_ours():
    compare = load_compare()
    floors = [("ddl", "openmpi", "*", 0, 0, 1000, 1.0), ("ddl-tensor", "openmpi", "*", 0, 0, 1000, 4.0)]
    results = results_of(compare, [10], [30])
    results.add("all_reduce", 2, "ddl-tensor", [(8, (10, 10))])
    missed, held = compare.check_floors(results, floors)
    check(held == 2 and len(missed) == 1 and "ddl-tensor is 3.00" in missed[0], f"{missed}")


@test
def ceilings_hold_differences_in_microseconds():
    compare = load_compare()
    ceilings = [("ddl", "openmpi", "all_reduce", 0, 0, 8, 1.0)]
    check(compare.check_ceilings(results_of(compare, [10.9], [10]), ceilings) == ([], 1), "0.9 us more are allowed")
    missed, held = compare.check_ceilings(results_of(compare, [11.1], [10]), ceilings)
    check(held == 1 and len(missed) == 1 and "11.10 us" in missed[0], f"{missed}")
    check(compare.check_ceilings(results_of(compare, [99], [10], size=9), ceilings) == ([], 0), "outside of all")


@test
def what_counts_as_near():
    """By itself up to three times the least that a run has told; where it was said, what was said, and not what is nearer."""
    compare = load_compare()
    rows = [(8, (1, 1, ns)) for ns in (30.0, 45.0, 89.0, 91.0, 0)]
    check(compare.Cores().far_of(rows, True) == [False, False, False, True, False],
          "more than three times 30 ns is far, what does not tell is as before")
    check(compare.Cores().far_of(rows, False)[4], "what does not tell was measured between far cores")
    check(compare.Cores([37, 90]).far_of(rows, True) == [True, False, False, True, False], "two threads of a core are not two cores")


@test
def bare_libfabric_is_right():
    """Also where blocks of the ring are empty or its last segment is short; the program checks its results."""
    compare = load_compare()
    peer = compare.FiRdm()
    try:
        peer.build()
    except compare.Skip as reason:
        skip(str(reason))
    sizes = [4, 8, 300000, 1048580]
    for ranks in (2, 3):
        for op in peer.only_ops:
            figures, _ = compare.run_once(peer, op, ranks, sizes)
            check(sorted(figures) == sizes, f"{op} at {ranks} ranks gave {figures}")


@test
def the_machines_limit_is_measured():
    compare = load_compare()
    peer = compare.Limit()
    peer.build()
    for ranks in (2, 3):
        figures, _ = compare.run_once(peer, "all_reduce", ranks, [8, 32 << 10, 100001])
        check(sorted(figures) == [32 << 10, 100001], f"at {ranks} ranks {figures}")
        check(all(0 < least <= median for median, least, _ in figures.values()), f"{figures}")


@test
def cores_that_came_near_again_are_waited_for_again():
    """Who waited in vain waits no more while they are far: nobody knows for how long they will be."""
    compare = load_compare()
    distances, slept = [], []
    compare.output_of = lambda *_: distances.pop(0)
    compare.time = types.SimpleNamespace(monotonic=time.monotonic, sleep=slept.append)
    cores = compare.Cores()
    distances[:] = ["35"]
    check(cores.wait(60) and not slept, "they are as near as they were ever seen")
    distances[:] = ["200"]
    check(not cores.wait(-1) and not slept, "far, and no time to wait")
    distances[:] = ["200"]
    check(not cores.wait(60) and not slept, "far still: waiting was in vain")
    distances[:] = ["36", "200", "200", "35"]
    check(cores.wait(60) and not slept, "near again")
    check(cores.wait(60) and len(slept) == 2, f"far once more, for a while: slept {len(slept)} times")


@test
def only_sizes_that_were_measured_on_far_cores_are_measured_again():
    compare = load_compare()
    options = types.SimpleNamespace(sizes=[8, 512, 4096], passes=1, repeats=2, wait_near=0, wait_idle=0)
    near, far = 35.0, 200.0
    runs = [{8: (1, 1, near), 512: (9, 9, far), 4096: (9, 9, far)},
            {512: (2, 2, near), 4096: (9, 9, far)}, {4096: (3, 3, far)}]
    asked = []

    def run_rows(_, op, ranks, sizes, limit_s):
        asked.append(list(sizes))
        return list(runs[len(asked) - 1].items()), 0.0

    compare.run_rows = run_rows
    compare.output_of = lambda *_: str(near)
    results = compare.Results()
    compare.PEERS["ddl"] = None
    compare.measure_one(results, "ddl", "all_reduce", 2, options)
    check(asked == [[8, 512, 4096], [512, 4096], [4096]], f"asked for {asked}")
    times = [results.median("all_reduce", 2, size, "ddl") for size in options.sizes]
    check(times == [1, 2, 3], f"used {times}")
    check((results.runs, results.used, results.far) == (3, 3, 1), f"{results.runs}, {results.used}, {results.far}")


@test
def a_run_that_does_not_tell_counts_by_what_was_before_and_after_it():
    compare = load_compare()
    options = types.SimpleNamespace(sizes=[8], passes=1, repeats=2, wait_near=-1, wait_idle=0)
    compare.PEERS["ddl"] = None

    def measured(distances, shares):
        """The figures used and how many of them count as far and as noisy, of runs that tell nothing of cores."""
        shares, times = list(shares), iter(range(1, 9))
        compare.output_of = lambda *_: str(distances.pop(0))
        compare.run_rows = lambda *_: ([(8, (next(times), 1, 0.0))], shares.pop(0))
        results = compare.Results()
        compare.measure_one(results, "ddl", "all_reduce", 2, options)
        return results.median("all_reduce", 2, 8, "ddl"), results.far, results.noisy

    check(measured([35, 35], [0.0]) == (1, 0, 0), "near and quiet")
    check(measured([35, 200, 35, 35], [0.0, 0.0]) == (2, 0, 0), "far after the first run")
    check(measured([35, 35, 35, 35], [0.5, 0.0]) == (2, 0, 0), "others had half of the machine in the first run")
    check(measured([35, 35] * 3, [0.5] * 3) == (3, 0, 1), "and in all of them: the last counts, as noisy")
    check(measured([35, 200] + [200, 200] * 2, [0.0] * 3) == (3, 1, 0), "far all the time: the last counts, as far")


@test
def passes_that_were_disturbed_are_measured_again():
    """Two passes over the small size and one over the large; of the first run a small one was far."""
    compare = load_compare()
    options = types.SimpleNamespace(sizes=[8, 16 << 20], passes=2, repeats=2, wait_near=-1, wait_idle=0)
    asked = []
    runs = [[(8, (1.0, 1, 40.0)), (16 << 20, (9.0, 9, 40.0)), (8, (5.0, 5, 200.0))], [(8, (2.0, 2, 40.0))]]

    def run_rows(peer, op, ranks, sizes, limit_s):
        asked.append(sizes)
        return runs.pop(0), 0.0
    compare.PEERS["ddl"], compare.output_of, compare.run_rows = None, lambda *_: "40", run_rows
    results = compare.Results()
    compare.measure_one(results, "ddl", "all_reduce", 2, options)
    check(asked == [[8, 16 << 20, 8], [8]], f"{asked}")
    check(results.figures["all_reduce", 2, 8, "ddl"] == [(1.0, 1), (2.0, 2)] and results.thrown == 1, f"{results.figures}")
    check(results.figures["all_reduce", 2, 16 << 20, "ddl"] == [(9.0, 9)] and results.used == 3, f"{results.figures}")


@test
def a_run_says_how_far_its_cores_were_apart():
    compare = load_compare()
    ddl = compare.TRANSPORTS["shm"]["ddl"]
    ddl.build()
    cores = sorted(os.sched_getaffinity(0))

    def apart(ranks, core_of):
        """Of a run whose ranks are bound to cores."""
        bound = types.SimpleNamespace(start=lambda *arguments: [
            (["taskset", "-c", str(core_of(r)), *command], extra)
            for r, (command, extra) in enumerate(ddl.start(*arguments))])
        figures, _ = compare.run_once(bound, "all_reduce", ranks, [8])
        return figures[8][2]

    check(apart(2, lambda _: cores[0]) == 0, "two ranks on one core say how far it is from itself")
    if len(cores) > 1:
        for ranks in (2, 3):
            ns = apart(ranks, lambda r: cores[r % 2])
            check(2 < ns < 20000, f"{ranks} ranks: a line takes {ns} ns between two cores")


@test
def floors_are_read_from_a_file():
    compare = load_compare()
    with scratch() as folder:
        path = pathlib.Path(folder, "floors")
        path.write_text("# peer op from to ratio\nopenmpi * 0 32K 1.5\n\ngloo all_reduce 1M 1G 2 # large\n")
        want = [("ddl", "openmpi", "*", 0, 0, 32768, 1.5), ("ddl", "gloo", "all_reduce", 0, 1 << 20, 1 << 30, 2.0)]
        check(compare.read_floors(path) == want)


@test
def a_library_that_is_not_there_is_skipped_with_its_reason():
    compare = load_compare()
    path = os.environ["PATH"]
    try:
        os.environ["PATH"] = "/nowhere"
        compare.TRANSPORTS["tcp"]["openmpi"].build()
        check(False, "built without a compiler")
    except compare.Skip as reason:
        check("not installed" in str(reason) and "libopenmpi-dev" in str(reason), str(reason))
    finally:
        os.environ["PATH"] = path


@test
def gradients_are_those_of_the_papers():
    with scratch() as folder:
        program = load_bench("strategies").build(folder)
        published = {"ResNet-50": (161, 25557032, 3.8e9), "BERT-Base": (199, 109482240, 128 * 85e6),
                     "BERT-Large": (391, 335141888, 128 * 302e6)}
        for model, (tensors, elements, macs) in published.items():
            rows = [line.split() for line in good(program, model, "list").splitlines()]
            check((len(rows), sum(int(r[1]) for r in rows)) == (tensors, elements), f"{model}: {len(rows)} tensors")
            counted = sum(float(r[2]) for r in rows)
            check(macs < counted < 1.05 * macs, f"{model} takes {counted:.4g} multiply-adds")


@test
def builds_are_measured_in_turn():
    if not (BUILD / "libddl-shm.so").exists():
        skip("libddl-shm.so is not built (make plugins)")
    with scratch() as folder:
        (pathlib.Path(folder) / "libddl-shm.so").symlink_to(BUILD / "libddl-shm.so")
        words = f"--op ping_pong --sizes 0,64 --seconds 2 --distances 42,105 ddl ddl@{folder}"
        rows = re.findall(r"^\| (0 B|64 B) \| (\S.*?) \| (.*) \| (.*) \|$", good(ROOT / "bench/in_turn", words, timeout=120), re.M)
        check({r[0] for r in rows} == {"0 B", "64 B"}, f"rows {rows}")
        check({r[1] for r in rows} <= {"not told", "< 42 ns", "< 105 ns", ">= 105 ns"}, f"distances of {rows}")
        runs = [[int(n) for n in re.findall(r"(\d+)\)", " ".join(r[k] for r in rows))] for k in (2, 3)]
        check(sum(runs[0]) == sum(runs[1]) > 0, f"{runs}: each variant has its turn as often as the other")
        for cell in (c for r in rows for c in r[2:] if c != "-"):
            told = re.fullmatch(r"([\d.]+) \((?:[\d.]+, )?([\d.]+) to ([\d.]+), \d+\)", cell)
            check(told and 0 < float(told[2]) <= float(told[1]) <= float(told[3]) < 1e7, f"{cell} is no time and where half of the runs lie")
        (pathlib.Path(folder) / "ddl.h").write_text("#error of this folder\n")
        for wrong, said in ((f"ddl@{folder}/none", "has plugins of it"), ("dld", "no library for this transport"),
                            (f"ddl@{folder}", "of this folder"), ("limit --op ping_pong", "limit has no ping_pong")):
            done = subprocess.run([ROOT / "bench/in_turn", *wrong.split()], capture_output=True, text=True, timeout=120)
            check(done.returncode == 2 and said in done.stderr, f"{wrong}: {done.returncode}, {done.stderr}")
        (pathlib.Path(folder) / "ddl.h").unlink()
        (pathlib.Path(folder) / "libddl-shm.so").unlink()
        (pathlib.Path(folder) / "libddl-shm.so").write_text("no plugin")
        words = ["--sizes", "8", "--op", "barrier", "ddl", "ddl", f"ddl@{folder}"]  # a good one is drawn first
        done = subprocess.run([ROOT / "bench/in_turn", *words], capture_output=True, text=True, timeout=120)
        kept = re.search(r"^\| 0 B \| all \|.* \d+\.\d+ \(", done.stdout, re.M)
        check(done.returncode == 1 and "a run failed" in done.stderr and folder in done.stderr, f"{done.returncode}, {done.stderr}")
        check(kept, f"what was measured before a run failed is lost: {done.stdout}")


@test
def a_small_call_takes_few_instructions():
    """Who need not wait takes much less than who must. With the compiler they were counted with (gcc 12, the tests' own flags), a
    fifth more than then at most."""
    if not (BUILD / "libddl-shm.so").exists():
        skip("libddl-shm.so is not built (make plugins)")
    if platform.machine() != "x86_64":
        skip("only an x86-64 is stopped after each instruction")
    as_counted = sh("gcc -dumpversion").stdout.split(".")[0] == "12" and not {"CC", "CFLAGS"} & set(os.environ)
    counted = {"reduce": (729, 578), "broadcast": (544, 617), "gather": (738, 578), "all_reduce": (968, 968),
               "all_gather": (980, 980), "barrier": (747, 747)}
    with scratch() as folder:
        good("gcc -std=c11 -O2", WARNINGS, "-I", ROOT, ROOT / "bench/steps.c", "-o", f"{folder}/steps", "-lpthread -ldl -lm")
        environment = {**os.environ, "DDL_PLUGIN_PATH": str(BUILD)}
        done = sh(f"{folder}/steps", env=environment)
        out = done.stdout
        if done.returncode == 77:
            skip(out.strip())
        check(done.returncode == 0, out)
        rows = {r[0]: (int(r[1]), int(r[2])) for r in re.findall(r"^(\w+) .* B  \D+(\d+)  \D+(\d+) instructions$", out, re.M)}
        check(set(rows) == set(counted), out)
        all_reduce = min(rows["all_reduce"])
        check(rows["reduce"][1] < 0.75 * all_reduce and rows["gather"][1] < 0.75 * all_reduce, f"who only gives waits:\n{out}")
        check(max(rows["broadcast"]) < 0.75 * all_reduce, f"who only gives, or finds all there, waits:\n{out}")
        for op, most in counted.items():
            for took, before in zip(rows[op], most):
                check(not as_counted or before / 4 < took < 1.2 * before, f"{op} takes {took} instructions, {before} before:\n{out}")
        done = subprocess.run([f"{folder}/steps", "1000000"], env=environment, capture_output=True, text=True, timeout=60)
        check(done.returncode == 2 and "usage" in done.stderr, f"{done.returncode}, {done.stderr}")


@test
def strategies_are_compared():
    """One model and one rate; where there are no namespaces, over loopback."""
    with scratch() as folder:
        out = good(ROOT / "bench/strategies", "--quick --rounds 2 --steps 4 --out", f"{folder}/results.md", timeout=300)
        table = dict(re.findall(r"^\| (\S+) \| ([\d.]+|not run) \|", pathlib.Path(folder, "results.md").read_text(), re.M))
        bench = load_bench("strategies")
        check(set(bench.NAMED + ["auto"]) == set(table), f"the table has {sorted(table)}")
        steps = {name: float(s) for name, s in table.items() if s != "not run"}
        check(len(steps) >= 5, f"only {steps} ran")
        check(all(s > 11.6 for s in steps.values()), f"steps shorter than their compute: {steps}")
        check(steps["auto"] < 2 * min(steps.values()), f"auto is far from the best: {steps}")
        check("Least exposed" in out and "Order" in out, out)


main()
