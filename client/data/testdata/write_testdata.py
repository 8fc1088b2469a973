"""Writes the files of numpy_test and of the fuzz targets' corpora, with NumPy 2: write_testdata.py

Values are such as the test computes: element i, in C's order, is 7 i - 20, of bool i % 3 == 1.
"""

import io
import os
import struct
import zlib

import numpy as np
from numpy.lib import format as npy

HERE = os.path.dirname(os.path.abspath(__file__))


def values(dtype, shape):
    count = int(np.prod(shape))
    if dtype == "|b1":
        return (np.arange(count) % 3 == 1).reshape(shape)
    return (7 * np.arange(count) - 20).astype(dtype).reshape(shape)


def write(name, array, version=None):
    with open(os.path.join(HERE, name), "wb") as file:
        npy.write_array(file, array, version=version)


def member(name, data, size=None, method=8):
    """A member's local header with its bytes, and its entry in the directory, which says `size`."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = data if method == 0 else packer.compress(data) + packer.flush()
    facts = struct.pack("<HHHHHIIIHH", 20, 0, method, 0, 33, zlib.crc32(data), len(packed),
                        len(data) if size is None else size, len(name), 0)
    local = b"PK\3\4" + facts + name + packed
    return local, lambda offset: (b"PK\1\2" + struct.pack("<H", 20) + facts
                                  + struct.pack("<HHHII", 0, 0, 0, 0, offset) + name)


def archive(name, contents, entries):
    directory = b"".join(entries)
    end = b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, len(entries), len(entries), len(directory),
                                  len(contents), 0)
    with open(os.path.join(HERE, name), "wb") as file:
        file.write(contents + directory + end)


for dtype in ["<f8", "<f4", "<f2", "<i8", "<i4", "<i2", "|i1", "|b1"]:
    write(dtype[1:] + ".npy", values(dtype, (2, 3)))
write("u1.npy", np.arange(6, dtype="|u1").reshape(2, 3))
write("version2.npy", values("<f4", (5,)), (2, 0))
write("version3.npy", values("<f4", (5,)), (3, 0))
write("fortran.npy", np.asfortranarray(values("<i4", (2, 3, 5))))
write("scalar.npy", values("<f8", ()))
write("empty.npy", values("<f4", (0, 3)))
write("empty_fortran.npy", np.asfortranarray(values("<f4", (3, 0, 2))))
# Refused.
write("big_endian.npy", values(">f4", (2,)))
write("unsigned.npy", values("<u4", (2,)).astype("<u4"))
write("complex.npy", values("<c8", (2,)))
write("structured.npy", np.zeros(2, dtype=[("a", "<f4"), ("b", "<i4")]))
write("text.npy", np.array(["a", "bc"]))
write("object.npy", np.array([{}], dtype=object))

np.savez(os.path.join(HERE, "stored.npz"), x=values("<f4", (2, 3)), y=values("<i8", (4,)))
np.savez_compressed(os.path.join(HERE, "deflated.npz"), x=values("<f4", (40, 30)),
                    y=values("|b1", (7,)))
np.savez(os.path.join(HERE, "nothing.npz"))

with open(os.path.join(HERE, "f4.npy"), "rb") as file:
    F4 = file.read()
# Sizes that are not those of the bytes.
for name, size in [("right", None), ("too_large", 1 << 30), ("larger", len(F4) + 8),
                   ("smaller", len(F4) - 8)]:
    local, entry = member(b"x.npy", F4, size)
    archive("size_%s.npz" % name, local, [entry(0)])
# One within the other, so that they have more bytes than the archive.
many = io.BytesIO()
npy.write_array(many, values("<f8", (40,)))
local, entry = member(b"x.npy", many.getvalue(), method=0)
outer, outer_entry = member(b"y.npy", local, method=0)
archive("nested.npz", outer, [entry(len(outer) - len(local)), outer_entry(0)])
local, entry = member(b"x.npy", F4, method=12)
archive("bzip2.npz", local, [entry(0)])
with open(os.path.join(HERE, "stored.npz"), "rb") as file:
    STORED = file.read()
with open(os.path.join(HERE, "cut.npz"), "wb") as file:
    file.write(STORED[:-30])
HUGE = b"{'descr': '<f8', 'fortran_order': True, 'shape': (4611686018427387904, 4), }"
with open(os.path.join(HERE, "huge_shape.npy"), "wb") as file:
    file.write(b"\x93NUMPY\1\0" + struct.pack("<H", len(HUGE)) + HUGE)
