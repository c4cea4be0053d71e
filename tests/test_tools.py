"""ddl-perf and ddl-info: arguments, right results for every operation, output that programs can read."""
import csv
import io
import json
import os
import pathlib
import re

from harness import BUILD, ROOT, check, main, scratch, sh, test

COLLECTIVES = """all_reduce broadcast reduce all_gather reduce_scatter all_to_all gather scatter scan exscan gatherv
scatterv all_gatherv reduce_scatterv all_to_allv send_recv ping_pong""".split()
IN_PLACE = "all_reduce reduce all_gather reduce_scatter all_to_all gather scatter scan exscan".split()


def perf(ranks, *arguments, **options):
    return sh([BUILD / "ddlrun", "-n", str(ranks), "--no-prefix", BUILD / "ddl-perf", *" ".join(arguments).split()],
              timeout=100, **options)


def rows_of(result):
    """The records of --format csv, whatever was logged around them."""
    check(result.returncode == 0, f"ended with {result.returncode}:\n{result.stdout[-2000:]}")
    lines = result.stdout.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("op,")), None)
    check(start is not None, f"no head of a table in:\n{result.stdout[-2000:]}")
    return list(csv.DictReader(io.StringIO("\n".join(l for l in lines[start:] if l.count(",") > 10))))


def check_all_operations(ranks, mode):
    """Sizes on both sides of what is sent eagerly; the last rank is root."""
    rows = rows_of(perf(ranks, "all -b 4 -e 400000 -f 300 -n 1 -w 1 -c 2 --format csv", f"-r {ranks - 1} --{mode}"))
    for name in COLLECTIVES:
        mine = [r for r in rows if r["op"] == name]
        sides = {r["in_place"] for r in mine}
        check(len({r["size_bytes"] for r in mine}) == 3, f"{name}: sizes {mine}")
        check(sides == ({"0", "1"} if name in IN_PLACE else {"0"}), f"{name}: {sides}")
        check(all(r["wrong"] == "0" for r in mine), f"{name} is wrong: {mine}")
        check(all(float(r["time_min_us"]) <= float(r["time_avg_us"]) <= float(r["time_max_us"]) for r in mine), str(mine))
    check(any(r["op"] == "barrier" for r in rows), "no barrier")


@test
def nothing_is_wrong_on_two_ranks():
    check_all_operations(2, "blocking")


@test
def nothing_is_wrong_on_three_ranks():
    check_all_operations(3, "nonblocking")


@test
def nothing_is_wrong_on_four_ranks():
    check_all_operations(4, "persistent")


@test
def nothing_is_wrong_for_any_type_and_op():
    rows = rows_of(perf(3, "all_reduce -b 4000 -e 4000 -n 1 -w 0 -d all -o all --format csv"))
    # 4 float types x 5 ops, 6 integer types x 11, bool x 10; out of place and in place
    check(len(rows) == 2 * (4 * 5 + 6 * 11 + 10), f"{len(rows)} rows")
    check(all(r["wrong"] == "0" for r in rows), str([r for r in rows if r["wrong"] != "0"][:3]))


@test
def what_is_not_checked_is_not_called_right():
    rows = rows_of(perf(2, "all_reduce -b 4096 -e 4096 -n 1 -c 0 --format csv"))
    check(all(r["wrong"] == "-1" for r in rows), str(rows))


@test
def bus_bandwidth_follows_nccl_tests():
    rows = rows_of(perf(4, "all -b 65536 -e 65536 -n 2 -w 1 -c 0 --format csv"))
    factors = {"all_reduce": 1.5, "all_gather": 0.75, "reduce_scatter": 0.75, "all_to_all": 0.75, "broadcast": 1.0,
               "reduce": 1.0, "gather": 0.75, "send_recv": 1.0}
    for row in rows:
        if row["op"] in factors:
            ratio = float(row["busbw_GBps"]) / float(row["algbw_GBps"])
            check(abs(ratio - factors[row["op"]]) < 0.01, f"{row['op']}: {ratio}")
            bandwidth = float(row["size_bytes"]) / float(row["time_us"]) / 1e3
            check(abs(bandwidth / float(row["algbw_GBps"]) - 1) < 0.01, str(row))


@test
def json_parses():
    result = perf(2, "broadcast -b 8 -e 64 -n 1 --format json")
    check(result.returncode == 0, result.stdout)
    found = json.loads(result.stdout[result.stdout.index("{"):])
    check(found["ranks"] == 2 and found["wrong"] == 0, str(found))
    check([r["size_bytes"] for r in found["results"]] == [8, 16, 32, 64], str(found))


@test
def the_table_has_the_columns_of_nccl_tests():
    result = perf(2, "all_reduce -b 8 -e 8 -n 1")
    for text in ("size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong", "out-of-place",
                 "in-place", "checked: 0 elements are wrong"):
        check(text in result.stdout, f"{text!r} is missing:\n{result.stdout}")


@test
def each_size_is_one_row():
    """Sizes below an element of each rank come to the same: nothing, then one."""
    for op, sizes in {"broadcast": [0, 4, 8, 16, 32, 64], "all_to_all": [0, 12, 24, 60], "barrier": [0]}.items():
        rows = [r for r in rows_of(perf(3, f"{op} -b 0 -e 64 -n 1 -w 0 --format csv")) if r["in_place"] == "0"]
        check([int(r["size_bytes"]) for r in rows] == sizes, str(rows))


@test
def an_algorithm_can_be_chosen():
    rows = rows_of(perf(3, "all_reduce -b 8 -e 8 -n 1 --algo ring --format csv"))
    check({r["algorithm"] for r in rows} == {"ring"}, str(rows))


@test
def wrong_arguments_are_refused_in_a_sentence():
    wrong = {"nonsense": 'The operation "nonsense" is not known.', "-b x": "must be a size in bytes",
             "-f 1": "must be a number greater than 1", "-n 0": "must be a whole number from 1",
             "-r 9": "--root is 9, but ranks go from 0 to 1.", "-d f99": "but it can be f16, bf16, f32",
             "-o avg -d bool": "The op avg is not defined for all_reduce of bool.",
             "all_reduce scan": "There are two operations", "--persistant": "unknown flag --persistant: did you mean --persistent?\nusage: ddlrun -n 4 ddl-perf",
             "--qqqqqqq": "unknown flag --qqqqqqq; --help lists",
             "-b": "The option -b needs a value.", "-b 8 -e 4": "must not be larger",
             "--format xml": "but it can be table, csv, json"}
    for arguments, sentence in wrong.items():
        result = perf(2, arguments)
        check(result.returncode == 2, f"{arguments}: {result.returncode}\n{result.stdout}")
        check(sentence in result.stdout, f"{arguments}: {result.stdout}")
        check(result.stdout.count("ddl-perf: ") == 1, f"{arguments}: said more than once:\n{result.stdout}")
    check(perf(2, "--algo nope").returncode == 1, "an unknown algorithm")
    check("usage:" in perf(2, "--help").stdout, "--help")


@test
def what_cannot_be_written_is_an_error_and_no_trace_of_python():
    with scratch() as folder:
        timeline = f"{folder}/timeline"
        perf(2, "all_reduce -b 8 -e 8 -n 1", env=dict(os.environ, DDL_TRACE=timeline))
        job = f"{BUILD}/ddlrun -n 2"
        for command in (*(f"{BUILD}/{tool} --help" for tool in ("ddlrun", "ddl-perf", "ddl-info", "ddl-timeline")),
                        f"{BUILD}/ddl-info", f"{BUILD}/ddl-info --json", f"{job} --no-prefix {BUILD}/ddl-perf all_reduce -e 8 -n 1",
                        f"{job} {BUILD}/hello", f"{BUILD}/ddl-timeline {timeline}"):
            done = sh(["sh", "-c", f"{command} > /dev/full"])
            check(done.returncode == 1 and "cannot write standard output" in done.stdout, f"{command}: {done.returncode} {done.stdout}")
            check("Traceback" not in done.stdout and done.stdout.count("cannot write") == 1, f"{command}: {done.stdout}")
        done = sh(["sh", "-c", f"{BUILD}/ddl-timeline {timeline} | head -c 10"])
        check(done.stdout == "<svg xmlns", done.stdout)
        for text in ("5", "[]", "{}", '{"traceEvents": 5}', '{"traceEvents": [{"ph": "X"}]}', '{"traceEvents": [7]}',
                     '{"traceEvents": [{"ph": "X", "name": "a", "pid": 0, "tid": 0, "ts": 0, "dur": 1, "args": {}}]}'):
            with open(timeline, "w") as file:
                file.write(text)
            done = sh([BUILD / "ddl-timeline", timeline])
            check(done.returncode == 2 and "is no timeline of DDL_TRACE: " in done.stdout and "Traceback" not in done.stdout,
                  f"{text}: {done.stdout}")


@test
def closed_descriptors_stay_what_they_are():
    """Nothing of the tools' own takes the place of standard input, output or error."""
    for closed in ("<&- >&- 2>&-", ">&- 2>&-", "<&- 2>&-", "<&- >&-"):
        for command in (f"{BUILD}/ddlrun -n 2 {BUILD}/hello", f"{BUILD}/ddlrun -n 2 --no-prefix {BUILD}/hello", f"{BUILD}/ddl-info"):
            check(sh(["sh", "-c", f"{command} {closed}"]).returncode == 0, f"{command} {closed}")


@test
def words_that_make_no_sense_are_a_sentence_and_no_trace_of_python():
    with scratch() as folder:
        pathlib.Path(folder, "floors").write_text("openmpi all_reduce 0 32K\n")
        compare, amalgamate, info = ROOT / "bench/compare", ROOT / "amalgamate.py", BUILD / "ddl-info"
        for words, sentence in (([compare, "--ranks", "0"], "no whole number from 2 on"),
                                ([compare, "--ranks", "x"], "no whole number from 2 on"),
                                ([compare, "--sizes", "8,1Q"], '"1Q" is no size in bytes'),
                                ([compare, "--blocks", "0"], "no whole number from 1 on"),
                                ([compare, "--floors", f"{folder}/floors"], "is no floor: peer op min_bytes max_bytes ratio"),
                                ([compare, "--floors", f"{folder}/none"], "No such file"),
                                ([compare, "--output", f"{folder}/floors/a"], "Not a directory"),
                                ([ROOT / "bench/servers", "--rate", "1"], "unrecognized arguments: --rate"),
                                ([amalgamate, "-o", "/dev/full"], "/dev/full is no file, and is left alone"),
                                ([amalgamate, "-o", f"{folder}/none/ddl.h"], "cannot be written: No such file"),
                                ([info, "--attach", ""], "--attach needs the number of a process"),
                                ([BUILD / "ddlrun", "-n", "2", info, "--group", "1-0,0"], "ranks go from 0 to 1, each once")):
            done = sh(words)
            check(done.returncode in (1, 2) and sentence in done.stdout, f"{words}: {done.returncode} {done.stdout}")
            check("Traceback" not in done.stdout, f"{words}: {done.stdout}")
        check(os.listdir(folder) == ["floors"], f"left behind: {os.listdir(folder)}")


@test
def an_unknown_flag_is_told_with_the_nearest():
    for words, near in (([BUILD / "train_gpt", "--stepps=4"], "--steps"), ([ROOT / "bench/compare", "--rank", "2"], "--ranks"),
                        ([ROOT / "bench/train", "--stps", "2"], "--steps"), ([ROOT / "bench/plot", "--outpt", "x"], "--output"),
                        ([ROOT / "tests/run", "--varient", "gcc"], "--variant"),
                        ([ROOT / "amalgamate.py", "--wiht", "plugins/shm"], "--with"), ([ROOT / "amalgamate.py", "--chek"], "--check"),
                        ([ROOT / "tools/ddl-timeline", "--fron", "2"], "--from")):
        done = sh(words)
        check(done.returncode in (1, 2) and f"did you mean {near}?" in done.stdout, f"{words}: {done.stdout}")
        check("usage: " in done.stdout, f"{words}: {done.stdout}")
    done = sh([BUILD / "embedding", "--dedicatet"])
    check(done.returncode == 2 and "unknown argument --dedicatet\nusage: " in done.stdout, done.stdout)


@test
def info_shows_settings_and_hides_the_secret():
    environment = dict(os.environ, DDL_SECRET="do not show this to anybody", DDL_STALL_MS="1234", DDL_LOG="none")
    result = sh([BUILD / "ddl-info"], env=environment)
    check(result.returncode == 0, result.stdout)
    check("do not show" not in result.stdout, "the secret is shown")
    line = next(l for l in result.stdout.splitlines() if "DDL_STALL_MS" in l)
    check("1234" in line and "environment" in line, line)
    line = next(l for l in result.stdout.splitlines() if "DDL_TIMEOUT_MS" in l)
    check("300000" in line and "default" in line, line)
    for text in ("cores", "interfaces", "127.0.0.1", "rank 0 of 1", "tcp"):
        check(text in result.stdout, f"{text!r} is missing:\n{result.stdout}")


@test
def info_says_why_a_plugin_was_refused():
    with scratch() as folder:
        with open(f"{folder}/libddl-broken.so", "w") as file:
            file.write("this is no library")
        result = sh([BUILD / "ddl-info"], env=dict(os.environ, DDL_PLUGIN_PATH=folder))
        check(result.returncode == 0, result.stdout)
        line = next((l for l in result.stdout.splitlines() if l.strip().startswith("broken")), "")
        check("refused" in line and folder in line and len(line.split(": ", 1)[1]) > 8, result.stdout)


def info_json(ranks, *words, **env):
    done = sh([BUILD / "ddlrun", "-n", ranks, "--no-prefix", BUILD / "ddl-info", "--json", *words],
              env={**os.environ, "DDL_LOG": "none", **env})
    return done, json.JSONDecoder().raw_decode(done.stdout)[0] if done.stdout.startswith("{") else None


@test
def info_for_machines():
    """Algorithm, transport and time per size of the job, of a group of it, and of a mixture of transports."""
    done, all_ranks = info_json(3, DDL_TRANSPORTS="shm,tcp", DDL_SECRET="do not show this to anybody")
    check(done.returncode == 0 and "do not show" not in done.stdout, done.stdout)
    check(all_ranks["version"] == 1 and all_ranks["ranks"] == 3 and all_ranks["group"] == [0, 1, 2], f"{all_ranks}")
    choices = all_ranks["algorithms"]
    check({c["operation"] for c in choices} == {"all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"} and
          sorted({c["bytes"] for c in choices}) == [8 ** i for i in range(1, 9)] and len(choices) == 40, f"{choices}")
    check(all(c["algorithm"] == "native" and c["transport"] == "shm" and 0 < c["seconds"] < 60 for c in choices), f"{choices}")
    check(len({c["seconds"] for c in choices}) > 5 and all_ranks["measured"][0]["latency_seconds"] > 0, f"{choices}")
    check([(x["rank"], x["transport"]) for x in all_ranks["links"]] == [(0, None), (1, "shm"), (2, "shm")], f"{all_ranks['links']}")
    secret = next(s for s in all_ranks["settings"] if s["name"] == "DDL_SECRET")
    check(secret["value"] == "(set, not shown)" and all_ranks["secret"] == "DDL_SECRET_FD", f"{secret}")
    _, pair = info_json(4, "--group", "1-2", DDL_TRANSPORTS="tcp")
    check(pair["group"] == [1, 2] and pair["rank"] == 1 and {c["transport"] for c in pair["algorithms"]} == {"tcp"}, f"{pair['group']}")
    check({c["algorithm"] for c in pair["algorithms"]} != {"native"}, f"{pair['algorithms']}")
    _, mixed = info_json(3, DDL_TRANSPORTS="shm,tcp", DDL_ALGO="ring")
    check({c["transport"] for c in mixed["algorithms"]} == {"shm"}, "by messages over shared memory")
    for words in ("0-9", "1,1", "2-1", "x", "0,"):
        done, _ = info_json(2, "--group", words)
        check(done.returncode in (1, 2) and f"--group {words}: ranks go from 0 to 1" in done.stdout, done.stdout)
    done = sh([BUILD / "ddl-info", "--json"], env=dict(os.environ, DDL_LOG="none", DDL_TIMEOUT_MS="soon"))
    broken = json.loads(done.stdout)
    check(done.returncode == 1 and broken["error"] == "DDL_ERR_CONFIG" and "\"soon\"" in broken["text"], done.stdout)


@test
def info_of_a_job_shows_transports_and_algorithms():
    for transport, algorithm in (("shm", "native"), ("tcp", "recursive_doubling")):
        env = dict(os.environ, DDL_TRANSPORTS="tcp") if transport == "tcp" else None  # shm is taken by itself
        result = sh([BUILD / "ddlrun", "-n", "3", "--no-prefix", BUILD / "ddl-info"], env=env)
        check(result.returncode == 0, result.stdout)
        check("3 ranks on 1 host)" in result.stdout and "inside a host" in result.stdout, result.stdout)
        links = [l for l in result.stdout.splitlines() if l.split()[:2] in (["1", "0"], ["2", "0"]) and "GB/s" in l]
        check(len(links) == 2 and all(transport in l for l in links), result.stdout)
        check("all_reduce" in result.stdout and algorithm in result.stdout, result.stdout)


@test
def info_alone_tells_what_two_ranks_would_use():
    """Beside make demo: shm by itself, and why; what is asked for; and why two would not meet. No file of theirs stays."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith("DDL_")}
    with scratch() as folder:
        for setting, words in (({}, r"would use shm: tensor memory direct.*\n  why: of .*\bshm\b.*promises the least time"),
                               ({"DDL_TRANSPORTS": "tcp"}, r"would use tcp\n  why: of DDL_TRANSPORTS \(tcp\) it is the first"),
                               ({"DDL_TRANSPORTS": "shm,tcp", "DDL_SHM_CMA": "0"}, r"would use shm: .*ordinary memory staged\n"),
                               ({"DDL_TRANSPORTS": "fabric:nonesuch"}, r"would not meet: ddl_init: .*fabric.*\n")):
            result = sh([BUILD / "ddl-info"], env={**plain, "DDL_TRACE": f"{folder}/trace", "DDL_TUNE_CACHE": f"{folder}/tune",
                                                   **setting})
            check(re.search(r"two ranks of this host \(ddlrun -n 2\)\n  " + words, result.stdout), f"{setting}: {result.stdout}")
        small = sh(["sh", "-c", f"ulimit -f 1000; exec {BUILD}/ddl-info"], env=plain).stdout
        check(re.search(r"would use tcp\n  why: shm: no segment of .*\(look at ulimit -f", small), small)
        check(os.path.getsize(f"{folder}/tune") == 0, "the two have left their measurements")
    found = json.loads(sh([BUILD / "ddl-info", "--json"], env=plain).stdout)["two_ranks"]
    check(found["transport"] == "shm" and "tcp" in found["among"] and found["error"] is None, f"{found}")
    check("two ranks of" not in perf_info(2), "in a job the ranks themselves are shown")


def perf_info(ranks):
    return sh([BUILD / "ddlrun", "-n", str(ranks), "--no-prefix", BUILD / "ddl-info"]).stdout


@test
def info_tells_how_shared_memory_moves_data():
    for pulls, words in (("1", ("by process_vm_readv", "staged")), ("0", ("staged",))):  # the kernel may forbid the first
        env = dict(os.environ, DDL_TRANSPORTS="shm", DDL_SHM_CMA=pulls)
        result = sh([BUILD / "ddlrun", "-n", "2", "--no-prefix", BUILD / "ddl-info"], env=env)
        said = re.findall(r"shm .* GB/s; tensor memory direct, large ordinary memory (.*)", result.stdout)
        check(len(said) == 1 and said[0] in words, result.stdout)


@test
def settings_of_a_plugin_are_its_own():
    env = dict(os.environ, DDL_SHM_WHATEVER="1", DDL_SHM_STAGING_BYTE="1M", DDL_SHM_RING_BYTES="64K",
               DDL_SHMOO_WHATEVER="1", DDL_FABRIC_PROVIDR="tcp", DDL_PLUGINS="shm,fabric")
    text = sh([BUILD / "ddl-info"], env=env).stdout
    check("DDL_SHMOO_WHATEVER is no setting of ddl" in text, text)
    check("DDL_SHM_WHATEVER is no setting of plugin shm; its documentation lists" in text, text)
    check("DDL_SHM_STAGING_BYTE is no setting of plugin shm; did you mean DDL_SHM_STAGING_BYTES?" in text, text)
    check("DDL_SHM_RING_BYTES is no setting" not in text, text)
    manual = (ROOT / "docs" / "operations.md").read_text()
    built = [plugin.upper() for plugin in ("shm", "fabric") if (BUILD / f"libddl-{plugin}.so").exists()]
    names = re.findall(rf"^\| (DDL_(?:{'|'.join(built)})_\w+) \|", manual, re.M)
    every = sh([BUILD / "ddl-info"], env=dict(env, **{name: "0" for name in names})).stdout
    wrong = [name for name in names if f"{name} is no setting" in every]
    check(len(names) >= 5 and not wrong, f"not in the list of its plugin: {wrong}")
    if (BUILD / "libddl-fabric.so").exists():
        check("DDL_FABRIC_PROVIDR is no setting of plugin fabric; did you mean DDL_FABRIC_PROVIDER?" in text, text)
    without = sh([BUILD / "ddl-info"], env=dict(env, DDL_PLUGINS="none")).stdout
    check("DDL_SHMOO_WHATEVER is no setting of ddl" in without, without)
    check("DDL_SHM_STAGING_BYTE is" not in without and "DDL_FABRIC_PROVIDR is" not in without, without)


@test
def info_explains_a_wrong_setting():
    result = sh([BUILD / "ddl-info"], env=dict(os.environ, DDL_TIMEOUT_MS="soon"))
    check(result.returncode == 1, result.stdout)
    check('DDL_ERR_CONFIG: ddl_init: DDL_TIMEOUT_MS is "soon"' in result.stdout, result.stdout)
    check("unknown argument what" in sh([BUILD / "ddl-info"], "what").stdout, "an argument")


@test
def the_counters_are_shown():
    text = perf(3, "all_reduce -b 400 -e 400 -n 30 -w 5 -c 1 --stats", env=dict(os.environ, DDL_TRANSPORTS="tcp")).stdout
    check(re.search(r"^# rank 0 of 3: \d+ operations started, \d+ completed, 0 failed, ", text, re.M), text)
    check(re.search(r"^#   transport tcp +2 peers, sent [1-9]\d* messages ", text, re.M), text)
    calls = re.findall(r"^#   algorithm (\w+) +(\d+) collectives, ", text, re.M)
    check(sum(int(n) for name, n in calls) >= 72, f"30 + 5 + 1 rounds in and out of place: {calls}")
    last = re.search(r"^# by messages, .*, by rank:((?: \d+)+)$", text, re.M)
    check(last and len(last.group(1).split()) == 3, text)


main()
