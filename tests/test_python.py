"""examples/python/ddl.py: all collectives on numpy arrays and DLPack, on three ranks.
tests/run: timeout=120 """
import ast
import os
import pathlib
import re
import sys

from harness import BUILD, ROOT, check, good, main, scratch, sh, skip, test


def python():
    """A Python that has numpy: the one that runs this, or Debian's."""
    for program in (sys.executable, "/usr/bin/python3"):
        if sh([program, "-c", "import numpy; numpy.from_dlpack"]).returncode == 0:
            return program
    skip("numpy 1.23 or newer is not installed (make deps)")


@test
def every_collective():
    program = python()
    good("make -s", f"B={BUILD}", BUILD / "ddlrun", BUILD / "libddl.a", timeout=300)
    with scratch() as folder:
        pathlib.Path(folder, "ddl.c").write_text('#define DDL_IMPLEMENTATION\n#include "ddl.h"\n')
        good("gcc -O0 -std=c11 -fPIC -shared", f"-I{ROOT}", "-o", f"{folder}/libddl.so", f"{folder}/ddl.c", "-lpthread -ldl")
        env = dict(os.environ, DDL_PYTHON_LIBRARY=f"{folder}/libddl.so", PYTHONPATH=str(ROOT / "examples" / "python"),
                   PYTHONDONTWRITEBYTECODE="1")
        out = good([BUILD / "ddlrun", "-n", "3", "--no-prefix", program, ROOT / "tests" / "python_rank.py"], env=env)
        check(all(f"rank {r} is done" in out for r in range(3)) and "no setting of ddl" not in out, out)


@test
def each_collective_is_wrapped():
    """Whatever the header has in a blocking and a non-blocking form, with as many arguments as it takes there."""
    header = re.sub(r"/\*.*?\*/", "", (ROOT / "src" / "api.h").read_text(), flags=re.S)
    functions = {name: args.count(",") + 1 for name, args in
                 re.findall(r"^DDL_API ddl_status ddl_(\w+)\((ddl_group \*[^;]*)\);", header, re.M)}
    collectives = [f for f in functions if "i" + f in functions and f != "probe"] + ["all_reduce_scalar", "send_recv"]
    check(len(collectives) >= 21 and {"all_reduce", "all_to_allv", "barrier"} <= set(collectives), f"{collectives}")
    module = ast.parse((ROOT / "examples" / "python" / "ddl.py").read_text())
    context, = (n for n in module.body if isinstance(n, ast.ClassDef) and n.name == "Context")
    methods = {n.name for n in context.body if isinstance(n, ast.FunctionDef)}
    missing = [f for f in collectives if f not in methods]
    check(not missing, f"examples/python/ddl.py lacks {missing}")
    for call in (n for n in ast.walk(context) if isinstance(n, ast.Call) and getattr(n.func, "attr", "") == "_call"):
        if isinstance(call.args[0], ast.Constant) and not isinstance(call.args[-1], ast.Starred):
            name = call.args[0].value.removeprefix("ddl_")
            check(len(call.args) == functions[name], f"{name} has {functions[name]} arguments, not {len(call.args)}")
    tried = (ROOT / "tests" / "python_rank.py").read_text()
    check(not [f for f in collectives if not re.search(rf'job\.{f}\b|"{f}"', tried)], "python_rank.py does not try all")


@test
def numbers_are_those_of_the_header():
    header, module = (ROOT / "src" / "api.h").read_text(), (ROOT / "examples" / "python" / "ddl.py").read_text()
    types = dict(re.findall(r'"(\w+)": (\d+)', re.search(r"_TYPES = \{(.*?)\}", module, re.S)[1]))
    short = {"float": "F", "int": "I", "uint": "U"}
    others = {"bool": "BOOL", "bfloat16": "BF16", "float8_e4m3fn": "E4M3", "float8_e5m2": "E5M2"}
    for name, number in types.items():
        kind = re.match(r"([a-z]+)(\d*)", name)
        constant = others[name] if name in others else short[kind[1]] + kind[2]
        check(re.search(rf"\bDDL_{constant} = {number}\b", header), f"{name} is not {number}")
    for name, number in re.findall(r'"(\w+)": (\d+)', re.search(r"_OPS = \{(.*?)\}", module, re.S)[1]):
        check(re.search(rf"\bDDL_{name.upper()} = {number}\b", header), f"{name} is not {number}")


main()
