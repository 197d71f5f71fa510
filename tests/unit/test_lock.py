"""The packages of the server image are pinned by hash, in the versions that everything else is tested with."""

from __future__ import annotations

import re
import tomllib

from support.servers import ROOT

LOCK = (ROOT / "docker/requirements.txt").read_text()
PINNED = dict(re.findall(r"^([\w.-]+)==(\S+)", LOCK, re.MULTILINE))


def test_versions_are_those_of_the_constraints() -> None:
    constraints = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert {name: version for name, version in PINNED.items() if constraints.get(name, version) != version} == {}


def test_every_requirement_of_the_server_is_pinned_by_hash() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, build = project["project"], project["build-system"]
    required = [*project["dependencies"], *project["optional-dependencies"]["server"], *build["requires"]]
    names = {re.split(r"[\s<>=!;\[]", line)[0] for line in required} - {"penstock"}
    assert names - PINNED.keys() == set()
    assert len(re.findall(r"^[\w.-]+==.+ \\\n    --hash=sha256:", LOCK, re.MULTILINE)) == len(PINNED)
