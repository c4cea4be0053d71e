"""tests/run itself: what passed, failed and was skipped in each kind of program is in its last line, and in its exit status.
tests/run: timeout=120 """
import os
import pathlib
import re
import shutil

from harness import ROOT, check, main, scratch, sh, test

PROGRAMS = {
    "test_good.py": "print('2 passed, 0 failed, 0 skipped')",
    "test_bad.py": "print('FAIL other: not so')\nprint('1 passed, 1 failed, 0 skipped')\nraise SystemExit(1)",
    "test_absent.py": "print('skip all: nothing to test it with')\nprint('0 passed, 0 failed, 1 skipped')",
    "test_silent.py": "print('ok   one')",  # no last line: it has ended in the midst
    "test_crash.py": "import os\nprint('3 passed, 0 failed, 0 skipped', flush=True)\nos.kill(os.getpid(), 11)",
    "test_late.py": "'''tests/run: timeout=0.5 '''\nimport time\ntime.sleep(60)",
    "test_unsteady.py": "import os\nif os.path.exists('second'):\n    print('1 passed, 0 failed, 0 skipped')\nelse:\n"
                        "    open('second', 'w').close()\n    print('0 passed, 1 failed, 0 skipped')\n    raise SystemExit(1)",
    "test_broken.c": "/* tests/run: variants=gcc */\nint main(void) { return nothing_of_this_name; }",
    "test_works.c": "/* tests/run: variants=gcc */\n#include <stdio.h>\nint main(void) { puts(\"1 passed, 0 failed, 0 skipped\"); return 0; }",
}


def project(folder, made="true"):
    for name in ("tests/run", "tests/turns.py", "bench/flags.py", "bench/compiled.py"):
        target = pathlib.Path(folder, name)
        target.parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, target)
    pathlib.Path(folder, "ddl.h").touch()
    pathlib.Path(folder, "Makefile").write_text(f"all:\n\t{made}\n")
    for name, text in PROGRAMS.items():
        pathlib.Path(folder, "tests", name).write_text(text + "\n")


def run(folder, *names, **more):
    env = {**{k: v for k, v in os.environ.items() if k != "TEST_TURN"}, **more}
    done = sh(f"{folder}/tests/run", *names, cwd=folder, env=env)
    return done.returncode, done.stdout, done.stdout.splitlines()[-1]


@test
def every_end_is_counted():
    with scratch() as folder:
        project(folder)
        status, out, last = run(folder)
        check(last == "8 passed, 5 failed, 1 skipped" and status == 1, out)  # bad, silent, crash, late, broken
        check("unsteady, passed only alone: test_unsteady.py\n" in out, out)
        check("skip all: nothing to test it with" in out and "killed after" in out and "exit status -11" in out and
              "does not compile:" in out and "nothing_of_this_name" in out, out)


@test
def what_repeats_has_its_turn():
    """A third of the sanitizers' builds, another third for another commit, and never the only build that a program has."""
    with scratch() as folder:
        project(folder)
        for old in pathlib.Path(folder, "tests").glob("test_*"):
            old.unlink()
        good = "#include <stdio.h>\nint main(void) { puts(\"1 passed, 0 failed, 0 skipped\"); return 0; }\n"
        for name, variants in [(c, "gcc,asan") for c in "abcdef"] + [("only", "asan")]:
            pathlib.Path(folder, "tests", f"test_{name}.c").write_text(f"/* tests/run: variants={variants} */\n{good}")
        left_out = []
        for turn in ("first", "third"):
            status, out, last = run(folder, TEST_TURN=turn)
            names = re.findall(r"skip asan/test_(\w+): its turn is in another run", out)
            check(status == 0 and last == f"{13 - len(names)} passed, 0 failed, {len(names)} skipped", out)
            check(0 < len(names) < 6 and "only" not in names, out)
            left_out.append(names)
        check(left_out[0] != left_out[1], f"twice the same: {left_out}")
        for whole in (["--whole"], ["test_"]):
            status, out, last = run(folder, *whole, TEST_TURN="")
            check(status == 0 and last == "13 passed, 0 failed, 0 skipped", out)


@test
def what_is_left_out_of_a_sample_is_summed():
    with scratch() as folder:
        project(folder)
        for name, text in (("one", "40 cases left out by TEST_SAMPLE"), ("two", "2 tests left out by TEST_PART")):
            text = f"print('     {text}')\nprint('1 passed, 0 failed, 0 skipped')\n"
            pathlib.Path(folder, "tests", f"test_left_{name}.py").write_text(text)
        status, out, last = run(folder, "left", "good")
        check(status == 0 and last == "4 passed, 0 failed, 0 skipped", out)
        check("\n42 cases left out by TEST_SAMPLE or tests by TEST_PART" in out and "0 skipped, 40 cases or tests left out (" in out, out)
        check("left out" not in run(folder, "good")[1], "nothing was left out")


@test
def all_is_well_only_when_something_passed():
    with scratch() as folder:
        project(folder)
        status, out, last = run(folder, "good", "works", "absent")
        check(last == "3 passed, 0 failed, 1 skipped" and status == 0, out)
        status, out, last = run(folder, "absent")
        check(last == "0 passed, 0 failed, 1 skipped" and status == 1, out)
        status, out, last = run(folder, "no_such_test")
        check(last == "0 passed, 0 failed, 0 skipped" and status == 1, out)


@test
def a_build_that_fails_is_a_failure():
    with scratch() as folder:
        project(folder, made="false")
        status, out, last = run(folder, "good")
        check(last == "2 passed, 1 failed, 0 skipped" and status == 1 and "FAIL make all" in out, out)


main()
