"""Imported once the other imports are made: what they have left is looked through by no garbage collection any more.

Each would write into all of it, and so copy it in each process that is forked off; the last one as such a process exits.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
