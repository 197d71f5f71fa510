import re
from dataclasses import fields
from pathlib import Path

import pytest

from penstock_server.settings import Settings, SettingsError


def test_flag_wins_over_the_environment() -> None:
    environment = {"PENSTOCK_DATA_DIR": "/env", "PENSTOCK_PORT": "1", "PENSTOCK_TOKENIZER": "", "HOME": "/home/me"}
    settings = Settings.read({"port": "2", "data_dir": None}, environment)
    assert (settings.data_dir, settings.port, settings.host, settings.tokenizer) == ((Path("/env"),), 2, "127.0.0.1", None)


def test_address_of_kubernetes_is_not_a_port() -> None:
    """In each pod beside a service that is called penstock."""
    assert Settings.read({"data_dir": "d"}, {"PENSTOCK_PORT": "tcp://10.96.0.1:8000"}).port == 8000


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("1000", 1000),
        ("200GB", 200 * 10**9),
        ("3 mb", 3 * 10**6),
        ("1.5MB", 1_500_000),
        ("1TB", 10**12),
        ("200G", 200 * 10**9),
        ("7k", 7000),
    ],
)
def test_byte_count_may_have_a_unit(text: str, nbytes: int) -> None:
    assert Settings.read({"data_dir": "d", "cache_bytes": text}, {}).cache_bytes == nbytes


@pytest.mark.parametrize(("text", "seconds"), [("0", 0.0), ("0.5", 0.5), ("60", 60.0)])
def test_poll_seconds_may_be_a_fraction(text: str, seconds: float) -> None:
    assert Settings.read({"data_dir": "d", "poll_seconds": text}, {}).poll_seconds == seconds


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "no data folder or URL is given"),
        ({"data_dir": "d", "port": "http"}, "--port must be a whole number from 0 .* to 65,535, not 'http'"),
        ({"data_dir": "d", "port": "70000"}, "--port must be a whole number"),
        ({"data_dir": "d", "cache_bytes": "a lot"}, "--cache-bytes must be a number such as 500000000 or 200GB"),
        ({"data_dir": "d", "inflight_bytes": "-1"}, "--inflight-bytes must be a number such as 500000000 or 200GB, not '-1'"),
        ({"data_dir": "d", "processes": "0"}, "--processes must be a whole number from 1 to 256, not '0'"),
        ({"data_dir": "d", "processes": "all"}, "--processes must be a whole number"),
        ({"data_dir": "d", "poll_seconds": "often"}, "--poll-seconds must be a number such as 30, or 0 for never, not 'often'"),
        ({"data_dir": "d", "poll_seconds": "-1"}, "--poll-seconds must be a number"),
        ({"data_dir": "d", "poll_seconds": "nan"}, "--poll-seconds must be a number"),
        ({"data_dir": "d", "poll_seconds": "1e10"}, "--poll-seconds must be a number"),  # no thread can wait so long
        ({"data_dir": "d", "log_format": "text"}, "--log-format must be human or json, not 'text'"),
        ({"data_dir": "d", "tls_key": "k"}, "--tls-key and --tls-client-ca need --tls-cert"),
        ({"data_dir": "d", "tls_client_ca": "c"}, "--tls-key and --tls-client-ca need --tls-cert"),
        ({"data_dir": "d", "trusted_proxy": "proxy"}, "--trusted-proxy must be addresses or networks, such as .*, not 'proxy'"),
        ({"data_dir": "d", "trusted_proxy": "*"}, "--trusted-proxy must be addresses or networks"),
        ({"port": "x", "cache_bytes": "-1"}, "no data folder(.|\n)*--port must be(.|\n)*--cache-bytes must be"),
    ],
)
def test_invalid_setting_is_named(flags: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Settings.read(flags, {})


@pytest.mark.parametrize("text", ["8_0", "+80", " 80 ", "80.0", "-80"])
@pytest.mark.parametrize("name", ["port", "processes"])
def test_whole_number_is_refused_when_it_has_more_than_digits(name: str, text: str) -> None:
    with pytest.raises(SettingsError, match=f"^--{name} must be a whole number .*, not '{re.escape(text)}'$"):
        Settings.read({"data_dir": "d", name: text}, {})


def test_invalid_variable_is_named() -> None:
    with pytest.raises(SettingsError, match="^PENSTOCK_POLL_SECONDS must be a number such as 30, or 0 for never, not 'often'$"):
        Settings.read({"data_dir": "d", "poll_seconds": None}, {"PENSTOCK_POLL_SECONDS": "often"})


COMPOSE = (Path(__file__).parents[2] / "docker-compose.yml").read_text()


def test_docker_compose_passes_every_option() -> None:
    names = {f.name for f in fields(Settings)} - {"data_dir", "cache_dir"}  # which are volumes
    assert {name for name in names - {"published"} if f"${{PENSTOCK_{name.upper()}:-" not in COMPOSE} == set()
    assert "PENSTOCK_PUBLISHED: ${PENSTOCK_HOST:-127.0.0.1}:${PENSTOCK_PORT:-8000}" in COMPOSE


def test_docker_compose_uses_only_what_compose_1_interpolates() -> None:
    """Names, with a default or an error message that is plain text: Compose 1 neither nests expressions nor has `:+`."""
    settings = [line.partition(" #")[0] for line in COMPOSE.splitlines() if not line.startswith("#")]
    rest = re.sub(r"\$\{[A-Z_]+(:?[-?][^${}]*)?\}", "", "\n".join(settings))
    assert "PENSTOCK_TOKENIZER" in rest
    assert "$" not in rest


def test_docker_compose_gives_each_container_its_own_token_alone() -> None:
    services = COMPOSE.partition("\nvolumes:")[0].split("\n\n")
    names = [service.partition(":")[0].split()[-1] for service in services]
    mounted = {name: re.findall(r"- (\S*token\S*):(/\S+)", service) for name, service in zip(names, services, strict=True)}
    assert mounted["trainer"] == [("trainer-token", "/run/penstock:ro")]
    assert mounted["prometheus"] == [("metrics-token", "/run/penstock:ro")]
    assert mounted["grafana"] == []
