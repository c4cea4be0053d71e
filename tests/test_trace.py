"""The timeline of DDL_TRACE: one file for the job that any JSON reader takes, all operations in it, clocks aligned though
those of the ranks differ by hours, and what becomes of it when ranks die, leave early, or the disk is full.
tests/run: timeout=180 """
import json
import os
import pathlib
import subprocess
import time

from harness import BUILD, ROOT, check, good, main, scratch, sh, skip, test
from jobs import Job, two_hosts


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
        waits = [e for e in mine if e[1] == "waits"]
        check(len(waits) > 0 and all(e[4].get("for rank") != rank for e in waits), f"rank {rank}: {waits}")
        check(rank != size - 1 or any(e[4].get("for rank") == 0 and e[3] - e[2] > 20000 for e in waits), f"for 0: {waits}")
        check(not any(e[1] in ("steps", "buckets", "compression") for e in mine), f"rank {rank}: what nobody did or asked for")
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
        part = good(ROOT / "tools" / "ddl-timeline", f"{folder}/t.json", "--from backward:2 --to backward:3 --show=program")
        mine = [e for e in events[0] if e[0] == "backward"][1:3]  # rank 0's second and third, and what overlaps them
        inside = [e for r in events for e in events[r] if e[1] == "program" and e[2] < mine[1][3] and e[3] > mine[0][2]]
        check(part.count("<title>") == len(inside), f"{part.count('<title>')} spans, not {len(inside)}")
        refused = sh([ROOT / "tools" / "ddl-timeline", f"{folder}/t.json", "--from", "backward:6"])
        check(refused.returncode == 2 and "rank 0 has 5 spans of the name backward" in refused.stdout, refused.stdout)
        said = [line for line in job.output(0).splitlines() if "timeline: " in line]
        job.check(len(said) == 1 and "hidden" in said[0] and "the others wait for rank 1:" in said[0], f"summary: {said}")
        job.check("links were not judged: DDL_TRACE_STEPS=1" in said[0], f"one message, and a link is judged: {said}")
        job.check("timeline: " not in job.output(1), "more than one rank sums up")


@test
def the_steps_of_an_algorithm():
    """Every send has its receive, of the same bytes; a ring of n ranks moves 2 (n - 1) times the vector, and adds n - 1
    times its elements."""
    with scratch() as folder, Job(RANK, "steps", ranks=4, DDL_TRACE=f"{folder}/t.json", DDL_TRACE_STEPS=1, DDL_ALGO="ring",
                                  DDL_TRANSPORTS="tcp") as job:
        job.succeed()
        events, notes = read(f"{folder}/t.json", range(4))
        aligned(events, notes)
        numbers = {r: [e[4]["operation"] for e in mine if e[0] == "all_reduce" and e[4]["bytes"] == 96000]
                   for r, mine in events.items()}
        check(len(numbers[0]) == 3 and all(n == numbers[0] for n in numbers.values()), f"{numbers}")
        for number in numbers[0]:
            sent, received, added = [], [], 0
            for rank, mine in events.items():
                whole, = [e for e in mine if e[0] == "all_reduce" and e[4]["operation"] == number and e[1] == "group world"]
                steps = [e for e in mine if e[1] == "steps" and e[4]["operation"] == number and e[4]["group"] == "world"]
                for name, _, start, end, args in steps:
                    check(whole[2] - 0.002 <= start and end <= whole[3] + 0.002, f"{name} is not inside its operation")
                    check(args["algorithm"] == "ring" == whole[4]["algorithm"], f"{args}, {whole}")
                sent += [(rank, e[4]["peer"], e[4]["bytes"]) for e in steps if e[0] == "send"]
                received += [(e[4]["peer"], rank, e[4]["bytes"]) for e in steps if e[0].startswith("receive")]
                added += sum(e[4]["bytes"] for e in steps if e[0] == "receive and reduce")
            check(sorted(sent) == sorted(received), f"sent {sent}, received {received}")
            check(sum(bytes for _, _, bytes in sent) == 2 * 3 * 96000 and added == 3 * 96000, f"{sent}, {added} bytes added")
            check(all(b == (a + 1) % 4 or b == (a - 1) % 4 for a, b, bytes in sent if bytes > 0), f"no ring: {sent}")


def summary(job):
    said = [line for line in job.output(0).splitlines() if "timeline: " in line]
    job.check(len(said) == 1, f"summary: {said}")
    return said[0]


@test
def a_slow_rank_is_no_slow_link():
    with scratch() as folder, Job(RANK, "late", ranks=3, DDL_TRACE=f"{folder}/t.json", DDL_TRACE_SUMMARY=1, DDL_TRACE_STEPS=1,
                                  DDL_ALGO="ring", DDL_TRANSPORTS="tcp") as job:
        job.succeed()
        said = summary(job)
        job.check("the others wait for rank 2:" in said and "no link stands out (150 transfers on 3 links)" in said, said)
    with scratch() as folder, Job(RANK, "late", ranks=3, DDL_TRACE=f"{folder}/t.json", DDL_TRACE_SUMMARY=1) as job:
        job.succeed()
        job.check("no link stands out (30 transfers on 3 links)" in summary(job), summary(job))


@test
def a_slow_link_is_named():
    """A ring of three; only what goes from rank 0's host to that of ranks 1 and 2 passes a narrow cable."""
    with two_hosts() as hosts, scratch() as folder:
        narrow = sh(hosts.into("A"), "tc qdisc add dev ddla root tbf rate 8mbit burst 16k latency 300ms")
        if narrow.returncode:
            skip(f"tc cannot do tbf here: {narrow.stdout.strip()[:100]}")
        with Job(RANK, "late", hosts=hosts, layout="ABB", DDL_TRACE=f"{folder}/t.json", DDL_TRACE_SUMMARY=1,
                 DDL_TRACE_STEPS=1, DDL_ALGO="ring", DDL_TRANSPORTS="tcp") as job:
            job.succeed()
            job.check("the slowest link is that from rank 0 to rank 1:" in summary(job), summary(job))


@test
def buckets_and_compression():
    with scratch() as folder, Job(RANK, "train", ranks=2, DDL_TRACE=f"{folder}/t.json") as job:
        job.succeed()
        events, _ = read(f"{folder}/t.json", range(2))
        for rank, mine in events.items():
            buckets = [e for e in mine if e[1] == "buckets"]
            told = [(e[0], e[4]["bucket"], e[4]["operation"], e[4]["plan"], e[4]["tensors"], e[4]["bytes"]) for e in buckets]
            step = [("w3 ... w2", 0, "all_reduce", "fused", 2, 12000), ("w1 ... w0", 1, "all_reduce", "fused", 2, 12000)]
            check(sorted(told) == sorted(3 * step), f"rank {rank}: {told}")
            first = min(e[4]["operation"] for e in mine if e[0] == "all_reduce" and e[4].get("bytes") == 12000) % 2
            for bucket in buckets:  # what carried it
                inside = [e for e in mine if e[0] == "all_reduce" and e[4]["bytes"] == 12000 and e[4]["operation"] % 2 == bucket[4]["bucket"] ^ first and
                          bucket[2] - 0.002 <= e[2] and e[3] <= bucket[3] + 0.002]
                check(len(inside) == 1, f"rank {rank}: {bucket} holds {inside}")
            codes = [e for e in mine if e[1].startswith("compression")]
            told = [(e[0], e[4]["compression"], e[4]["tensor"], e[4]["bytes"], e[4]["compressed bytes"]) for e in codes]
            tensors = (("f16", 0, 12000, 6000), ("top-k", 1, 16000, 800))
            check(sorted(told) == sorted(2 * [(name, *t) for t in tensors for name in ("compress", "decompress")]), f"{told}")
            for tensor in (0, 1):
                times = [(e[0], e[2], e[3]) for e in codes if e[4]["tensor"] == tensor]
                check([n for n, _, _ in times] == ["compress", "decompress"] * 2, f"{times}")
                check(all(a[2] <= b[1] + 0.002 for a, b in zip(times, times[1:])), f"one ends before the next: {times}")


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
def the_first_error_of_the_file_is_said():
    """Rank 0 has the disk's error before it has received everything, which leaves errors of its own (EAGAIN)."""
    with Job(RANK, "early", ranks=4, DDL_TRACE="/dev/full", DDL_TRANSPORTS="tcp") as job:
        job.succeed()
        said = [line for line in job.output(0).splitlines() if "could not be written" in line]
        job.check(len(said) == 1 and "No space left" in said[0] and "cut short" in said[0], f"it says {said}")


@test
def the_file_of_the_job_before_is_emptied():
    """A job that dies leaves no file that looks like its own; one that never begins leaves it as it is."""
    with scratch() as folder, open(f"{folder}/t.json", "w") as file:
        print("of the job before", file=file, flush=True)
        with Job(RANK, "early", ranks=2, only=[0], DDL_TRACE=file.name, DDL_INIT_TIMEOUT_MS=500) as job:
            job.finish(30, ranks=[0])
            job.check("of the job before" in open(file.name).read(), "the file is gone, and no job began")
        with Job(RANK, "stay", ranks=2, DDL_TRACE=file.name) as job:
            job.until("staying")
            job.check(os.path.getsize(file.name) == 0, "the file of the job before is still there")


@test
def it_costs_less_than_two_percent():
    """By what recording takes over what the operation takes, each at its best of many blocks: load moves neither much.
    In shared memory the smallest operations take less than 0.1 us, of which recording is more than that."""
    good("make -s", f"B={BUILD}", BUILD / "ddlrun", BUILD / "libddl-shm.so", timeout=300)
    with scratch() as folder:
        good("gcc -std=c11 -O1", f"-I{ROOT}", "-o", f"{folder}/bench-trace", ROOT / "bench/trace.c", "-lpthread -ldl", timeout=300)
        for transport in ("tcp", "shm"):
            out = good([BUILD / "ddlrun", "-n", "2", "--no-prefix", f"{folder}/bench-trace", "10"],
                       env={**os.environ, "DDL_TRANSPORTS": transport, "DDL_PLUGIN_PATH": str(BUILD)})
            rows = [dict(word.split("=") for word in line.split()[1:]) for line in out.splitlines() if line.startswith("trace ")]
            check([int(r["bytes"]) for r in rows] == [8, 4096, 32768, 1048576], out)
            for r in rows:
                check(0 < float(r["operation_ns"]) < 60 and 0 < float(r["wait_ns"]) < 400 and 0 <= float(r["waits"]) <= 1, out)
                if transport == "tcp" or int(r["bytes"]) > 32768:
                    check(float(r["cost_percent"]) < 2, out)


@test
def wrong_settings_are_refused():
    for env, words in (({"DDL_TRACE": "/no/such/folder/t"}, "cannot write /no/such/folder/t of DDL_TRACE"),
                       ({"DDL_TRACE": "/tmp"}, "cannot write /tmp of DDL_TRACE"),
                       ({"DDL_TRACE": "/dev/null", "DDL_TRACE_EVENTS": "0"}, "DDL_TRACE_EVENTS is \"0\""),
                       ({"DDL_TRACE_SUMMARY": "yes"}, "DDL_TRACE_SUMMARY is \"yes\""),
                       ({"DDL_TRACE_STEPS": "2"}, "DDL_TRACE_STEPS is \"2\"")):
        done = subprocess.run([RANK, "run"], env=dict(os.environ, **env), stdout=subprocess.PIPE, text=True, timeout=30)
        check(done.returncode == 1 and words in done.stdout, f"{env}: {done.stdout}")


main()
