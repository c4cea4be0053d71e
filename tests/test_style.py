"""The rules of the house hold (amalgamate.py --check), and the checker does see each kind of offence."""
import pathlib
import shutil

from harness import ROOT, check, good, main, scratch, sh, test


@test
def the_rules_hold():
    result = sh("./amalgamate.py --check")
    check(result.returncode == 0, "amalgamate.py --check:\n" + result.stdout)


@test
def output_is_the_same_each_time_and_from_each_folder():
    one = good("./amalgamate.py -o -")
    with scratch() as folder:
        check(one == good("python3 -B", ROOT / "amalgamate.py", "-o -", cwd=folder), "the output differs")


MANUAL = "/* ddl.h\n *   DDL_IMPLEMENTATION, DDL_NAMESPACE, DDL_LOG\n */\n"
API = "#ifndef DDL_API_H\n#define DDL_API_H\n/* Does it. */\nDDL_API int ddl_do(void);\n#endif\n"
BASE = """#ifndef DDL_BASE_H
#define DDL_BASE_H
#include <stdio.h>
#include "api.h"
struct ddl__box {
    int n;
};
typedef int (*ddl__fn)(void);
enum { DDL__A, DDL__B = 2 };
static const char *const ddl__names[] = {"DDL_LOG", "b"};
static int ddl__f(struct ddl__box *box) {
    static const int table[2] = {1, 2};
    return box->n + table[0];
}
DDL_API int ddl_do(void) {
    return ddl__names[0] ? ddl__f(NULL) : 0;
}
#endif
"""


def findings(folder, **files):
    """What --check says about a small house with these rooms; the absence of the other rooms is not told."""
    shutil.copy(ROOT / "LICENSE", folder)
    rooms = dict(dict(manual=MANUAL, api=API, base=BASE), **files)
    for name, text in rooms.items():
        path = pathlib.Path(folder, "src", name.replace("__", "/") + ".h")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    good("./amalgamate.py --root", folder)
    out = sh("./amalgamate.py --check --root", folder).stdout
    return [line for line in out.splitlines() if "there is no such file" not in line]


@test
def a_clean_house_has_no_findings():
    with scratch() as folder:
        found = findings(folder)
        check(found == [], "\n".join(found))


def offends(text, **files):
    with scratch() as folder:
        found = findings(folder, **files)
        check(any(text in line for line in found), f"not seen: {text}; only: {found}")


def with_line(line):
    return BASE.replace("struct ddl__box {", line + "\nstruct ddl__box {", 1)


@test
def private_names_are_seen():
    offends("the function helper lacks ddl__", base=with_line("static int helper(int x) {\n    return x;\n}"))
    offends("the function helper lacks ddl__", base=with_line("static int helper(int x);"))
    offends("the variable limit lacks ddl__", base=with_line("static const int limit = 3;"))
    offends("the tag box lacks ddl__", base=with_line("struct box {\n    int n;\n};"))
    offends("the typedef box lacks ddl__", base=with_line("typedef struct {\n    int n;\n} box;"))
    offends("the typedef fn lacks ddl__", base=with_line("typedef int (*fn)(int x);"))
    offends("the enumerator RED lacks ddl__", base=with_line("enum ddl__colour { RED, DDL__BLUE };"))
    offends("the macro LIMIT lacks DDL__", base=with_line("#define LIMIT 3"))


@test
def globals_are_seen():
    offends("ddl__n is a variable at file scope", base=with_line("static int ddl__n;"))
    offends("ddl__n is a variable at file scope", base=with_line("static const char *ddl__n = \"x\";"))
    offends("ddl__n is a variable at file scope", base=with_line("static int ddl__n[2] = {1, 2};"))
    offends("ddl__n is a variable at file scope", base=with_line("static int (*ddl__n)(int) = NULL;"))
    offends("n is a static variable", base=BASE.replace("static const int table", "static int n;\n    const int table"))


@test
def layers_are_seen():
    offends("base includes plan, which is above it", base=BASE.replace('"api.h"', '"plan.h"'),
            plan="#ifndef DDL_PLAN_H\n#define DDL_PLAN_H\n#endif\n")
    offends("belongs to no room", stranger="#ifndef S\n#define S\n#endif\n")
    offends("in a circle", wire__a='#ifndef A\n#define A\n#include "b.h"\n#endif\n',
            wire__b='#ifndef B\n#define B\n#include "a.h"\n#endif\n')


@test
def calls_up_are_seen():
    plan = '#ifndef DDL_PLAN_H\n#define DDL_PLAN_H\n#include "base.h"\nstatic int ddl__up(int x) {\n    return x;\n}\n#endif\n'
    offends("base calls ddl__up, which plan defines, a room above it", base=with_line("static int ddl__up(int x);"), plan=plan)
    offends("mesh does not call ddl__thread_tick; take it off", mesh="#ifndef DDL_MESH_H\n#define DDL_MESH_H\n#endif\n")


@test
def options_are_seen():
    offends("DDL_NO_TCP is missing", base=with_line("#ifdef DDL_NO_TCP\n#endif"))
    offends("DDL_TRACE is missing", base=BASE.replace('"b"', '"DDL_TRACE"'))
    offends("DDL_GONE is documented", manual=MANUAL.replace(" */", " *   DDL_GONE  what it was\n */"))


@test
def documentation_and_shape_are_seen():
    offends("the text about ddl_do has 13 lines", api=API.replace("Does it.", "Does it." + "\n * more" * 12))
    offends("ddl__f has 10", base=BASE.replace("    return box->n", "    box->n++;\n" * 100 + "    return box->n"))
    offends("columns", base=with_line("/* " + "x" * 120 + " */"))
    offends("a tab or a blank", base=with_line("/* x */ "))


@test
def a_stale_header_is_seen():
    with scratch() as folder:
        findings(folder)
        with open(folder + "/ddl.h", "a") as f:
            f.write("/* edited by hand */\n")
        check("is stale" in sh("./amalgamate.py --check --root", folder).stdout, "an edited ddl.h was not noticed")


main()
