"""Writes GGUF files by hand."""

import struct


def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


def field(name, value):
    if isinstance(value, bool):
        return text(name) + struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return text(name) + struct.pack("<II", 4, value)
    if isinstance(value, float):
        return text(name) + struct.pack("<If", 6, value)
    if isinstance(value, str):
        return text(name) + struct.pack("<I", 8) + text(value)
    if value and isinstance(value[0], str):
        return text(name) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    return text(name) + struct.pack(f"<IIQ{len(value)}I", 9, 4, len(value), *value)


def contents(fields, tensors):
    """Returns the bytes of a GGUF file; tensors are given as (shape, type, bytes) by name."""
    infos, data = b"", b""
    for name, (shape, kind, content) in tensors.items():
        data += bytes(-len(data) % 32)
        infos += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        infos += struct.pack("<IQ", kind, len(data))
        data += content
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
    head += b"".join(field(*each) for each in fields.items()) + infos
    return head + bytes(-len(head) % 32) + data


def write(path, fields, tensors):
    """Writes a GGUF file, and returns its path."""
    path.write_bytes(contents(fields, tensors))
    return path
