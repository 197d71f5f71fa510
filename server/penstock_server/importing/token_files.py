"""Files of token ids, as pretraining code writes them: a document becomes a row. token_formats lists the formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from penstock_server.importing.columnar import portions, refusing, survey_typed
from penstock_server.importing.source import Advance, Survey
from penstock_server.importing.token_formats import Documents, Found, find_documents
from penstock_server.order.arrays import IntArray, starts_of

_ADVICE = "Mend the file, or what is said of it"


class TokenFile:
    """Memory-mapped file of token ids: a document is a row, and empty documents are left out.

    Without document borders, rows are equal pieces of the file.
    """

    def __init__(self, path: Path, columns: Sequence[str] | None, documents: Documents) -> None:
        self.path = path
        self._columns, self._documents = columns, documents

    def survey(self, advance: Advance) -> Survey:
        """Return the columns: ids, and their loss mask. Raises ImportRefused: the file contradicts its header or index."""
        with refusing(self.path, _ADVICE):
            found = find_documents(self.path, self._documents)
            schema = _batch(found, 0, 0, np.zeros(0, np.int64)).schema
        survey = survey_typed(self.path, schema, self._columns, lambda names: self._tables(names, advance))
        return replace(survey, is_stream=found.is_stream)

    def tables(self, survey: Survey, advance: Advance) -> Iterator[pa.Table]:
        """Yield the documents in the file's order. Raises ImportRefused: as `survey`."""
        return self._tables(survey.schema.names, advance)

    def _tables(self, names: Sequence[str], advance: Advance) -> Iterator[pa.Table]:
        with refusing(self.path, _ADVICE):
            found = find_documents(self.path, self._documents)
            stop = 0
            for lengths in found.lengths if names else ():
                start, stop = stop, stop + int(lengths.sum())
                yield from portions(_batch(found, start, stop, lengths[lengths > 0]).select(names))
                advance(stop * found.ids.itemsize)


def _batch(found: Found, start: int, stop: int, lengths: IntArray) -> pa.RecordBatch:
    """Return the documents of these lengths, made of the ids [start, stop)."""
    borders = pa.array(starts_of(lengths))
    columns = {"tokens": found.ids} | ({} if found.in_loss is None else {"loss_mask": found.in_loss})
    native = {name: values[start:stop].astype(values.dtype.newbyteorder("="), copy=False) for name, values in columns.items()}
    return pa.record_batch({name: pa.LargeListArray.from_arrays(borders, pa.array(values)) for name, values in native.items()})
