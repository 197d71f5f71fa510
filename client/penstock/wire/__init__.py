"""The wire format: a batch as two msgpack objects, a header map and one `bin` with the tensors' raw bytes.

    body    = frame frame frame ...
    frame   = header payload                 each frame a multiple of 64 bytes long
    header  = {v, dataset, snapshot, spec_digest, epoch, rank, step, digest, nbytes,
               tensors: [[name, dtype, shape, offset], ...], replaced, header_digest, filler}
    payload = bin                            starts on a 64-byte boundary of the body, as does each tensor in it

A tensor of dtype utf8 or binary holds texts or bytes, shape [count, nbytes]: count + 1 int64 offsets, then nbytes bytes; text i
is bytes [offsets[i], offsets[i + 1]). `replaced` is the number of samples that replace unusable rows.

`spec_digest` is that of the resolved spec, see Spec.digest: batches of another seed may differ in nothing else.

`digest` is the xxh3-64 of the payload, `header_digest` that of the header's fields before it, packed as a map; both as 16
hex digits. `filler` puts the payload on its boundary. All numbers in tensors are little-endian.

`document_starts` has one bit per token, set where a document or the padding begins: token i of a sample is bit i % 8 of its
byte i // 8, the lowest bit first. A sample's first token always begins a document.
"""

from penstock.wire.frame import Frame, FrameGroup, decode, decode_groups
from penstock.wire.header import VERSION, Address, Heads, content_digest, digest
from penstock.wire.layout import Layout, TensorLayout

MEDIA_TYPE = "application/vnd.msgpack"

__all__ = [
    "MEDIA_TYPE",
    "VERSION",
    "Address",
    "Frame",
    "FrameGroup",
    "Heads",
    "Layout",
    "TensorLayout",
    "content_digest",
    "decode",
    "decode_groups",
    "digest",
]
