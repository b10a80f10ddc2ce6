"""How problems become prompts: template and system prompt."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from eval.problems import ProblemsError
from eval.problems.items import Problem
from eval.problems.prompts import DEFAULT, TEMPLATES, Message, read_utf8
from eval.problems.rows import Row, text_of
from eval.problems.values import is_missing
from tasks.config.data import ColumnsConfig

# {name}, but not the argument of a LaTeX command such as \boxed{answer}.
_PLACE = re.compile(r"(?<![A-Za-z\\])\{([A-Za-z_][\w .-]*)\}")


@dataclass(frozen=True)
class PromptFormat:
    """A prompt template and a system prompt."""

    template: str  # a name of evaluate.prompt, or "own"
    keeps_chat: bool  # use the chat of a row, if it has one
    text: str
    columns: tuple[str, ...]  # columns used in `text` besides {problem}
    system_prompt: str | None = None
    system_column: str | None = None

    def messages(self, problem: Problem, row: Row) -> list[Message]:
        """The chat for a row: its own if that is kept, else the filled-in template."""
        chat = list(problem.messages or ()) if self.keeps_chat else []
        if not chat:
            given = {name: row.get(name) for name in self.columns}
            values = {name: "" if is_missing(one) else str(one) for name, one in given.items()}
            values["problem"] = problem.text
            text = _PLACE.sub(lambda match: values.get(match[1], match[0]), self.text)
            chat = [{"role": "user", "content": text}]
        system = self.system_prompt or None
        if system is None and self.system_column:
            system = text_of(row, self.system_column)
        if system is not None:
            rest = [message for message in chat if message["role"] != "system"]
            chat = [{"role": "system", "content": system}, *rest]
        return chat

    def template_of(self, problem: Problem) -> str:
        """The equivalent template of evaluate.prompt; `given` if the chat must be kept as it is."""
        has_system = self.system_prompt is not None or self.system_column is not None
        is_own = has_system or self.template not in TEMPLATES
        return "given" if is_own or (self.keeps_chat and problem.messages) else self.template


def find_format(
    prompt: str, system_prompt: str | None, default: str, columns: ColumnsConfig
) -> PromptFormat:
    """Resolve data.prompt_template: `default`, a template, a text with {problem}, or its file.

    Raises ProblemsError for a missing file, and for a text without {problem} or with the answer.
    """
    name = default if prompt == DEFAULT else prompt
    if name in TEMPLATES:
        keeps_chat, text = prompt == DEFAULT or name == "given", TEMPLATES[name].text
        return PromptFormat(name, keeps_chat, text, (), system_prompt, columns.system)
    text = prompt
    if "{" not in prompt:
        if not Path(prompt).is_file():
            raise ProblemsError(
                f"data.prompt_template={prompt} is not a text with {{problem}}, a file, or one of "
                f"the templates {', '.join(TEMPLATES)}"
            )
        text = read_utf8(Path(prompt)).removesuffix("\n")
    named = dict.fromkeys(_PLACE.findall(text))
    if "problem" not in named:
        raise ProblemsError(f"data.prompt_template has no placeholder {{problem}}: {text[:100]!r}")
    if {columns.answer, "answer", "solution", "ground_truth"} & named.keys():
        raise ProblemsError(
            "data.prompt_template contains a column that holds the answer, which the prompt would "
            "reveal; write \\boxed{...} for a box"
        )
    used = tuple(name for name in named if name != "problem")
    return PromptFormat("own", False, text, used, system_prompt, columns.system)
