"""Files of proofs with something wrong."""

from __future__ import annotations

import hashlib
import json

import numpy as np

from meanfield.transport.checker import HEAD


def damaged_files(rng: np.random.Generator, content: bytes) -> bytes:
    """A file with something wrong: by accident, or on purpose and signed again."""
    kind = rng.integers(0, 14)
    place = int(rng.integers(len(content)))
    if kind == 0:
        return content[:place]
    if kind == 1:
        return (
            content[:place]
            + bytes([content[place] ^ (1 << rng.integers(8))])
            + content[place + 1 :]
        )
    if kind == 2:
        return content[:place] + content[place + 1 :]
    if kind == 3:
        return content + b"\n"
    if kind == 4:
        return content.partition(b"\n")[2]
    data = json.loads(content.partition(b"\n")[2])
    change = 10 ** int(rng.integers(9, 20))
    if kind == 5:  # a narrower claim
        data["lower"] = data["upper"] + max(data["upper"] // change, 1)
        data["upper"] = data["lower"]
    elif kind == 6:  # another plan: all to one column
        data["rows"], data["cols"], data["mass"] = [], [], []
        data["upper"] = data["lower"] + (data["upper"] - data["lower"]) // 2
        data["lower"] = data["upper"] + 1
    elif kind == 7:
        data["rows"][0] = -1
    elif kind == 8:
        data["cols"][-1] = len(data["b"])
    elif kind == 9:
        data["mass"][0] = -data["mass"][0] - 1
    elif kind == 10:
        data["a"] = data["a"][1:]
    elif kind == 11:
        data["g"][0] = 0.5
    elif kind == 12:
        del data[str(rng.choice(list(data)))]
    else:
        data["x"][0] = [*data["x"][0], 1]
    body = json.dumps(data, separators=(",", ":")).encode()
    return (HEAD + hashlib.sha256(body).hexdigest()).encode() + b"\n" + body
