"""Batches: the plan of an epoch, the samples of a batch, and its frames.

plan        a spec for a dataset: which spans of rows some batches are made of, by arithmetic alone. `member` is the same for
            one dataset of a mixture, `planned` remembers its epochs, and `tensor` says what a batch holds
gather      the blocks of a chunk of batches, and the samples in them; `stand_ins` are rows in place of bad ones
samples   spans, cut into the runs of tokens that the lines of each tensor are made of
batch       the frames of a chunk: `body` says where in them each line lies, `pieces` copies it there
readable    the same for people, as JSON
room        whether the cache has room for what a shuffle needs
"""
