"""TIFF files written by hand, in every order and packing that is read."""

import itertools
import struct
import zlib

import numpy as np

H, W = 21, 35


def file(pages, order="<"):
    """A TIFF of pages, each (tags, blocks); offsets and sizes of the blocks are filled in."""
    mark = b"II" if order == "<" else b"MM"
    out = bytearray(mark + struct.pack(order + "HI", 42, 0))
    link = 4
    for tags, blocks in pages:
        lengths = [len(block) for block in blocks]
        starts = list(itertools.accumulate(lengths, initial=len(out)))[: len(blocks)]
        out += b"".join(blocks)
        entries = b""
        for tag, values in sorted({273: starts, 279: lengths, **tags}.items()):
            values = values if isinstance(values, list) else [values]
            content = struct.pack(f"{order}{len(values)}I", *values)
            if len(content) > 4:
                content, at = struct.pack(order + "I", len(out)), content
                out += at
            entries += struct.pack(order + "HHI", tag, 4, len(values)) + content.ljust(4, b"\0")
        struct.pack_into(order + "I", out, link, len(out))
        out += struct.pack(order + "H", len(entries) // 12) + entries
        link = len(out)
        out += bytes(4)
    return bytes(out)


def lzw(content):
    """LZW of literals alone; the table is cleared before its codes would grow longer."""
    codes = []
    for at in range(0, len(content), 250):
        codes += [256, *content[at : at + 250]]
    digits = "".join(f"{code:09b}" for code in [*codes, 257])
    return int(digits + "0" * (-len(digits) % 8), 2).to_bytes(-(-len(digits) // 8), "big")


NONE, LZW, DEFLATE = 1, 5, 8
ENCODERS = {NONE: bytes, LZW: lzw, DEFLATE: zlib.compress}


def layout(values, *, order="<", compression=NONE, **more):
    """A TIFF of (H, W, C) samples of any dtype; tags are given as t317=2, and win."""
    count, kind = values.shape[2], values.dtype
    tags = {256: W, 257: H, 258: [kind.itemsize * 8] * count, 259: compression}
    tags |= {262: 2 if count >= 3 else 1, 277: count}
    tags |= {278: 6, 339: [3 if kind.kind == "f" else 1] * count} | {
        int(k[1:]): v for k, v in more.items()
    }
    blocks = []
    for part in (values[top : top + 6] for top in range(0, H, 6)):
        if tags.get(317) == 2 and compression != NONE:
            part = np.diff(part, axis=1, prepend=np.zeros_like(part[:, :1]))
        blocks.append(ENCODERS[compression](part.astype(kind.newbyteorder(order)).tobytes()))
    return file([(tags, blocks)], order)


def samples(count, dtype=np.uint16, seed=0, size=(H, W)):
    """Noise (H, W, count) over the whole range."""
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        return rng.random((*size, count)).astype(dtype)
    return rng.integers(0, np.iinfo(dtype).max + 1, (*size, count)).astype(dtype)
