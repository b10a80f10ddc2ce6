"""Secrets must not reach files, logs or the terminal."""

import pytest

import redaction
from redaction import add_secret, add_secret_url, is_secret, redact


@pytest.fixture(autouse=True)
def nothing_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_added", set())


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_API_KEY",
        "OPENAI_APIKEY",
        "AWS_SECRET_ACCESS_KEY",
        "HF_TOKEN",
        "GITHUB_PAT",
        "AWS_SECRET",
        "DB_PASSWORD",
        "DB_PASS",
        "MYSQL_PWD",
        "AZURE_CREDENTIALS",
        "PREFECT_API_AUTH_STRING",
        "SENTRY_DSN",
        "STORAGE_CONNECTION_STRING",
        "PGPASSWORD",
        "SSHPASS",
        "SESSION_COOKIE",
    ],
)
def test_environment_secrets_are_replaced_also_percent_encoded(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "sk+abc/123\n")
    assert redact("Bearer sk+abc/123 and ?key=sk%2Babc%2F123 are refused") == (
        "Bearer [redacted] and ?key=[redacted] are refused"
    )


def test_the_password_of_an_auth_string_is_replaced_on_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "dapo:correct-horse")
    assert redact("user dapo, password correct-horse") == "user dapo, password [redacted]"


def test_settings_and_placeholders_are_not_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "parallel")
    monkeypatch.setenv("MAX_TOKENS", "204800")
    monkeypatch.setenv("VLLM_API_KEY", "EMPTY")
    monkeypatch.setenv("PRIMARY_KEY", "problem")
    monkeypatch.setenv("DATABASE_URL", "postgresql://reader@warehouse/problems")
    monkeypatch.setenv("PWD", "parallel")
    text = (
        "an EMPTY set of 204800 parallel lines: a problem of the reader of "
        "postgresql://reader@warehouse/problems"
    )
    assert redact(text) == text
    assert not any(
        is_secret(*each)
        for each in (("PRIMARY_KEY", "problem"), ("PWD", "/home"), ("COMPASS", "north"))
    )


def test_any_key_variable_is_recognized_by_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_KEY", "sk-proj-0123456789abcdef")
    assert redact("sk-proj-0123456789abcdef is refused") == "[redacted] is refused"


@pytest.mark.parametrize("end", ["", ":", ":x-oauth-basic"])
def test_a_token_in_place_of_a_user_in_a_url_is_replaced(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "PIP_INDEX_URL", f"https://ghp_0123456789abcdef{end}@index.example.org/simple"
    )
    assert redact("ghp_0123456789abcdef is refused") == "[redacted] is refused"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DATABASE_URL", "postgresql://reader:hunter%4022@warehouse:5432/problems"),
        ("https_proxy", "http://:hunter@22@gate"),
        ("PG_DSN", "host=warehouse user=reader password='hunter@22' dbname=problems"),
        ("SQL_CONNECTION_STRING", "Server=warehouse;User=reader;Pwd=hunter@22;"),
        ("PREFECT_CLIENT_CUSTOM_HEADERS", '{"Authorization": "Bearer hunter@22"}'),
    ],
)
def test_passwords_in_urls_and_connection_strings_are_replaced(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert is_secret(name, value)
    assert redact("the reader of problems has hunter@22") == "the reader of problems has [redacted]"
    assert "hunter" not in redact(f"cannot connect to {value}")


def test_url_secrets_and_added_secrets_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "TEAM_WEBHOOK_URL", "https://hooks.example.org/services/T01/B02/abcdefghijklmnopqrstuvwx"
    )
    add_secret_url(
        "https://user:secret-word@host.example.org/robot/send?access_token=0123456789abcdef0123"
    )
    add_secret("longer secret")
    add_secret("secret")
    assert (
        redact("POST /services/T01/B02/abcdefghijklmnopqrstuvwx")
        == "POST /services/T01/B02/[redacted]"
    )
    assert redact(
        "https://user:secret-word@host.example.org/robot/send?access_token=0123456789abcdef0123"
    ) == ("https://user:[redacted]@host.example.org/robot/send?access_token=[redacted]")
    assert redact("a longer secret") == "a [redacted]"
