"""tests/run: timeout=200

The libfabric plugin in whole programs: what ddl-info says of it, sentences of what cannot be, a library that is missing or
too old, registrations that fail, and two ranks on two hosts, one of which is killed."""
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import tempfile
import time

from harness import BUILD, ROOT, check, good, main, sh, skip, test

PERF, INFO, RUN = BUILD / "ddl-perf", BUILD / "ddl-info", BUILD / "ddlrun"


def environment(transports="fabric:tcp", **more):
    for needed in (BUILD / "libddl-fabric.so", PERF, INFO, RUN):
        if not needed.exists():
            skip(f"{needed.name} is not built; make builds it, where libfabric's headers are")
    return dict(os.environ, DDL_TRANSPORTS=transports, DDL_PLUGIN_PATH=str(BUILD), **more)


def job(program, env, ranks=2):
    return sh(str(RUN), f"-n {ranks} --no-prefix", program, env=env, timeout=60)


@test
def ddl_info_says_what_was_found_and_taken():
    text = job(INFO, environment()).stdout
    check("what transports found" in text and "fabric: tcp" in text and "is taken" in text, text)
    check(re.search(r"fabric: (\S+): not looked at, as tcp is asked for", text), text)


@test
def ddl_info_says_why_nothing_was_taken():
    """Of each adapter, whichever rank came to its end first; and where nobody asked for libfabric."""
    fails("it is not in DDL_FABRIC_SUBNET", DDL_FABRIC_SUBNET="203.0.113.0/24")
    fails("DDL_FABRIC_DOMAIN names another", DDL_FABRIC_DOMAIN="mlx5_9")
    fails("another interface was asked for", DDL_FABRIC_INTERFACE="eth77")
    fails("tcp is asked for", DDL_FABRIC_SUBNET="203.0.113.0/24")
    if not os.path.isdir("/sys/class/infiniband"):
        env = environment()
        del env["DDL_TRANSPORTS"]
        text = job(INFO, env).stdout
        check("fabric: there is no RDMA device" in text, text)


@test
def a_library_that_was_there_before_is_told():
    """It reads once what to do with the connection of a rank that has died, and may have done so."""
    sentence = "libfabric was loaded before ddl_init, without FI_AV_REMOVE_CLEANUP=1"
    for there, variable in ((True, None), (True, "1"), (False, None)):
        env = environment("fabric:tcp;ofi_rxm", DDL_LOG="info")
        env.update({"LD_PRELOAD": "libfabric.so.1"} if there else {}, **({"FI_AV_REMOVE_CLEANUP": variable} if variable else {}))
        result = job(INFO, env)
        check(result.returncode == 0 and (sentence in result.stdout) == (there and not variable), result.stdout[-3000:])


def fails(sentence, **env):
    result = job(INFO, environment(**env))
    check(result.returncode != 0 and sentence in result.stdout, f"{sentence!r} is not in:\n{result.stdout[-3000:]}")


@test
def it_listens_where_ddl_port_range_allows():
    first = int(os.environ.get("TEST_PORTS", 20000)) + 100
    text = job(INFO, environment(DDL_PORT_RANGE=f"{first}-{first + 200}", DDL_LOG="info")).stdout
    ports = [int(port) for port in re.findall(r"fabric: listens on port (\d+)", text)]
    check(ports and all(first <= port <= first + 200 for port in ports), f"{ports}\n{text}")


@test
def a_provider_that_is_not_there_is_an_error():
    fails("no provider nosuch", transports="fabric:nosuch")


@test
def an_interface_that_is_not_there_is_an_error():
    fails("there is no interface eth77", DDL_FABRIC_INTERFACE="eth77")


@test
def ranks_that_see_different_providers_are_told_both():
    text = sh(str(RUN), "-n 2 --no-prefix", ["sh", "-c", f'test "$RANK" = 0 || DDL_TRANSPORTS=fabric:sockets; exec {INFO}'],
              env=environment(), timeout=60).stdout
    if "no provider sockets" in text:
        skip("this libfabric has no sockets provider")
    check("tcp" in text and "sockets" in text and "they cannot reach each other this way" in text, text[-3000:])
    check("no transport reaches rank" in text and "addresses that the other cannot use" in text, text[-3000:])


def largest_piece(transports_of_rank_1):
    """Of an all_reduce of 4 MiB between rank 0, which prefers libfabric, and another; its result is checked."""
    with tempfile.TemporaryDirectory() as folder:
        env = environment("fabric:tcp,tcp", DDL_TRACE=f"{folder}/t.json", DDL_TRACE_STEPS="1", DDL_ALGO="ring")
        script = f'test "$RANK" = 0 || DDL_TRANSPORTS={transports_of_rank_1}; exec {PERF} all_reduce -b 4M -e 4M -n 2'
        result = sh(str(RUN), "-n 2 --no-prefix", ["sh", "-c", script], env=env, timeout=60)
        check(result.returncode == 0 and "0 elements are wrong" in result.stdout, result.stdout[-3000:])
        events = json.loads(pathlib.Path(folder, "t.json").read_text())["traceEvents"]
    return max(e["args"]["bytes"] for e in events if e["name"] == "receive and reduce")


@test
def two_ranks_that_read_cut_into_what_is_read():
    check(largest_piece("fabric:tcp,tcp") == 512 << 10, "pieces are not of 512 KiB")


@test
def ranks_that_prefer_different_transports_cut_alike():
    """Each sends by its own first choice; what only one of them knows decides nothing."""
    check(largest_piece("tcp,fabric:tcp") == 256 << 10, "pieces are not of 256 KiB")


@test
def ranks_without_a_common_transport_are_told_what_each_has():
    text = sh(str(RUN), "-n 2 --no-prefix", ["sh", "-c", f'test "$RANK" = 0 || DDL_TRANSPORTS=tcp; exec {INFO}'],
              env=environment(), timeout=60).stdout
    check(re.search(r"no transport reaches rank 1 on host \S+, which has tcp, from rank 0 on host \S+, which has fabric: they "
                    "have none in common .set DDL_TRANSPORTS", text), text[-3000:])


def with_library(source, sentence):
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/libfabric.so.1"
        if source is None:
            with open(library, "w") as file:
                file.write("no library")
        else:
            with open(f"{folder}/old.c", "w") as file:
                file.write(source)
            subprocess.run(["cc", "-shared", "-fPIC", "-o", library, f"{folder}/old.c"], check=True)
        fails(sentence, LD_LIBRARY_PATH=folder)


@test
def without_libfabric_a_sentence_says_what_to_install():
    with_library(None, "install it")


@test
def an_old_libfabric_is_refused():
    names = ["getinfo", "freeinfo", "dupinfo", "fabric", "strerror"]
    source = "".join(f"int fi_{name}(void) {{ return 0; }}\n" for name in names)
    with_library(source + "unsigned fi_version(void) { return 1u << 16 | 10; }\n", "older than 1.14")


@test
def nobody_who_did_not_ask_is_told_of_it():
    env = environment(LD_LIBRARY_PATH="/nowhere")
    del env["DDL_TRANSPORTS"]
    result = sh(str(RUN), "-n 2 --no-prefix", PERF, "all_reduce -b 8 -e 1M -f 64 -n 2 -w 1", env=env, timeout=60)
    right = re.search(r"\b0 elements are wrong", result.stdout)
    check(result.returncode == 0 and right and "fabric" not in result.stdout, result.stdout[-2000:])


@test
def registrations_that_fail_cost_speed_and_nothing_else():
    env = environment("fabric:tcp", DDL_FABRIC_FORCE_FAIL_REGISTRATION="4", DDL_FABRIC_FORCE_MR="local")
    result = sh(str(RUN), "-n 2 --no-prefix", PERF, "all_reduce -b 1M -e 4M -n 3", env=env, timeout=60)
    told = "may lock" in result.stdout or "Payloads are copied" in result.stdout
    check(result.returncode == 0 and told and re.search(r"\b0 elements are wrong", result.stdout),
          result.stdout[-3000:])


@test
def without_fi_hmem_a_job_says_once_why_gpu_memory_goes_through_the_host():
    """libfabric refuses FI_HMEM for tcp here; the "device" is ordinary memory by the name of cuda."""
    with tempfile.TemporaryDirectory() as folder:
        good(["cc", "-std=c11", "-shared", "-fPIC", "-fvisibility=hidden", f"-I{ROOT}", "-o", f"{folder}/libddl-cuda.so",
              f"{ROOT}/tests/hmem_device.c"])
        env = environment(DDL_PLUGINS="cuda")
        env["DDL_PLUGIN_PATH"] = f"{folder}:{BUILD}"
        said = "does not reach memory of devices (FI_HMEM): "
        text = job(INFO, env).stdout
        check(text.count(said) == 1 and "pinned memory" in text, text)
        result = sh(str(RUN), "-n 2 --no-prefix", PERF, "all_reduce -b 8 -e 8 -n 1", env=dict(env, DDL_LOG="info"), timeout=60)
        check(result.returncode == 0 and result.stdout.count(said) == 1, result.stdout[-3000:])
    check(said not in job(INFO, environment()).stdout, "said without a device")


def own_address():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect(("192.0.2.77", 9))
            address = s.getsockname()[0]
        except OSError:
            skip("this machine has no network but loopback")
    if address.startswith("127."):
        skip("this machine has no network but loopback")
    return address


@test
def a_rank_of_another_host_that_is_killed_is_noticed():
    with socket.socket() as s:
        s.bind(("", 0))
        port = s.getsockname()[1]
    common = environment(MASTER_ADDR=own_address(), MASTER_PORT=str(port), WORLD_SIZE="2", LOCAL_WORLD_SIZE="1",
                         LOCAL_RANK="0", DDL_SECRET="a secret that only tests have")
    ranks = [subprocess.Popen([PERF, *"all_reduce -b 1M -e 1M -n 1000000 -c 0".split()], text=True,
                              env=dict(common, RANK=str(i), DDL_HOST_ID=f"host{i}"), stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT) for i in range(2)]
    try:
        time.sleep(4)
        check(ranks[0].poll() is None and ranks[1].poll() is None, "the job did not run")
        ranks[1].send_signal(signal.SIGKILL)
        start = time.monotonic()
        text = ranks[0].communicate(timeout=30)[0]
        check("rank 1" in text and "is dead" in text, text)
        check(time.monotonic() - start < 5 + 2 * os.getloadavg()[0], f"after {time.monotonic() - start:.1f} s")
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


main()
