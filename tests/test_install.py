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
    with scratch() as folder:
        good("make -s install PREFIX=/opt/ddl", f"DESTDIR={folder}", timeout=300)
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
