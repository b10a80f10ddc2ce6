"""What is sent to a server, how its replies are read, and what a failure advises."""

import json
import re
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval import InputError
from eval.advice import advise
from eval.endpoint import Endpoint, Sampling
from eval.requests.replies import Answer, ReplyError, read_answer, read_echoed
from flows.config import load_config_or_defaults
from tasks.evaluation.settings import sampling_of

CHAT = "chat/completions"


@pytest.mark.parametrize(
    ("base_url", "url"),
    [
        ("http://h", "http://h/v1/chat/completions"),
        ("http://h:8000/v1/", "http://h:8000/v1/chat/completions"),
        ("http://h/qwen", "http://h/qwen/v1/chat/completions"),
        ("http://h/v1/chat/completions", "http://h/v1/chat/completions"),
        (" http://h/v1/completions/ ", "http://h/v1/chat/completions"),
        ("http://h/chat/completions", "http://h/chat/completions"),
        ("http://h/v1/models", "http://h/v1/chat/completions"),
        ("http://h/v1?key=x#top", "http://h/v1/chat/completions?key=x"),
        ("http://h/v1/chat/completions?key=x", "http://h/v1/chat/completions?key=x"),
        ("http://h/api/v3", "http://h/api/v3/chat/completions"),
        ("http://h/api/paas/v4/", "http://h/api/paas/v4/chat/completions"),
        ("http://h/v1beta/openai", "http://h/v1beta/openai/chat/completions"),
        ("http://h/vision", "http://h/vision/v1/chat/completions"),
        (
            "http://h/openai/deployments/m?api-version=2",
            "http://h/openai/deployments/m/chat/completions?api-version=2",
        ),
        ("http://[::1]:8000", "http://[::1]:8000/v1/chat/completions"),
    ],
)
def test_a_pasted_url_or_another_version_reaches_the_server(base_url: str, url: str) -> None:
    assert Endpoint(base_url, "m").url(CHAT) == url


@pytest.mark.parametrize("base_url", ["127.0.0.1:8000", "h/v1", "ftp://h", "http://[::1", ""])
def test_a_base_url_without_scheme_or_host_is_named(base_url: str) -> None:
    with pytest.raises(InputError, match=re.escape(repr(base_url))):
        Endpoint(base_url, "m").url(CHAT)


def body_with(*overrides: str) -> dict[str, Any]:
    """The request fields of a configuration with these overrides."""
    settings = load_config_or_defaults(None, [f"evaluate.{one}" for one in overrides]).evaluate
    return sampling_of(settings, None).body(1)


def test_null_leaves_a_request_field_out_and_a_field_can_be_renamed() -> None:
    everything = {"max_tokens": 20480, "temperature": 0.0, "top_p": 1.0, "seed": 1235}
    assert body_with() == everything
    keys = {name: name for name in everything} | {"max_tokens": "max_response_tokens"}
    for name in everything:
        left = {other: value for other, value in everything.items() if other != name}
        assert body_with(f"{keys[name]}=null") == left
    renamed = body_with("renamed_fields={max_tokens: max_completion_tokens, seed: random_seed}")
    assert renamed == {
        **{"max_completion_tokens": 20480, "random_seed": 1235},
        **{"temperature": 0.0, "top_p": 1.0},
    }
    assert Sampling(1, seed=None, num_samples=4).body(3).keys() == {
        "max_tokens",
        "temperature",
        "top_p",
    }


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        ("{max_token: x}", r"no field max_token \(did you mean max_tokens"),
        ("{seed: max_tokens}", "seed='max_tokens' is not a name for this field alone"),
        ("{seed: x, top_p: x}", "seed='x' is not a name"),
        ("{seed: null}", "seed=None is not a name"),
    ],
)
def test_a_renaming_that_would_lose_a_field_is_refused(names: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        body_with(f"renamed_fields={names}")


def reply(message: Any, **choice: Any) -> dict[str, Any]:
    return {"choices": [{"message": message, **choice}]}


@pytest.mark.parametrize(
    ("payload", "answer"),
    [
        (reply({"content": "5"}), Answer("5", None, None)),
        (reply({"content": "5"}, finish_reason={"type": "stop"}), Answer("5", "stop", None)),
        (reply({"content": "5"}, finish_reason=1), Answer("5", "1", None)),
        (reply({"content": None}, logprobs=None), Answer("", None, None)),
        (reply({"role": "assistant", "tool_calls": []}), Answer("", None, None)),
        (reply({"content": None, "refusal": "No."}), Answer("No.", None, None)),
        (reply({"reasoning": "hm"}), Answer("", None, None, "hm")),
        (reply({"content": "5", "reasoning_content": ""}), Answer("5", None, None)),
        (reply({"content": "5", "thinking": ["h", "m"]}), Answer("5", None, None, "hm")),
        (
            reply(
                {"content": "5", "reasoning_details": [{"type": "reasoning.text", "text": "hm"}]}
            ),
            Answer("5", None, None, "hm"),
        ),
        (reply({"content": ["It is ", {"text": "5"}]}), Answer("It is 5", None, None)),
        (reply({"content": {"type": "future_text", "text": "5"}}), Answer("5", None, None)),
        (
            reply(
                {"content": [{"type": "image_url", "image_url": {}}, {"type": "t", "text": "5"}]}
            ),
            Answer("5", None, None),
        ),
        (
            reply({"content": [{"type": "thinking", "thinking": [{"text": "hm"}]}, {"text": "5"}]}),
            Answer("5", None, None, "hm"),
        ),
        ({"choices": [{"text": "5"}], "usage": None}, Answer("5", None, None)),
        ({"choices": [{"text": None}], "usage": {}}, Answer("", None, None)),
        (
            {
                **reply({"content": "5"}),
                "usage": {"completion_tokens": "7", "reasoning_tokens": 2.0},
            },
            Answer("5", None, 7, None, 2),
        ),
        (
            {**reply({"content": "5"}), "error": None, "usage": {"completion_tokens": 10**30}},
            Answer("5", None, None),
        ),
    ],
)
def test_a_legal_reply_is_read_whatever_it_leaves_out(payload: Any, answer: Answer) -> None:
    assert read_answer(json.dumps(payload).encode()) == answer


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b'{"choices": []}', "not a completion"),
        (b'{"choices": null, "object": "list"}', "not a completion"),
        (b'{"choices": [null]}', "not a completion"),
        (b"[]", "not a completion"),
        (
            b'{"choices": [{"index": 0, "delta": {"content": "5"}}]}',
            "no content, only index, delta",
        ),
        (b'{"choices": [{"message": {"role": "assistant"}}]}', "no content, only message"),
        (b'{"choices": [{"message": {"content": 5}}]}', "of type int, not text"),
        (b'{"choices": [{"message": {"content": [{"type": "image"}]}}]}', "of type image"),
        (b'{"error": {"message": "overloaded", "code": 429}}', "an error in place .*overloaded"),
        (b'{"choices": [{"error": "boom", "message": {"content": "5"}}]}', "an error in place"),
        (b'data: {"choices": []}\n\ndata: [DONE]\n\n', "a stream of events"),
        (b"<!DOCTYPE html><p>Hi", "a web page: '<!DOCTYPE"),
        (b'{"choices": [', "invalid JSON in a body of 13 bytes"),
        (b"9" * 5000, "invalid JSON"),
        (b"[" * 100_000, "invalid JSON"),
        (b"\xff", "invalid JSON"),
        (b"", "invalid JSON in a body of 0 bytes"),
    ],
)
def test_a_reply_without_an_answer_says_what_it_is(content: bytes, fault: str) -> None:
    with pytest.raises(ReplyError, match=fault):
        read_answer(content)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "x", "7"]),
    lambda values: (
        st.lists(values, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                "choices message content text finish_reason usage completion_tokens error code "
                "reasoning type index logprobs token_logprobs completion_tokens_details".split()
            ),
            values,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON, JSON)
def test_no_json_in_place_of_a_completion_ends_the_evaluation(message: Any, usage: Any) -> None:
    for payload in (message, {**reply(message, text=usage, logprobs=usage), "usage": usage}):
        for read in (read_answer, lambda content: read_echoed(content, 1)):
            try:
                found = read(json.dumps(payload).encode())
            except ReplyError:
                continue
            orjson.dumps(list(found))  # rows must be storable


@pytest.mark.parametrize(
    ("status", "text", "advice"),
    [
        (301, "<html>moved</html>", r"redirects to https://h/v1: use that base URL"),
        (401, '{"error": "Incorrect API key"}', "export VLLM_API_KEY"),
        (403, "no", "export VLLM_API_KEY"),
        (403, "<html>Forbidden by WAF</html>", "proxy or firewall"),
        (404, "<html>nginx</html>", "No API answers at this URL: correct the base URL"),
        (404, '{"message": "The model `p` does not exist."}', "Set --model-name"),
        (405, "Method Not Allowed", "correct the base URL"),
        (413, "<html>too large</html>", "larger than the server or a proxy accepts"),
        (400, '{"param": "max_tokens"}', r"evaluate\.max_response_tokens=null, or rename it"),
        (400, "Unrecognized request argument supplied: seed", r"evaluate\.seed=null"),
        (422, '{"loc": ["body", "seed"]}', r"evaluate\.seed=null"),
        (400, "min_p: extra inputs are not permitted", r"change evaluate\.extra_body"),
        (400, "maximum context length is 2048 tokens; max_tokens is 4096", "lower evaluate.max_r"),
        (400, "the chat template is missing", "evaluate.api=completions"),
        (400, "no", "its reply says why"),
        (429, "slow down", "requests_per_second"),
        (500, "boom", "see its log"),
        (502, "<html>Bad Gateway</html>", "proxy or firewall"),
        (200, "<html>Open WebUI</html>", "correct the base URL"),
    ],
)
def test_advice_fits_the_status_and_the_server_s_words(status: int, text: str, advice: str) -> None:
    sent = ("model", "messages", "max_tokens", "temperature", "seed", "min_p")
    assert re.search(advice, advise(status, text, sent, "https://u:secret@h/v1?key=secret"))
