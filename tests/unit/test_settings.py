from pathlib import Path

import pytest

from penstock_server.settings import Settings, SettingsError


def test_a_flag_wins_over_the_environment_and_both_over_the_default() -> None:
    environment = {"PENSTOCK_DATA_DIR": "/env", "PENSTOCK_PORT": "1", "PENSTOCK_TOKENIZER": "", "HOME": "/home/me"}
    settings = Settings.read({"port": "2", "data_dir": None}, environment)
    assert (settings.data_dir, settings.port, settings.host, settings.tokenizer) == (Path("/env"), 2, "127.0.0.1", None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "no data folder is given"),
        ({"data_dir": "d", "port": "http"}, "port must be a whole number, not 'http'"),
        ({"data_dir": "d", "port": "70000"}, "port must be from 0"),
    ],
)
def test_a_wrong_setting_is_named(flags: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Settings.read(flags, {})
