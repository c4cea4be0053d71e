"""make install puts header, tools, plugins and ddl.pc where they belong; a program builds with them; uninstall is clean."""
import importlib
import os
import pathlib
import shlex
import shutil
import sys

from harness import BUILD, ROOT, check, good, main, scratch, test


def files_under(folder):
    return sorted(str(p.relative_to(folder)) for p in pathlib.Path(folder).rglob("*") if not p.is_dir())


@test
def install_build_with_it_and_uninstall():
    with scratch() as folder:  # PLACE=: nothing is made anew in the build folder that other tests use
        good("make -s install PREFIX=/opt/ddl PLACE=", f"DESTDIR={folder}", timeout=300)
        found = files_under(folder)
        for name in ("include/ddl.h", "lib/pkgconfig/ddl.pc", "lib/cmake/ddl/ddl-config.cmake", "share/man/man1/ddlrun.1"):
            check("opt/ddl/" + name in found, f"{name} is missing from {found}")
        env = dict(os.environ, PKG_CONFIG_PATH=f"{folder}/opt/ddl/lib/pkgconfig", PKG_CONFIG_SYSROOT_DIR=folder)
        flags = shlex.split(good("pkg-config --cflags --libs ddl", env=env))  # quoted for a shell
        program = pathlib.Path(folder, "a.c")
        program.write_text('#define DDL_IMPLEMENTATION\n#include <ddl.h>\nint main(void) { return ddl_version() < 0; }\n')
        good("gcc -std=c11 -o", pathlib.Path(folder, "a"), program, flags)
        good(pathlib.Path(folder, "a"))
        good("make -s uninstall PREFIX=/opt/ddl", f"DESTDIR={folder}")
        left = [f for f in files_under(folder) if f.startswith("opt/")]
        check(not left, f"uninstall leaves {left}")


@test
def another_prefix_makes_anew_what_knows_it():
    """Tools look for plugins where they are installed. The compiler is one that only says what it is asked for."""
    with scratch() as folder:
        log, compiler = pathlib.Path(folder, "log"), pathlib.Path(folder, "cc")
        compiler.write_text(f'#!/bin/sh\necho "$*" >> {log}\n'
                            'while [ $# -gt 1 ]; do if [ "$1" = -o ]; then : > "$2"; fi; shift; done\n')
        compiler.chmod(0o700)
        for prefix, anew in (("/usr/local", True), ("/usr", True), ("/usr", False), ("/usr/local", True)):
            log.write_text("")
            good(f"make -s tools PREFIX={prefix}", f"B={folder}/build", f"CC={compiler}")
            for name in ("ddl.o", *(p.stem for p in (ROOT / "tools").glob("*.c"))):
                made = [line for line in log.read_text().splitlines() if f"-o {folder}/build/{name} " in line]
                check(len(made) == anew and all(f'"{prefix}/lib/ddl"' in line for line in made), f"{name}, {prefix}: {made}")


@test
def man_pages_say_what_the_tools_say():
    good("make -s tools", f"B={BUILD}", timeout=300)
    sys.path.insert(0, str(ROOT / "docs" / "man"))
    sys.dont_write_bytecode = True
    made = importlib.import_module("make-man")
    for name, text in made.pages(BUILD):
        check((ROOT / "docs" / "man" / name).read_text() == text, f"docs/man/{name} is stale: docs/man/make-man.py build")
        if shutil.which("man"):
            shown = good("man --warnings=w -E UTF-8 -l -Tutf8 -Z", ROOT / "docs" / "man" / name)
            check("warning" not in shown, shown[-500:])
    check({p.name for p in (ROOT / "docs" / "man").glob("*.1")} == {n for n, _ in made.pages(BUILD)}, "another page")


main()
