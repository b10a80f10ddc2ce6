"""Simple statements of a bash script: track variables and list commands without executing them."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from interop.shell.conditions import Verdict, judge, verdict_of
from interop.shell.scope import MARK, OUTPUT, Scope, ShellError, Unknown, Word, marks_of, shown
from interop.shell.words import fields, index_of, scalar

SUCCESS = "a command's success"
MAX_DEPTH = 20
SHELLS = ("bash", "sh", "zsh")
# Commands assumed to succeed before `&&` and `||`.
SUCCEEDING = (
    "cd",
    "echo",
    "mkdir",
    "touch",
    "rm",
    "cp",
    "mv",
    "ulimit",
    "sleep",
    "source",
    ".",
    "wait",
)
NO_WORDS = ("comment", "file_redirect", "heredoc_redirect", "herestring_redirect")


@dataclass(frozen=True)
class Command:
    """A command in a script: its words, environment, origin, and the conditions it depends on."""

    words: tuple[Word, ...]
    environment: dict[str, str]
    origin: str
    conditions: tuple[str, ...] = ()


@dataclass
class Script:
    """The commands of a script in order, here-documents by path, unknown values, and notes."""

    name: str
    commands: list[Command] = field(default_factory=list)
    documents: dict[str, Word] = field(default_factory=dict)
    unknowns: list[Unknown] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    started: set[str] = field(default_factory=set)  # other scripts that it runs or sources
    ends: str | None = None  # where `exit` ends it


class Leave(Exception):
    """Leaves a script, a function or a loop."""


class Exit(Leave):
    pass


class Return(Leave):
    pass


class Break(Leave):
    pass


class Continue(Leave):
    pass


COMMENT_OF_A_LIST = re.compile(rb"(?m)(?<=[ \t])`#[^`\n]*`(?=[ \t]*\\?$)")
READ_HERE = ("arithmetic_expansion", "expansion", "command_substitution", "string")
LEAVING = {"exit": Exit, "return": Return, "break": Break, "continue": Continue}


def parsed(source: bytes) -> tuple[Any, bytes]:
    """Return the syntax tree of a script, and the source it was parsed from.

    A backquoted comment among continued lines, `# ...`, is blanked: tree-sitter-bash reads it as a
    command. tree-sitter-bash 0.25 merges the lines after `A=1 B=2` into the same command, so a
    semicolon is inserted to separate them. If that does not help, the line is not valid bash.
    """
    import tree_sitter
    import tree_sitter_bash

    source = COMMENT_OF_A_LIST.sub(lambda match: b" " * len(match[0]), source)
    parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))
    parted = set[int]()  # rows
    while True:
        root = parser.parse(source).root_node
        ends = {row: at for row, at in _swallowed(root, source) if row not in parted}
        if not ends:
            return root, source
        parted |= ends.keys()
        source = b";".join(
            source[start:end]
            for start, end in itertools.pairwise([0, *sorted(ends.values()), None])
        )


def _swallowed(node: Any, source: bytes) -> Iterator[tuple[int, int]]:
    """Yield (row, end byte) of words after which a command continues on the next line without a
    backslash.
    """
    if node.type in ("command", "variable_assignments"):
        words = [child for child in node.children if child.type != "comment"]
        for word, following in itertools.pairwise(words):
            if re.search(rb"(?<!\\)\n", source[word.end_byte : following.start_byte]):
                yield word.end_point.row, word.end_byte
    for child in node.children:
        yield from _swallowed(child, source)


class Commands:
    """Walks the simple statements of a script and tracks its variables; Walk adds compound
    statements.
    """

    def __init__(self, script: Script, scope: Scope, others: dict[str, str]) -> None:
        self.script, self.scope, self.others = script, scope, others
        self.source = b""
        self.is_file = False  # False for a text inside a file, such as the argument of `bash -c`
        self.functions: dict[str, tuple[Any, bytes, bool]] = {}
        self.conditions: tuple[str, ...] = ()
        self.depth = 0
        self.status = Verdict(True)

    def text(self, text: str, is_file: bool = False) -> None:
        """Walk a script, or the text of `bash -c` or `eval`, which keeps the command's line number."""
        if self.depth >= MAX_DEPTH:
            raise ShellError(f"{self.scope.origin}: nested more than {MAX_DEPTH} times")
        before = self.source, self.is_file
        root, source = parsed(text.encode())
        self.source, self.is_file, self.depth = source, is_file, self.depth + 1
        try:
            if root.has_error:
                self.refuse(root)
            self.block(root.children)
        finally:
            (self.source, self.is_file), self.depth = before, self.depth - 1

    def refuse(self, node: Any) -> None:
        """Raise ShellError for the first syntax error; `pieces` parses the insides of words."""
        for child in node.children:
            if child.is_missing or child.type == "ERROR":
                line = self.of(child).strip().partition("\n")[0][:60]
                raise ShellError(
                    f"{self.at(child)}: cannot parse {line!r} as bash; remove or simplify the line"
                )
            if (
                child.has_error
                and child.type not in READ_HERE
                and not self.of(child).startswith("((")
            ):
                self.refuse(child)

    def of(self, node: Any) -> str:
        return self.source[node.start_byte : node.end_byte].decode()

    def block(self, nodes: Iterable[Any]) -> None:
        for node in nodes:
            self.statement(node)

    def statement(self, node: Any) -> None:
        """Walk one statement; comments, separators and keywords have no method and are skipped."""
        method: Callable[[Any], None] | None = getattr(self, f"on_{node.type}", None)
        if method is not None:
            self.at(node)
            self.status = Verdict(True)
            method(node)

    def at(self, node: Any) -> str:
        if self.is_file:
            self.scope.line = node.start_point.row + 1
        return self.scope.origin

    # Assignments

    def on_variable_assignment(self, node: Any) -> None:
        target = node.child_by_field_name("name")
        name, index = self.of(target), None
        if target.type == "subscript":
            name = self.of(target.child_by_field_name("name"))
            index = index_of(self.scope, name, self.of(target.child_by_field_name("index")))
        value = node.child_by_field_name("value")
        is_added = any(child.type == "+=" for child in node.children)
        if value is not None and value.type == "array":
            self.assign_array(name, value, is_added)
            return
        text = (
            ""
            if value is None
            else scalar(self.source[value.start_byte : node.end_byte].decode(), self.scope)
        )
        if is_added:
            text = (self.scope.text_of(name, index) or "") + text
        self.scope.assign(name, self.named(name, text), index)

    def named(self, name: str, text: str) -> str:
        """Return a text; if it depends on a command's output, a mark named after the variable."""
        found = [self.scope.unknowns[int(number)] for number in MARK.findall(text)]
        outputs = [unknown for unknown in found if unknown.why == OUTPUT]
        return self.scope.mark(name, f"from {outputs[0].name}") if outputs else text

    def assign_array(self, name: str, value: Any, is_added: bool) -> None:
        current = self.scope.variables.get(name) if is_added else None
        items = (
            dict(current)
            if isinstance(current, dict)
            else {}
            if current is None
            else {"0": current}
        )
        following = max((int(key) for key in items if key.isdigit()), default=-1) + 1
        for child, source in self.sources(value):
            self.at(child)
            if keyed := re.match(r"\[([^]]+)\]=", source):
                key = index_of(self.scope, name, keyed[1])
                items[key] = Word(scalar(source[keyed.end() :], self.scope), self.scope.origin)
                following = int(key) + 1 if key.isdigit() else following
                continue
            for word in fields(source, self.scope):
                items[str(following)] = word
                following += 1
        self.scope.variables[name] = items

    def on_variable_assignments(self, node: Any) -> None:
        self.block(node.named_children)

    def on_declaration_command(self, node: Any) -> None:
        flags = "".join(self.of(child) for child in node.named_children if child.type == "word")
        for child in node.named_children:
            name = self.of(
                child.child_by_field_name("name") if child.type == "variable_assignment" else child
            )
            if child.type not in ("variable_assignment", "variable_name"):
                if marks_of(scalar(self.of(child), self.scope)):
                    self.script.notes.append(
                        f"{self.at(child)}: sets variables from {self.of(child)}, which is unknown"
                    )
                continue
            if "A" in flags:
                self.scope.associative.add(name)
            if child.type == "variable_assignment":
                self.on_variable_assignment(child)
            if self.of(node.children[0]) == "export" or "x" in flags:
                self.scope.exported.add(name)

    def on_unset_command(self, node: Any) -> None:
        for child in node.named_children:
            self.scope.variables.pop(self.of(child), None)

    # Commands

    def on_command(self, node: Any) -> None:
        own: dict[str, str] = {}
        words: list[Word] = []
        for child, source in self.sources(node):
            self.at(child)
            if child.type == "variable_assignment":
                name, _, value = source.partition("=")
                own[name] = scalar(value, self.scope)
            else:
                words += fields(source, self.scope)
        self.at(node)
        if words:
            self.run(words, own)
        for name, text in () if words else own.items():
            self.scope.assign(name, text)

    def sources(self, node: Any) -> Iterator[tuple[Any, str]]:
        """Yield the words of a command or array, joining those split only by a backslash-newline."""
        found: list[tuple[Any, str, int]] = []
        for child in node.named_children:
            if child.type in NO_WORDS:
                continue
            gap = self.source[found[-1][2] : child.start_byte] if found else b" "
            if gap and not gap.replace(b"\\\n", b""):
                first, source, _ = found.pop()
                found.append((first, source + self.of(child), child.end_byte))
            else:
                found.append((child, self.of(child), child.end_byte))
        return ((child, source) for child, source, _ in found)

    def run(self, words: list[Word], own: dict[str, str]) -> None:
        """Apply a command's effect on the script's state; list all other commands."""
        name, rest = words[0].text, [word.text for word in words[1:]]
        if name in self.functions:
            self.call(name, words[1:])
        elif name in LEAVING:
            raise LEAVING[name]
        elif name == "exec" and rest:
            self.run(words[1:], own)
            raise Exit
        elif name in ("set", "shift"):
            self.change_positional(name, words[1:])
        elif name in ("read", "mapfile", "readarray", "getopts"):
            for variable in filter(re.compile(r"[A-Za-z_]\w*").fullmatch, rest):
                self.scope.assign(variable, self.scope.mark(variable, f"read by {name}"))
        elif name == "eval":
            self.text(" ".join(rest))
        elif name in ("true", ":", "false", "exec"):
            self.status = Verdict(name != "false")
        elif name in ("test", "["):
            tokens = [
                shlex.quote(text) if " " in text or not text else text
                for text in rest
                if text != "]"
            ]
            self.status = judge(tokens, self.scope, is_double=False)
        elif PurePosixPath(name).name in SHELLS and rest:
            self.start(words, own)
        else:
            self.keep(words, own)

    def change_positional(self, name: str, rest: list[Word]) -> None:
        texts = [word.text for word in rest]
        if name == "shift":
            count = int(texts[0]) if texts and texts[0].isdigit() else 1
            self.scope.positional = self.scope.positional[count:]
        elif "--" in texts:
            self.scope.positional = rest[texts.index("--") + 1 :]

    def keep(self, words: list[Word], own: dict[str, str]) -> None:
        """Record a command with its environment."""
        name, rest = words[0].text, words[1:]
        if name == "cd" and rest:
            self.script.notes.append(
                f"{self.scope.origin}: cd {shown(rest[0].text, self.scope.unknowns)}"
            )
            self.scope.assign("PWD", rest[0].text)
        elif name in ("source", ".") and rest:
            target = PurePosixPath(rest[0].text).name
            if target in self.others:
                self.script.started.add(target)
                self.text(self.others[target], is_file=True)
                return
            shown_path = shown(rest[0].text, self.scope.unknowns)
            self.script.notes.append(
                f"{self.scope.origin}: source {shown_path}: not read; give it as another FILE"
            )
        exported = {key: self.scope.text_of(key) for key in sorted(self.scope.exported)}
        environment = {key: text for key, text in {**exported, **own}.items() if text is not None}
        self.script.commands.append(
            Command(tuple(words), environment, self.scope.origin, self.conditions)
        )
        if name not in SUCCEEDING:
            text = " ".join(shown(word.text, self.scope.unknowns) for word in words)
            self.status = verdict_of(self.scope.mark(text, SUCCESS))

    def start(self, words: list[Word], own: dict[str, str]) -> None:
        """Follow `bash -c TEXT`, or `bash other.sh` if the other script was given too."""
        options = [word for word in words[1:] if word.text.startswith("-")]
        rest = [word for word in words[1:] if not word.text.startswith("-")]
        is_text = any("c" in word.text for word in options if not word.text.startswith("--"))
        target = PurePosixPath(rest[0].text).name if rest else ""
        if not rest or not (is_text or target in self.others):
            self.keep(words, own)
            return
        scope, self.scope = self.scope, self.scope.copy()
        self.scope.variables.update({key: Word(text, scope.origin) for key, text in own.items()})
        self.scope.positional = rest[1:]
        try:
            if is_text:
                self.text(rest[0].text)
            else:
                self.script.started.add(target)
                self.scope.name = target
                self.text(self.others[target], is_file=True)
        except Exit:
            pass
        finally:
            self.scope = scope

    def call(self, name: str, words: list[Word]) -> None:
        """Call a function of the script; `local` variables stay set, which such scripts do not
        depend on.
        """
        if self.depth >= MAX_DEPTH:
            raise ShellError(f"{self.scope.origin}: {name} recurses more than {MAX_DEPTH} times")
        body, source, is_file = self.functions[name]
        outer, here = self.scope.positional, (self.source, self.is_file)
        self.scope.positional, (self.source, self.is_file), self.depth = (
            words,
            (source, is_file),
            self.depth + 1,
        )
        try:
            self.block(body.children)
        except Return:
            pass
        finally:
            self.scope.positional, (self.source, self.is_file), self.depth = (
                outer,
                here,
                self.depth - 1,
            )
