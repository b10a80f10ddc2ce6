"""Walk a bash script from its first statement to its last without executing it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from interop.shell.conditions import Verdict, judge, leaves, negated, verdict_of
from interop.shell.scope import MARK, OUTPUT, Scope, ShellError, Unknown, Word, marks_of, shown
from interop.shell.words import EXTENDED, NOT_READ, fields, number, pieces, regex_of, scalar

SUCCESS = "a command's success"
MAX_DEPTH, MAX_ITERATIONS = 20, 1000
SHELLS = ("bash", "sh", "zsh")
# Commands assumed to succeed before `&&` and `||`.
SUCCEEDING = set("cd echo mkdir touch rm cp mv ulimit sleep source . wait printf tee cat".split())
# Commands that start none of their words; all others may.
STARTING_NOTHING = SUCCEEDING | {"grep", "sed", "awk", "pkill", "pgrep", "alias", "which", "git"}
PROGRAM = re.compile(r"(?:^|[\s;&|(=])(?:[\w./~-]*/)?(?:python[\d.]*|torchrun|bash|sh|zsh)\s")
NO_WORDS = ("comment", "file_redirect", "heredoc_redirect", "herestring_redirect")
COMMENT_OF_A_LIST = re.compile(rb"(?m)(?<=[ \t])`#[^`\n]*`(?=[ \t]*\\?$)")
ONE_LINE = ("command", "declaration_command", "variable_assignments", "variable_assignment")
CUT_NAME = re.compile(rb"(?<!\\)\$([A-Za-z_]\w*|[\d@*#?!-])")
LAST_BACKSLASH = re.compile(r"\\\s*\Z")
READ_HERE = ("arithmetic_expansion", "expansion", "command_substitution", "string")
NAME = re.compile(r"[A-Za-z_]\w*")
Body = Callable[[], object]


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
    """Leaves a script, a function or a loop: `how` is the command."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


def read_script(
    text: str, name: str, given: Mapping[str, str], others: Mapping[str, str] | None = None
) -> Script:
    """Return what a script does as far as its text tells; `others` are scripts that it may start.

    `given` holds the --set-env variables. Raises ShellError with the line of a syntax error.
    """
    script = Script(name)
    scope = Scope(name, dict(given), unknowns=script.unknowns, used=script.used, kept=script.kept)
    numbers = sorted(int(key) for key in given if key.isdigit() and key != "0")
    scope.positional = [Word(given[str(at)], f"--set-env {at}") for at in numbers]
    script.used.update(map(str, numbers))
    walk = Walk(script, scope, others or {})
    try:
        walk.text(text, is_file=True)
    except Leave:
        script.ends = walk.scope.origin
    return script


def parsed(source: bytes) -> tuple[Any, bytes]:
    """Return the syntax tree of a script, and the source it was parsed from.

    tree-sitter-bash 0.25 misreads three things, which are changed first: a backquoted comment among
    continued lines, `# ...`, is a command; the lines after `A=1 B=2` belong to the same command;
    and the word `$A/$B` ends at the second `$`. A line that stays unclear is not valid bash.
    """
    import tree_sitter
    import tree_sitter_bash

    source = COMMENT_OF_A_LIST.sub(lambda match: b" " * len(match[0]), source)
    parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))
    root = parser.parse(source).root_node
    while repairs := sorted({*_repairs(root, source)}, reverse=True):
        for start, end, text in repairs:
            source = source[:start] + text + source[end:]
        root = parser.parse(source).root_node
    return root, source


def _repairs(node: Any, source: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield (start, end, replacement): a semicolon for the end of a line that its command goes
    beyond without a backslash, and braces for a `$NAME` of which only the `$` is in the node.
    """
    if node.type in ONE_LINE:
        words = [child for child in node.children if child.type != "comment"]
        for word, following in itertools.pairwise(words):
            end = word.end_byte
            is_ended = b";" in source[end - 1 : end + 1]
            if not is_ended and re.search(rb"(?<!\\)\n", source[end : following.start_byte]):
                yield end, end, b";"
    cut = CUT_NAME.match(source, node.end_byte - 1)
    if cut and node.type != "$":
        yield *cut.span(), b"${" + cut[1] + b"}"
    for child in node.children:
        yield from _repairs(child, source)


class Walk:
    """Walks statements and tracks variables; of an unknown condition, both branches."""

    def __init__(self, script: Script, scope: Scope, others: Mapping[str, str]) -> None:
        self.script, self.scope, self.others = script, scope, others
        self.source = b""
        self.is_file = False  # False for a text inside a file, such as the argument of `bash -c`
        self.functions: dict[str, tuple[Any, bytes, bool]] = {}
        self.hidden: dict[str, Any] | None = None  # outer values of a function's local variables
        self.conditions: tuple[str, ...] = ()
        self.depth = 0
        self.status: Verdict = True

    def text(self, text: str, is_file: bool = False) -> None:
        """Walk a script, or the text of `bash -c`, which keeps the command's line number."""
        root, source = parsed(LAST_BACKSLASH.sub("\n", text).encode())
        with self.within(source, is_file):
            if root.has_error:
                self.refuse(root)
            self.block(root.children)

    @contextlib.contextmanager
    def within(self, source: bytes, is_file: bool) -> Iterator[None]:
        """Walk a text or a function."""
        if self.depth >= MAX_DEPTH:
            raise ShellError(f"{self.scope.origin}: nested more than {MAX_DEPTH} times")
        before = self.source, self.is_file
        self.source, self.is_file, self.depth = source, is_file, self.depth + 1
        try:
            yield
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
            is_inside = child.type in READ_HERE or self.of(child).startswith("((")
            if child.has_error and not is_inside:
                self.refuse(child)

    def of(self, node: Any) -> str:
        return self.source[node.start_byte : node.end_byte].decode()

    def block(self, nodes: Iterable[Any]) -> None:
        """Walk statements; comments, separators and keywords have no method and are skipped."""
        end = -1
        for node in nodes:
            if node.is_named and node.start_byte == end and self.source[end - 1 : end] != b"\n":
                text = self.of(node).partition("\n")[0][:60]
                raise ShellError(f"{self.at(node)}: {text!r} is not parted from the word before it")
            end = node.end_byte if node.is_named else -1
            method: Callable[[Any], None] | None = getattr(self, f"on_{node.type}", None)
            if method is not None:
                self.at(node)
                self.status = True
                method(node)

    def at(self, node: Any) -> str:
        if self.is_file:
            self.scope.line = node.start_point.row + 1
        return self.scope.origin

    # Assignments

    def on_variable_assignment(self, node: Any) -> None:
        self.set(node, self.of(node))

    def set(self, node: Any, source: str) -> None:
        """Set the variable of an assignment; `source` may be longer than its node."""
        target, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        name, scope = self.of(target).partition("[")[0], self.scope
        is_added = any(child.type == "+=" for child in node.children)
        if target.type == "subscript":
            scope.variables[name] = Word(scope.mark(self.of(node), NOT_READ), scope.origin)
        elif value is not None and value.type == "array":
            before = scope.variables.get(name, []) if is_added else []
            items = [before] if isinstance(before, Word) else before
            scope.variables[name] = [*items, *self.items(value)]
        else:
            start = (scope.text_of(name) or "") if is_added else ""
            text = scalar(source.partition("=")[2], scope)
            scope.assign(name, self.named(name, start + text))

    def named(self, name: str, text: str) -> str:
        """Return a text; if it depends on a command's output, a mark named after the variable."""
        found = [self.scope.unknowns[int(each)] for each in MARK.findall(text)]
        outputs = [unknown for unknown in found if unknown.why == OUTPUT]
        return self.scope.mark(name, f"from {outputs[0].name}") if outputs else text

    def items(self, array: Any) -> Iterator[Word]:
        """Yield the words between the brackets of an array; `[key]=word` is not read."""
        for child, source in self.sources(array.named_children):
            self.at(child)
            if source.startswith("["):
                yield Word(self.scope.mark(source, NOT_READ), self.scope.origin)
            else:
                yield from fields(source, self.scope)

    def on_variable_assignments(self, node: Any) -> None:
        for child, source in self.sources(node.named_children):
            self.at(child)
            self.set(child, source)

    def on_declaration_command(self, node: Any) -> None:
        keyword = self.of(node.children[0])
        flags = "".join(self.of(child) for child in node.named_children if child.type == "word")
        is_global = keyword in ("export", "readonly") or "g" in flags
        before = self.scope.copy()  # every value is expanded before any variable is set
        for child, source in self.sources(node.named_children):
            if child.type not in ("variable_assignment", "variable_name"):
                if marks_of(scalar(source, self.scope)):
                    note = f"sets variables from {source}, which is unknown"
                    self.script.notes.append(f"{self.at(child)}: {note}")
                continue
            name = re.split(r"[+=\[]", source, maxsplit=1)[0]
            if not is_global and self.hidden is not None and name not in self.hidden:
                self.hidden[name] = self.scope.variables.pop(name, None)
            if child.type == "variable_assignment":
                scope, self.scope = self.scope, before.copy()
                self.set(child, source)
                scope.variables[name], self.scope = self.scope.variables[name], scope
            if keyword == "export" or "x" in flags:
                self.scope.exported.add(name)

    def on_unset_command(self, node: Any) -> None:
        for child in node.named_children:
            self.scope.variables.pop(self.of(child), None)

    # Commands

    def on_command(self, node: Any) -> None:
        own: dict[str, str] = {}
        words: list[Word] = []
        for child, source in self.sources(node.named_children):
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
        for child in node.named_children:
            if child.type == "herestring_redirect":
                self.feed(self.of(node), scalar(self.of(child.children[-1]), self.scope))

    def feed(self, receiver: str, text: str) -> None:
        """Follow a text that is the input of the last command in `receiver`."""
        words = receiver.rpartition("|")[2].split()
        if words and not starts_nothing(words[0]):
            self.follow(text)

    def sources(self, nodes: Sequence[Any]) -> Iterator[tuple[Any, str]]:
        """Yield the words of a command or array; adjacent nodes without a blank are one word."""
        found: list[tuple[Any, str, int]] = []
        for child in nodes:
            if child.type in NO_WORDS:
                continue
            gap = self.source[found[-1][2] : child.start_byte] if found else b" "
            if gap.replace(b"\\\n", b""):
                found.append((child, self.of(child), child.end_byte))
            else:
                first, source, _ = found.pop()
                found.append((first, source + self.of(child), child.end_byte))
        return ((child, source) for child, source, _ in found)

    def run(self, words: list[Word], own: dict[str, str]) -> None:
        """Apply a command's effect on the script's state; list all other commands."""
        name, rest = words[0].text, [word.text for word in words[1:]]
        match name:
            case _ if name in self.functions:
                self.call(name, words[1:])
            case "exit" | "return" | "break" | "continue":
                raise Leave(name)
            case "exec" if rest:
                self.run(words[1:], own)
                raise Leave("exit")
            case "shift":
                count = int(rest[0]) if rest and rest[0].isdigit() else 1
                self.scope.positional = self.scope.positional[count:]
            case "set" if "--" in rest:
                self.scope.positional = words[rest.index("--") + 2 :]
            case "read" | "mapfile" | "readarray" | "getopts" | "let":
                for variable in filter(None, map(NAME.match, rest)):
                    mark = self.scope.mark(variable[0], f"set by {name}")
                    self.scope.assign(variable[0], mark)
            case "eval":
                self.text(" ".join(rest))
            case "true" | ":" | "false" | "exec" | "set":
                self.status = name != "false"
            case _ if starts_nothing(name):
                self.keep(words, own)
            case _:
                self.launch(words, own)

    def launch(self, words: list[Word], own: dict[str, str]) -> None:
        """Follow the shell that a command starts, such as `srun bash -c TEXT`, or texts for one
        elsewhere, such as `ssh HOST TEXT`; else record the command.
        """
        at = shell_in(words)
        if at is not None and self.start(words[at:], own):
            return
        self.keep(words, own)
        for word in words[1:]:
            self.follow(word.text)

    def follow(self, text: str) -> None:
        """Walk a text that another shell runs, if it is bash that starts a program."""
        if PROGRAM.search(text) and not parsed(text.encode())[0].has_error:
            status = self.status
            with self.apart():
                self.text(text)
            self.status = status

    def keep(self, words: list[Word], own: dict[str, str]) -> None:
        """Record a command with its environment."""
        name, origin = words[0].text, self.scope.origin
        first = shown(words[1].text, self.scope.unknowns) if len(words) > 1 else ""
        if name == "cd" and first:
            self.script.notes.append(f"{origin}: cd {first}")
            self.scope.assign("PWD", words[1].text)
        elif name in ("source", ".") and first:
            if (target := PurePosixPath(words[1].text).name) in self.others:
                self.script.started.add(target)
                self.text(self.others[target], is_file=True)
                return
            note = f"source {first}: not read; give it as another FILE"
            self.script.notes.append(f"{origin}: {note}")
        exported = {key: self.scope.text_of(key) for key in sorted(self.scope.exported)}
        environment = {key: text for key, text in {**exported, **own}.items() if text is not None}
        self.script.commands.append(Command(tuple(words), environment, origin, self.conditions))
        if name not in SUCCEEDING:
            text = " ".join(shown(word.text, self.scope.unknowns) for word in words)
            self.status = verdict_of(self.scope.mark(text, SUCCESS))

    def start(self, words: list[Word], own: dict[str, str]) -> bool:
        """Follow `bash -c TEXT`, or `bash other.sh` if that script was given; else False."""
        texts = [word.text for word in words]
        option = next((at for at, text in enumerate(texts) if re.match("-[a-z]*c", text)), 0)
        rest = [word for word in words[option + 1 :] if not word.text.startswith("-")]
        target = PurePosixPath(rest[0].text).name if rest else ""
        if not rest or not (option or target in self.others):
            return False

        with self.apart():
            origin = self.scope.origin
            self.scope.variables |= {key: Word(text, origin) for key, text in own.items()}
            self.scope.positional = rest[1:]
            if option:
                self.text(rest[0].text)
            else:
                self.script.started.add(target)
                self.scope.name = target
                self.text(self.others[target], is_file=True)
        return True

    def call(self, name: str, words: list[Word]) -> None:
        """Call a function of the script."""
        body, source, is_file = self.functions[name]
        outer, self.scope.positional = self.scope.positional, words
        outer_hidden, self.hidden = self.hidden, {}
        try:
            with self.within(source, is_file):
                self.block(body.children)
        except Leave as leave:
            if leave.how != "return":
                raise
        finally:
            self.scope.positional = outer
            known = {**self.scope.variables, **self.hidden}
            self.scope.variables = {key: one for key, one in known.items() if one is not None}
            self.hidden = outer_hidden

    # Conditions

    def verdict(self, nodes: Sequence[Any]) -> Verdict:
        """Walk the statements; returns whether the last one succeeds."""
        self.block(nodes)
        return self.status

    def choose(self, verdict: Verdict, test: str, yes: Body, no: Body) -> None:
        """Walk one branch, or, if the verdict is unknown, both; then one that exits is ignored."""
        if isinstance(verdict, bool):
            (yes if verdict else no)()
            return
        before, conditions = self.scope, self.conditions
        staying, leaving = list[Scope](), list[tuple[Leave, Scope]]()
        for body, said in ((yes, test), (no, f"not {test}")):
            self.scope, self.conditions = before.copy(), (*conditions, said)
            try:
                body()
                staying.append(self.scope)
            except Leave as leave:
                leaving.append((leave, self.scope))
        self.conditions = conditions
        for end, self.scope in leaving:
            if end.how == "break" or not staying:  # a loop that waits for something
                raise end
        self.scope = merged(staying[0], staying[-1], verdict)
        self.scope.line = before.line

    def on_list(self, node: Any) -> None:
        left, operator, right = node.children[0], self.of(node.children[1]), node.children[-1]
        verdict = self.verdict([left])
        self.status = operator == "||"
        verdict = negated(verdict) if self.status else verdict
        self.choose(verdict, self.of(left), lambda: self.block([right]), lambda: None)
        if isinstance(verdict, str):
            self.status = verdict + (self.status if isinstance(self.status, str) else "")

    def on_test_command(self, node: Any) -> None:
        bracket, *tokens, _ = leaves(node, self.source)
        self.status = judge(tokens, self.scope, is_double=bracket == "[[")

    def on_negated_command(self, node: Any) -> None:
        self.status = negated(self.verdict(node.named_children))

    def on_if_statement(self, node: Any) -> None:
        self.branch(node)
        self.status = True

    def branch(self, node: Any, following: Sequence[Any] = ()) -> None:
        """Walk an `if` or `elif` and the clauses after it."""
        then = next(at for at, child in enumerate(node.children) if child.type == "then")
        own = [each for each in node.children if each.type in ("elif_clause", "else_clause")]
        clauses = own or following
        body = [child for child in node.children[then + 1 :] if child not in clauses]
        test = node.children[1:then]

        def otherwise() -> None:
            if clauses and clauses[0].type == "elif_clause":
                self.branch(clauses[0], clauses[1:])
            elif clauses:
                self.block(clauses[0].children)

        said = " ".join(self.of(child) for child in test if child.is_named)
        self.choose(self.verdict(test), said, lambda: self.block(body), otherwise)

    def on_case_statement(self, node: Any) -> None:
        value = scalar(self.of(node.child_by_field_name("value")), self.scope)
        self.case(value, [child for child in node.children if child.type == "case_item"])

    def case(self, value: str, items: Sequence[Any]) -> None:
        if not items:
            return
        parts = items[0].children
        bracket = next(at for at, child in enumerate(parts) if child.type == ")")
        sources = [self.of(child) for child in parts[:bracket] if child.type not in ("(", "|")]
        patterns = [regex_of(pieces(source, self.scope)) for source in sources]
        verdict: Verdict = any(re.fullmatch(pattern, value) for pattern in patterns)
        if "*" not in sources:
            verdict = marks_of(value) or verdict
        said = f"{shown(value, self.scope.unknowns)} in {'|'.join(sources)}"
        if any(map(EXTENDED.search, sources)):
            verdict = verdict_of(self.scope.mark(said, NOT_READ))
        body = parts[bracket + 1 :]
        self.choose(verdict, said, lambda: self.block(body), lambda: self.case(value, items[1:]))

    # Groups, loops and functions

    def on_pipeline(self, node: Any) -> None:
        first, num_before = node.named_children[0], len(self.script.commands)
        for child in node.named_children:
            with self.apart():
                self.block([child])
        if first.type == "command" and self.of(first).startswith(("echo ", "printf ")):
            printed = self.script.commands[num_before].words[1:]
            self.feed(self.of(node), " ".join(word.text for word in printed))
        self.status = verdict_of(self.scope.mark(self.of(node), SUCCESS))

    def on_subshell(self, node: Any) -> None:
        with self.apart():
            self.block(node.children)

    def on_compound_statement(self, node: Any) -> None:
        if node.children[0].type != "((":
            self.block(node.children)
            return
        value = number(self.scope, self.of(node)[2:-2])
        self.status = marks_of(value) or value != "0"

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Walk statements in a copy of the state, as in a subshell."""
        scope, self.scope = self.scope, self.scope.copy()
        try:
            yield
        except Leave as leave:
            if leave.how != "exit":
                raise
        finally:
            self.scope = scope

    def iterate(self, body: Any) -> bool:
        """Walk one iteration of a loop; False if it breaks."""
        try:
            self.block(body.children)
        except Leave as leave:
            if leave.how not in ("break", "continue"):
                raise
            return leave.how == "continue"
        return True

    def on_for_statement(self, node: Any) -> None:
        name = self.of(node.child_by_field_name("variable"))
        values = node.children_by_field_name("value")
        found = [fields(source, self.scope) for _, source in self.sources(values)]
        for word in [*itertools.chain(*found)] if values else list(self.scope.positional):
            self.scope.assign(name, self.named(name, word.text))
            if not self.iterate(node.child_by_field_name("body")):
                break

    def on_c_style_for_statement(self, node: Any) -> None:
        """Walk the body of `for ((...))` once; its variable is unknown."""
        body = node.child_by_field_name("body")
        number(self.scope, self.source[node.start_byte : body.start_byte].decode())
        self.iterate(body)

    def on_while_statement(self, node: Any) -> None:
        body = node.child_by_field_name("body")
        test = node.children[1 : node.children.index(body)]
        for _ in range(MAX_ITERATIONS):
            verdict = self.verdict(test)
            if node.children[0].type == "until":
                verdict = negated(verdict)
            if isinstance(verdict, str):
                said = self.of(node).partition("\n")[0]
                self.choose(verdict, said, functools.partial(self.iterate, body), lambda: None)
                break
            if not verdict or not self.iterate(body):
                break
        self.status = True

    def on_function_definition(self, node: Any) -> None:
        name = self.of(node.child_by_field_name("name"))
        self.functions[name] = (node.child_by_field_name("body"), self.source, self.is_file)

    # Here-documents

    def on_redirected_statement(self, node: Any) -> None:
        body = node.child_by_field_name("body")
        if body is not None:
            self.block([body])
        for child in node.children:
            if child.type == "heredoc_redirect":
                self.document(node, body, child)

    def document(self, node: Any, body: Any, heredoc: Any) -> None:
        """Record a here-document under the path it is written to."""
        parts = {child.type: child for child in heredoc.children}
        if "heredoc_body" not in parts:
            return
        text = self.of(parts["heredoc_body"])
        if not re.search(r"[\\'\"]", self.of(parts["heredoc_start"])):
            found = pieces(text, self.scope, quoted=True, is_document=True)
            text = "".join(piece.text for piece in found)
        command = self.of(body).split() if body is not None else []
        written = [*heredoc.children, *node.children]
        paths = [self.of(each.children[-1]) for each in written if each.type == "file_redirect"]
        paths = command[-1:] if command[:1] == ["tee"] else paths
        origin = self.at(parts["heredoc_body"])
        if paths:
            self.script.documents[scalar(paths[0], self.scope)] = Word(text, origin)
        else:
            self.feed(self.of(parts.get("pipeline", body or heredoc)), text)


def starts_nothing(name: str) -> bool:
    """True for a command that starts none of its words, such as `echo`."""
    return PurePosixPath(name).name in STARTING_NOTHING


def shell_in(words: Sequence[Word]) -> int | None:
    """Return the place of the first word that names a shell."""
    names = (PurePosixPath(word.text).name for word in words)
    return next((at for at, name in enumerate(names) if name in SHELLS), None)


def merged(a: Scope, b: Scope, marks: str) -> Scope:
    """Merge the states after two branches; variables that differ get the condition's marks."""
    scope = a.copy()
    scope.exported |= b.exported
    for name in {*a.variables, *b.variables}:
        one, other = a.variables.get(name), b.variables.get(name)
        if _texts(one) != _texts(other):
            word = Word(marks, a.origin)
            scope.variables[name] = [word] if isinstance(one or other, list) else word
    return scope


def _texts(value: Word | list[Word] | None) -> Any:
    return [word.text for word in value] if isinstance(value, list) else value and value.text
