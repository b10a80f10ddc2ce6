"""Read another trainer's bash scripts and YAML as settings, executing nothing."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from interop import ForeignConfigError, mindspeed
from interop.foreign_config import Setting
from interop.hydra import setting_of, settings_of_yaml
from interop.shell.scope import MARK, Word, marks_of, shown
from interop.shell.walk import Command, Script, read_script, shell_in, starts_nothing
from interop.table import TRAINERS, load

ENTRY = re.compile(
    r"(?:.*[./])?(?:main_\w*(?:ppo|dapo)\w*|train_(?:grpo|dapo|ppo)\w*|posttrain\w*)(?:\.py)?"
)
# A program that runs a Python file; unknown values may be one.
INTERPRETER = re.compile(r"python[\d.]*|torchrun|accelerate|deepspeed|coverage|.*\ue000\d+\ue001.*")
VARIABLE = re.compile(r"[A-Za-z_]\w*=")
OTHER_ENTRY = re.compile(r"(?:.*[./])?(?:\w*sft_trainer|main_eval|main_generation)\w*(?:\.py)?")
LIKE_OVERRIDE = re.compile(
    r"(?:\+\+|\+|~)?[A-Za-z_]\w*(?:\.[\w$-]+)*=.*|~[A-Za-z_]\w*(?:\.[\w$-]+)+", re.DOTALL
)
DEVICE = "trainer.device"
NAMES = frozenset({"run.name", "train.tracker_project"})  # our keys that only name things
CONFIG_OPTIONS = ("--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd")
BUILT_IN = re.compile(r"(?:ppo|dapo)\w*trainer\w*(?:[-_]megatron)?\w*")
ENVIRONMENT = re.compile(r"\$\{oc\.env:\s*(\w+)\s*(?:,\s*([^}]*))?\}")
REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")


@dataclass
class Training:
    """A command that starts a training, its program, and its settings in order."""

    command: Command
    program: str
    settings: list[Setting] = field(default_factory=list)
    config_names: list[Word] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Reading:
    """The settings in the files; later ones win."""

    settings: list[Setting]
    trainer: str
    environment: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_files(
    paths: Sequence[Path],
    given: Mapping[str, str] | None = None,
    training: int | None = None,
    has_npus: bool = False,
) -> Reading:
    """Read the settings in files; `given` holds the --set-env variables, `training` selects one of
    several, and `has_npus` is true on a machine with NPUs.

    Raises ForeignConfigError for no or several trainings, and once for all values that are known
    only on the script's machine.
    """
    scripts, configs = dict[str, str](), dict[str, list[Setting]]()
    for path in paths:
        text = text_of(path)
        if path.suffix in (".yaml", ".yml", ".json"):
            configs[path.name] = config_of(text, path.name, path.parent)
        else:
            scripts[path.name] = text
    if not scripts:
        settings = [setting for found in configs.values() for setting in found]
        if not settings:
            raise ForeignConfigError(f"{', '.join(map(str, paths))}: no keys found")
        reading = Reading(_resolved(settings, {}, given or {}), trainer_of(settings))
    else:
        reading = _of_scripts(scripts, configs, given or {}, training)
    reading.settings += _npu_of(reading, [path.name for path in paths], has_npus)
    return reading


def text_of(path: Path) -> str:
    """Return the text of a UTF-8 or GB 18030 file (Chinese Windows editors) with \\n line ends."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ForeignConfigError(f"{path} cannot be read: {error.strerror}") from None
    for encoding in ("utf-8-sig", "gb18030"):
        try:
            return content.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")
        except UnicodeDecodeError:
            continue
    raise ForeignConfigError(f"{path} is neither UTF-8 nor GB 18030 text")


def config_of(text: str, name: str, folder: Path | None = None) -> list[Setting]:
    """Return the settings of a YAML text; MindSpeed's may name a model file in `folder`."""
    settings = settings_of_yaml(text, name)
    return mindspeed.sectioned(settings, folder) if mindspeed.is_mindspeed(settings) else settings


def trainer_of(settings: Iterable[Setting]) -> str:
    """Return the trainer whose table has most of the keys."""
    keys = [setting.key for setting in settings]
    return max(TRAINERS, key=lambda name: sum(load(name).find(key) is not None for key in keys))


def rows_of(settings: Iterable[Setting]) -> list[str]:
    """Return the training files that the settings name."""
    values = [setting.value for setting in settings if setting.key == "data.train_files"]
    last = values[-1] if values else []
    return [str(path) for path in (last if isinstance(last, list) else [last])]


def _of_scripts(
    scripts: Mapping[str, str],
    configs: Mapping[str, list[Setting]],
    given: Mapping[str, str],
    training: int | None,
) -> Reading:
    read = [
        read_script(text, name, given, {key: scripts[key] for key in scripts if key != name})
        for name, text in scripts.items()
    ]
    started = {name for script in read for name in script.started}
    read = [script for script in read if script.name not in started] or read[:1]
    script, chosen = _one(read, training)
    settings, notes, origin = chosen.settings, chosen.notes, chosen.command.origin
    for word in chosen.config_names:
        config, note = _config(word, script, configs)
        settings = [*config, *settings]
        notes += [note] if note else []
    read_too, left_out = _others(configs, settings, bool(chosen.config_names))
    settings, notes = [*read_too, *settings], [*notes, *left_out]
    _require_used(given, settings, read)
    settings, without = _settled(settings, script)
    _require_known(settings, script)
    if not settings:
        why = f"{origin}: the command sets no training keys; also give its YAML"
        raise ForeignConfigError("\n".join([why, *notes]))
    before = [note for note in script.notes if _line(note) <= _line(origin)]
    known = chosen.command.environment.items()
    environment = {name: text for name, text in known if not marks_of(text)}
    settings = _resolved(settings, environment, given)
    notes = [*before, *script.kept.values(), *notes, *without]
    return Reading(settings, trainer_of(settings), environment, notes)


def _others(
    configs: Mapping[str, list[Setting]], settings: Sequence[Setting], is_named: bool
) -> tuple[list[Setting], list[str]]:
    """Return the settings of files that no --config-name selects, and notes on those left out.

    Without --config-name all are read, else only those that prepare data for MindSpeed.
    """
    read, notes = [], []
    used = {setting.origin.rpartition(":")[0] for setting in settings}
    for name, others in configs.items():
        prepares = all(setting.key.startswith(mindspeed.PREPROCESS) for setting in others)
        if not is_named or (prepares and name not in used):
            read += others
        elif name not in used:
            notes.append(f"{name} is ignored: the command selects another configuration")
    return read, notes


def _line(origin: str) -> int:
    match = re.match(r"[^:]*:(\d+)", origin)
    return int(match[1]) if match else 0


def trainings_of(script: Script) -> list[Training]:
    """Return the commands of a script that start a training, in order."""
    found = []
    for command in script.commands:
        first, *rest = texts = [word.text for word in command.words]
        if _is_key(first):
            raise ForeignConfigError(
                f"{command.origin}: {first[:60]!r} is read as a separate command: the line "
                "before it lacks a backslash at its end, or has a space after it"
            )
        is_other = starts_nothing(first) or any(map(OTHER_ENTRY.fullmatch, rest))
        if not is_other and (entry := _entry(texts)) is not None:
            found.append(_training(command, entry, script))
    return found


def _entry(texts: Sequence[str]) -> int | None:
    """Return the place of the trainer's entry point: after `-m` or an interpreter, or before
    several of verl's keys.

    As an argument of another program, such as `-m py_compile`, it must be followed by settings.
    """
    for at, text in enumerate(texts):
        if not at or not ENTRY.fullmatch(text) or texts[at - 1] == "-c":
            continue
        before, after = texts[:at], texts[at + 1 :]
        is_argument = "-m" in before or any(each.endswith(".py") for each in before)
        is_run = any(INTERPRETER.fullmatch(PurePosixPath(each).name) for each in before)
        has_settings = any(
            LIKE_OVERRIDE.fullmatch(each) or each.partition("=")[0] in CONFIG_OPTIONS
            for each in after
        )
        if before[-1] == "-m" or (is_run and (not is_argument or has_settings)):
            return at
    if sum(map(_is_key, texts)) < 2:
        return None
    starts = [at + 1 for at, text in enumerate(texts) if text == "-m"]
    starts += [at for at, text in enumerate(texts) if text.endswith(".py")]
    overrides = (at for at, text in enumerate(texts) if LIKE_OVERRIDE.fullmatch(text))
    return starts[-1] if starts else next(overrides) - 1


def _is_key(text: str) -> bool:
    """True for an override of a key in one of verl's sections."""
    root = re.split(r"[.=]", text.lstrip("+~"), maxsplit=1)[0]
    return LIKE_OVERRIDE.fullmatch(text) is not None and root in load("verl").sections


def _training(command: Command, entry: int, script: Script) -> Training:
    texts = [word.text for word in command.words[: entry + 1]]
    own = dict(text.split("=", 1) for text in texts[:-1] if VARIABLE.match(text))
    command = replace(command, environment={**command.environment, **own})
    found = Training(command, " ".join(shown(text, script.unknowns) for text in texts))
    words = iter(command.words[entry + 1 :])
    for word in words:
        option, equal, value = word.text.partition("=")
        if option in CONFIG_OPTIONS:
            named = Word(value, word.origin) if equal else next(words, Word("", word.origin))
            if option in ("--config-name", "-cn"):
                found.config_names.append(named)
        elif marks_of(word.text):
            is_set = LIKE_OVERRIDE.fullmatch(shown(word.text, script.unknowns))
            key, value = (option.lstrip("+~"), value) if is_set else (word.text, "")
            found.settings.append(Setting(key, value, word.origin))
        elif word.text.startswith("-"):
            found.notes.append(f"{word.origin}: option {word.text} is ignored")
        elif word.text.strip():
            found.settings.append(setting_of(*word))
    return found


def _one(read: list[Script], training: int | None) -> tuple[Script, Training]:
    """Return the training to import; raises ForeignConfigError for none, or for several."""
    found = [(script, each) for script in read for each in trainings_of(script)]
    if not found:
        raise ForeignConfigError(_nothing_found(read))
    if training is None and len(found) > 1:
        lines = [f"found {len(found)} trainings; select one with FILE#N:"]
        for number, (_, each) in enumerate(found, start=1):
            tests = each.command.conditions
            conditions = f" (if {' and '.join(tests)})" if tests else ""
            lines.append(f"  {number}. {each.command.origin}: {each.program}{conditions}")
        raise ForeignConfigError("\n".join(lines))
    if training is not None and not 1 <= training <= len(found):
        raise ForeignConfigError(f"no training {training}: found {len(found)}")
    return found[(training or 1) - 1]


def _nothing_found(read: list[Script]) -> str:
    lines = [
        "no training found: looked for a command such as `python3 -m verl.trainer.main_ppo "
        "KEY=VALUE...` or `python cli/train_grpo.py --config-name NAME`"
    ]
    for script in read:
        for command in script.commands:
            texts = [shown(word.text, script.unknowns) for word in command.words]
            at = 0 if texts[0] in ("source", ".") else shell_in(command.words)
            if at is not None and texts[at + 1 :]:
                lines.append(f"{command.origin} runs {texts[at + 1]}: give that file too")
        if script.ends:
            lines.append(
                f"the script exits at {script.ends}; to give its arguments, use --set-env 1=... "
                "--set-env 2=..."
            )
    return "\n".join(lines)


def _config(
    word: Word, script: Script, configs: Mapping[str, list[Setting]]
) -> tuple[list[Setting], str]:
    """Return the settings of the configuration that a command selects, and a note, if any."""
    name = PurePosixPath(word.text).name
    for known in (name, f"{name}.yaml", f"{name}.yml"):
        if known in configs:
            return configs[known], ""
        for path, document in script.documents.items():
            if PurePosixPath(path).name == known:
                return config_of(document.text, f"{document.origin} {known}"), ""
    if not BUILT_IN.fullmatch(name.removesuffix(".yaml")):
        note = f"configuration {word.text} is not among the given files; its values are not read"
        return [], f"{word.origin}: {note}"
    strategy = Setting("actor_rollout_ref.actor.strategy", "megatron", f"{word.origin} {name}")
    return [strategy] if "megatron" in name else [], ""


def _require_used(
    given: Mapping[str, str], settings: Iterable[Setting], read: list[Script]
) -> None:
    used = {name for script in read for name in script.used}
    for setting in settings:
        used |= {match[1] for match in ENVIRONMENT.finditer(str(setting.value))}
    if unused := sorted(given.keys() - used):
        raise ForeignConfigError(
            f"--set-env {', '.join(unused)}: not used in {', '.join(each.name for each in read)}; "
            "the script sets it itself, or the name is misspelt"
        )


def _settled(settings: Iterable[Setting], script: Script) -> tuple[list[Setting], list[str]]:
    """Return the settings without unknown values that change no recipe, and notes on names.

    A name loses the unknown part; a value of a key that has no key of ours is shown as written.
    """
    settings, notes = list(settings), []
    table = load(trainer_of(settings))
    for at, (key, value, origin) in enumerate(settings):
        row = table.find(key)
        if row is None or not marks_of(str(value)):
            continue
        text = shown(value, script.unknowns)
        if NAMES.issuperset(row.ours or {None}):
            name = MARK.sub("", value).strip("-_./ ") or PurePosixPath(script.name).stem
            settings[at] = Setting(key, name, origin)
            notes.append(f"{origin}: {key}={text} becomes {name}: the rest is unknown here")
        elif not row.ours and row.convert is None and row.only is None:
            settings[at] = Setting(key, text, origin)
    return settings, notes


def _npu_of(reading: Reading, files: Iterable[str], has_npus: bool) -> Iterator[Setting]:
    """Yield verl's device if it is not set, and the files or this machine are for NPUs."""
    if reading.trainer != "verl" or any(each.key == DEVICE for each in reading.settings):
        return
    named = [name for name in files if re.search(r"(?<![a-z])npu(?![a-z])", name.lower())]
    variables = [name for name in reading.environment if name.startswith(("ASCEND_", "HCCL_"))]
    if named or variables or has_npus:
        why = f"the name {named[0]}" if named else "this machine has NPUs"
        why = f"the script sets {variables[0]}" if variables else why
        yield Setting(DEVICE, "npu", f"{why}:")


def _require_known(settings: Iterable[Setting], script: Script) -> None:
    """Raise one ForeignConfigError for all unknown values that affect a key."""
    asked: dict[int, list[tuple[str, str]]] = {}
    for setting in settings:
        key = "further arguments" if marks_of(setting.key) else setting.key
        for number in dict.fromkeys(MARK.findall(f"{setting.key}{setting.value}")):
            asked.setdefault(int(number), []).append((key, setting.origin))
    if not asked:
        return
    values = f"{len(asked)} value{'s' * (len(asked) > 1)}"
    lines = [f"{values} known only on the script's machine; give each with --set-env:"]
    for number, keys in asked.items():
        name, origin, why = script.unknowns[number]
        typed = f"{name}=..." if re.fullmatch(r"\w+", name) else shlex.quote(f"{name}=...")
        affected = [f"{key} ({where})" for key, where in keys[:4]] + ["..."] * (len(keys) > 4)
        lines.append(f"  --set-env {typed}  {origin}, {why}; affects {', '.join(affected)}")
    raise ForeignConfigError("\n".join(lines))


def _resolved(
    settings: list[Setting], environment: Mapping[str, str], given: Mapping[str, str]
) -> list[Setting]:
    """Resolve variables and references inside texts; a value that is only a reference stays."""
    values = {setting.key: setting.value for setting in settings}
    known = {**environment, **given}
    missing: list[str] = []

    def variable(match: re.Match[str]) -> str:
        if match[1] not in known and match[2] is None:
            missing.append(f"--set-env {match[1]}=...")
        return known.get(match[1], match[2] or "")

    def fill(value: Any) -> Any:
        if isinstance(value, list):
            return [fill(each) for each in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        value = ENVIRONMENT.sub(variable, value)
        if REFERENCE.fullmatch(value):
            return value
        return REFERENCE.sub(lambda match: str(values.get(match[1], match[0])), value)

    filled = [setting._replace(value=fill(setting.value)) for setting in settings]
    if missing:
        each = " ".join(dict.fromkeys(missing))
        raise ForeignConfigError(
            f"the configuration reads environment variables; give each: {each}"
        )
    return filled
