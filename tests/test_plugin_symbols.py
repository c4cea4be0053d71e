"""A plugin exports its entry alone, and needs no symbol of the program that loads it."""
from harness import BUILD, ROOT, check, good, main, skip, test

FOLDERS = sorted(p.name for p in (ROOT / "plugins").glob("*") if list(p.glob("*.c"))) if (ROOT / "plugins").exists() else []


def symbols(path, which):
    return {line.split()[-1].split("@")[0] for line in good("nm -D", which, path).splitlines()}


def check_plugin(name):
    path = BUILD / f"libddl-{name}.so"
    if not path.exists():
        why = BUILD / f"{name}.missing"
        lines = [l for l in why.read_text().splitlines() if "error:" in l] if why.exists() else []
        skip(lines[0] if lines else "it was not built")
    exported = symbols(path, "--defined-only")
    check(exported == {f"ddl_plugin_{name}_v1"}, f"exports {sorted(exported)}")
    needed = {s for s in symbols(path, "--undefined-only") if s.startswith("ddl")}
    check(not needed, f"needs {sorted(needed)} of the program")


def make_test(name):
    def run():
        check_plugin(name)
    run.__name__ = f"plugin_{name}"
    test(run)


for folder in FOLDERS:
    make_test(folder)


@test
def there_are_plugins():
    check(FOLDERS, "no plugin has been looked at")


main()
