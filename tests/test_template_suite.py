"""tests/run: timeout=1500

The template is a real transport: the suites of messages and collectives pass over it, with nothing of TCP in use."""
import os
import re

from harness import BUILD, check, good, main, sh, skip, test

PLUGIN = BUILD / "libddl-template.so"
SUITES = ["test_p2p", "test_collectives", "test_v_forms", "test_requests", "test_leave"]


def over_template(suite):
    program = BUILD / "tests" / "gcc" / suite
    if not PLUGIN.exists() or not program.exists():
        skip(f"{PLUGIN.name} or {program} is not built; tests/run builds them")
    env = dict(os.environ, DDL_TRANSPORTS="template", DDL_PLUGIN_PATH=str(BUILD))
    result = sh(str(program), env=env, timeout=420)
    last = re.findall(r"^(\d+) passed, (\d+) failed", result.stdout, re.M)
    check(result.returncode == 0 and last and int(last[-1][0]) > 0 and last[-1][1] == "0",
          f"{suite} over the template:\n{result.stdout[-3000:]}")


def add(suite):
    def run():
        over_template(suite)
    run.__name__ = suite[5:] + "_over_template"
    test(run)


for name in SUITES:
    add(name)


@test
def it_is_the_template_that_carries():
    info = BUILD / "ddl-info"
    if not info.exists() or not (BUILD / "ddlrun").exists():
        skip("ddl-info and ddlrun are not built")
    env = dict(os.environ, DDL_TRANSPORTS="template", DDL_PLUGIN_PATH=str(BUILD))
    text = good(str(BUILD / "ddlrun"), "-n 2 --no-prefix", str(info), env=env)
    check(re.search(r"^ +1 +0 +\d+ +template ", text, re.M), f"the link is not the template's:\n{text}")


main()
