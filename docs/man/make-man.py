#!/usr/bin/env python3
"""Writes docs/man/*.1 from what the tools say with --help, so that there is one text: make-man.py FOLDER_OF_TOOLS."""
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
TOOLS = {"ddlrun": "start the ranks of a job on this machine", "ddl-perf": "measure operations of ddl",
         "ddl-info": "show what ddl finds, chooses and why", "ddl-timeline": "draw a timeline of DDL_TRACE"}


def quoted(line):
    line = line.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + line if line[:1] in (".", "'") else line


def page(name, text):
    """The text as it is, in a fixed pitch; its first paragraph is the synopsis."""
    synopsis, _, rest = text.strip().partition("\n\n")
    if not synopsis.startswith("usage:"):  # a line about it comes first
        rest = text.strip()
        synopsis = re.search(r"^ +(\S.*)$", text, re.M)[1]
    lines = [f'.TH {name.upper()} 1 "" "ddl" "ddl"', ".SH NAME", f"{quoted(name)} \\- {TOOLS[name]}", ".SH SYNOPSIS", ".nf"]
    lines += [quoted(re.sub(r"^(usage: |       )", "", l)) for l in synopsis.splitlines()]
    lines += [".fi", ".SH DESCRIPTION", ".nf"] + [quoted(l) for l in rest.splitlines()]
    lines += [".fi", ".SH SEE ALSO", "docs/operations.md of the sources: settings, networks, reading failures.", ".br",
              ", ".join(f"{quoted(n)}(1)" for n in sorted(TOOLS) if n != name)]
    return "\n".join(lines) + "\n"


def pages(folder):
    for name in TOOLS:
        done = subprocess.run([f"{folder}/{name}", "--help"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        yield f"{name}.1", page(name, done.stdout)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not all(pathlib.Path(sys.argv[1], name).is_file() for name in TOOLS):
        sys.exit(f"usage: make-man.py FOLDER_OF_TOOLS (build): it has {', '.join(TOOLS)}")
    for file, text in pages(sys.argv[1]):
        (HERE / file).write_text(text)
