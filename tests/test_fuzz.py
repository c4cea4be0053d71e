"""Each tests/fuzz/fuzz_NAME.c (a libFuzzer target) runs over its corpus/NAME and then over new inputs for some seconds.
New inputs go to build/, never to the corpus: what is worth keeping is copied there by hand. Torture: minutes each."""
import os

from harness import BUILD, ROOT, check, good, main, sh, skip, test

SECONDS = 300 if os.environ.get("TEST_TORTURE") else 5
FUZZ = ROOT / "tests" / "fuzz"


def make_test(source):
    name = source.stem[len("fuzz_"):]

    def run():
        folder = BUILD / "tests" / "fuzz"
        found = folder / f"found_{name}"
        found.mkdir(parents=True, exist_ok=True)
        program = folder / source.stem
        compiled = sh("clang -std=c11 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined",
                      ["-o", program, source], f"-I{ROOT}", "-lpthread -ldl")
        if "libclang_rt.fuzzer" in compiled.stdout and "cannot find" in compiled.stdout:
            skip("this clang has no libFuzzer (make deps)")
        check(compiled.returncode == 0, compiled.stdout[-3000:])
        corpus = FUZZ / "corpus" / name
        check(corpus.is_dir() and any(corpus.iterdir()), f"{corpus.relative_to(ROOT)} is empty: nothing to start from")
        good(program, "-runs=0 -timeout=10", corpus, timeout=120)  # what was found once stays mended
        good(program, f"-seed=1 -max_total_time={SECONDS} -timeout=10 -rss_limit_mb=2048 -print_final_stats=1",
             f"-artifact_prefix={folder}/{name}-", [found, corpus], timeout=SECONDS + 120)

    run.__name__ = source.stem
    test(run)


for path in sorted(FUZZ.glob("fuzz_*.c")):
    make_test(path)


@test
def there_are_fuzz_targets():
    check(sorted(FUZZ.glob("fuzz_*.c")), "nothing has been fuzzed")


main()
