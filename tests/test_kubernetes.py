"""The manifests of examples/kubernetes: what Kubernetes itself defines is valid by its schemas, the rest by what
its operators define (kubernetes_schemas.json), and the variables that they give to pods are enough for the ranks to meet.
tests/run: timeout=120 """
import copy
import json
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


def validator(kind):
    try:
        import jsonschema
    except ImportError:
        skip("jsonschema is not installed (make deps)")
    schema = json.loads((ROOT / "tests" / "kubernetes_schemas.json").read_text())[kind]
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


@test
def schemas_of_custom_resources():
    """JobSet and MPIJob by what tests/kubernetes_schemas.json has of their definitions; what is wrong is refused."""
    jobset, = documents("jobset.yaml")
    mpi, = documents("mpijob.yaml")
    for kind, d in (("JobSet", jobset), ("MPIJob", mpi)):
        found = [e.message for e in validator(kind).iter_errors(d)]
        check(not found, f"{kind}: {found}")
    for kind, d, path, value in (("JobSet", jobset, ["network", "subDomain"], "x"),
                                 ("JobSet", jobset, ["failurePolicy", "maxRestarts"], "3"),
                                 ("JobSet", jobset, ["replicatedJobs", 0, "name"], 5),
                                 ("JobSet", jobset, ["completions"], 4),
                                 ("MPIJob", mpi, ["mpiImplementation"], "OpenMpi"),
                                 ("MPIJob", mpi, ["slotsPerWorker"], "2"),
                                 ("MPIJob", mpi, ["runPolicy", "cleanPodPolicy"], "Never"),
                                 ("MPIJob", mpi, ["mpiReplicaSpecs", "Workers"], {"template": {}})):
        wrong = copy.deepcopy(d)
        at = wrong["spec"]
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = value
        check(list(validator(kind).iter_errors(wrong)), f"{kind} with {path} = {value!r} is not refused")


@test
def ranks_and_slots_of_the_mpi_job():
    mpi, = documents("mpijob.yaml")
    replicas = mpi["spec"]["mpiReplicaSpecs"]
    command = replicas["Launcher"]["template"]["spec"]["containers"][0]["command"]
    check(int(command[command.index("-n") + 1]) == replicas["Worker"]["replicas"] * mpi["spec"]["slotsPerWorker"],
          "ranks and slots differ")
    users = {role: r["template"]["spec"].get("securityContext", {}).get("runAsUser", 0) for role, r in replicas.items()}
    check(all(users.values()) or "--allow-run-as-root" in command, "mpirun refuses to run as root")


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
