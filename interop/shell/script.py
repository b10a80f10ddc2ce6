"""Walk a bash script from its first statement to its last without executing it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from interop.shell.commands import SHELLS, SUCCESS, Break, Commands, Continue, Exit, Leave, Script
from interop.shell.conditions import Verdict, judge, leaves, verdict_of
from interop.shell.scope import Scope, Word, marks_of, shown
from interop.shell.syntax import regex_of
from interop.shell.words import fields, number, pieces, scalar

MAX_ITERATIONS = 1000
Body = Callable[[], object]


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
    walk = Walk(script, scope, dict(others or {}))
    try:
        walk.text(text, is_file=True)
    except Leave:
        script.ends = walk.scope.origin
    return script


class Walk(Commands):
    """Walks compound statements. If a condition is unknown, walks both branches and merges their
    states.
    """

    def verdict(self, nodes: Sequence[Any]) -> Verdict:
        """Walk the statements; returns whether the last one succeeds."""
        self.block(nodes)
        return self.status

    def choose(self, verdict: Verdict, test: str, yes: Body, no: Body) -> None:
        """Walk one branch, or both if the verdict is unknown; a branch that ends the script is then
        ignored.
        """
        if verdict.value is not None:
            (yes if verdict.value else no)()
            return
        before, conditions = self.scope, self.conditions
        ends: list[Leave | None] = []
        states = []
        for body, said in ((yes, test), (no, f"not {test}")):
            self.scope, self.conditions = before.copy(), (*conditions, said)
            try:
                body()
                ends.append(None)
            except Leave as leave:
                ends.append(leave)
            states.append(self.scope)
        self.conditions = conditions
        leaving = [end is not None and not isinstance(end, Break) for end in ends]
        broken = next((end for end in ends if isinstance(end, Break)), None)
        if broken is not None:  # a loop that waits for something ends at its break
            self.scope = states[ends.index(broken)]
            raise broken
        if all(leaving):
            raise ends[0] or Exit()
        self.scope = (
            states[leaving.index(False)]
            if any(leaving)
            else merged(states[0], states[1], verdict.marks)
        )
        self.scope.line = before.line

    # Lists, pipelines, groups

    def on_list(self, node: Any) -> None:
        left, operator, right = node.children[0], self.of(node.children[1]), node.children[-1]
        verdict = self.verdict([left])
        if operator == "||":
            verdict = verdict.negated()
        reached: list[Verdict] = []
        self.choose(
            verdict, self.of(left), lambda: reached.append(self.verdict([right])), lambda: None
        )
        if verdict.value is None:
            self.status = Verdict(None, verdict.marks + "".join(end.marks for end in reached))
        else:
            self.status = reached[0] if reached else Verdict(operator == "||")

    def on_pipeline(self, node: Any) -> None:
        for child in node.named_children:
            self.apart(functools.partial(self.statement, child))
        self.status = verdict_of(self.scope.mark(self.of(node), SUCCESS))

    def on_subshell(self, node: Any) -> None:
        self.apart(lambda: self.block(node.children))

    def on_compound_statement(self, node: Any) -> None:
        if node.children[0].type != "((":
            self.block(node.children)
            return
        value = number(self.scope, self.of(node)[2:-2])
        self.status = Verdict(None, value) if marks_of(value) else Verdict(value != "0")

    def apart(self, body: Body) -> None:
        """Walk statements in a copy of the state, as in a subshell."""
        scope, self.scope = self.scope, self.scope.copy()
        try:
            body()
        except Exit:
            pass
        finally:
            self.scope = scope

    # Conditions

    def on_test_command(self, node: Any) -> None:
        if node.children[0].type == "((":
            self.on_compound_statement(node)
            return
        tokens = leaves(node, self.source)[1:-1]
        self.status = judge(tokens, self.scope, is_double=node.children[0].type == "[[")

    def on_negated_command(self, node: Any) -> None:
        self.status = self.verdict(node.named_children).negated()

    def on_if_statement(self, node: Any) -> None:
        self.branch(node)
        self.status = Verdict(True)

    def branch(self, node: Any, following: Sequence[Any] = ()) -> None:
        """Walk an `if` or `elif` and the clauses after it."""
        then = next(at for at, child in enumerate(node.children) if child.type == "then")
        clauses = [
            child for child in node.children if child.type in ("elif_clause", "else_clause")
        ] or following
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
        bracket = next(at for at, child in enumerate(items[0].children) if child.type == ")")
        sources = [
            self.of(child) for child in items[0].children[:bracket] if child.type not in ("(", "|")
        ]
        patterns = [regex_of(pieces(source, self.scope)) for source in sources]
        verdict = Verdict(any(re.fullmatch(pattern, value, re.DOTALL) for pattern in patterns))
        if marks_of(value) and "*" not in sources:
            verdict = Verdict(None, marks_of(value))
        said = f"{shown(value, self.scope.unknowns)} in {'|'.join(sources)}"
        body = items[0].children[bracket + 1 :]
        self.choose(verdict, said, lambda: self.block(body), lambda: self.case(value, items[1:]))

    # Loops and functions

    def iterate(self, body: Any) -> bool:
        """Walk one iteration of a loop; False if it breaks."""
        try:
            self.block(body.children)
        except Break:
            return False
        except Continue:
            pass
        return True

    def on_for_statement(self, node: Any) -> None:
        name = self.of(node.child_by_field_name("variable"))
        sources = [self.of(child) for child in node.children_by_field_name("value")]
        words = [word for source in sources for word in fields(source, self.scope)]
        for word in words if sources else list(self.scope.positional):
            self.scope.assign(name, self.named(name, word.text))
            if not self.iterate(node.child_by_field_name("body")):
                break

    def on_c_style_for_statement(self, node: Any) -> None:
        body = node.child_by_field_name("body")
        head = self.source[node.start_byte : body.start_byte].decode()
        first, condition, step = head[head.index("((") + 2 : head.rindex("))")].split(";")
        number(self.scope, first)
        for _ in range(MAX_ITERATIONS):
            value = number(self.scope, condition or "1")
            if value == "0" or not self.iterate(body) or marks_of(value):
                break
            number(self.scope, step)

    def on_while_statement(self, node: Any) -> None:
        body = node.child_by_field_name("body")
        test = node.children[1 : node.children.index(body)]
        for _ in range(MAX_ITERATIONS):
            verdict = self.verdict(test)
            if node.children[0].type == "until":
                verdict = verdict.negated()
            if verdict.value is None:
                self.choose(
                    verdict,
                    self.of(node).partition("\n")[0],
                    functools.partial(self.iterate, body),
                    lambda: None,
                )
            if not verdict.value or not self.iterate(body):
                break
        self.status = Verdict(True)

    def on_function_definition(self, node: Any) -> None:
        name = self.of(node.child_by_field_name("name"))
        self.functions[name] = (node.child_by_field_name("body"), self.source, self.is_file)

    # Here-documents

    def on_redirected_statement(self, node: Any) -> None:
        body = node.child_by_field_name("body")
        if body is not None:
            self.statement(body)
        for child in node.children:
            if child.type == "heredoc_redirect":
                self.document(node, body, child)

    def document(self, node: Any, body: Any, heredoc: Any) -> None:
        """Record a here-document under the path it is written to; walk it if a shell reads it."""
        parts = {child.type: child for child in heredoc.children}
        if "heredoc_body" not in parts:
            return
        text = self.of(parts["heredoc_body"])
        if heredoc.children[0].type == "<<-":
            text = re.sub(r"(?m)^\t+", "", text)
        if not re.search(r"[\\'\"]", self.of(parts["heredoc_start"])):
            text = "".join(
                piece.text for piece in pieces(text, self.scope, quoted=True, is_document=True)
            )
        command = self.of(body).split() if body is not None else []
        if command[:1] and command[0] in SHELLS and len(command) == 1:
            self.text(text)
            return
        written = [*heredoc.children, *node.children]
        paths = [child.children[-1] for child in written if child.type == "file_redirect"]
        if command[:1] == ["tee"]:
            path = scalar(command[-1], self.scope)
        elif paths:
            path = scalar(self.of(paths[0]), self.scope)
        else:
            return
        self.script.documents[path] = Word(text, self.at(parts["heredoc_body"]))


def merged(a: Scope, b: Scope, marks: str) -> Scope:
    """Merge the states after two branches; variables that differ become unknown, like the
    condition.
    """
    scope = a.copy()
    scope.exported |= b.exported
    for name in {*a.variables, *b.variables}:
        one, other = a.variables.get(name), b.variables.get(name)
        if _texts(one) != _texts(other):
            word = Word(marks, a.origin)
            scope.variables[name] = {"0": word} if isinstance(one or other, dict) else word
    return scope


def _texts(value: Word | dict[str, Word] | None) -> Any:
    if isinstance(value, dict):
        return {key: word.text for key, word in value.items()}
    return None if value is None else value.text
