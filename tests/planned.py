"""Plans over a catalog in this process."""

from __future__ import annotations

import time
from typing import Any

from penstock.spec import Spec
from penstock_server.batches.plan import Plan
from penstock_server.datasets.catalog import Catalog
from penstock_server.problems import IndexNotReady


def plan_of(catalog: Catalog, dataset: str, **spec: Any) -> Plan:
    """The plan of a spec, once what it needs is counted."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return catalog.plan(dataset, Spec(**spec))
        except IndexNotReady:
            assert time.monotonic() < deadline
            time.sleep(0.002)
