"""Reading bash scripts without executing them, compared with bash on generated scripts."""

import shutil
import subprocess
from types import SimpleNamespace

import pytest
import tree_sitter
import tree_sitter_bash
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from interop.shell.scope import UNSET, ShellError, marks_of, shown
from interop.shell.walk import Script, parsed, read_script
from interop.shell.words import NOT_READ

VALUES = ("", "1", "12", "a b", "x.tar.gz", "p/q/r", "True", "-3", "é中", "A*b")
VALUE = st.sampled_from(VALUES)
NAME = st.sampled_from(("A", "B", "C", "unset_one"))
GLOB = st.sampled_from(("*", "?", ".*", "*/", "[a-p]", "1", "\\*", '"*"', "a", "x*"))
SIMPLE = st.one_of(
    NAME.map(lambda name: f"${name}"),
    NAME.map(lambda name: f"${{#{name}}}"),
    st.tuples(NAME, st.sampled_from((":-", "-", ":+", "+", ":=", "=")), VALUE).map(
        lambda t: f"${{{t[0]}{t[1]}{t[2]}}}"
    ),
)
NUMBER = st.sampled_from(("7", "0x1f", "N", "$N", "${N}", "M", "-2", "1"))
OPERATOR = st.sampled_from(("+", "-", "*", ">", "==", "&&", "||", "<=", "!="))
ARITHMETIC = st.recursive(
    NUMBER,
    lambda inner: st.one_of(
        st.tuples(inner, OPERATOR, inner).map(lambda t: f"{t[0]} {t[1]} {t[2]}"),
        st.tuples(inner, st.sampled_from(("/", "%"))).map(lambda t: f"({t[0]}) {t[1]} 3"),
    ),
    max_leaves=5,
)
ARRAY = st.sampled_from(
    ('"${L[@]}"', "${L[@]}", '"${L[*]}"', "${#L[@]}", "${L[1]}", "${L[-1]}", '"${L[@]:1}"')
)
PIECE = st.one_of(
    SIMPLE,
    SIMPLE.map(lambda text: f'"{text}"'),
    SIMPLE.map(lambda text: f'"pre {text} post"'),
    ARITHMETIC.map(lambda text: f"$(({text}))"),
    ARRAY,
    st.sampled_from(("bare", "k=v", '""', "\\\n", '"q\\"q"')),
    st.sampled_from(("'single $A'", "a\\ b", "{x,y z}", "'['")),
)
PATH = st.lists(
    st.sampled_from(("$A", "$B", "${A}", '"$B"', "/", "/x-", ".y")), min_size=3, max_size=6
)
WORD = st.one_of(st.lists(PIECE, min_size=1, max_size=3), PATH).map("".join)
TEST = st.one_of(
    st.tuples(NAME, st.sampled_from(("=", "!=")), VALUE).map(
        lambda t: f'[ "${{{t[0]}:-}}" {t[1]} "{t[2]}" ]'
    ),
    st.tuples(NAME, GLOB).map(lambda t: f'[[ "${{{t[0]}-}}" == {t[1]} ]]'),
    st.tuples(st.sampled_from(("-lt", "-ge", "-eq")), ARITHMETIC).map(
        lambda t: f"[ $N {t[0]} $(({t[1]})) ]"
    ),
    NAME.map(lambda name: f'[ -n "${{{name}-}}" -a ! -z "$A" ]'),
    NAME.map(lambda name: f'[[ -z ${{{name}-}} || $N -gt 3 && "$A" != "b" ]]'),
    ARITHMETIC.map(lambda text: f"(( {text} ))"),
)
SHOW = WORD.map(lambda word: f"show {word}")
STATEMENT = st.one_of(
    SHOW,
    st.tuples(st.sampled_from("ABC"), WORD).map(lambda t: f"{t[0]}={t[1]}"),
    st.tuples(st.sampled_from("ABC"), WORD).map(lambda t: f"{t[0]}+={t[1]}"),
    st.tuples(st.sampled_from("ABC"), WORD).map(lambda t: f"export {t[0]}={t[1]}"),
    st.tuples(WORD, WORD).map(lambda t: f"export A={t[0]} B={t[1]}"),
    WORD.map(lambda word: f"L+=({word} # a comment\n  k=1)"),
    st.tuples(TEST, SHOW, SHOW).map(
        lambda t: f"if {t[0]}; then {t[1]}; A=then; else {t[2]}; A=else; fi"
    ),
    st.tuples(TEST, TEST).map(lambda t: f"if {t[0]}; then B=1; elif {t[1]}; then B=2; fi"),
    st.tuples(TEST, TEST).map(lambda t: f"{t[0]} && {t[1]} || C=neither"),
    st.tuples(NAME, GLOB).map(
        lambda t: f'case "${{{t[0]}-}}" in {t[1]}) show one;; 1|2) show two;; *) C=other;; esac'
    ),
    WORD.map(lambda word: f'for i in {word} last; do show $i; [ "$i" = 2 ] && break; done'),
    WORD.map(lambda word: f'f() {{ local A=$1; show "$#" "$@" "${{@:2}}" $A; }}; f {word} two'),
    st.just("while [ $N -lt 9 ]; do N=$((N + 2)); done; show $N"),
    WORD.map(lambda word: f"( A=inside; show $A {word} ); show $A"),
)
PROLOGUE = "A=x.tar.gz; B='a b'; C=; N=5; M='N + 1'; L=(one 'two b' three)\n"


def shows(script: Script) -> list[list[str]]:
    return [
        [word.text for word in each.words[1:]]
        for each in script.commands
        if each.words[0].text == "show"
    ]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash to compare with")
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(st.lists(STATEMENT, min_size=1, max_size=4), min_size=10, max_size=10))
@example([["f $C two"]])  # one argument: "${@:2}" is no word
def test_words_are_expanded_like_bash(scripts: list[list[str]]) -> None:
    """Run ten scripts in one bash, each in a subshell; scripts that bash aborts are skipped."""
    shown = '\nshow "$A" "$B" "$C"\nshow end\n'
    texts = [PROLOGUE + "\n".join(statements) + shown for statements in scripts]
    show = "show() { for w in \"$@\"; do printf '%s\\0' \"$w\"; done; printf '\\1\\0'; }\nset -f\n"
    whole = show + "".join(f"(\n{text})\nprintf '\\2\\0'\n" for text in texts)
    done = subprocess.run(
        ["bash", "-c", whole], capture_output=True, timeout=300, env={"LC_ALL": "C.UTF-8"}
    )
    for text, output in zip(texts, done.stdout.decode().split("\2\0"), strict=False):
        commands = [part.split("\0")[:-1] for part in output.split("\1\0")[:-1]]
        if commands[-1:] == [["end"]]:
            script = read_script(text, "made.sh", {})
            # bash takes it as empty
            if not any(unknown.why in (UNSET, NOT_READ) for unknown in script.unknowns):
                assert shows(script) == commands, text


def words_of(text: str, **given: str) -> list[str]:
    script = read_script(text, "run.sh", given)
    return [shown(word.text, script.unknowns) for word in script.commands[-1].words]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo $(date) `uname -m` $HOSTNAME", ["echo", "$(date)", "`uname -m`", "${HOSTNAME}"]),
        (
            "D=$(date +%F)\necho x-$D ${D:-y} ${D:+z} ${#D} ${D%-*}",
            ["echo", "x-${D}"] + ["${D}"] * 4,
        ),
        ("N=$(nproc)\necho $((N * 2)) $((3 * 2))", ["echo", "${N}", "6"]),
        ("echo $HOME/data ~/x $PWD/y", ["echo", "~/data", "~/x", "./y"]),
        ("if [ $(hostname) = a ]; then X=1; else X=2; fi\necho $X y", ["echo", "$(hostname)", "y"]),
        ("if [ $(hostname) = a ]; then X=1; else exit 1; fi\necho $X", ["echo", "1"]),
        ("if [ -f x ]; then X=1; else X=1; fi\necho $X", ["echo", "1"]),
        (
            "while true; do if [ $(nproc) -gt 4 ]; then X=1; break; else sleep 5; fi; done\necho "
            "$X",
            ["echo", "1"],
        ),
        ("case $MODE in a) X=1 ;; b) X=2 ;; *) exit 1 ;; esac\necho $X", ["echo", "${MODE}"]),
        (
            "A=(1)\nif command -v npu-smi; then A+=(2); fi\necho ${A[@]}",
            ["echo", "command -v npu-smi"],
        ),
        ('f() { python -m $1 "$@"; }\nf x y=1', ["python", "-m", "x", "x", "y=1"]),
        ("bash -c 'A=1; nohup python -m x a.b=$A 2>&1 | cat' > log &", ["cat"]),
        ("export B=2\nbash -c 'echo $B c=$0'", ["echo", "2", "c=run.sh"]),
        ('[[ "${BASH_SOURCE[0]}" == "$0" ]] && X=1\necho $X', ["echo", "1"]),
        ("a=1\\\nb=2\necho $a", ["echo", "1b=2"]),
        (
            "A=1 B=2\n\nL=(x)\nfor i in 1 2; do\n  C=$i\ndone\necho $A $B $L $C",
            ["echo", "1", "2", "x", "2"],
        ),
        ("false && exit\n[ 1 = 2 ] || echo yes", ["echo", "yes"]),
        ("uv sync || exit 1\necho on", ["echo", "on"]),
        (
            'R=/d; N=q\nexport A=$R/models/$N/hf\necho $A path=$R/m/$N/hf "$R"/$N/y',
            ["echo", "/d/models/q/hf", "path=/d/m/q/hf", "/d/q/y"],
        ),
        (
            "N=q\n[ $N/$N/y = q/q/y ] && A=\\$1/$N/z\necho $A ${N}/p-$N/q",
            ["echo", "$1/q/z", "q/p-q/q"],
        ),
        ("echo a.{b,c.d}=1 n{1..2}", ["echo", "a.b=1", "a.c.d=1", "n{1..2}"]),
        (
            "A=4\nA[1]=5\necho $((010 * 2)) $((4 / 0)) ${A:1:2} ${A^^} ${A[1]}",
            ["echo", "$((010 * 2))", "$((4 / 0))", "${A:1:2}", "${A^^}", "A[1]=5"],
        ),
        ("((x = 1 << 3, y == 2))\necho $x ${x%8}", ["echo"] + ["$((x = 1 << 3, y == 2))"] * 2),
        ("A=a/b\nfor ((i = 0; i < 3; i++)); do B=1; done\necho $B", ["echo", "1"]),
        ("A=1\nexport A=2 B=$A\necho $B", ["echo", "1"]),
        ("N=1\n(( N += 2 ))\necho $N", ["echo", "$(( N += 2 ))"]),
        ("N=1\nlet N+=2\necho $N", ["echo", "${N}"]),
        ("A=a/b.sh\necho ${A##*/} ${A/b/c}", ["echo", "${A##*/}", "${A/b/c}"]),
        ("[[ a == @(a|b) ]] && X=1\necho $X", ["echo", "[ a == @(a|b) ]"]),
        ("case a in +(a)) X=1;; *) X=2;; esac\necho $X", ["echo", "a in +(a)"]),
        ("echo $'a' b", ["echo", "$'a'", "b"]),
        ("echo last \\\n", ["echo", "last"]),
    ],
)
def test_unknown_values_are_carried_along(text: str, words: list[str]) -> None:
    assert words_of(text) == words


def test_set_env_replaces_unknown_values() -> None:
    text = 'D=$(date)\nif [ "$1" = a ]; then E=${X:-3}; else E=no; fi\necho $D $E $(nproc)'
    assert words_of(text, D="d", X="4", **{"1": "a", "$(nproc)": "8"}) == ["echo", "d", "4", "8"]
    script = read_script(text, "run.sh", {"D": "d", "E": "ignored"})
    assert script.used == {"D"}  # the script sets E itself


def test_origins_environment_and_documents() -> None:
    text = """export V=1 W=$(date)
A=( # a comment
  one  # 中文

  "two"
)
cat <<EOF > conf/x.yaml
v: $V
q: "it's"
EOF
U=3 python -m x \\
  "${A[@]}" \\
  three 2>&1 | tee log
"""
    script = read_script(text, "run.sh", {})
    command = next(each for each in script.commands if each.words[0].text == "python")
    assert [word.origin for word in command.words] == [
        *["run.sh:11"] * 3,
        "run.sh:3",
        "run.sh:5",
        "run.sh:13",
    ]
    assert command.environment["V"] == "1"
    assert command.environment["U"] == "3"
    assert marks_of(command.environment["W"])
    assert script.documents["conf/x.yaml"].text == 'v: 1\nq: "it\'s"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("if x; then\necho", "run.sh:1: cannot parse 'if x; then' as bash"),
        ("f() { f; }\nf", "run.sh:1: nested more than 20 times"),
    ],
)
def test_bash_errors_are_reported_with_the_line(text: str, message: str) -> None:
    with pytest.raises(ShellError, match=message):
        read_script(text, "run.sh", {})


@pytest.mark.parametrize(
    ("text", "num_ended"),
    [
        ("if true; then\nA=1 B=2\necho x\nfi\n" * 40, 40),
        ("|-|\n|s|e\nd r e", 1),  # a table, no script: a semicolon does not help
        ("export A=$B/$C/d\n" * 2000, 0),
    ],
)
def test_the_number_of_parses_does_not_grow_with_the_script(
    text: str, num_ended: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse, passes = tree_sitter.Parser, list[bytes]()

    def counted(source: bytes) -> tree_sitter.Tree:
        passes.append(source)
        assert len(passes) < 4
        return parse(tree_sitter.Language(tree_sitter_bash.language())).parse(source)

    monkeypatch.setattr(tree_sitter, "Parser", lambda _: SimpleNamespace(parse=counted))
    assert parsed(text.encode())[1].count(b";\n") == num_ended
