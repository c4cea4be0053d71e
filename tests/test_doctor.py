"""ddl-info --doctor finds what is set up wrong, says what fixes it, and is silent about what is fine.
tests/run: timeout=120 """
import json
import os
import pathlib
import re
import resource
import shutil

from harness import BUILD, ROOT, check, good, main, scratch, sh, skip, test
from jobs import Job, two_hosts

INFO = BUILD / "ddl-info"


def doctor(*words, ranks=3, limits=None, before=(), **env):
    """(exit code, findings) of a job. before: a command that starts it."""
    good("make -s", f"B={BUILD}", BUILD / "ddlrun", INFO, timeout=300)
    done = sh([*before, BUILD / "ddlrun", "-n", ranks, "--no-prefix", INFO, "--doctor", "--json", *words],
              env={**os.environ, "DDL_LOG": "none", **env}, preexec_fn=limits)
    return done.returncode, sound(json.JSONDecoder().raw_decode(done.stdout)[0])["findings"]  # then ddlrun's own words


def sound(report):
    """The report, which must be as docs/operations.md says."""
    check(list(report) == ["version", "ranks", "hosts", "network", "findings"] and report["version"] == 1, f"{report}")
    for f in report["findings"]:
        check(list(f) == ["rank", "level", "what", "text", "fix"] and f["level"] in ("fine", "warning", "wrong") and
              f["text"] and bool(f["fix"]) == (f["level"] != "fine") and 0 <= f["rank"] < report["ranks"], f"{f}")
    for n in report["network"]:
        check(list(n) == ["from", "to", "interface", "address", "mtu", "tcp", "small_packets", "whole_packets"] and
              n["tcp"] in ("not tried", "reached", "refused", "no answer", "no route"), f"{n}")
    check(report["hosts"] > 1 or report["network"] == [], f"{report}")
    return report


def between(hosts, *words, each=None):
    """The report of a job of two ranks on two hosts, or the text."""
    good("make -s", f"B={BUILD}", INFO, timeout=300)
    with Job(INFO, "--doctor", *words, hosts=hosts, layout="AB", DDL_LOG="none", each=each) as job:
        job.finish()
        return job.output(0) if not words else sound(json.loads(job.output(0)))


def bad(findings, what):
    return [f for f in of(findings, what) if f["level"] != "fine"]


def changed_root(*commands):
    """A command that makes its own mounts before the one that follows it. Skips where it cannot be."""
    if os.geteuid() != 0 or not shutil.which("unshare") or sh("unshare -m true").returncode:
        skip("needs root and mount namespaces")
    return ["unshare", "-m", "sh", "-c", "set -e; " + "; ".join(commands) + "; exec \"$@\"", "sh"]


def of(findings, what):
    return [f for f in findings if f["what"] == what]


@test
def a_job_that_is_fine():
    code, findings = doctor()
    check(code == 0 and all(f["level"] != "wrong" for f in findings), f"{code}: {findings}")
    check([f["level"] for f in of(findings, "reachability")] == ["fine"], f"{of(findings, 'reachability')}")
    check("each of 2 ranks" in of(findings, "reachability")[0]["text"], "not all pairs")
    check({f["what"] for f in findings} >= {"file descriptors", "locked memory", "memory of the container", "cores",
                                            "job secret", "plugins", "shared memory"} - {"plugins"}, f"{findings}")
    check({f["what"] for f in findings} >= {"/dev/shm", "libfabric", "CUDA", "clocks", "slow link", "slow rank"}, f"{findings}")
    check("one host" in of(findings, "interfaces")[0]["text"], f"{findings}")
    check("all 3 ranks have ddl" in of(findings, "versions")[0]["text"], f"{findings}")


@test
def few_descriptors():
    code, findings = doctor(ranks=2, limits=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300)))
    bad = of(findings, "file descriptors")
    check(code == 0 and {f["rank"] for f in bad} == {0, 1} and "at most 300" in bad[0]["text"] and
          "nofile" in bad[0]["fix"] and bad[0]["level"] == "warning", f"{code}: {findings}")


@test
def more_ranks_than_cores():
    _, findings = doctor(ranks=2, limits=lambda: os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]))
    found = bad(findings, "cores")
    check(found and "2 ranks of this host may use 1 cores" in found[0]["text"], f"{of(findings, 'cores')}")


@test
def a_plugin_that_is_refused():
    with scratch() as folder:
        with open(f"{folder}/libddl-broken.so", "w") as file:
            file.write("this is no shared object")
        _, findings = doctor(ranks=2, DDL_PLUGIN_PATH=folder)
    check(any(f["level"] == "warning" and "libddl-broken.so is refused" in f["text"] for f in of(findings, "plugins")),
          f"{findings}")


@test
def a_plugin_that_declines():
    """One note of the host, with the whole reason: it has nothing to do here, and that is no fault."""
    if sh(["ldconfig", "-p"]).stdout.count("libcuda.so.1"):
        skip("an NVIDIA driver is installed here")
    with scratch() as folder:
        good("gcc -std=c11 -O0 -fPIC -shared -fvisibility=hidden -o", f"{folder}/libddl-cuda.so",
             ROOT / "plugins/cuda/cuda.c", "-lpthread -ldl")
        os.chmod(f"{folder}/libddl-cuda.so", 0o755)
        _, findings = doctor(DDL_PLUGIN_PATH=folder)
    found = [f for f in of(findings, "plugins") if f"{folder}/libddl-cuda.so" in f["text"]]
    check(len(found) == 1 and found[0]["level"] == "fine" and found[0]["rank"] == 0, f"{found}")
    check("it declines: cuda: there is no NVIDIA driver here" in found[0]["text"] and
          found[0]["text"].endswith("cannot open shared object file: No such file or directory)"), f"{found}")


@test
def libfabric_is_asked_though_nobody_uses_it():
    if not (BUILD / "libddl-fabric.so").exists() or not sh(["ldconfig", "-p"]).stdout.count("libfabric.so.1"):
        skip("libfabric or its headers are not installed (make deps)")
    _, findings = doctor(DDL_TRANSPORTS="tcp")
    found = of(findings, "libfabric")
    check(len(found) == 4 and all(f["rank"] == 0 for f in found), f"{found}")
    check(re.search(r"its plugin is loaded, and not used by this job; providers of the library: .*\btcp\b", found[0]["text"]),
          f"{found[0]}")
    for f, name in zip(found[1:], ("efa", "verbs", "tcp")):
        check(re.match(rf"{name}: (can be used|refused): .{{20}}", f["text"]), f"{f}")
    check("can be used" in found[3]["text"] and "on lo (127.0.0.1): is taken" in found[3]["text"], f"{found[3]}")
    _, findings = doctor(ranks=2, DDL_TRANSPORTS="fabric:tcp")
    check("its plugin is used" in of(findings, "libfabric")[0]["text"], f"{of(findings, 'libfabric')}")


@test
def a_slow_link():
    """What leaves rank 0's host passes a narrow cable, and takes long there."""
    with two_hosts() as hosts:
        narrow = sh(hosts.into("A"), "tc qdisc add dev ddla root tbf rate 40mbit burst 32k latency 300ms")
        if narrow.returncode:
            skip(f"tc cannot do tbf here: {narrow.stdout.strip()[:100]}")
        report = between(hosts, "--json")
    found = bad(report["findings"], "slow link")
    check(len(found) == 1 and re.search(r"from rank 0 \(\S+\) to rank 1 \(\S+\): \d+\.\d{3} MB/s, the usual link has", found[0]["text"])
          and "ethtool" in found[0]["fix"], f"{of(report['findings'], 'slow link')}")


@test
def a_slow_rank():
    """Rank 1, whose clock runs five times as fast, so that its work seems to take five times as long."""
    with scratch() as folder:
        source = pathlib.Path(folder, "fast.c")
        source.write_text("""#define _GNU_SOURCE
            #include <stdlib.h>
            #include <sys/syscall.h>
            #include <time.h>
            #include <unistd.h>
            int clock_gettime(clockid_t id, struct timespec *t) {
                static long long first;
                long status = syscall(SYS_clock_gettime, id, t);
                const char *rank = getenv("RANK");
                if (id == CLOCK_MONOTONIC && rank && rank[0] == '1') {
                    long long now = t->tv_sec * 1000000000ll + t->tv_nsec;
                    first = first ? first : now;
                    now = first + 5 * (now - first);
                    t->tv_sec = now / 1000000000;
                    t->tv_nsec = now % 1000000000;
                }
                return (int)status;
            }""")
        good("gcc -shared -fPIC -O1 -o", f"{folder}/fast.so", source)
        _, findings = doctor(ranks=3, LD_PRELOAD=f"{folder}/fast.so")
    found = bad(findings, "slow rank")
    check(len(found) == 1 and found[0]["rank"] == 0 and found[0]["text"].startswith("rank 1 (") and
          "the median rank" in found[0]["text"], f"{of(findings, 'slow rank')}")


@test
def two_hosts_that_are_fine():
    with two_hosts() as hosts:
        report = between(hosts, "--json")
    check(report["hosts"] == 2 and len(report["network"]) == 4, f"{report}")  # two addresses each way
    check(all(n["tcp"] == "reached" and n["small_packets"] and n["whole_packets"] and n["mtu"] == 1500
              for n in report["network"]), f"{report['network']}")
    check([f["level"] for w in ("interfaces", "versions", "clocks") for f in of(report["findings"], w)] == ["fine"] * 3,
          f"{report}")


@test
def an_mtu_that_differs():
    with two_hosts() as hosts:
        good(f"ip -n {hosts.name['A']} link set ddla mtu 9000")
        report = between(hosts, "--json")
    mtu, packets = bad(report["findings"], "MTU"), bad(report["findings"], "packets")
    check(mtu and all(word in mtu[0]["text"] for word in ("ddla of rank 0", "has 9000", "has 1500")) and
          "ip link set dev ddla mtu 1500" in mtu[0]["fix"], f"{report}")
    check(packets and all("from rank 0" in p["text"] and "are lost" in p["text"] for p in packets), f"{packets}")
    lost = [n for n in report["network"] if not n["whole_packets"]]
    check(lost and all(n["from"] == 0 and n["small_packets"] for n in lost), f"{report['network']}")


@test
def interfaces_that_are_not_reached():
    """One without a route to it, one address that is forbidden; the job itself goes on over the others."""
    with two_hosts() as hosts:
        good(f"ip -n {hosts.name['B']} link add name spare type bridge")
        good(f"ip -n {hosts.name['B']} addr add 10.99.0.1/24 dev spare")
        good(f"ip -n {hosts.name['B']} link set spare up")
        good(f"ip -n {hosts.name['A']} route add prohibit 10.78.0.12/32")
        report, text = between(hosts, "--json"), between(hosts)
    failed = {n["address"]: n for n in report["network"] if n["tcp"] != "reached"}
    check(set(failed) == {"10.99.0.1", "10.78.0.12"} and all(n["from"] == 0 and n["to"] == 1 for n in failed.values()),
          f"{report['network']}")
    found = bad(report["findings"], "interfaces")
    check(len(found) == 2 and all(f["level"] == "warning" and f["rank"] == 0 for f in found) and
          any("does not reach 10.99.0.1, spare of rank 1" in f["text"] for f in found) and
          all("open TCP from" in f["fix"] for f in found), f"{found}")
    check(re.search(r"from rank 0 +\| to rank 0: itself  \| to rank 1: .*ddlb reached.* spare no route", text), text)
    check(re.search(r"from rank 1 +\| to rank 0: ddla reached ddla reached  \| to rank 1: itself", text), text)


@test
def a_clock_that_is_wrong():
    """Of rank 1, ahead by 5.25 s, by a clock_gettime of its own."""
    with scratch() as folder:
        source = pathlib.Path(folder, "skew.c")
        source.write_text("""#define _GNU_SOURCE
            #include <stdlib.h>
            #include <sys/syscall.h>
            #include <time.h>
            #include <unistd.h>
            int clock_gettime(clockid_t id, struct timespec *t) {
                long status = syscall(SYS_clock_gettime, id, t);
                const char *rank = getenv("RANK");
                if (id == CLOCK_REALTIME && rank && rank[0] == '1') {
                    t->tv_sec += 5 + (t->tv_nsec >= 750000000);
                    t->tv_nsec = (t->tv_nsec + 250000000) % 1000000000;
                }
                return (int)status;
            }""")
        good("gcc -shared -fPIC -O1 -o", f"{folder}/skew.so", source)
        _, findings = doctor(ranks=3, LD_PRELOAD=f"{folder}/skew.so")
    wrong = bad(findings, "clocks")
    said = re.search(r"the clock of rank 1 \(.*\) is ([\d.]+) s ahead of that of rank 0, give or take ([\d.]+) ms",
                     wrong[0]["text"] if wrong else "")
    check(len(wrong) == 1 and said, f"{findings}")
    check(abs(float(said[1]) - 5.25) * 1000 <= float(said[2]) + 0.5, said[0])


@test
def plugins_that_differ():
    with scratch() as folder:
        start = pathlib.Path(folder, "start")
        start.write_text(f"#!/bin/sh\n[ $RANK = 1 ] && export DDL_PLUGIN_PATH={folder}/plugins\n"
                         f"exec {folder}/ddl-info --doctor --json\n")
        start.chmod(0o755)
        good("make -s", f"B={BUILD}", BUILD / "ddlrun", INFO, BUILD / "libddl-template.so", timeout=300)
        shutil.copy(INFO, folder)
        os.mkdir(f"{folder}/plugins", 0o755)
        shutil.copy(BUILD / "libddl-template.so", f"{folder}/plugins")
        done = sh([BUILD / "ddlrun", "-n", "3", "--no-prefix", start], env={**os.environ, "DDL_LOG": "none"})
    findings = sound(json.loads(done.stdout))["findings"]
    differ = bad(findings, "versions")
    check(len(differ) == 1, f"{findings}")
    check(re.search(r"rank 1 \(.*plugins .*template \d.*; rank 0 has .* plugins none", differ[0]["text"]), f"{differ}")


@test
def devices():
    """Two that are made of ordinary memory: whole, and with copies that damage a byte."""
    source = (ROOT / "tests" / "device_standin.c").read_text()
    copying = "memmove(dst, src, t->bytes);"
    check(copying in source, "the stand-in copies in another way")
    for text, level, said in ((source, "fine", "64 KiB through each and between every two came back"),
                              (source.replace(copying, copying + " dst[77] ^= 1;"), "wrong",
                               "the bytes that come back are others")):
        with scratch() as folder:
            pathlib.Path(folder, "device.c").write_text(text)
            good("gcc -std=c11 -D_GNU_SOURCE -shared -fPIC -fvisibility=hidden", f"-I{ROOT} -I{ROOT}/tests", "-o",
                 f"{folder}/libddl-standin.so", f"{folder}/device.c", "-lpthread")
            code, findings = doctor(ranks=1, DDL_PLUGIN_PATH=folder)
        found = of(findings, "devices")
        check(found and all(f["level"] == level and said in f["text"] for f in found) and code == (level == "wrong"),
              f"{code}: {findings}")
    check(any("device 1 to device 2 (standin)" in f["text"] for f in found) and len(found) == 4, f"{found}")


@test
def a_cuda_driver_without_the_plugin():
    """A library of that name; ddl-info is moved to where no plugin is beside it."""
    good("make -s", f"B={BUILD}", INFO, timeout=300)
    with scratch() as folder:
        pathlib.Path(folder, "empty.c").write_text("int cuda_is_not_here;\n")
        shutil.copy(INFO, folder)
        env = {k: v for k, v in os.environ.items() if not k.startswith("DDL_")}
        for path, level, said in ((folder, "warning", "plugin cuda is not loaded"),
                                  ("/nowhere", "fine", "no driver is here")):
            good("gcc -shared -fPIC -o", f"{folder}/libcuda.so.1", f"{folder}/empty.c")
            done = sh([f"{folder}/ddl-info", "--doctor", "--json"],
                      env={**env, "LD_LIBRARY_PATH": path, "DDL_LOG": "none"})
            found = of(sound(json.loads(done.stdout))["findings"], "CUDA")
            if path == "/nowhere" and found[0]["level"] != "fine":
                skip("a CUDA driver is installed here")
            check(len(found) == 1 and found[0]["level"] == level and said in found[0]["text"], f"{done.stdout}")


@test
def a_container_that_is_too_small():
    """/dev/shm of 1 MiB, memory almost used up, a quota that bites."""
    group = ["mount -t tmpfs none /sys/fs/cgroup", "cd /sys/fs/cgroup", "echo 209715200 > memory.max",
             "echo 199715200 > memory.current", "printf 'nr_periods 1000\\nnr_throttled 400\\n' > cpu.stat", "cd /"]
    before = changed_root("mount -t tmpfs -o size=1m none /dev/shm", *group)
    _, findings = doctor(ranks=2, before=before)
    for what, text, fix in (("/dev/shm", "1 MiB are free", "--shm-size"),
                            ("memory of the container", "9 MiB of 200 MiB", "memory"),
                            ("CPU quota", "stopped in 400 of 1000 periods", "--cpus")):
        found = bad(findings, what)
        check({f["rank"] for f in found} == {0, 1}, f"{what}: {findings}")
        check(text in found[0]["text"] and fix in found[0]["fix"], f"{found}")


@test
def an_adapter_without_locked_memory():
    """As far as a container shows it: /dev/infiniband is there."""
    nodes = [f"mknod -m 666 /dev/{name} c 1 {minor}" for name, minor in (("null", 3), ("zero", 5), ("urandom", 9))]
    before = changed_root("mount -t tmpfs none /dev", "mkdir /dev/infiniband /dev/shm", *nodes)
    if sh([*before, "test", "-c", "/dev/null"]).returncode:
        skip("device nodes cannot be made here")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    limit = 1 << 20 if limit == resource.RLIM_INFINITY else min(limit, 1 << 20)
    _, findings = doctor(ranks=2, before=before, limits=lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit)))
    found = bad(findings, "locked memory")
    check({f["rank"] for f in found} == {0, 1} and f"{limit >> 10} KiB, and this host has RDMA" in found[0]["text"] and
          "ulimit -l unlimited" in found[0]["fix"], f"{findings}")


@test
def words_for_people_and_wrong_arguments():
    out = good([BUILD / "ddlrun", "-n", "2", "--no-prefix", BUILD / "ddl-info", "--doctor"])
    check("reachability" in out and "8 KiB to and from each of 1 ranks" in out and "{" not in out, out)
    for words, said in ((["--docter"], "unknown flag --docter: did you mean --doctor?\nusage: ddl-info"), (["--group", "0", "--doctor"], "tell none"),
                        (["x"], "unknown argument x;")):
        done = sh([BUILD / "ddl-info", *words])
        check(done.returncode == 2 and said in done.stdout, f"{words}: {done.stdout}")


main()
