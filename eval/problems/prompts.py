"""Prompt templates, and prompts as chat messages or as text to complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from downloads.nearest import nearest
from eval.problems import ProblemsError

Message = dict[str, str]  # {"role": ..., "content": ...}
Prompt = tuple[Message, ...] | str  # messages of a chat, or the text to complete
Api = Literal["chat", "completions"]


def problem_of(prompt: Prompt) -> str:
    """Return the last message of a prompt, or its whole text."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


PLACE = "{problem}"
IMAGE = "<image>"  # the place of a picture in a text
DEFAULT = "default"  # the benchmark's own template


@dataclass(frozen=True)
class Template:
    """A text around `{problem}`. `stop` ends a response; `system` replaces the file's message.

    The template `given` uses the messages of the file, or the bare problem if it has none.
    """

    name: str
    text: str
    stop: tuple[str, ...] = ()
    system: str | None = None

    def to_json(self) -> dict[str, str]:
        """Convert to the form stored in settings.json."""
        return {
            "name": self.name,
            "text": self.text,
            **({"system": self.system} if self.system else {}),
        }

    def render(self, problem: str) -> str:
        """Insert the problem. Other braces in either text are kept."""
        before, _, after = self.text.partition(PLACE)
        return before + problem + after


# Four original problems in the layout of Minerva's prompt (arXiv:2206.14858, appendix D.2), answers
# in boxes.
_SHOTS = (
    (
        r"For which real numbers $t$ is $\log_2(9 - t^2)$ defined and not negative?",
        r"The logarithm is defined for $9 - t^2 > 0$ and is not negative for $9 - t^2 \ge 1$, "
        r"which includes the first condition. So $t^2 \le 8$, hence $-2\sqrt{2} \le t \le "
        r"2\sqrt{2}$.",
        r"[-2\sqrt{2}, 2\sqrt{2}]",
    ),
    (
        r"What is the remainder when $7^{50}$ is divided by $48$?",
        r"Since $7^2 = 49$ leaves the remainder $1$, so does $7^{50} = (7^2)^{25}$, which leaves "
        r"$1^{25} = 1$.",
        r"1",
    ),
    (
        r"A bag holds 3 white and 5 black stones. Two are drawn without putting back. What is the "
        r"probability that they have different colours?",
        r"There are $\binom{8}{2} = 28$ pairs, of which $3 \cdot 5 = 15$ have one stone of each "
        r"colour. So the probability is $\frac{15}{28}$.",
        r"\frac{15}{28}",
    ),
    (
        r"A right triangle has legs of $9$ and $12$ centimetres. How many centimetres is its "
        r"altitude to the hypotenuse?",
        r"The hypotenuse is $\sqrt{9^2 + 12^2} = 15$. Twice the area is $9 \cdot 12 = 108$ and "
        r"also $15 h$, so the altitude is $h = \frac{108}{15} = \frac{36}{5}$.",
        r"\frac{36}{5}",
    ),
)
_FEW_SHOT = "".join(
    f"Problem:\n{problem}\n\nSolution:\n{solution} The final answer is $\\boxed{{{answer}}}$.\n\n"
    for problem, solution, answer in _SHOTS
)

TEMPLATES: dict[str, Template] = {
    template.name: template
    for template in (
        # AISBench, task math_prm800k_500_0shot_cot_gen
        Template(
            "aisbench",
            PLACE + "\nPlease reason step by step, and put your final answer within \\boxed{}.",
        ),
        Template(
            "cot",
            "Solve the following mathematics problem. Think step by step, derive each step from "
            "the ones before "
            f"it, and check the result.\n\n{PLACE}\n\n"
            "End with one line that holds the final answer and nothing else, within \\boxed{}.",
        ),
        Template("few-shot", f"{_FEW_SHOT}Problem:\n{PLACE}\n\nSolution:\n", stop=("\nProblem:",)),
        Template(
            "choice",
            PLACE + "\n\nPlease reason step by step, and put the letter of the right option within "
            "\\boxed{}, such as \\boxed{A}.",
        ),
        Template(
            "choices",
            PLACE + "\n\nPlease reason step by step, and put the letters of all right options "
            "within \\boxed{}, such as \\boxed{AC}.",
        ),
        # verl's examples/data_preprocess/geo3k.py, for the reward that checks this format
        Template(
            "geo3k",
            PLACE + " You FIRST think about the reasoning process as an internal monologue and "
            "then provide the final answer. The reasoning process MUST BE enclosed within <think> "
            "</think> tags. The final answer MUST BE put in \\boxed{}.",
        ),
        Template("bare", PLACE),
        Template("given", PLACE),
    )
}


def find_template(name: str, default: str) -> Template:
    """Return the template of that name, else of that file, which must contain {problem} once.

    `default` is the name that "default" stands for. A newline at the end of the file is dropped.
    Raises ProblemsError if there is neither.
    """
    name = default if name == DEFAULT else name
    if name in TEMPLATES:
        return TEMPLATES[name]
    path = Path(name)
    if not path.is_file():
        raise ProblemsError(
            f"evaluate.prompt={name} is not a file, and the list of prompt templates has no "
            f"{name}{nearest(name, (DEFAULT, *TEMPLATES))}"
        )
    text = read_utf8(path).removesuffix("\n")
    if text.count(PLACE) != 1:
        raise ProblemsError(
            f"{path} contains {PLACE} {text.count(PLACE)} times; a prompt template "
            "(evaluate.prompt) needs it exactly once"
        )
    return Template(path.name, text)


def read_utf8(path: Path) -> str:
    """Read a text file. Raises ProblemsError if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ProblemsError(
            f"{path} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}; save it "
            "as UTF-8 text"
        ) from None


def with_parts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages with their contents as parts: texts, and a picture for each `<image>`."""
    return [{**message, "content": _parts(message["content"])} for message in messages]


def _parts(content: str) -> list[dict[str, str]]:
    texts = content.split(IMAGE)
    parts: list[dict[str, str]] = [{"type": "text", "text": texts[0]}]
    for text in texts[1:]:
        parts += [{"type": "image"}, {"type": "text", "text": text}]
    return [part for part in parts if part.get("text") != ""]


def make_messages(
    template: Template, problem: str, messages: Sequence[Message] | None
) -> tuple[Message, ...]:
    """Build the chat for one problem; the template `given` uses the file's `messages`."""
    chat: Sequence[Message] = ({"role": "user", "content": template.render(problem)},)
    if template.name == "given" and messages:
        chat = messages
    if template.system is not None:
        others = (message for message in chat if message["role"] != "system")
        return ({"role": "system", "content": template.system}, *others)
    return tuple(chat)


def make_prompt(
    template: Template, api: Api, problem: str, messages: Sequence[Message] | None
) -> Prompt:
    """Build the prompt for one problem: a chat, or its messages joined as text to complete."""
    chat = make_messages(template, problem, messages)
    return chat if api == "chat" else "\n\n".join(message["content"] for message in chat)
