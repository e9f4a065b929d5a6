"""TIFF files written by hand, in every order and packing that the format allows."""

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
        where, sizes = (324, 325) if 322 in tags else (273, 279)
        lengths = [len(block) for block in blocks]
        starts = list(itertools.accumulate(lengths, initial=len(out)))[: len(blocks)]
        out += b"".join(blocks)
        entries = b""
        for tag, values in sorted({where: starts, sizes: lengths, **tags}.items()):
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


def blocks_of(values, block, tiled):
    """Cut (H, W, C) into strips or tiles, the way TIFF 6.0 orders them."""
    rows, columns = block
    for y, x in itertools.product(range(0, H, rows), range(0, W, columns)):
        part = values[y : y + rows, x : x + columns]
        if tiled:
            part = np.pad(part, ((0, rows - part.shape[0]), (0, columns - part.shape[1]), (0, 0)))
        yield part


def pack_bits(content):
    """PackBits of runs where there are some, and of literals."""
    out, at = b"", 0
    while at < len(content):
        run = 1
        while run < 128 and content[at : at + 1] == content[at + run : at + run + 1]:
            run += 1
        out += bytes([257 - run if run > 1 else 0, content[at]])
        at += run
    return out


def lzw(content):
    """LZW of literals alone; the table is cleared before its codes would grow longer."""
    codes = []
    for at in range(0, len(content), 250):
        codes += [256, *content[at : at + 250]]
    digits = "".join(f"{code:09b}" for code in [*codes, 257])
    return int(digits + "0" * (-len(digits) % 8), 2).to_bytes(-(-len(digits) // 8), "big")


NONE, LZW, DEFLATE, PACK_BITS = 1, 5, 8, 32773
ENCODERS = {NONE: bytes, LZW: lzw, DEFLATE: zlib.compress, PACK_BITS: pack_bits}


def layout(values, *, tiled=False, order="<", compression=NONE, **more):
    """A TIFF of (H, W, C) samples of any dtype; tags are given as t317=2, and win."""
    block = (16, 16) if tiled else (6, W)
    count, kind = values.shape[2], values.dtype
    tags = {256: W, 257: H, 258: [kind.itemsize * 8] * count, 259: compression}
    tags |= {262: 2 if count >= 3 else 1, 277: count}
    tags |= {322: 16, 323: 16} if tiled else {278: 6}
    tags |= {339: [3 if kind.kind == "f" else 1] * count} | {int(k[1:]): v for k, v in more.items()}
    blocks = []
    for part in blocks_of(values, block, tiled):
        if tags.get(317) == 2 and compression not in (NONE, PACK_BITS):
            part = np.diff(part, axis=1, prepend=np.zeros_like(part[:, :1]))
        blocks.append(ENCODERS[compression](part.astype(kind.newbyteorder(order)).tobytes()))
    return file([(tags, blocks)], order)


def samples(count, dtype=np.uint16, seed=0, size=(H, W)):
    """Noise (H, W, count) over the whole range."""
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        return rng.random((*size, count)).astype(dtype)
    return rng.integers(0, np.iinfo(dtype).max + 1, (*size, count)).astype(dtype)
