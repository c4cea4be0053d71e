"""ddl-info --doctor finds what is set up wrong, says what fixes it, and is silent about what is fine.
tests/run: timeout=120 """
import json
import os
import resource

from harness import BUILD, check, good, main, scratch, sh, test


def doctor(*words, ranks=3, limits=None, **env):
    """(exit code, findings) of a job."""
    good("make -s", f"B={BUILD}", BUILD / "ddlrun", BUILD / "ddl-info", timeout=300)
    done = sh([BUILD / "ddlrun", "-n", ranks, "--no-prefix", BUILD / "ddl-info", "--doctor", "--json", *words],
              env={**os.environ, "DDL_LOG": "none", **env}, preexec_fn=limits)
    return done.returncode, json.loads(done.stdout)["findings"]


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
    check(all(f["fix"] for f in findings if f["level"] != "fine"), "a finding without what fixes it")


@test
def few_descriptors():
    code, findings = doctor(ranks=2, limits=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300)))
    bad = of(findings, "file descriptors")
    check(code == 0 and {f["rank"] for f in bad} == {0, 1} and "at most 300" in bad[0]["text"] and
          "nofile" in bad[0]["fix"] and bad[0]["level"] == "warning", f"{code}: {findings}")


@test
def more_ranks_than_cores():
    _, findings = doctor(ranks=2, limits=lambda: os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]))
    check(any(f["level"] == "warning" and "2 ranks of this host may use 1 cores" in f["text"] for f in of(findings, "cores")),
          f"{of(findings, 'cores')}")


@test
def a_plugin_that_is_refused():
    with scratch() as folder:
        with open(f"{folder}/libddl-broken.so", "w") as file:
            file.write("this is no shared object")
        _, findings = doctor(ranks=2, DDL_PLUGIN_PATH=folder)
    check(any(f["level"] == "warning" and "libddl-broken.so is refused" in f["text"] for f in of(findings, "plugins")),
          f"{findings}")


@test
def words_for_people_and_wrong_arguments():
    out = good([BUILD / "ddlrun", "-n", "2", "--no-prefix", BUILD / "ddl-info", "--doctor"])
    check("reachability" in out and "8 KiB to and from each of 1 ranks" in out and "{" not in out, out)
    for words, said in ((["--docter"], "unknown flag --docter: did you mean --doctor?\nusage: ddl-info"), (["--json"], "give both"),
                        (["x"], "unknown argument x;")):
        done = sh([BUILD / "ddl-info", *words])
        check(done.returncode == 2 and said in done.stdout, f"{words}: {done.stdout}")


main()
