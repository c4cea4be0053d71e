"""The manifests of examples/kubernetes: what Kubernetes itself defines is valid by its schemas, the rest has the shape
that its operators ask for, and the variables that they give to pods are enough for the ranks to meet.
tests/run: timeout=120 """
import os
import pathlib
import re
import sys

from harness import ROOT, check, main, skip, test
from jobs import Job, free_port, program

sys.path.append(str(ROOT / "build" / "python"))  # where make deps puts what Debian has no package of
FOLDER = ROOT / "examples" / "kubernetes"


def documents(name):
    try:
        import yaml
    except ImportError:
        skip("PyYAML is not installed (make deps)")
    with open(FOLDER / name) as file:
        return list(yaml.safe_load_all(file))


@test
def schemas_of_kubernetes():
    try:
        import kubernetes_validate
    except ImportError:
        skip("kubernetes-validate is not installed (make deps)")
    checked = 0
    for name in sorted(os.listdir(FOLDER)):
        for d in documents(name) if name.endswith(".yaml") else []:
            jobs = [r["template"] for r in d["spec"].get("replicatedJobs", [])]
            pods = [r["template"] for r in d["spec"].get("mpiReplicaSpecs", {}).values()]
            parts = [{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **j} for j in jobs]
            parts += [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **p} for p in pods]
            for part in parts or [d]:
                kubernetes_validate.validate(part, "1.28", strict=True)
                checked += 1
    check(checked == 5, f"{checked} parts were checked")
    wrong = documents("job.yaml")[1]
    wrong["spec"]["completions"] = "four"
    try:
        kubernetes_validate.validate(wrong, "1.28", strict=True)
    except kubernetes_validate.ValidationError:
        return
    check(False, "the schema refuses nothing")


def keys(found, must, may, where):
    check(set(must) <= set(found) <= set(must) | set(may), f"{where} has {sorted(found)}")


@test
def shape_of_custom_resources():
    """By the types of jobset.x-k8s.io/v1alpha2 and kubeflow.org/v2beta1."""
    jobset, = documents("jobset.yaml")
    check((jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet"), "another kind")
    keys(jobset["spec"], ["replicatedJobs"], ["network", "successPolicy", "failurePolicy", "suspend"], "JobSet.spec")
    keys(jobset["spec"]["network"], [], ["enableDNSHostnames", "subdomain", "publishNotReadyAddresses"], "network")
    keys(jobset["spec"]["failurePolicy"], [], ["maxRestarts", "rules"], "failurePolicy")
    for part in jobset["spec"]["replicatedJobs"]:
        keys(part, ["name", "template"], ["replicas"], "replicatedJobs")
    mpi, = documents("mpijob.yaml")
    check((mpi["apiVersion"], mpi["kind"]) == ("kubeflow.org/v2beta1", "MPIJob"), "another kind")
    keys(mpi["spec"], ["mpiReplicaSpecs"], ["slotsPerWorker", "runPolicy", "sshAuthMountPath", "mpiImplementation",
                                            "launcherCreationPolicy"], "MPIJob.spec")
    check(mpi["spec"]["mpiImplementation"] in ("OpenMPI", "Intel", "MPICH"), "no such implementation")
    replicas = mpi["spec"]["mpiReplicaSpecs"]
    keys(replicas, ["Launcher", "Worker"], [], "mpiReplicaSpecs")
    for part in replicas.values():
        keys(part, ["template"], ["replicas", "restartPolicy"], "a replica")
    command = replicas["Launcher"]["template"]["spec"]["containers"][0]["command"]
    check(int(command[command.index("-n") + 1]) == replicas["Worker"]["replicas"] * mpi["spec"]["slotsPerWorker"],
          "ranks and slots differ")


def environment(container, index):
    """What the container of pod `index` gets."""
    env = {}
    for entry in container["env"]:
        source = entry.get("valueFrom", {})
        if "fieldRef" in source:
            check(source["fieldRef"]["fieldPath"] == "metadata.annotations['batch.kubernetes.io/job-completion-index']",
                  "another field")
            env[entry["name"]] = str(index)
        elif "secretKeyRef" in source:
            env[entry["name"]] = "a secret that only pods have"
        else:
            check(isinstance(entry["value"], str), f"{entry['name']} is no string")
            env[entry["name"]] = entry["value"]
    return env


def runs(job, master):
    spec = job["spec"]
    container = spec["template"]["spec"]["containers"][0]
    each = {i: environment(container, i) for i in range(spec["completions"])}
    check(spec["completionMode"] == "Indexed" and spec["parallelism"] == spec["completions"] and
          spec["template"]["spec"]["restartPolicy"] == "Never", "not all ranks run at once")
    check({e["MASTER_ADDR"] for e in each.values()} == {master}, f"{master} is not rank 0's name: {each[0]}")
    port = free_port()
    for e in each.values():
        e.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    with Job(program(), "init", ranks=spec["completions"], each=each, MASTER_ADDR=None, MASTER_PORT=None,
             DDL_SECRET=None) as ranks:
        ranks.succeed()
        ranks.check("4 ranks on 1 host" in ranks.output(0) and "authenticated" in ranks.output(0), "not all have met")


@test
def variables_are_enough():
    service, job = documents("job.yaml")
    name = job["metadata"]["name"]
    check(service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {"job-name": name} and
          service["spec"]["publishNotReadyAddresses"] is True and
          job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"], "the service is not the Job's")
    runs(job, f"{name}-0.{service['metadata']['name']}")
    jobset, = documents("jobset.yaml")
    part, = jobset["spec"]["replicatedJobs"]
    runs(part["template"], f"{jobset['metadata']['name']}-{part['name']}-0-0.{jobset['spec']['network']['subdomain']}")


@test
def comments_name_files_that_exist():
    for word in re.findall(r"-f (\S+\.yaml)", "".join(pathlib.Path(p).read_text() for p in FOLDER.glob("*"))):
        check((FOLDER / word).exists(), f"there is no {word}")


main()
