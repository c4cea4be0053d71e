"""The documents say what is so: programs in them are those of examples/, links lead somewhere, settings are all listed."""
import pathlib
import re

from harness import BUILD, ROOT, WARNINGS, check, good, main, scratch, sh, test

DOCUMENTS = sorted(p for p in ROOT.rglob("*.md") if "build" not in p.relative_to(ROOT).parts)


def code(text):
    """A program without comments and blank lines."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    return [line.rstrip() for line in text.splitlines() if line.strip()]


@test
def the_programs_of_readme_and_manual_are_hello():
    hello = code((ROOT / "examples/hello.c").read_text())
    readme = (ROOT / "README.md").read_text()
    check(code(re.search(r"```c\n(.*?)```", readme, re.S)[1]) == hello, "README.md shows another program than hello.c")
    manual = (ROOT / "src/manual.h").read_text()
    block = re.search(r"examples/hello\.c:\n \*\n(.*?)\n \*\n \*     cc ", manual, re.S)[1]
    shown = [line[len(" *     "):] for line in block.splitlines()]
    check([l.rstrip() for l in shown if l.strip()] == hello, "the manual shows another program than hello.c")


@test
def the_loop_of_the_training_page_runs():
    page = (ROOT / "docs/training.md").read_text()
    program = next(block for block in re.findall(r"```c\n(.*?)```", page, re.S) if "int main" in block)
    with scratch() as folder:
        pathlib.Path(folder, "loop.c").write_text(program.replace("#define DDL_IMPLEMENTATION", "", 1))
        good("cc -std=c11", WARNINGS, "-I", ROOT, f"{folder}/loop.c", BUILD / "libddl.a", "-o", f"{folder}/loop",
             "-lpthread -ldl -lm")
        out = good(BUILD / "ddlrun", "-n 2", f"{folder}/loop")
        for rank in (0, 1):
            check(f"rank {rank}: w[1][2] is 4.000; BSP over all-reduce on 2 ranks, schedule auto (" in out, out)


# What the pieces of programs in the pages take for granted.
STAGE = """#include "ddl.h"
#include <stdbool.h>
#include <string.h>
enum { layers = 3, steps = 5, STEPS = 5, count = 2, n0 = 10, n1 = 20, rank = 0, size = 4 };
enum { MPI_BYTE, MPI_COMM_WORLD, cudaStreamCaptureModeGlobal };
int MPI_Allgather(const void *, int, int, void *, int, int, int);
extern ddl_context *context, *c;
extern ddl_group *world, *group, *smaller;
extern ddl_trainer *trainer;
extern ddl_ps *ps;
extern ddl_tensor weight[], gradient[], grad, gradient_of_layer;
extern const char *name[];
extern float parameters[100], gradients[100], w0[n0], w1[n1], g0[n0], g1[n1], anchor[100], difference[100], grads[100], values[100];
extern uint64_t ids[4];
extern int n, table, layer, optimizer;
extern ddl_request *requests[3];
extern ddl_status status;
extern bool saved;
extern void *stream, *graph, *pointer_of_cudaMalloc;
#define forward_and_loss(...) ((void)0)
#define forward(...) ((void)0)
#define backward(...) ((void)0)
#define compute(...) ((void)0)
#define apply(parameters, gradients, step) ((void)(step))
#define outer_step(...) ((void)0)
#define optimizer_step(...) 0
#define gradient_of(layer) gradient_of_layer
#define cudaStreamBeginCapture(...) ((void)0)
#define cudaStreamEndCapture(...) ((void)0)
"""


@test
def pieces_of_programs_compile():
    """Calls in the pages are those that there are: names, members, number and types of arguments."""
    checked = 0
    for page in sorted((ROOT / "docs").glob("*.md")):
        for i, piece in enumerate(re.findall(r"```c\n(.*?)```", page.read_text(), re.S)):
            if "int main" in piece:
                continue  # runs, in a test of its own
            inside = re.sub(r"^(\.\.\.|static )", "", piece, flags=re.M)  # gcc has functions in functions
            whole = piece if "#include" in piece else f"{STAGE}void piece(void);\nvoid piece(void) {{\n{inside}}}\n"
            with scratch() as folder:
                pathlib.Path(folder, "piece.c").write_text(whole)
                done = sh("gcc -std=c11 -fsyntax-only -Wall -Wextra -Werror -Wno-unused -Dthe_hardware_is_here()=1",
                          f"-I{ROOT}", f"{folder}/piece.c")
                check(done.returncode == 0, f"{page.name}, piece {i}:\n{piece}\n{done.stdout[-2000:]}")
            checked += 1
    check(checked > 15, f"{checked} pieces")


@test
def links_lead_somewhere():
    for document in DOCUMENTS:
        text = document.read_text()
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = target.partition("#")
            if "://" in target:
                continue
            file = (document.parent / path).resolve() if path else document
            check(file.exists(), f"{document.relative_to(ROOT)} links to {target}, which is not there")
            if anchor:
                heads = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
                names = [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads]
                check(anchor in names, f"{document.relative_to(ROOT)} links to {target}; there are {names}")


@test
def every_setting_is_in_manual_and_operations():
    table = (ROOT / "src/settings/table.h").read_text()
    rows = re.findall(r'\{"(DDL_\w+)", "(\w*)"', table)
    check(len(rows) > 15, str(rows))
    manual, operations = (ROOT / "src/manual.h").read_text(), (ROOT / "docs/operations.md").read_text()
    for name, standard in rows:
        line = re.search(rf"^ \*     {name} +(.*)$", manual, re.M)
        check(line and (not standard or line[1].startswith(standard)), f"the manual has not {name} with its default")
        check(name in operations, f"docs/operations.md lacks {name}")


@test
def every_setting_of_a_plugin_is_in_a_document():
    """DDL_FABRIC_FORCE_UNORDERED, _NO_RMA: what follows the first may be said by its end."""
    text = "".join((ROOT / "docs" / name).read_text() for name in ("operations.md", "plugins.md"))
    sources = [p.read_text() for p in (ROOT / "plugins").glob("*/*.[ch]")]
    names = {f"DDL_{n}" for source in sources for n in re.findall(r'"((?:SHM|FABRIC|CUDA)_[A-Z_]+)"', source)}
    check(len(names) > 12, str(names))
    for name in names:
        check(name in text or f" {name.replace('DDL_FABRIC_FORCE', '')}" in text, f"docs/operations.md lacks {name}")


@test
def every_algorithm_is_in_operations():
    table = (ROOT / "src/algo/table.h").read_text()
    operations = (ROOT / "docs/operations.md").read_text()
    for name, kind in re.findall(r'\{"(\w+)", DDL_(\w+),', table):
        rows = [l for l in operations.splitlines() if l.startswith("|") and kind.lower() in l.split("|")[1].replace(",", "").split()]
        check(kind == "BARRIER" or any(name in row for row in rows), f"docs/operations.md lacks {kind.lower()}={name}")


@test
def every_function_is_in_the_map():
    """docs/api.md names each function that src/api*.h declares, once, and no other; its sections are those of the header."""
    header = "".join(p.read_text() for p in [ROOT / "src/api.h", *sorted((ROOT / "src/api").glob("*.h"))])
    declared = re.findall(r"^DDL_API [^;(]*?\b(ddl_\w+)\(", header, re.M)
    check(len(declared) > 120, f"{len(declared)} functions")
    page = (ROOT / "docs/api.md").read_text()
    rows = "\n".join(line for line in page.splitlines() if line.startswith("|"))
    for name in declared:
        found = len(re.findall(rf"\b{name}\b", rows))
        check(found == 1, f"docs/api.md names {name} {found} times")
    for name in set(re.findall(r"\bddl_\w+", page)) - set(declared):
        check(False, f"docs/api.md names {name}, which src/api*.h does not declare")
    for section in set(re.findall(r"`>>(\w+)`", page)):
        check(re.search(rf">>{section}\b", header), f"docs/api.md names the section >>{section}")


@test
def rooms_are_listed_in_order():
    rooms = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/design.md").read_text(), re.M)
    script = (ROOT / "amalgamate.py").read_text()
    listed = re.search(r"DECLARATIONS = (\[.*?\])\nIMPLEMENTATION = (\[.*?\])", script, re.S)
    check(rooms == eval(listed[1]) + eval(listed[2]), f"docs/design.md has {rooms}")


@test
def the_options_of_ddl_perf_are_all_parsed():
    usage = sh([BUILD / "ddl-perf", "--help"]).stdout
    source = (ROOT / "tools/perf_options.h").read_text()
    for name in re.findall(r'\{"([a-z_-]+)", (?:no|required)_argument', source):
        check(f"--{name}" in usage, f"ddl-perf --help lacks --{name}")


main()
