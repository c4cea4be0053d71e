"""The three projects of examples/embed build as their page says, by copy, with an installed ddl, and as a subfolder, and
run; and every plugin can be folded into ddl.h and is then found without a shared object.
tests/run: timeout=240 """
import os
import pathlib
import shutil

from harness import BUILD, ROOT, WARNINGS, check, good, main, scratch, skip, test

EMBED = ROOT / "examples" / "embed"


def runs(program, **env):
    """On three ranks: (0 + 2 + 4) / 3."""
    good("make -s", f"B={BUILD}", BUILD / "ddlrun", timeout=300)
    out = good([BUILD / "ddlrun", "-n", "3", "--no-prefix"], program, env=dict(os.environ, **env))
    check(out.split("\n").count("average 2") == 3, f"{program} prints:\n{out}")


def copied(name, folder):
    target = pathlib.Path(folder, name)
    shutil.copytree(EMBED / name, target)
    return target


@test
def by_copy():
    with scratch() as folder:
        project = copied("copy", folder)
        shutil.copy(ROOT / "ddl.h", project)
        good("make -s -C", project, ["CC=gcc", "CFLAGS=-O0 -Wall -Wextra -Wpedantic -Werror"])
        runs(project / "average")


@test
def installed():
    """By pkg-config, with ddl.c apart from what nvcc or a C++ compiler takes; and by CMake's find_package."""
    with scratch() as folder:
        good("make -s install PLACE=", f"PREFIX={folder}/usr", timeout=300)
        project = copied("pkg-config", folder)
        env = dict(os.environ, PKG_CONFIG_PATH=f"{folder}/usr/lib/pkgconfig", CFLAGS="-O0")
        good("make -s -C", project, env=env)
        runs(project / "average")
        if shutil.which("cmake"):
            project = copied("cmake", folder)
            good("cmake -S", project, "-B", project / "build", f"-DCMAKE_PREFIX_PATH={folder}/usr", "-DDDL_SOURCE=/nowhere")
            good("cmake --build", project / "build", timeout=300)
            runs(project / "build" / "average")
        good("make -s uninstall", f"PREFIX={folder}/usr")
        left = [p for p in pathlib.Path(folder, "usr").rglob("*") if not p.is_dir()]
        check(not left, f"uninstall leaves {left}")


@test
def as_a_subfolder():
    if not shutil.which("cmake"):
        skip("cmake is not installed (make deps)")
    with scratch() as folder:
        good("cmake -S", EMBED / "cmake", "-B", f"{folder}/build", "-DCMAKE_DISABLE_FIND_PACKAGE_ddl=ON")
        good("cmake --build", f"{folder}/build", timeout=300)
        runs(f"{folder}/build/average")


def folded_works(name, program):
    """No libddl-*.so is near: a transport carries the messages; cuda looks for a driver, and says why there is none."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("DDL_")}
    if name == "cuda":
        out = good([program], env=dict(env, DDL_LOG="debug"))
        check("plugin cuda 1: loaded from (built in: cuda)" in out or
              "plugin (built in: cuda): it declines: cuda: there is no NVIDIA driver here" in out or
              "plugin (built in: cuda): it declines: cuda: this build of the plugin has no kernels" in out, out)
        return
    out = good([BUILD / "ddlrun", "-n", "2", "--no-prefix"], program, env=dict(env, DDL_TRANSPORTS=name, DDL_LOG="info"))
    check(f"rank 0: 2 ranks on 1 host; {name} to 1 rank here" in out and out.count("average 1\n") == 2, out)


@test
def each_plugin_folded_in():
    for name in sorted(p.name for p in (ROOT / "plugins").iterdir() if (p / f"{p.name}.c").exists()):
        with scratch() as folder:
            project = copied("copy", folder)
            good("./amalgamate.py --with", name, "-o", project / "ddl.h")
            probe = pathlib.Path(project, "main.c")
            probe.write_text(probe.read_text().replace("ddl_context *context;", "ddl_context *context;\n"
                                                       f'    if (ddl_feature("{name}") != 1) {{ return 9; }}'))
            good("make -s -C", project, ["CFLAGS=-O0 -Wno-unused-function " + " ".join(WARNINGS)], timeout=300)
            runs(project / "average", DDL_PLUGINS="none")  # means these too: TCP is left
            folded_works(name, project / "average")


main()
