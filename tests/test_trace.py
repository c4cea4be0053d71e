"""The timeline of DDL_TRACE: one file for the job that any JSON reader takes, all operations in it, clocks aligned though
those of the ranks differ by hours, and what becomes of it when ranks die, leave early, or the disk is full.
tests/run: timeout=180 """
import json
import os
import pathlib
import subprocess
import time

from harness import BUILD, ROOT, check, good, main, scratch, sh, skip, test
from jobs import Job


def program():
    target, source, library = BUILD / "tests" / "trace_rank", ROOT / "tests" / "trace_rank.c", BUILD / "libddl.a"
    good("make -s", f"B={BUILD}", library, timeout=300)
    target.parent.mkdir(parents=True, exist_ok=True)
    good("gcc -std=gnu11 -Wall -Wextra -Werror -g", f"-I{ROOT}", "-o", f"{target}.tmp", source, library, "-lpthread -ldl")
    os.replace(f"{target}.tmp", target)
    return target


RANK = program()


def read(path, ranks):
    """{rank: events} of a file, each (name, track, start_us, end_us, args); the rules of the format are kept."""
    with open(path) as file:
        timeline = json.load(file)
    names, found, notes = {}, {r: [] for r in ranks}, {}
    for e in timeline["traceEvents"]:
        check(e["ph"] in ("M", "X") and isinstance(e["pid"], int), f"not a trace event: {e}")
        if e["ph"] == "M":
            if e["name"] == "thread_name":
                names[e["pid"], e["tid"]] = e["args"]["name"]
            notes.setdefault(e["pid"], {}).update(e["args"] if e["name"] == "ddl" else {})
            continue
        check(e["dur"] >= 0 and (e["pid"], e["tid"]) in names, f"an event of no thread: {e}")
        found.setdefault(e["pid"], []).append((e["name"], e["tid"], e["ts"], e["ts"] + e["dur"], e["args"]))
    check(sorted(found) == sorted(ranks), f"{sorted(found)} are in the file, not {sorted(ranks)}")
    for rank, events in found.items():
        check(sorted(e[2] for e in events) == [e[2] for e in events], f"rank {rank}: not in order")
        for tid in {e[1] for e in events}:
            nested([e for e in events if e[1] == tid])
    return {r: [(n, names[r, tid], a, b, args) for n, tid, a, b, args in events] for r, events in found.items()}, notes


def nested(events):
    """Of one thread: two events are apart, or one is inside the other."""
    open_until = []
    for name, _, start, end, _ in events:
        while open_until and open_until[-1] <= start + 0.0005:
            open_until.pop()
        check(not open_until or end <= open_until[-1] + 0.0005, f"{name} at {start} sticks out of what it is in")
        open_until.append(end)


def complete(events, size):
    """What `trace_rank run` does, and nothing else of that name."""
    for rank, mine in events.items():
        def of(name, track):
            return [e for e in mine if e[0] == name and e[1].startswith(track)]
        sums = of("all_reduce", "group world")
        check(sorted(e[4]["bytes"] for e in sums) == [4000] * 5 + [400000] * 5, f"rank {rank}: {len(sums)} all_reduces")
        check(all(e[4]["status"] == "DDL_OK" and e[4]["algorithm"] not in ("", "?") for e in sums), "no algorithm")
        late = [e[4].get("last came rank") for e in sums]
        check(all(r is not None and 0 <= r < size and r != rank for r in late), f"rank {rank} waited for {late}")
        check(len(of("barrier", "group world")) == 3, f"rank {rank}: barriers")
        check(len([e for e in mine if e[0] == "broadcast" and e[1] != "group world" and e[4]["bytes"] == 12]) == 1, "broadcast")
        spans = [e for e in mine if e[1] == "program"]
        check(sorted(e[0] for e in spans) == ["backward"] * 5 + ['step "\\\n'] * 5, f"rank {rank}: {spans}")
        check(len([e for e in mine if e[1] == "waits"]) > 0, f"rank {rank}: no waits")
        message = [(e[0], e[4]["peer"]) for e in mine if e[1].startswith("messages") and e[4]["bytes"] == 2000]
        check(message == {0: [("send", size - 1)], size - 1: [("recv", 0)]}.get(rank, []), f"rank {rank}: {message}")


def aligned(events, notes):
    """No rank leaves a barrier before the last has come, and no message comes before it was sent."""
    slack = sum(n["clock error ns"] for n in notes.values()) / 1000
    check(slack < 200000, f"clocks were measured with errors of {slack} us")
    barriers = [[e for e in mine if e[0] == "barrier"] for _, mine in sorted(events.items())]
    for same in zip(*barriers):
        last = max(e[2] for e in same)
        check(all(e[3] >= last - slack for e in same), f"a barrier was left before the last came: {same}, {slack}")
        check(max(e[3] for e in same) - last < 5e6 + slack, "a barrier was left seconds after the last had come")


@test
def one_file_for_all():
    with scratch() as folder, Job(RANK, "run", ranks=4, DDL_TRACE=f"{folder}/t.json", DDL_TRACE_SUMMARY=1) as job:
        job.succeed()
        check(os.listdir(folder) == ["t.json"], f"other files: {os.listdir(folder)}")
        events, notes = read(f"{folder}/t.json", range(4))
        complete(events, 4)
        aligned(events, notes)
        picture = good(ROOT / "tools" / "ddl-timeline", f"{folder}/t.json")
        check(picture.count("<rect") > 4 * 24 and picture.rstrip().endswith("</svg>"), "no picture")
        said = [line for line in job.output(0).splitlines() if "timeline: " in line]
        job.check(len(said) == 1 and "hidden" in said[0] and "the others wait for rank 1:" in said[0], f"summary: {said}")
        job.check("timeline: " not in job.output(1), "more than one rank sums up")


@test
def clocks_that_differ():
    """Ranks 1 and 2 live in time namespaces whose clocks are hours ahead."""
    if os.geteuid() != 0 or sh("unshare -T --monotonic 5 true").returncode:
        skip("needs root and time namespaces (unshare -T)")
    with scratch() as folder:
        shell = pathlib.Path(folder, "rank")
        shell.write_text(f"#!/bin/sh\ncase $RANK in 1) exec unshare -T --monotonic 7200 {RANK} run;; "
                         f"2) exec unshare -T --monotonic 86400 {RANK} run;; esac\nexec {RANK} run\n")
        shell.chmod(0o700)
        with Job(shell, ranks=4, DDL_TRACE=f"{folder}/t.json") as job:
            job.succeed()
            events, notes = read(f"{folder}/t.json", range(4))
            complete(events, 4)
            aligned(events, notes)


@test
def the_newest_stay():
    with scratch() as folder, Job(RANK, "run", ranks=2, DDL_TRACE=f"{folder}/t.json", DDL_TRACE_EVENTS=4) as job:
        job.succeed()
        events, notes = read(f"{folder}/t.json", range(2))
        for rank in range(2):
            check(len(events[rank]) == 4 == notes[rank]["events"] and notes[rank]["older events lost"] > 10, f"{notes}")
            check(events[rank][-1][0] in ("barrier", "ddl_barrier") and not any(e[0] == "all_reduce" for e in events[rank]),
                  f"not the newest: {events[rank]}")


@test
def a_dead_rank_is_missing():
    with scratch() as folder, Job(RANK, "die", ranks=4, DDL_TRACE=f"{folder}/t.json") as job:
        codes = job.finish()
        job.check(codes == {0: 0, 1: 7, 2: 0, 3: 0}, f"exit statuses {codes}")
        events, _ = read(f"{folder}/t.json", (0, 2, 3))
        job.check("the timeline lacks ranks 1:" in job.output(0), "rank 0 does not say who is missing")
        check(any(e[4].get("status") == "DDL_ERR_PEER" for e in events[0]), "the failed barrier is not there")


@test
def who_comes_late_is_waited_for():
    with scratch() as folder, Job(RANK, "early", ranks=3, DDL_TRACE=f"{folder}/t.json") as job:
        job.succeed()
        read(f"{folder}/t.json", range(3))


@test
def rank_0_is_gone():
    """Then each of the others has a file of its own, and nobody waits for ever."""
    with scratch() as folder, Job(RANK, "early", ranks=3, DDL_TRACE=f"{folder}/t.json", DDL_TIMEOUT_MS=4000) as job:
        time.sleep(0.7)
        job.signal(0, 9)
        codes = job.finish(40, ranks=[1, 2])
        job.check(codes[1] == codes[2] == 0, f"exit statuses {codes}")
        for rank in (1, 2):
            read(f"{folder}/t.json.rank{rank}", [rank])


@test
def only_some_ranks_trace():
    with scratch() as folder, Job(RANK, "early", ranks=3, each={r: {"DDL_TRACE": f"{folder}/t.json"} for r in (0, 1)}) as job:
        job.succeed()
        read(f"{folder}/t.json", [0])
        read(f"{folder}/t.json.rank1", [1])
        job.check("not all ranks" in job.output(1), "rank 1 does not say where its events are")


@test
def a_full_disk_is_said():
    with Job(RANK, "early", ranks=2, DDL_TRACE="/dev/full") as job:
        job.succeed()
        job.check("could not be written to /dev/full" in job.output(0) and "No space left" in job.output(0), "it is not said")


@test
def wrong_settings_are_refused():
    for env, words in (({"DDL_TRACE": "/no/such/folder/t"}, "cannot write /no/such/folder/t of DDL_TRACE"),
                       ({"DDL_TRACE": "/tmp"}, "cannot write /tmp of DDL_TRACE"),
                       ({"DDL_TRACE": "/dev/null", "DDL_TRACE_EVENTS": "0"}, "DDL_TRACE_EVENTS is \"0\""),
                       ({"DDL_TRACE_SUMMARY": "yes"}, "DDL_TRACE_SUMMARY is \"yes\"")):
        done = subprocess.run([RANK, "run"], env=dict(os.environ, **env), stdout=subprocess.PIPE, text=True, timeout=30)
        check(done.returncode == 1 and words in done.stdout, f"{env}: {done.stdout}")


main()
