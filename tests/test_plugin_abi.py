"""What a stranger's plugin needs is ddl.h and one compile line: the line in each plugin's head comment works, the plugin
includes nothing else of the project, and it opens with all symbols resolved. (test_embed.py folds each into ddl.h.)"""
import re

from harness import BUILD, ROOT, check, good, main, scratch, skip, test

FOLDERS = sorted(p for p in (ROOT / "plugins").glob("*") if list(p.glob("*.c")))


def built(name):
    path = BUILD / f"libddl-{name}.so"
    if not path.exists():
        skip(f"{path.name} was not built here (its library may be missing)")
    return path


def check_compile_line(folder):
    built(folder.name)
    lines = [m[1] for f in sorted(folder.glob("*.c")) for m in re.finditer(r"^ \*\s+(cc .*)$", f.read_text(), re.M)]
    check(len(lines) == 1, f"{len(lines)} compile lines in the head comments of {folder.name}")
    with scratch() as there:
        target = f"{there}/libddl-{folder.name}.so"
        check(f"libddl-{folder.name}.so" in lines[0], "the line names another file")
        good(lines[0].replace(f"libddl-{folder.name}.so", target))
        exported = {l.split()[-1] for l in good("nm -D --defined-only", target).splitlines()}
        check(exported == {f"ddl_plugin_{folder.name}_v1"}, f"exports {sorted(exported)}")


def check_includes(folder):
    for path in sorted(folder.glob("*.[ch]")):
        for include in re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.M):
            target = (path.parent / include).resolve()
            check(target == ROOT / "ddl.h" or target.parent == folder, f"{path.name} includes {include}")


def check_opens(folder):
    # In a process of its own: nothing that was opened is ever closed.
    path = built(folder.name)
    code = f"import ctypes, os; ctypes.CDLL({str(path)!r}, os.RTLD_NOW | os.RTLD_LOCAL).ddl_plugin_{folder.name}_v1"
    good(["python3", "-c", code])


def make_test(name, function, folder):
    def run():
        function(folder)
    run.__name__ = f"{name}_{folder.name}"
    test(run)


for folder in FOLDERS:
    make_test("compile_line", check_compile_line, folder)
    make_test("includes", check_includes, folder)
    make_test("opens", check_opens, folder)


@test
def there_are_plugins():
    check(FOLDERS, "no plugin has been looked at")


main()
