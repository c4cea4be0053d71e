"""What README and CONTRIBUTING say to type is there: the targets of make, the demonstration, what continuous integration
runs. TEST_TORTURE=1 types `make demo` in a fresh clone and waits until the model has learned.
tests/run: timeout=500 """
import os
import pathlib
import re

from harness import ROOT, check, good, main, scratch, sh, skip, test

TARGETS = "all demo test test-arm64 test-gpu deps plugins tools examples bench plots torture install uninstall check clean help".split()


@test
def every_target_is_there_and_in_the_help():
    help_text = good("make -s help")
    for target in TARGETS:
        planned = sh("make -n", target)
        check(planned.returncode == 0, f"make {target}: {planned.stdout[-500:]}")
        check(target in ("all", "tools", "examples", "plugins", "help") or f"make {target} " in help_text or
              f"make {target}:" in help_text, f"make help says nothing of {target}")
    check(sh("make -n no-such-target").returncode != 0, "make takes any target")


@test
def the_demonstration_trains_on_two_ranks():
    with scratch() as folder:  # nothing is built there: all that would be done is shown
        good("git clone -q --depth 1", f"file://{ROOT}", folder)
        planned = good("make -n demo", cwd=folder)
        check(re.search(r"^build/ddlrun -n 2 .*build/train_gpt --fresh$", planned, re.M), planned[-500:])


@test
def continuous_integration_runs_what_readme_says():
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci/run").read_text()
    check(re.search(r"make deps test\b", readme), "README does not say how the tests are run")
    check(re.search(r"^make deps$.*^make test$", ci, re.M | re.S), ".ci/run runs something else")
    check(os.access(ROOT / ".ci/run", os.X_OK), ".ci/run cannot be run")


@test
def other_architectures_make_the_kernels_anew():
    if not (ROOT / "build/cuda.fatbin").exists():
        skip("the kernels are not built here")
    for archs, anew in (("", False), ("CUDA_ARCHS=75", True)):
        planned = good("make -n build/libddl-cuda.so", archs)
        check(("-fatbin" in planned) == anew, f"{archs}: {planned}")
        check(not anew or "-o build/libddl-cuda.so" in planned, f"{archs}: {planned}")


@test
def the_licence_is_mit_and_in_the_header():
    licence = (ROOT / "LICENSE").read_text()
    check(licence.startswith("MIT License"), licence[:80])  # and all of its text is in the file that people copy
    check("THE SOFTWARE IS PROVIDED" in licence and "THE SOFTWARE IS PROVIDED" in (ROOT / "ddl.h").read_text(),
          "ddl.h does not bring its licence")


def a_fresh_clone_learns_within_two_minutes():
    with scratch() as folder:
        good("git clone -q --depth 1", f"file://{ROOT}", folder)
        good("make -s build/ddlrun build/train_gpt build/libddl-shm.so", cwd=folder, timeout=300)
        output = good("make -s demo", cwd=folder, timeout=600)
        head, *rows = [line.split(",") for line in pathlib.Path(folder, "gpt-run/loss.csv").read_text().splitlines()]
        limit = 120 * float(os.environ.get("TEST_SLOW", 1))
        losses = [float(row[head.index("loss")]) for row in rows if float(row[head.index("seconds")]) < limit]
        print(f"  loss {losses[-1]} after {limit:.0f} s or at the end")
        check(losses[-1] < 2.6, output[-1000:])
        check("<svg" in pathlib.Path(folder, "gpt-run/loss.svg").read_text(), "no curve was drawn")


if os.environ.get("TEST_TORTURE"):
    test(a_fresh_clone_learns_within_two_minutes)

main()
