"""The ported programs of examples/port learn what the one-process program learns, in few changed lines, and
docs/porting.md shows the very diffs. tests/run: timeout=120 """
import difflib
import re

from harness import BUILD, ROOT, check, good, main, scratch, test

PORT = ROOT / "examples" / "port"


def losses(text):
    return [float(x) for x in re.findall(r"loss ([\d.]+)", text)]


def difference(name):
    return list(difflib.unified_diff((PORT / "before/train.c").read_text().splitlines(),
                                     (PORT / name / "train.c").read_text().splitlines(), lineterm="", n=0))


@test
def all_three_learn_the_same():
    good("make -s", f"B={BUILD}", BUILD / "ddlrun", timeout=300)
    with scratch() as folder:
        good("gcc -std=c11 -O1 -Wall -Wextra -Werror -o", f"{folder}/before", PORT / "before/train.c", "-lm")
        expected = losses(good(f"{folder}/before"))
        check(len(expected) == 4 and expected[3] < 0.6 * expected[0], f"it does not learn: {expected}")
        for name in ("data_parallel", "zero1"):
            good("gcc -std=c11 -O0 -Wall -Wextra -Werror", f"-I{ROOT}", "-o", f"{folder}/{name}", PORT / name / "train.c",
                 "-lm -lpthread -ldl")
            for ranks in (1, 4):
                got = losses(good([BUILD / "ddlrun", "-n", ranks, "--no-prefix"], f"{folder}/{name}"))
                check(len(got) == 4 and all(abs(a - b) < 2e-4 for a, b in zip(got, expected)),
                      f"{name} on {ranks} ranks: {got}, not {expected}")


@test
def a_port_is_few_lines():
    for name in ("data_parallel", "zero1"):
        changed = [l for l in difference(name) if re.match(r"[+-](?![+-]{2})", l)]
        check(10 < len(changed) < 60, f"{name}: {len(changed)} changed lines")


@test
def the_page_shows_the_diffs():
    page = (ROOT / "docs" / "porting.md").read_text()
    for name in ("data_parallel", "zero1"):
        shown = [block for block in re.findall(r"```diff\n(.*?)```", page, re.S) if f"b/{name}/" in block.replace("+++ ", "b/")
                 or f"{name}/train.c" in block]
        check(len(shown) == 1, f"docs/porting.md has {len(shown)} diffs of {name}")
        lines = [l for l in shown[0].splitlines() if re.match(r"[+-](?![+-]{2})", l)]
        check(lines == [l for l in difference(name) if re.match(r"[+-](?![+-]{2})", l)], f"{name}: not the present diff")


@test
def the_page_names_what_there_is():
    header = (ROOT / "ddl.h").read_text()
    page = (ROOT / "docs" / "porting.md").read_text()
    for name in sorted(set(re.findall(r"\b(?:ddl_[a-z_0-9]+[a-z0-9]|DDL_[A-Z_0-9]*[A-Z0-9])\b", page))):
        check(re.search(rf"\b{name}\b", header), f"docs/porting.md names {name}, which is not in ddl.h")


main()
