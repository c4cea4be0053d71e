"""Jobs that other launchers start: both mpiruns and Slurm with each of its three wires place the ranks, tell them who they are
and how to meet, on one host and on two; one program, no flags. And what is said when variables contradict each other.
tests/run: timeout=300 waits=yes """
import contextlib
import csv
import pathlib
import socket
import subprocess

from cluster import mpirun, plain_env, slurm
from harness import BUILD, ROOT, Skipped, check, good, main, scratch, sh, skip, test
from jobs import SECRET, SLOW, program, two_hosts

RANK = program()
GPT = "--layers 1 --dim 32 --heads 2 --context 32 --steps 6 --save 6 --batch 4 --sample 0 --fresh".split()


def all_correct(out, ranks, hosts, secret):
    check(out.count("correct; ") == ranks, f"not all {ranks} ranks came to the end:\n{out[-3000:]}")
    check(f"rank 0: {ranks} ranks on {hosts} host" in out, f"not {ranks} ranks on {hosts} hosts:\n{out[-3000:]}")
    check((secret in out), f"the start does not say {secret!r}:\n{out[-3000:]}")


# ------------------------------------------------------------------------------------------------ one host


@test
def open_mpi_here():
    all_correct(mpirun("openmpi", "--oversubscribe -n 4", RANK, "correct"), 4, 1, "no job secret")


@test
def mpich_here():
    all_correct(mpirun("mpich", "-n 4", RANK, "correct"), 4, 1, "no job secret")


@test
def slurm_here_by_each_wire():
    with slurm() as cluster:
        for wire in ("none", "pmi2", "pmix"):
            all_correct(cluster.srun(f"--mpi={wire} -N 1 -n 4", RANK, "correct"), 4, 1, "no job secret")


@test
def key_value_spaces():
    """Where no rank knows that all are here, the space tells them; twice in one process, too."""
    out = mpirun("mpich", "-launcher fork -hosts a,b -ppn 2 -n 4", RANK, "twice")
    check(out.count("joined") == 8 and out.count("authenticated by the job secret") == 2, out[-3000:])
    hidden = ["env", "OMPI_COMM_WORLD_LOCAL_RANK=0", "OMPI_COMM_WORLD_LOCAL_SIZE=1", RANK, "twice"]
    out = mpirun("openmpi", "--oversubscribe -n 4", *hidden)
    check(out.count("joined") == 8 and out.count("authenticated by the job secret") == 2, out[-3000:])
    with slurm() as cluster:  # two nodes, which are both here
        out = cluster.srun("--mpi=pmi2 -N 2 -n 4", RANK, "twice")
        check(out.count("joined") == 8 and out.count("authenticated by the job secret") == 2, out[-3000:])
        out = cluster.srun("--mpi=pmix -N 1 -n 4", "env", "SLURM_STEP_NUM_NODES=2", RANK, "twice")
        check(out.count("joined") == 8 and out.count("authenticated by the job secret") == 2, out[-3000:])


@test
def a_rank_outlives_the_others():
    """A rank that ends after ddl_finalize is no crash to the launcher, which would kill the others of its host."""
    def both(out):
        check("outlived 0" in out and "outlived 2" in out and out.count("done ") == 4, f"some were killed:\n{out[-3000:]}")
    both(mpirun("mpich", "-launcher fork -hosts a,b -ppn 2 -n 4", RANK, "outlive"))
    with slurm() as cluster:
        both(cluster.srun("--mpi=pmi2 -N 2 -n 4", RANK, "outlive"))


@test
def one_program_same_loss():
    """train_gpt, the same file, with 4 ranks each by four launchers."""
    with scratch() as folder:
        text = pathlib.Path(folder, "text")
        text.write_bytes((ROOT / "src" / "api.h").read_bytes())
        same = {"DDL_DETERMINISTIC": "1", "DDL_ALGO": "all_reduce=all_gather"}

        def losses(name, run):
            command = [BUILD / "train_gpt", *GPT, "--data", text, "--out", f"{folder}/{name}"]
            run(*command)
            with open(f"{folder}/{name}/loss.csv") as file:
                return [row["loss"] for row in csv.DictReader(file)]

        found = {"ddlrun": losses("ddlrun", lambda *c: good([BUILD / "ddlrun", "-n", "4"], list(c),
                                                            env=plain_env(**same)))}
        missing = []
        for name, run in (("openmpi", lambda *c: mpirun("openmpi", "--oversubscribe -n 4", *c, **same)),
                          ("mpich", lambda *c: mpirun("mpich", "-n 4", *c, **same)),
                          ("slurm", lambda *c: by_slurm(c, same))):
            try:
                found[name] = losses(name, run)
            except Skipped as reason:
                missing.append(str(reason))
        check(len(found["ddlrun"]) == 6 and len(set(found["ddlrun"])) > 1, f"it did not train: {found}")
        check(all(curve == found["ddlrun"] for curve in found.values()), f"the losses differ: {found}")
        if missing:
            skip(f"{sorted(found)} agree; {'; '.join(missing)}")


def by_slurm(command, env):
    with slurm() as cluster:
        cluster.srun("-N 1 -n 4", *command, **env)


# ------------------------------------------------------------------------------------------------ two hosts


@test
def open_mpi_on_two_hosts():
    with two_hosts() as hosts:
        all_correct(mpirun("openmpi", "-n 4", RANK, "correct 1000", hosts=hosts), 4, 2, "authenticated by the job secret")


@test
def mpich_on_two_hosts():
    with two_hosts() as hosts:
        all_correct(mpirun("mpich", "-n 4", RANK, "correct 1000", hosts=hosts), 4, 2, "authenticated by the job secret")


@test
def slurm_on_two_hosts():
    with two_hosts() as hosts, slurm(hosts) as cluster:
        for wire, secret in (("none", SECRET), ("pmi2", ""), ("pmix", "")):
            out = cluster.srun(f"--mpi={wire} -N 2 -n 4", RANK, "correct 1000", DDL_SECRET=secret)
            all_correct(out, 4, 2, "authenticated by the job secret")


# ------------------------------------------------------------------------------------------------ contradictions


def alone(**env):
    """A program that no launcher started, with these variables."""
    return sh([str(RANK), "init"], env=plain_env(DDL_INIT_TIMEOUT_MS=1500, **env)).stdout


def says(out, *words):
    for word in words:
        check(word in out, f"{word!r} is not in:\n{out}")


@test
def ranks_that_do_not_add_up():
    says(alone(PMI_RANK=4, PMI_SIZE=4), "DDL_ERR_CONFIG", "PMI_RANK is 4 and PMI_SIZE is 4, but ranks go from 0 to 3")
    says(alone(PMI_RANK=1), "DDL_ERR_CONFIG", "PMI_RANK is \"1\", but PMI_SIZE is not set")
    says(alone(OMPI_COMM_WORLD_RANK=7, OMPI_COMM_WORLD_SIZE=2), "OMPI_COMM_WORLD_RANK is 7", "from 0 to 1")
    says(alone(OMPI_COMM_WORLD_RANK=0, OMPI_COMM_WORLD_SIZE=2, OMPI_COMM_WORLD_LOCAL_RANK=3,
               OMPI_COMM_WORLD_LOCAL_SIZE=2), "3 of 2 on its host (Open MPI): these contradict each other")
    says(alone(SLURM_PROCID=2, SLURM_STEP_NUM_TASKS=2, SLURM_STEP_NODELIST="n1"), "SLURM_PROCID is 2")
    says(alone(PMIX_RANK=1, PMIX_NAMESPACE="prun-1"), "rank 1, but nothing says of how many", "WORLD_SIZE")
    says(alone(PMI_RANK=0, PMI_SIZE=2, PMI_FD=77), "PMI_FD is 77, but no such descriptor is open")
    says(alone(PMI_RANK=0, PMI_SIZE=2, PMI_FD="x"), "PMI_FD is \"x\"", "not a whole number")
    says(alone(OMPI_COMM_WORLD_RANK=0, OMPI_COMM_WORLD_SIZE=2, PMIX_NAMESPACE="x", DDL_PMIX_LIBRARY="/no/lib.so"),
         "/no/lib.so: cannot open shared object", "DDL_PMIX_LIBRARY", "MASTER_ADDR")


@test
def two_launchers_at_once():
    """The first of the order decides, and one rank says so."""
    out = alone(RANK=0, WORLD_SIZE=1, OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=2)
    says(out, "joined 0 of 1", "2 launchers contradict each other: this is rank 0 of 1 by RANK and WORLD_SIZE, rank 1 of 2 "
         "by Open MPI. RANK and WORLD_SIZE decides, as it comes first in the order ddl_config, RANK and WORLD_SIZE, Open MPI,")
    out = alone(PMI_RANK=0, PMI_SIZE=1, SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=2, SLURM_STEP_NODELIST="n1")
    says(out, "joined 0 of 1", "rank 0 of 1 by PMI, rank 1 of 2 by Slurm. PMI decides")
    check("contradict" not in alone(RANK=0, WORLD_SIZE=1, PMI_RANK=0, PMI_SIZE=1), "it warns where both agree")
    check("contradict" not in alone(RANK=0, WORLD_SIZE=1, PMI_RANK=0, PMI_SIZE=2, TORCHELASTIC_RUN_ID="x"),
          "it warns of torchrun inside mpirun")


@test
def more_launchers_at_once():
    """All of them are named, also one whose variables make no sense; in one line."""
    out = alone(RANK=0, WORLD_SIZE=1, OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=2, PMI_RANK=2, PMI_SIZE=3)
    says(out, "joined 0 of 1", "3 launchers contradict each other: this is rank 0 of 1 by RANK and WORLD_SIZE, rank 1 of 2 "
         "by Open MPI, rank 2 of 3 by PMI. RANK and WORLD_SIZE decides")
    out = alone(OMPI_COMM_WORLD_RANK=0, OMPI_COMM_WORLD_SIZE=1, PMI_RANK=9, PMI_SIZE=3, SLURM_PROCID=1,
                SLURM_STEP_NUM_TASKS=2, SLURM_STEP_NODELIST="n1")
    says(out, "3 launchers", "by Open MPI, a rank that makes no sense by PMI, rank 1 of 2 by Slurm. Open MPI decides")
    check(out.count("contradict") == 1, f"more than one line:\n{out}")


class Server:
    """A launcher that speaks PMI-1 badly: the answers, in order, to whatever is asked."""

    def __init__(self, *answers):
        self.mine, theirs = socket.socketpair()
        theirs.set_inheritable(True)
        env = plain_env(PMI_RANK=1, PMI_SIZE=2, PMI_FD=theirs.fileno(), DDL_INIT_TIMEOUT_MS=1500)
        self.rank = subprocess.Popen([str(RANK), "init"], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                     text=True, pass_fds=[theirs.fileno()])
        theirs.close()
        for answer in answers:
            self.mine.recv(1000)
            self.mine.sendall(answer.encode())

    def output(self, close=False):
        if close:
            self.mine.close()
        with contextlib.closing(self.mine):
            return self.rank.communicate(timeout=30 * SLOW)[0]


@test
def a_launcher_that_answers_badly():
    init, space = "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1\n", "cmd=my_kvsname kvsname=k\n"
    says(Server("cmd=response_to_init rc=1\n").output(), "DDL_ERR_CONFIG", "answered cmd=init", "rc=1")
    says(Server(init, "what?\n").output(), "DDL_ERR_CONFIG", "with \"what?\"", "MASTER_ADDR")
    says(Server(init, space).output(), "DDL_ERR_TIMEOUT", "did not answer cmd=barrier_in", "look at what the others printed")
    says(Server(init).output(close=True), "DDL_ERR_SYSTEM", "did not answer cmd=get_my_kvsname", "set MASTER_ADDR")
    says(Server(init, "x" * 3000).output(), "DDL_ERR_SYSTEM", "did not answer")
    bye = "cmd=finalize_ack rc=0\n"
    says(Server(init, space, "cmd=barrier_out\n", "cmd=get_result rc=0 value=x\n", "no\n").output(), "DDL_ERR_CONFIG",
         "answered cmd=finalize", "with \"no\"")
    for value in ("ddl1/h", "ddl1/h/0/-", "ddl1/h/70000/-", "ddl1//1/-", "ddl1/h/5/abc", "ddl1/h/5/" + "g" * 64,
                  "ddl1/" + "h" * 300 + "/5/-", ""):
        says(Server(init, space, "cmd=barrier_out\n", f"cmd=get_result rc=0 value={value}\n", bye).output(),
             "DDL_ERR_CONFIG", "rank 0 left no address")


@test
def layout_of_pmix_structs():
    """ours are written down in src/store/pmix.h, as the library is opened at run time."""
    where = sorted(pathlib.Path("/usr/lib").glob("*/pmix2/include/pmix.h"))
    if not where:
        skip("the headers of libpmix are not installed (libpmix-dev)")
    with scratch() as folder:
        source = pathlib.Path(folder, "layout.c")
        same = [("pmix_proc_t", "ddl__pmix_proc", {"nspace": "space", "rank": "rank"}),
                ("pmix_value_t", "ddl__pmix_value", {"type": "type", "data": "data"}),
                ("pmix_info_t", "ddl__pmix_info", {"key": "key", "flags": "flags", "value": "value"})]
        asserts = [f"_Static_assert(sizeof({a}) == sizeof({b}), \"{a}\");" for a, b, _ in same]
        asserts += [f"_Static_assert(offsetof({a}, {m}) == offsetof({b}, {n}), \"{a}.{m}\");"
                    for a, b, members in same for m, n in members.items()]
        asserts += [f"_Static_assert({a} == {b}, \"{a}\");" for a, b in (
            ("PMIX_BOOL", "DDL__PMIX_BOOL"), ("PMIX_STRING", "DDL__PMIX_STRING"), ("PMIX_INT", "DDL__PMIX_INT"),
            ("PMIX_GLOBAL", "DDL__PMIX_GLOBAL"), ("PMIX_SUCCESS", "0"))]
        source.write_text("#define DDL_IMPLEMENTATION\n#include \"ddl.h\"\n#include <pmix.h>\n" + "\n".join(asserts) +
                          "\nint main(void) { return strcmp(PMIX_COLLECT_DATA, \"pmix.collect\") != 0 || "
                          "strcmp(PMIX_TIMEOUT, \"pmix.timeout\") != 0; }\n")
        good("gcc -std=gnu11", f"-I{ROOT} -I{where[0].parent}", "-o", f"{folder}/layout", source, "-lpthread -ldl")
        good(f"{folder}/layout")


main()
