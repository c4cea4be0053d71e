"""tests/run: timeout=300

Every example runs as its first comment says, and prints what it says:

     * Run:    ddlrun -n 4 ./hello
     * Prints: rank 3 of 4: the sum is 6
"Run:" is carried out in the build folder. There may be several "Prints:" lines; each must appear in the output.
An example that is a folder says it in the .c file that is named like the folder.

The same with a ddl.h in which shared memory is folded, a single file, and nothing but shared memory in use."""
import functools
import os
import pathlib
import re
import shlex

from harness import BUILD, ROOT, check, good, main, scratch, sh, test

SOURCES = sorted((ROOT / "examples").glob("*.c")) + sorted((ROOT / "examples").glob("*/*.c"))
SOURCES = [s for s in SOURCES if s.parent.name in ("examples", s.stem)]


def run_as_it_says(source, folder, **env):
    head = source.read_text().split("*/")[0]
    commands = re.findall(r"Run:\s*(.+?)\s*$", head, re.M)
    check(commands, f"{source.name} does not say how to run it (Run: ...)")
    wanted = re.findall(r"Prints:\s*(.+?)\s*$", head, re.M)
    check(wanted, f"{source.name} does not say what it prints (Prints: ...)")
    environment = dict(os.environ, PATH=f"{BUILD}:{os.environ['PATH']}", **env)
    output = ""
    for command in commands:
        result = sh(shlex.split(command), cwd=folder, env=environment, timeout=100)
        output += result.stdout
        check(result.returncode == 0, f"{command} ended with {result.returncode}:\n{result.stdout[-3000:]}")
    for text in wanted:
        check(text in output, f"the output lacks {text!r}:\n{output[-3000:]}")


def make_test(source):
    def run():
        run_as_it_says(source, BUILD)
    run.__name__ = source.stem
    test(run)


@functools.cache
def folded():
    """A ddl.h in which shared memory is folded, and beside it the implementation, compiled once for all examples."""
    folder = BUILD / "folded"
    folder.mkdir(parents=True, exist_ok=True)
    good("./amalgamate.py --with plugins/shm -o", folder / "ddl.h")
    (folder / "ddl.c").write_text('#define DDL_IMPLEMENTATION\n#include "ddl.h"\n')
    good("cc -std=c11 -O1", f"-I{folder}", "-c -o", folder / "ddl.o", folder / "ddl.c", timeout=300)
    return folder


def make_folded_test(source):
    def run():
        folder = folded()
        sources = [source] if source.parent.name == "examples" else sorted(source.parent.glob("*.c"))
        whole = source.stem == "hello"  # this one as a reader compiles it: a single file, with all that it brings
        rest = [] if whole else ["-DDDL__IMPLEMENTED", folder / "ddl.o"]
        good("cc -std=c11 -O1", f"-I{folder}", "-o", folder / source.stem, sources, rest, "-lpthread -ldl -lm", timeout=300)
        newcomers = "ddl_group_grow" in source.read_text()  # between them and the others TCP carries the data
        run_as_it_says(source, folder, DDL_TRANSPORTS="shm,tcp" if newcomers else "shm", DDL_PLUGIN_PATH="/nonexistent")
    run.__name__ = f"{source.stem}_with_shared_memory_folded_in"
    test(run)


for path in SOURCES:
    make_test(path)
for path in SOURCES:
    make_folded_test(path)


def losses(output, pattern):
    found = re.search(pattern, output)
    check(found, f"no {pattern} in:\n{output[-2000:]}")
    return [float(x) for x in found.groups()]


def run_example(name, ranks, *words):
    launcher = [BUILD / "ddlrun", "-n", str(ranks), BUILD / name, *words]
    with scratch() as folder:
        result = sh(launcher, cwd=folder, timeout=100)
        check(result.returncode == 0, f"{name} ended with {result.returncode}:\n{result.stdout[-3000:]}")
        return result.stdout, {p.name: p.read_text() for p in pathlib.Path(folder).iterdir()}


@test
def the_embedding_example_learns():
    output, _ = run_example("embedding", 3)
    begin, end = losses(output, r"loss ([0-9.]+) at the beginning, ([0-9.]+) at the end")
    check(0.6 < begin < 0.75, f"a new model does not guess: its loss is {begin}, not ln 2")
    check(end < 0.9 * begin, f"the loss goes from {begin} to {end} only")


@test
def the_ssp_example_draws_what_it_measured():
    output, files = run_example("ssp", 4)
    svg = files["ssp.svg"]
    check(svg.startswith("<svg") and svg.endswith("</svg>\n") and "nan" not in svg, f"no picture:\n{svg[:500]}")
    lines = re.findall(r"points='([^']*)'", svg)
    check(len(lines) == 3 and "SSP (staleness 4)" in svg, f"{len(lines)} lines, not one for each of three modes")
    for line in lines:  # y grows downwards: from a loss of 1 (y 20) to below 0.02 (y 206)
        heights = [float(point.split(",")[1]) for point in line.split()]
        check(len(heights) == 150, f"{len(heights)} points of 150 iterations")
        check(heights[0] < 25 and max(heights) > 206, f"the loss goes from y = {heights[0]} to {max(heights)} only")
    check(output.count("reached the loss of 0.02") == 3, output)


@test
def the_local_sgd_example_draws_what_it_measured():
    output, files = run_example("local_sgd", 2)
    svg = files["local_sgd.svg"]
    check(svg.startswith("<svg") and svg.endswith("</svg>\n") and "nan" not in svg, f"no picture:\n{svg[:500]}")
    lines = [line.split() for line in re.findall(r"points='([^']*)'", svg)]
    check([len(line) for line in lines] == [100, 13, 5], f"{[len(line) for line in lines]} points, not one for each average")
    for line in lines:  # y grows downwards: from a loss of 1 (y 20) to below 0.03 (y 187)
        heights = [float(point.split(",")[1]) for point in line]
        check(heights[0] < 25 and max(heights) > 187, f"the loss goes from y = {heights[0]} to {max(heights)} only")
    check(output.count("reached the loss of 0.03") == 3, output)


@test
def there_are_examples():
    check(SOURCES, "no example has been run")


main()
