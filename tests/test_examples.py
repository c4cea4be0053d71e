"""tests/run: timeout=300

Every example runs as its first comment says, and prints what it says:

     * Run:    ddlrun -n 4 ./hello
     * Prints: rank 3 of 4: the sum is 6
"Run:" is carried out in the build folder. There may be several "Prints:" lines; each must appear in the output.
An example that is a folder says it in the .c file that is named like the folder.

The same with a ddl.h in which shared memory is folded, a single file, and nothing but shared memory in use."""
import os
import re
import shlex

from harness import BUILD, ROOT, check, good, main, sh, test

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


def make_folded_test(source):
    def run():
        folder = BUILD / "folded"
        folder.mkdir(parents=True, exist_ok=True)
        good("./amalgamate.py --with plugins/shm -o", folder / "ddl.h")
        sources = [source] if source.parent.name == "examples" else sorted(source.parent.glob("*.c"))
        good("cc -std=c11 -O1", f"-I{folder}", "-o", folder / source.stem, sources, "-lpthread -ldl -lm", timeout=300)
        run_as_it_says(source, folder, DDL_TRANSPORTS="shm", DDL_PLUGIN_PATH="/nonexistent")
    run.__name__ = f"{source.stem}_with_shared_memory_folded_in"
    test(run)


for path in SOURCES:
    make_test(path)
for path in SOURCES:
    make_folded_test(path)


@test
def there_are_examples():
    check(SOURCES, "no example has been run")


main()
