"""The pictures of bench/plots are those of the newest figures in bench/results: each point of each line is where its
number belongs. Drawn again they say the same, and twice the same bytes.
tests/run: timeout=120 """
import csv
import math
import pathlib
import re
import subprocess
import sys

from harness import BUILD, ROOT, check, good, main, scratch, sh, skip, test

PLOTS, RESULTS = ROOT / "bench" / "plots", ROOT / "bench" / "results"
TRANSPORTS = ("tcp", "shm", "fabric-tcp")


def drawing_python():
    for program in (sys.executable, "/usr/bin/python3"):
        if subprocess.run([program, "-c", "import matplotlib"], capture_output=True).returncode == 0:
            return program
    skip("matplotlib is not installed (Debian: python3-matplotlib)")


def figures(transport):
    """(op, ranks, peer) -> {bytes: microseconds}, of the newest file of a transport."""
    files = [p for p in RESULTS.glob("*.csv") if re.fullmatch(rf"\d{{4}}-\d\d-\d\d-{transport}-.*\.csv", p.name)]
    found = {}
    with open(max(files, key=lambda p: p.name)) as file:
        for row in csv.DictReader(file):
            if row["op"] in ("reduce", "barrier") or row["bytes"] == "0":
                continue  # not drawn: what has no place on a logarithmic axis, and more panels than are read
            found.setdefault((row["op"], row["ranks"], row["peer"]), {})[int(row["bytes"])] = float(row["median_us"])
    return found


def lines_of(path):
    """{(panel, peer): [(x, y)]} in pixels, y upwards."""
    text = path.read_text()
    check(path.stat().st_size < 100_000 and "fill: #ffffff" in text, f"{path.name} is large, or transparent")
    groups = re.findall(r'<g id="([^"|]+)\|([^"]+)">\s*<path d="([^"]+)"', text)
    pairs = [(panel, peer, re.findall(r"[ML] ([\d.]+) ([\d.]+)", way)) for panel, peer, way in groups]
    return {(panel.replace("_", " "), peer): [(float(x), -float(y)) for x, y in points] for panel, peer, points in pairs}


def lies_right(name, drawn, expected):
    """drawn and expected: {peer: [(x, y)]} of one panel, of logarithms. The scales are taken from the outermost points."""
    check(sorted(drawn) == sorted(expected), f"{name}: {sorted(drawn)} is drawn, {sorted(expected)} was measured")
    check(all(len(drawn[p]) == len(expected[p]) for p in drawn), f"{name}: points are missing")
    both = [(a, b) for peer in drawn for a, b in zip(drawn[peer], expected[peer])]
    for axis in (0, 1):
        low, high = min(both, key=lambda p: p[1][axis]), max(both, key=lambda p: p[1][axis])
        scale = (high[0][axis] - low[0][axis]) / (high[1][axis] - low[1][axis])
        check(scale > 0, f"{name}: an axis points the other way")
        for at, value in both:
            off = at[axis] - low[0][axis] - scale * (value[axis] - low[1][axis])
            check(abs(off) < 0.1, f"{name}: the point of {value} lies {off:.2f} pixels off")


def logs(points):
    return [(math.log(size), math.log(value)) for size, value in sorted(points.items())]


def check_all_reduce(path, transport):
    measured, lines = figures(transport), lines_of(path)
    for ranks in ("2", "4"):
        times = {peer: us for (op, r, peer), us in measured.items() if (op, r) == ("all_reduce", ranks)}
        for title, values in (("time", times),
                              ("bandwidth", {p: {s: s / us[s] for s in us} for p, us in times.items()}),
                              ("time over ddl's", {p: {s: us[s] / times["ddl"][s] for s in us if s in times["ddl"]}
                                                   for p, us in times.items() if p != "ddl"})):
            panel = f"{ranks} ranks: {title}"
            drawn = {peer: points for (p, peer), points in lines.items() if p.replace("&#x27;", "'") == panel}
            lies_right(f"{path.name}, {panel}", drawn, {p: logs(v) for p, v in values.items()})


def check_ratios(path, transport):
    measured, lines = figures(transport), lines_of(path)
    panels = {(op, ranks) for op, ranks, _ in measured}
    names = {f"{op}, {ranks} ranks".replace("_", " ") for op, ranks in panels}
    check({p for p, _ in lines} == names, f"{path.name} has the panels {sorted({p for p, _ in lines})}")
    for op, ranks in panels:
        ours = measured[op, ranks, "ddl"]
        expected = {p: logs({s: us[s] / ours[s] for s in us if s in ours})
                    for (o, r, p), us in measured.items() if (o, r) == (op, ranks) and p != "ddl"}
        panel = f"{op}, {ranks} ranks".replace("_", " ")
        lies_right(f"{path.name}, {panel}", {peer: v for (p, peer), v in lines.items() if p == panel}, expected)


def check_folder(folder):
    for transport in TRANSPORTS:
        check_all_reduce(folder / f"{transport}-all_reduce.svg", transport)
        check_ratios(folder / f"{transport}-ratio.svg", transport)


@test
def the_pictures_show_the_figures():
    check_folder(PLOTS)
    drawn = {f"{transport}-{what}.svg" for transport in TRANSPORTS for what in ("all_reduce", "ratio")}
    others = {p.name for p in PLOTS.iterdir()} - drawn
    check(others == {"local_sgd.svg"}, f"there are pictures that nobody checks: {others}")  # that is bench/local_sgd's


@test
def drawn_again_they_say_the_same():
    python = drawing_python()
    with scratch() as folder:
        good([python, ROOT / "bench" / "plot", "--output", folder])
        check_folder(pathlib.Path(folder))


@test
def the_same_figures_give_the_same_bytes():
    python = drawing_python()
    with scratch() as folder:
        source = max(RESULTS.glob("*-fabric-tcp-*.csv"))
        for name in ("a", "b"):
            good([python, ROOT / "bench" / "plot", "--output", f"{folder}/{name}", source])
        for path in pathlib.Path(folder, "a").iterdir():
            check(path.read_bytes() == pathlib.Path(folder, "b", path.name).read_bytes(), f"{path.name} differs")
            check(not re.search(r"<dc:date>", path.read_text()), "a date")


@test
def ddl_perf_is_drawn():
    python = drawing_python()
    with scratch() as folder:
        table, picture = pathlib.Path(folder, "perf.csv"), pathlib.Path(folder, "perf.svg")
        table.write_text(good([BUILD / "ddlrun", "-n", "2", "--no-prefix", BUILD / "ddl-perf", "all", "-b", "8", "-e", "32768",
                               "-f", "8", "-n", "2", "-c", "0", "--format", "csv"]))
        good([python, ROOT / "bench" / "plot", table])
        lines, expected = lines_of(picture), {}
        with open(table) as file:
            for row in csv.DictReader(line for line in file if line.startswith("op,") or line.count(",") > 10):
                if row["in_place"] == "0" and row["op"] != "barrier":
                    expected.setdefault(row["op"], {})[int(row["size_bytes"])] = float(row["time_us"])
        check(len(expected) > 10 and {p for p, _ in lines} == {"time", "bus bandwidth"}, f"{sorted(lines)}")
        lies_right("perf.svg", {peer: v for (p, peer), v in lines.items() if p == "time"},
                   {op: logs(v) for op, v in expected.items()})


@test
def what_is_no_table_is_refused():
    python = drawing_python()
    with scratch() as folder:
        empty = pathlib.Path(folder, "empty.csv")
        empty.write_text("")
        for file, words in ((empty, "has no figures"), (pathlib.Path(folder, "none.csv"), "cannot read")):
            done = sh([python, ROOT / "bench" / "plot", file])
            check(done.returncode == 1 and words in done.stdout, f"{file}: {done.stdout}")
        done = sh([python, ROOT / "bench" / "plot", "--outputs", folder])
        check(done.returncode == 2 and "did you mean --output?" in done.stdout, done.stdout)


main()
