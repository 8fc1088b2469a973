#!/usr/bin/python3
"""Runs clang-tidy over C++ files with the flags that Bazel compiles them with; see tools/lint.

    lint_files.py --actions=FILE --execution_root=DIRECTORY SOURCE...

FILE holds what `bazel aquery --output=jsonproto` says of the compile actions. Of their flags those are
kept that say what the code means; the warnings are the compiler's own business. Sources are read where
they are and what rules have made below DIRECTORY, Bazel's execution root, so that another build may
run meanwhile. Files are looked at by as many processes as there are processors.

A file without findings is remembered by a hash of all that its result depends on: clang-tidy's
version, the checks, the flags (whose defines name the versions of Debian's libraries), its text and
that of every header of this tree or of Bazel's output which it includes.
"""

import argparse
import concurrent.futures
import hashlib
import json
import os
import re
import signal
import subprocess
import sys

# Headers of this tree, directly or by a target's virtual include folder; none that protoc makes.
HEADERS = (r"^(\./)?(benchmarks|client|core|examples|proto|server|tests|third_party|tools)/"
           r"|/_virtual_includes/[^/]*/chorus/[^/]*\.h$")

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*(["<])([^">\n]+)[">]', re.MULTILINE)
_FINDING = re.compile(r"^(\S+?):\d+:\d+: (?:warning|error): ")
_TAKES_A_PATH = ("-I", "-iquote", "-isystem", "-include")


def compile_flags(arguments, execution_root):
    """Of a compiler's arguments those that clang-tidy needs, and the last of its standards."""
    def path(name):
        if name.startswith("external/"):
            return os.path.join(execution_root, os.pardir, os.pardir, name)
        return os.path.join(execution_root, name) if name.startswith("bazel-out/") else name

    flags = []
    standard = []
    rest = iter(arguments)
    for argument in rest:
        if argument in _TAKES_A_PATH:
            flags += [argument, path(next(rest))]
        elif argument.startswith("-std="):
            standard = [argument]
        elif argument.startswith("-I"):
            flags += ["-I", path(argument[2:])]
        elif argument.startswith(("-D", "-U", "-m")):
            flags.append(argument)
    return standard + flags


def read_commands(actions, execution_root):
    """{source: flags} of the compile actions; of a source with several, the first one's."""
    commands = {}
    for action in actions.get("actions", []):
        arguments = action.get("arguments", [])
        if "-c" in arguments:
            source = arguments[arguments.index("-c") + 1]
            commands.setdefault(source, compile_flags(arguments, execution_root))
    return commands


class Includes:
    """The files that a file includes, and theirs; what is found in none of the folders is the system's."""

    def __init__(self, root):
        self._root = root
        self._texts = {}

    def _read(self, path):
        """(hash, [(quote, name)]) of a file; None if there is none. Each is read once."""
        if path not in self._texts:
            try:
                with open(os.path.join(self._root, path), "rb") as file:
                    text = file.read()
                self._texts[path] = (hashlib.sha256(text).hexdigest(),
                                     [(quote, os.fsdecode(name)) for quote, name in _INCLUDE.findall(text)])
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                self._texts[path] = None
        return self._texts[path]

    def hashes(self, source, flags):
        """[(path, hash)] of the source and all that it includes."""
        quoted = [flags[i + 1] for i, flag in enumerate(flags) if flag == "-iquote"]
        angled = [flags[i + 1] for i, flag in enumerate(flags) if flag in ("-I", "-isystem")]
        found = {}
        todo = [os.path.normpath(source)]
        while todo:
            path = todo.pop()
            if path in found or self._read(path) is None:
                continue
            digest, names = self._read(path)
            found[path] = digest
            for quote, name in names:
                folders = angled if quote == b"<" else [os.path.dirname(path)] + quoted + angled
                for folder in folders:
                    candidate = os.path.normpath(os.path.join(folder, name))
                    if self._read(candidate) is not None:
                        todo.append(candidate)
                        break
        return sorted(found.items())


def split_findings(text, root):
    """The findings in clang-tidy's output: the lines of each, with paths as git has them."""
    findings = []
    for line in text.replace(os.path.join(root, ""), "").splitlines():
        if _FINDING.match(line):
            findings.append([])
        if findings:
            findings[-1].append(line)
    return ["\n".join(lines) for lines in findings]


class Linter:
    def __init__(self, program, config, root, cache):
        self._program = program
        self._config = config
        self._root = root
        self._cache = cache
        version = subprocess.run([program, "--version"], stdout=subprocess.PIPE, check=True).stdout
        with open(config, "rb") as file:
            self._base = hashlib.sha256(version + file.read() + HEADERS.encode()).hexdigest()

    def key(self, flags, hashes):
        return hashlib.sha256(json.dumps([self._base, flags, hashes]).encode()).hexdigest()

    def lint(self, source, flags, key):
        """The findings in a file; those in its headers too."""
        remembered = os.path.join(self._cache, source + ".clean")
        try:
            with open(remembered, encoding="utf-8") as file:
                if file.read() == key:
                    return []
        except FileNotFoundError:
            os.makedirs(os.path.dirname(remembered), exist_ok=True)
        result = subprocess.run(
            [self._program, "--quiet", "--config-file=" + self._config, "--warnings-as-errors=*",
             "--header-filter=" + HEADERS, source, "--"] + flags,
            cwd=self._root, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            encoding="utf-8", errors="replace", check=False)
        if result.returncode == 0:
            with open(remembered, "w", encoding="utf-8") as file:
                file.write(key)
            return []
        return (split_findings(result.stdout, self._root) or
                ["%s: clang-tidy ended with status %d: %s" % (
                    source, result.returncode, (result.stdout + result.stderr).strip())])


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--actions", required=True)
    parser.add_argument("--execution_root", required=True)
    parser.add_argument("--root", default=".")
    parser.add_argument("--program", default="clang-tidy-14")
    parser.add_argument("--config", default=".clang-tidy")
    parser.add_argument("--cache", default=".cache/lint")
    parser.add_argument("sources", nargs="+")
    options = parser.parse_args(arguments)
    with open(options.actions, encoding="utf-8") as file:
        commands = read_commands(json.load(file), options.execution_root)
    # A script's command in the background is started with this signal ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    root = os.path.abspath(options.root)
    linter = Linter(options.program, os.path.abspath(options.config), root, options.cache)
    includes = Includes(root)
    known = [source for source in options.sources if source in commands]
    shown = set()
    clean = 0
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = {}
        for source in known:
            flags = commands[source]
            key = linter.key(flags, includes.hashes(source, flags))
            results[pool.submit(linter.lint, source, flags, key)] = source
        try:
            for done in concurrent.futures.as_completed(results):
                findings = done.result()
                clean += not findings
                # A header's finding comes with every file that includes it.
                for finding in findings:
                    if finding not in shown:
                        shown.add(finding)
                        print(finding, flush=True)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            print("lint: interrupted")
            return 130
    unknown = [source for source in options.sources if source not in commands]
    for source in unknown:
        print("not compiled here: " + source)
    print("lint: %d clean, %d with findings, %d not compiled here" % (
        clean, len(known) - clean, len(unknown)))
    return 0 if known and clean == len(known) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
