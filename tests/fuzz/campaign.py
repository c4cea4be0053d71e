#!/usr/bin/env python3
"""Runs the fuzz targets until each has had so many executions, in pieces, so that it can be stopped and taken up again.

    tests/fuzz/campaign.py                    all targets to 10^8 executions, one at a time on each core
    tests/fuzz/campaign.py --runs 1e6 store   one target to a million
    tests/fuzz/campaign.py --seconds 60       not longer than that
    tests/fuzz/campaign.py --table            what has been run so far, as the lines of RUNS.md

build/fuzz/TARGET.runs keeps the counts: executions, findings, seconds; they go on from those of RUNS.md where these are
more. New inputs that reach something new are in build/fuzz/found/TARGET, inputs that fail in build/fuzz/failed. A
target that has failed is tried again from the same inputs, and goes on failing until it is mended. Its own file says
what it is, in a line "campaign: parser max_len=512"."""
import argparse
import concurrent.futures
import datetime
import os
import pathlib
import re
import subprocess
import sys
import time

FUZZ = pathlib.Path(__file__).resolve().parent
ROOT = FUZZ.parent.parent
SANITIZERS = "address, undefined"
FLAGS = ("-std=c11 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined "
         "-fno-omit-frame-pointer -Werror=incompatible-pointer-types").split()


def targets():
    return [p.stem[len("fuzz_"):] for p in sorted(FUZZ.glob("fuzz_*.c"))]


def recorded(name):
    """Executions and findings of a target by RUNS.md."""
    line = re.search(rf"^\| {name} \|(.*)\|$", (FUZZ / "RUNS.md").read_text(), re.M)
    cells = [cell.strip() for cell in line[1].split("|")] if line else []
    return (int(cells[1].replace(",", "")), int(cells[4])) if len(cells) == 5 else (0, 0)


class Target:
    """quick: compiled without optimisation, for runs that are shorter than compiling."""

    def __init__(self, name, build, root=ROOT, quick=False):
        self.name, self.build, self.root = name, pathlib.Path(build), pathlib.Path(root)
        self.level = "-O0" if quick else "-O2"
        self.program = self.build / (f"quick_{name}" if quick else f"fuzz_{name}")
        self.count_file = self.build / f"{name}.runs"
        self.corpus = FUZZ / "corpus" / ("frames" if name == "stream" else name)  # they read the same inputs
        self.found = self.build / "found" / name
        self.failed = self.build / "failed"
        about = re.search(r"\bcampaign: (parser|machine) max_len=(\d+)", (FUZZ / f"fuzz_{name}.c").read_text())
        self.kind, self.max_len = about[1], int(about[2])

    def fresh(self):
        """The program is newer than all that it is made of."""
        made_of = [*(self.root / "src").rglob("*.h"), self.root / "ddl.h", *(self.root / "plugins" / "fabric").glob("*.[ch]"),
                   *(self.root / "tests" / "fuzz").glob("*.[ch]")]
        return self.program.exists() and self.program.stat().st_mtime > max(p.stat().st_mtime for p in made_of)

    def compile(self):
        """Empty, or what the compiler said."""
        self.build.mkdir(parents=True, exist_ok=True)
        if self.fresh():
            return ""
        source = self.root / "tests" / "fuzz" / f"fuzz_{self.name}.c"
        done = subprocess.run(["clang", self.level, *FLAGS, f"-I{self.root}", source, "-o", self.program, "-lpthread", "-ldl"],
                              text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return "" if done.returncode == 0 else done.stdout or "clang failed"

    def counts(self):
        """Executions, findings and seconds so far."""
        base = (*recorded(self.name), 0.0)
        try:
            runs, findings, seconds = self.count_file.read_text().split()
            return max(base, (int(runs), int(findings), float(seconds)))
        except (FileNotFoundError, ValueError):
            return base

    def add(self, runs, findings, seconds):
        had = self.counts()
        temporary = self.count_file.with_suffix(".tmp")
        temporary.write_text(f"{had[0] + runs} {had[1] + findings} {had[2] + seconds:.0f}\n")
        temporary.rename(self.count_file)

    def options(self):
        dictionary = FUZZ / f"{self.name}.dict"
        words = [f"-dict={dictionary}"] if dictionary.exists() else []
        return ["-timeout=10", "-rss_limit_mb=2048", "-report_slow_units=100", "-print_final_stats=1", "-entropic=0",
                f"-max_len={self.max_len}",
                f"-artifact_prefix={self.failed}/{self.name}-", *words]

    def piece(self, seconds, runs, seed=0):
        """Fuzzes for a while. The output when something was found, else empty."""
        self.found.mkdir(parents=True, exist_ok=True)
        self.failed.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        done = subprocess.run(["nice", "-n", "19", self.program, *self.options(), f"-seed={seed}", f"-runs={runs}",
                               f"-max_total_time={seconds}", self.found, self.corpus], text=True, errors="replace",
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        executed = re.findall(r"^stat::number_of_executed_units: (\d+)", done.stdout, re.M) or \
            re.findall(r"^#(\d+)\t", done.stdout, re.M)
        found = done.returncode != 0 and not self.was_stopped(done.stdout)
        self.add(int(executed[-1]) if executed else 0, int(found), time.monotonic() - start)
        return done.stdout if found else ""

    def was_stopped(self, output):
        """An input took too long by the clock, but not when it is tried again: the fuzzer itself was stopped."""
        late = re.search(r"Test unit written to (\S+/\w+-timeout-\S+)", output)
        again = late and subprocess.run([self.program, *self.options(), late[1]], stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL)
        if again and again.returncode == 0:
            pathlib.Path(late[1]).unlink()
        return bool(again) and again.returncode == 0


def campaign(target, runs, deadline, piece_s):
    while target.counts()[0] < runs and time.monotonic() < deadline:
        seconds = max(1, int(min(piece_s, deadline - time.monotonic())))
        trouble = target.piece(seconds, runs - target.counts()[0])
        if trouble:
            print(f"{target.name}: FOUND\n{trouble[-3000:]}", flush=True)
            return False
        print(f"{target.name}: {target.counts()[0]:,} runs", flush=True)
    return True


def table(build):
    today = datetime.date.today().isoformat()
    for target in (Target(name, build) for name in targets()):
        runs, findings, _ = target.counts()
        print(f"| {target.name} | {target.kind} | {runs:,} | {today} | {SANITIZERS} | {findings} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--runs", type=float, default=1e8)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--piece", type=float, default=60, help="seconds between two looks at the counts")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--build", default=ROOT / "build" / "fuzz")
    parser.add_argument("--root", default=ROOT, help="the tree to compile")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.table:
        return table(args.build)
    deadline = time.monotonic() + args.seconds
    chosen = [Target(name, args.build, args.root) for name in args.targets or targets()]
    for target in chosen:
        trouble = target.compile()
        if trouble:
            sys.exit(trouble)
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        good = list(pool.map(lambda t: campaign(t, int(args.runs), deadline, args.piece), chosen))
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
