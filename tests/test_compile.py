"""ddl.h can be used in every way it promises: compilers, languages, several translation units, several copies.
tests/run: timeout=300 """
import functools
import re

from harness import ROOT, WARNINGS, check, good, main, scratch, sh, skip, test

COMPILERS = ["gcc", "clang"]
OBJECTS = scratch()
LIBS = ["-lpthread", "-ldl"]
IMPLEMENTATION = '#define DDL_IMPLEMENTATION\n#include "ddl.h"\n'
USE = '#include "ddl.h"\nint {0}(void);\nint {0}(void) {{ return ddl_status_name(DDL_OK)[0] == \'D\' ? 0 : 1; }}\n'
MAIN = "int main(void) { return first() + second(); }\n"


def write(folder, **files):
    for name, text in files.items():
        open(f"{folder}/{name.replace('_c', '.c').replace('_pp', 'pp')}", "w").write(text)


def compile_c(folder, name, compiler="gcc", *flags):
    good(compiler, "-std=c11", WARNINGS, f"-I{ROOT}", list(flags), "-c", "-o", f"{name}.o", f"{name}.c", cwd=folder)


def public_functions():
    return set(re.findall(r"^#define (ddl_\w+) DDL__PASTE\(", (ROOT / "ddl.h").read_text(), re.M))


def defined_globals(folder, name):
    """Symbols that other objects of a program can see."""
    out = good("nm -g --defined-only", f"{name}.o", cwd=folder)
    return {line.split()[-1] for line in out.splitlines()}


@functools.cache
def plain_object(compiler):
    """The two-line file as an object, compiled once for all tests."""
    write(OBJECTS.name, **{f"{compiler}_c": IMPLEMENTATION})
    compile_c(OBJECTS.name, compiler, compiler)
    return f"{OBJECTS.name}/{compiler}.o"


@test
def the_two_line_file_compiles_without_a_warning():
    for compiler in COMPILERS:
        plain_object(compiler)


@test
def other_levels_dialects_and_position_independence_compile_too():
    """gcc warns of more the more it optimises, clang warns before it does."""
    for command in ("gcc -O3 -std=c17 -DNDEBUG", "clang -O0 -fPIC -fvisibility=hidden", "gcc -std=gnu11 -D_GNU_SOURCE"):
        with scratch() as folder:
            write(folder, ddl_c=IMPLEMENTATION)
            compile_c(folder, "ddl", *command.split())


@test
def declarations_compile_as_c11_and_cpp17():
    for command in ("gcc -std=c11", "clang -std=c11", "g++ -xc++ -std=c++17", "clang++ -xc++ -std=c++17",
                    "g++ -xc++ -std=c++20"):
        with scratch() as folder:
            write(folder, a_c='#include "ddl.h"\n#include "ddl.h"\nint main(void) { ddl_tensor t; return sizeof t == 0; }\n')
            good(command, WARNINGS, f"-I{ROOT}", "-c a.c", cwd=folder)


@test
def two_files_of_a_program_include_it():
    for compiler in COMPILERS:
        with scratch() as folder:
            write(folder, one_c=USE.format("first"), two_c=USE.format("second") + "int first(void);\n" + MAIN)
            for name in ("one", "two"):
                compile_c(folder, name, compiler)
            good(compiler, "-o prog one.o two.o", plain_object(compiler), LIBS, cwd=folder)
            good("./prog", cwd=folder)


CPP_PROGRAM = '''#include "ddl.h"
int main() {
    float a[5] = {};
    const long long b[3] = {};
    bool c = true;
    ddl_tensor t = ddl_array(a), u = ddl_array(b), v = ddl_view(&c, 1);
    bool good = t.dtype == DDL_F32 && t.shape[0] == 5 && t.data == a && u.dtype == DDL_I64 && v.dtype == DDL_BOOL;
    return ddl_status_name(DDL_OK)[0] != 'D' || !good;
}
'''


@test
def a_cpp_program_uses_the_c_implementation():
    for cc, cpp in (("gcc", "g++"), ("clang", "clang++")):
        with scratch() as folder:
            open(f"{folder}/a.cpp", "w").write(CPP_PROGRAM)
            good(cpp, "-std=c++17", WARNINGS, f"-I{ROOT}", "-o prog a.cpp", plain_object(cc), LIBS, cwd=folder)
            good("./prog", cwd=folder)


@test
def the_implementation_as_cpp_stops_and_shows_the_two_lines():
    with scratch() as folder:
        write(folder, a_c=IMPLEMENTATION)
        result = sh("g++ -xc++ -std=c++17", f"-I{ROOT}", "-c a.c", cwd=folder)
        check(result.returncode != 0, "the implementation compiled as C++")
        for words in ("#define DDL_IMPLEMENTATION", '#include \\"ddl.h\\"'):
            check(words in result.stdout or words.replace("\\", "") in result.stdout, f"no {words} in {result.stdout[:600]}")


@test
def declarations_first_and_the_implementation_later():
    with scratch() as folder:
        write(folder, ddl_c='#include "ddl.h"\n' + IMPLEMENTATION + IMPLEMENTATION)
        compile_c(folder, "ddl", "gcc", "-D_GNU_SOURCE")
        write(folder, late_c="#include <stdio.h>\n" + IMPLEMENTATION)
        result = sh("gcc -std=c11", f"-I{ROOT}", "-c late.c", cwd=folder)
        check("include ddl.h first" in result.stdout, result.stdout[:600])


@test
def big_endian_processors_are_refused():
    with scratch() as folder:
        write(folder, a_c=IMPLEMENTATION)
        for order, refused in (("__ORDER_LITTLE_ENDIAN__", False), ("__ORDER_BIG_ENDIAN__", True)):
            result = sh("gcc -std=c11 -U__BYTE_ORDER__", f"-D__BYTE_ORDER__={order}", f"-I{ROOT} -E -o /dev/null a.c", cwd=folder)
            check(("little-endian numbers" in result.stdout) == refused, f"{order}: {result.stdout[:600]}")


@test
def the_object_shows_the_public_functions_and_nothing_else():
    for compiler in COMPILERS:
        plain_object(compiler)
        seen, wanted = defined_globals(OBJECTS.name, compiler), public_functions()
        check(len(wanted) > 20, f"only {len(wanted)} public functions were found in ddl.h")
        check(seen <= wanted, f"visible, but not public: {sorted(seen - wanted)}")
        check(wanted <= seen, f"declared, but not defined: {sorted(wanted - seen)}")


@test
def static_copies_show_no_symbol():
    with scratch() as folder:
        static = "#define DDL_STATIC\n" + IMPLEMENTATION
        write(folder, one_c=static + USE.format("first"), two_c=static + USE.format("second") + "int first(void);\n" + MAIN)
        for name in ("one", "two"):
            compile_c(folder, name)
            seen = {s for s in defined_globals(folder, name) if s.startswith("ddl")}
            check(not seen, f"DDL_STATIC leaves {sorted(seen)}")
        good("gcc -o prog one.o two.o", LIBS, cwd=folder)
        good("./prog", cwd=folder)


@test
def two_namespaces_and_the_plain_one_live_in_one_program():
    with scratch() as folder:
        one, two = ("#define DDL_NAMESPACE %s_\n" % name for name in ("left", "right"))
        write(folder, one_c=one + IMPLEMENTATION + USE.format("first"),
              two_c=two + IMPLEMENTATION + USE.format("second") + "int first(void);\n" + MAIN)
        for name in ("one", "two"):
            compile_c(folder, name)
        seen = defined_globals(folder, "one") - {"first"}
        check(seen == {"left_" + f for f in public_functions()}, f"differs: {sorted(seen)[:5]}")
        good("gcc -o prog one.o two.o", plain_object("gcc"), LIBS, cwd=folder)
        good("./prog", cwd=folder)


@test
def no_library_but_libc_is_needed():
    with scratch() as folder:
        write(folder, a_c="int main(void) { return 0; }\n")
        compile_c(folder, "a")
        good("gcc -o prog a.o", plain_object("gcc"), LIBS, cwd=folder)
        needed = re.findall(r"NEEDED.*\[(.*)\]", good("readelf -d prog", cwd=folder))
        check(set(needed) <= {"libc.so.6", "libpthread.so.0", "libdl.so.2"}, f"needs {needed}")


@test
def a_build_with_each_option_compiles():
    options = sorted(set(re.findall(r"^\s*#\s*if(?:n?def|.*defined).*?\b(DDL_NO_\w+)", (ROOT / "ddl.h").read_text(), re.M)))
    if not options:
        skip("ddl.h has no DDL_NO_ option")
    for option in options:
        with scratch() as folder:
            write(folder, ddl_c=IMPLEMENTATION)
            compile_c(folder, "ddl", "gcc", "-D" + option)


main()
