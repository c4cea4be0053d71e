#!/usr/bin/env python3
"""Glue the rooms of src/ into ddl.h, and check that they keep the rules of the house.

    amalgamate.py                       write ddl.h (only when its bytes change)
    amalgamate.py --with shm            fold a plugin in, by name or folder: it is found without a shared object (repeatable)
    amalgamate.py -o FILE               write another file; - is standard output
    amalgamate.py --check               one line per broken rule, exit status 1 if there is one
    amalgamate.py --stats               size, comments and function lengths of each room

Same input, same bytes: no date, no path, no dependence on the order of a directory.
"""
import argparse
import difflib
import os
import pathlib
import re
import sys

# Bottom to top; a room is src/<room>.h, or the parts src/<room>/*.h, or both. A room includes only rooms before it.
DECLARATIONS = ["api", "plugin"]
IMPLEMENTATION = ["base", "dtype", "plan", "algo", "tune", "wire", "trace", "settings", "store", "tcp", "loader", "mesh",
                  "device", "tensor", "group", "p2p", "engine", "coll", "optim", "compress", "ps", "train"]
ROOMS = DECLARATIONS + IMPLEMENTATION

# Functions that a room calls although a room above it defines them, as the call is news for that room: somebody died, a
# group goes, a turn of waiting. The lower room declares them, and knows no more. There are no others.
CALLS_UP = {
    "mesh": {"ddl__groups_rank_dead", "ddl__groups_rank_rejoined", "ddl__device_allocation", "ddl__stages_poll",
             "ddl__natives_poll", "ddl__natives_miss", "ddl__messages_poll", "ddl__detached_reap", "ddl__thread_tick"},
    "tensor": {"ddl__memory_used"},
    "group": {"ddl__p2p_rank_dead", "ddl__p2p_group_free", "ddl__ops_fail_all", "ddl__engine_group_free",
              "ddl__native_close", "ddl__agree_group_free"},
}

# File-scope variables that are not const, each with the reason why it has to be. "No globals" is a promise to users.
GLOBALS_ALLOWED = {"ddl__ended"}

MAX_DECLARATION_LINES = 1800  # manual, api and plugin together
MAX_DOC_LINES = 12            # the comment above one public function
MAX_FILE_LINES = 1000
MAX_FUNCTION_LINES = 100
MAX_COLUMNS = 120

# ---------------------------------------------------------------------------------------------- reading the rooms


class Fragment:
    """One file of a room: its text, and what amalgamation takes out of it."""

    def __init__(self, root, path, room):
        self.path = path.relative_to(root).as_posix()
        self.room = room
        self.text = path.read_text()
        self.lines = self.text.splitlines()
        self.project_includes = re.findall(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', self.text, re.M)
        self.guard = self._find_guard()
        self.system_includes = []
        self.body = self._strip()

    def _find_guard(self):
        """The include guard: the macro of the first #ifndef, if the next directive defines it and an #endif ends it."""
        directives = [(i, l.split()) for i, l in enumerate(self.lines) if re.match(r"#\s*\w", l)]
        if len(directives) < 3:
            return None
        (_, first), (_, second), last = directives[0], directives[1], directives[-1]
        if first[0] == "#ifndef" and second == ["#define", first[1]] and last[1][0] == "#endif":
            return first[1], {directives[0][0], directives[1][0], last[0]}
        return None

    def _strip(self):
        """Drops the guard and the project includes; moves system includes that stand under no #if to the top."""
        depth, out = 0, []
        for number, line in enumerate(self.lines):
            if self.guard and number in self.guard[1]:
                continue
            directive = re.match(r"\s*#\s*(\w+)\s*(\S*)", line)
            word, arg = directive.groups() if directive else ("", "")
            depth += (word in ("if", "ifdef", "ifndef")) - (word == "endif")
            if word == "include" and arg.startswith('"') or word == "define" and arg == "_GNU_SOURCE" and depth == 0:
                continue
            if word == "include" and depth == 0:
                self.system_includes.append(arg)
                continue
            out.append(line.rstrip())
        return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip("\n")


class House:
    """All fragments in the order of ddl.h, and the trouble met while they were read."""

    def __init__(self, root):
        self.root = root.resolve()
        self.src = self.root / "src"
        self.findings = []
        self.fragments = []
        for room in ROOMS:
            self._read_room(room)
        self.manual = self._read_manual()
        known = {f.path for f in self.fragments} | {"src/manual.h"}
        for path in sorted(self.src.rglob("*.h")):
            if path.relative_to(self.root).as_posix() not in known:
                self.findings.append(f"{path.relative_to(self.root).as_posix()}:1: belongs to no room of the list")

    def _read_manual(self):
        path = self.src / "manual.h"
        if path.exists():
            return path.read_text().strip("\n")
        return "/* ddl.h: distributed deep-learning communication in one C header. */"

    def _read_room(self, room):
        """The parts of a room stand in order of name, but after the parts that they include."""
        paths = sorted((self.src / room).rglob("*.h")) if (self.src / room).is_dir() else []
        paths += [self.src / f"{room}.h"] if (self.src / f"{room}.h").exists() else []
        if not paths:
            self.findings.append(f"src/{room}.h:1: the list names this room, but there is no such file")
        self.fragments += self.in_include_order([Fragment(self.root, p, room) for p in paths])

    def in_include_order(self, fragments):
        """A file comes after those of the given ones that it includes; otherwise as given."""
        files = {self.root / f.path: f for f in fragments}
        done, open_ = [], []

        def visit(path):
            if path in done:
                return
            if path in open_:
                self.findings.append(f"{files[path].path}:1: the parts of this room include each other in a circle")
                return
            open_.append(path)
            for include in files[path].project_includes:
                target = self.resolve(files[path], include)
                if target in files:
                    visit(target)
            open_.pop()
            done.append(path)

        for path in files:
            visit(path)
        return [files[p] for p in done]

    def resolve(self, fragment, include):
        """The file that an #include "..." of a fragment means: beside it, or in src/."""
        for base in ((self.root / fragment.path).parent, self.src):
            path = pathlib.Path(os.path.normpath(base / include))
            if path.exists():
                return path
        return None

    def of(self, rooms):
        return [f for f in self.fragments if f.room in rooms]

    def public_functions(self):
        text = "\n".join(strip_comments(f.text) for f in self.of(DECLARATIONS))
        return sorted(set(re.findall(r"^DDL_API\s[^;(]*?\b(ddl_\w+)\s*\(", text, re.M)))


# ---------------------------------------------------------------------------------------------- writing ddl.h

HEAD = """\
/* Made by amalgamate.py from src/. Do not edit: change src/ and run it again. */
#if defined(DDL_IMPLEMENTATION) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE 1 /* memfd, pidfd, accept4: this needs Linux */
#endif

#ifndef DDL_H
#define DDL_H
"""

IMPLEMENTATION_HEAD = """\
#endif /* DDL_H */

/* >>implementation */
#if defined(DDL_IMPLEMENTATION) && !defined(DDL__IMPLEMENTED)
#define DDL__IMPLEMENTED

#ifdef __cplusplus
#error "ddl.h: the implementation is C. Make a file ddl.c of two lines and compile it as C: \\
#define DDL_IMPLEMENTATION (newline) #include \\"ddl.h\\" (newline)"
#endif
#if !defined(__linux__) || !defined(__GLIBC__) || UINTPTR_MAX != UINT64_MAX || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "ddl.h: Linux with glibc, 64-bit pointers and little-endian numbers is what this is written for and tried on"
#elif !defined(__USE_GNU)
#error "ddl.h: a system header came before; include ddl.h first in this file, or compile it with -D_GNU_SOURCE"
#endif
"""

NAMESPACE_HEAD = """\
/* DDL_NAMESPACE: a prefix for all public functions, so that two libraries in one program can each bring a ddl. */
#ifdef DDL_NAMESPACE
#define DDL__PASTE2(a, b) a##b
#define DDL__PASTE(a, b) DDL__PASTE2(a, b)
"""


def include_block(fragments, seen):
    """The system includes of some fragments, once each, by name; `seen` carries over to the next block."""
    names = sorted({i for f in fragments for i in f.system_includes} - seen)
    seen.update(names)
    return "".join(f"#include {name}\n" for name in names)


def namespace_block(functions):
    rows = "".join(f"#define {name} DDL__PASTE(DDL_NAMESPACE, {name})\n" for name in functions)
    return NAMESPACE_HEAD + rows + "#endif\n"


def fragment_block(fragment):
    name = fragment.path[len("src/"):-len(".h")] if fragment.path.startswith("src/") else fragment.path
    return f"/* >>{name} */\n{fragment.body}\n"


def included_from(sources):
    """The headers of their folder that these reach by includes: not those of the code for GPUs that stands beside them."""
    reached, left = set(), list(sources)
    while left:
        file = left.pop()
        names = re.findall(r'^\s*#\s*include\s+"([^"/]+)"', file.read_text(), re.M)
        new = {file.parent / n for n in names if (file.parent / n).exists()} - reached
        reached |= new
        left += sorted(new)
    return sorted(reached)


def read_plugin(house, folder):
    """Name and sources of a plugin, headers first. One of plugins/ by its name, or any folder, from here or from the root."""
    places = [house.root / "plugins" / folder] if pathlib.Path(folder).name == folder else []
    places += [pathlib.Path(folder), house.root / folder]
    path = next((p for p in places if p.is_dir()), house.root / folder).resolve()
    sources = sorted(path.glob("*.c"))
    files = included_from(sources) + sources
    if not any(f.suffix == ".c" for f in files):
        why = "its folder holds no .c file" if path.is_dir() else "there is no such folder"
        sys.exit(f"amalgamate.py: {folder} is no plugin: {why}")
    return path.name, house.in_include_order([Fragment(house.root, f, "plugin") for f in files])


def static_plugins_block(names):
    """What the loader reads: DDL__STATIC_PLUGINS(X) calls X(name) for each plugin that is folded in."""
    if not names:
        return ""
    out = "#define DDL__STATIC_PLUGINS(X)" + "".join(f" X({name})" for name in names) + "\n"
    out += "#undef DDL_PLUGIN_EXPORT\n#define DDL_PLUGIN_EXPORT static\n"
    return out + "".join(f"static const ddl_plugin *ddl_plugin_{n}_v1(const ddl_host *host);\n" for n in names)


def licence_block(root):
    lines = (root / "LICENSE").read_text().strip().splitlines()
    return "/* >>licence\n" + "".join((" * " + line).rstrip() + "\n" for line in lines) + " */\n"


def generate(house, plugin_folders=()):
    plugins = [read_plugin(house, folder) for folder in plugin_folders]
    declared, implemented = house.of(DECLARATIONS), house.of(IMPLEMENTATION)
    folded = [f for _, fragments in plugins for f in fragments]
    seen = set()
    blocks = [house.manual + "\n", HEAD, include_block(declared, seen), namespace_block(house.public_functions())]
    blocks += [fragment_block(f) for f in declared]
    blocks += [IMPLEMENTATION_HEAD, include_block(implemented + folded, seen)]
    blocks += [static_plugins_block([name for name, _ in plugins])]
    blocks += [fragment_block(f) for f in implemented + folded]
    blocks += ["#endif /* DDL_IMPLEMENTATION */\n", licence_block(house.root)]
    return "\n".join(b for b in blocks if b)


def write_if_changed(path, text):
    """Leaves an equal file alone, so that nothing is rebuilt; never shows a half-written one to a parallel build."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        if path.exists() and not path.is_file():  # the rename would put a file where a device was
            sys.exit(f"amalgamate.py: {path} is no file, and is left alone; -o - writes to standard output")
        if path.exists() and path.read_text(errors="replace") == text:
            return
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        sys.exit(f"amalgamate.py: {path} cannot be written: {error.strerror}")


# ---------------------------------------------------------------------------------------------- reading C

TOKEN = re.compile(r"""
    (?P<space>\s+)
  | (?P<comment>/\*.*?\*/|//[^\n]*)
  | (?P<pp>(?<![^\n])\#(?:\\\n|/\*.*?\*/|[^\n])*)
  | (?P<str>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
  | (?P<id>[A-Za-z_]\w*)
  | (?P<num>\.?\d[\w.]*)
  | (?P<op>.)
""", re.X | re.S)


class Token:
    def __init__(self, kind, text, line):
        self.kind, self.text, self.line = kind, text, line
        self.body = []  # of kind 'body': the tokens between the braces
        self.end = line


def lex(text):
    """Tokens of C, without space and comments. A directive is one token (indented ones are found at line starts)."""
    text = re.sub(r"^[ \t]+#", "#", text, flags=re.M)
    tokens, line = [], 1
    for m in TOKEN.finditer(text):
        if m.lastgroup not in ("space", "comment"):
            tokens.append(Token(m.lastgroup, m.group(), line))
        line += m.group().count("\n")
    return tokens


def strip_comments(text):
    """The text with comments blanked; lines keep their numbers."""
    keep = lambda m: re.sub(r"[^\n]", " ", m.group()) if m.lastgroup == "comment" else m.group()
    return TOKEN.sub(keep, text)


def file_scope(tokens):
    """Splits a file into declarations; each {...} at file scope becomes one token of kind 'body'."""
    item, depth, body = [], 0, None
    for t in tokens:
        if t.kind == "pp":
            continue
        if t.text == "{" and t.kind == "op":
            depth += 1
            if depth == 1:
                body = Token("body", "{}", t.line)
                item.append(body)
                continue
        elif t.text == "}" and t.kind == "op":
            depth -= 1
            if depth == 0:
                body.end = t.line
                if is_function(item):
                    yield item
                    item = []
                continue
        if depth:
            body.body.append(t)
        elif t.text == ";":
            if item:
                yield item
            item = []
        else:
            item.append(t)


def is_function(item):
    return item[-1].kind == "body" and len(item) > 3 and item[-2].text == ")" and "=" not in [t.text for t in item]


def matching(item, close):
    """Index of the ( or [ that belongs to the ) or ] at index close."""
    depth = 0
    for i in range(close, -1, -1):
        depth += (item[i].text in ")]") - (item[i].text in "([")
        if depth == 0:
            return i
    return 0


def declarator(item):
    """(index of the declared name, is it a function) of a declaration without initializer, body or attributes."""
    end = len(item) - 1
    while end >= 0:
        t = item[end]
        if t.text in (")", "]"):
            start = matching(item, end)
            before = item[start - 1] if start else None
            if before is not None and before.text == "__attribute__":
                end = start - 2
            elif t.text == "]":
                end = start - 1
            elif before is not None and before.kind == "id":
                return start - 1, True
            elif before is not None and before.text == ")":  # (*name)(arguments): a pointer to a function
                inner = [i for i in range(matching(item, start - 1), start) if item[i].kind == "id"]
                return (inner[-1], False) if inner else (None, False)
            else:
                return None, False
        elif t.kind == "id":
            return end, False
        else:
            end -= 1
    return None, False


def initializer_cut(item):
    """The part of a declaration before its = (or its body, for a function)."""
    for i, t in enumerate(item):
        if t.text == "=" or (t.kind == "body" and i == len(item) - 1):
            return item[:i]
    return item


def is_const(item, name_index):
    """A pointer must itself be const (after the last star), anything else must be const at all."""
    words = [t.text for t in item[:name_index]]
    if "*" in words:
        words = words[len(words) - words[::-1].index("*"):]
    return "const" in words


def enumerators(body):
    wanted = True
    for t in body:
        if wanted and t.kind == "id":
            yield t
        wanted = t.text == ","


def declared(item):
    """Yields (what, token, item's head, index of name) for each name that a file-scope declaration introduces."""
    for i, t in enumerate(item):
        if t.kind == "body" and i >= 1:
            tagged = item[i - 1].kind == "id" and i >= 2 and item[i - 2].text in ("struct", "union", "enum")
            if tagged:
                yield "tag", item[i - 1], item, i - 1
            if item[i - 2 if tagged else i - 1].text == "enum":
                for e in enumerators(t.body):
                    yield "enumerator", e, item, i
    head = initializer_cut(item)
    texts = [t.text for t in head]
    only_a_type = item[-1].kind == "body" and "=" not in [t.text for t in item] and not is_function(item)
    only_a_tag = len(head) == 2 and texts[0] in ("struct", "union", "enum")
    if only_a_type or only_a_tag or "_Static_assert" in texts:
        return
    index, function = declarator(head)
    if index is not None:
        what = "typedef" if "typedef" in texts else "function" if function else "variable"
        yield what, head[index], head, index


def functions(fragment):
    """(name, line, lines) of each function that a fragment defines."""
    for item in file_scope(lex(fragment.text)):
        if is_function(item):
            head = item[:-1]
            index, _ = declarator(head)
            if index is not None:
                yield head[index].text, head[index].line, item[-1].end - head[index].line + 1


# ---------------------------------------------------------------------------------------------- checks


def check_layers(house):
    rank = {room: i for i, room in enumerate(ROOMS)}
    for f in house.fragments:
        if not f.guard:
            yield f"{f.path}:1: has no include guard"
        for include in f.project_includes:
            target = house.resolve(f, include)
            other = next((g for g in house.fragments if target == house.root / g.path), None)
            line = next(i for i, l in enumerate(f.lines, 1) if f'"{include}"' in l)
            if other is None:
                yield f'{f.path}:{line}: "{include}" is in no room'
            elif rank[other.room] > rank[f.room]:
                yield f"{f.path}:{line}: {f.room} includes {other.room}, which is above it"


def check_calls(house):
    """No room calls a function of a room above it but those of CALLS_UP, and each of those is called."""
    rank = {room: i for i, room in enumerate(ROOMS)}
    homes = {name: f.room for f in house.of(IMPLEMENTATION) for name, _, _ in functions(f) if name.startswith("ddl__")}
    seen = set()
    for f in house.of(IMPLEMENTATION):
        for t in lex(f.text):
            if rank[homes.get(t.text, f.room)] > rank[f.room]:
                if t.text not in CALLS_UP.get(f.room, ()):
                    yield f"{f.path}:{t.line}: {f.room} calls {t.text}, which {homes[t.text]} defines, a room above it"
                seen.add((f.room, t.text))
    for room in {f.room for f in house.fragments} & set(CALLS_UP):
        for name in sorted(n for n in CALLS_UP[room] if (room, n) not in seen):
            yield f"amalgamate.py:1: {room} does not call {name}; take it off CALLS_UP"


def check_names(house):
    """Private names start with ddl__ or DDL__; what the public part mentions is public."""
    public = set()
    for f in house.of(DECLARATIONS):
        public |= {w for t in lex(f.text) for w in re.findall(r"\b(?:ddl|DDL)_\w+", t.text)}
    private = re.compile(r"(ddl__|DDL__)\w")
    for f in house.of(IMPLEMENTATION):
        tokens = lex(f.text)
        for t in tokens:
            m = re.match(r"#\s*define\s+(\w+)", t.text) if t.kind == "pp" else None
            if m and not private.match(m[1]) and m[1] not in public and m[1] != (f.guard or [""])[0]:
                yield f"{f.path}:{t.line}: the macro {m[1]} lacks DDL__"
        for item in file_scope(tokens):
            for what, name, head, index in declared(item):
                if not private.match(name.text) and name.text not in public:
                    yield f"{f.path}:{name.line}: the {what} {name.text} lacks ddl__"
                if what == "variable" and not is_const(head, index) and name.text not in GLOBALS_ALLOWED:
                    yield f"{f.path}:{name.line}: {name.text} is a variable at file scope; there are no globals"
            yield from check_locals(f, item)


def check_locals(fragment, item):
    """A static variable inside a function is a global too."""
    body = item[-1].body if is_function(item) else []
    for i, t in enumerate(body):
        if t.text != "static":
            continue
        end = next((j for j in range(i, len(body)) if body[j].text in ";={"), len(body))
        index, _ = declarator(body[i:end])
        name = body[i + index].text if index is not None else "?"
        if index is not None and not is_const(body[i:end], index) and name not in GLOBALS_ALLOWED:
            yield f"{fragment.path}:{t.line}: {name} is a static variable; there are no globals"


def options_used(house):
    """Names of option macros (DDL_X that an #if asks for) and environment variables, with the place of the first."""
    used = {}
    guards = {f.guard[0] for f in house.fragments if f.guard}
    public = {w for f in house.of(DECLARATIONS) for t in lex(f.text) if t.kind == "id" or "define" in t.text
              for w in re.findall(r"\w+", t.text)}
    for f in house.fragments:
        for t in lex(f.text):
            names = []
            if t.kind == "pp" and re.match(r"#\s*(if|elif)", t.text):
                names = re.findall(r"\bDDL_(?!_)[A-Z0-9_]+", t.text)
            elif t.kind == "str" and f.room in IMPLEMENTATION:
                names = [n for n in re.findall(r'^"(DDL_(?!_)[A-Z0-9_]+)"$', t.text) if n not in public]
            for name in names:
                if name not in guards:
                    used.setdefault(name, f"{f.path}:{t.line}")
        for m in re.finditer(r'setting\s*\([^()"]*"([A-Z0-9_]+)"', f.text):
            name = m[1] if m[1].startswith("DDL_") else "DDL_" + m[1]
            used.setdefault(name, f"{f.path}:{f.text.count(chr(10), 0, m.start()) + 1}")
    for name in ("DDL_IMPLEMENTATION", "DDL_NAMESPACE"):
        used.setdefault(name, "amalgamate.py:1")
    return used


def check_options(house):
    """The manual lists every option, and no option that is gone."""
    used = options_used(house)
    for name, place in used.items():
        if not re.search(rf"\b{name}\b", house.manual):
            yield f"{place}: {name} is missing from the options of the manual"
    elsewhere = "".join(p.read_text(errors="replace") for folder in ("plugins", "tools")
                        for p in sorted((house.root / folder).rglob("*.[ch]")))
    known = "\n".join(f.text for f in house.fragments) + elsewhere
    for name in sorted(set(re.findall(r"^[ *]*(DDL_(?!_)[A-Z0-9_]+)\b(?!\()", house.manual, re.M))):
        if name not in used and not re.search(rf"\b{name}\b", known) and f'"{name[4:]}"' not in known:
            yield f"src/manual.h:1: {name} is documented, but nothing reads it"


def check_docs(house):
    total = house.manual.count("\n") + sum(len(f.lines) for f in house.of(DECLARATIONS))
    if total > MAX_DECLARATION_LINES:
        yield f"src/api.h:1: manual and declarations have {total} lines; {MAX_DECLARATION_LINES} is the limit"
    for f in house.of(DECLARATIONS):
        for m in re.finditer(r"(/\*(?:(?!\*/).)*\*/)\nDDL_API\s[^;(]*?\b(ddl_\w+)\s*\(", f.text, re.S):
            lines = m[1].count("\n") + 1
            if lines > MAX_DOC_LINES:
                place = f.text.count("\n", 0, m.start()) + 1
                yield f"{f.path}:{place}: the text about {m[2]} has {lines} lines; {MAX_DOC_LINES} is the limit"


def check_shape(house):
    """Limits of size for all C of the project, and of form for what becomes ddl.h."""
    others = [Fragment(house.root, p, folder) for folder in ("plugins", "tools", "examples", "tests", "bench")
              for p in sorted((house.root / folder).rglob("*.[ch]"))]
    for f in house.fragments + others:
        if len(f.lines) > MAX_FILE_LINES:
            yield f"{f.path}:1: {len(f.lines)} lines; {MAX_FILE_LINES} is the limit"
        for number, line in enumerate(f.lines if f in house.fragments else [], 1):
            if len(line) > MAX_COLUMNS:
                yield f"{f.path}:{number}: {len(line)} columns; {MAX_COLUMNS} is the limit"
            if "\t" in line or line != line.rstrip():
                yield f"{f.path}:{number}: a tab or a blank at the end"
        if f.room not in DECLARATIONS:
            for name, line, lines in functions(f):
                if lines > MAX_FUNCTION_LINES:
                    yield f"{f.path}:{line}: {name} has {lines} lines; {MAX_FUNCTION_LINES} is the limit"


def check_fresh(house, path):
    if not path.exists() or path.read_text() != generate(house):
        yield "ddl.h:1: is stale; run ./amalgamate.py and commit it"


def check(house, path):
    found = list(house.findings)
    for rule in (check_layers, check_calls, check_names, check_options, check_docs, check_shape):
        found += rule(house)
    return found + list(check_fresh(house, path))


# ---------------------------------------------------------------------------------------------- figures


def comment_share(fragments):
    """Lines that hold comment text, of all lines that are not empty."""
    commented = total = 0
    for f in fragments:
        bare = strip_comments(f.text).splitlines()
        total += sum(1 for line in f.lines if line.strip())
        commented += sum(1 for line, code in zip(f.lines, bare) if line.rstrip() != code.rstrip())
    return 100 * commented // max(total, 1)


def stats_row(name, fragments):
    lengths = sorted(n for f in fragments for _, _, n in functions(f))
    at = lambda share: lengths[min(len(lengths) - 1, int(len(lengths) * share))] if lengths else 0
    lines = sum(len(f.lines) for f in fragments)
    return (f"{name:10} {len(fragments):5} {lines:7} {comment_share(fragments):8} % {len(lengths):9} "
            f"{at(0.5):7} {at(0.9):5} {at(1):5}")


def stats(house):
    print("room       files   lines  comments  functions  median   p90   max")
    for room in ROOMS:
        if house.of([room]):
            print(stats_row(room, house.of([room])))
    print(stats_row("all", house.fragments))


class Parser(argparse.ArgumentParser):
    """An unknown flag is answered by the one that may be meant, as the tools in C do."""

    def error(self, message):
        unknown = re.search(r"unrecognized arguments: (\S+)", message)
        near = difflib.get_close_matches(unknown[1].split("=")[0], self._option_string_actions, 1) if unknown else []
        super().error(f"unknown flag {unknown[1]}: did you mean {near[0]}?" if near else message)


def main():
    parser = Parser(allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="check the rules instead of writing")
    parser.add_argument("--stats", action="store_true", help="print figures instead of writing")
    parser.add_argument("--with", action="append", default=[], metavar="FOLDER", dest="plugins", help="fold a plugin in")
    parser.add_argument("-o", metavar="FILE", dest="output", help="instead of ddl.h")
    parser.add_argument("--root", default=pathlib.Path(__file__).parent, type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    house = House(args.root)
    target = pathlib.Path(args.output) if args.output else args.root / "ddl.h"
    if args.stats:
        stats(house)
    elif args.check:
        found = check(house, target)
        print("".join(line + "\n" for line in found), end="")
        return 1 if found else 0
    elif args.output == "-":
        sys.stdout.write(generate(house, args.plugins))
    else:
        write_if_changed(target, generate(house, args.plugins))
    return 0


if __name__ == "__main__":
    sys.exit(main())
