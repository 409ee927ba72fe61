"""What the kernels' assembly computes, on a CPU: the few instructions of PTX that it has, on arrays
of numbers, one element a thread. Approximate instructions are exact here."""

import re

import numpy as np

LINE = re.compile(r"(?:@(!?)(\w+)\s+)?([\w.]+)\s*(.*)")


def run(text, results, operands):
    """``text``: an assembly whose first ``results`` operands are float32 results; ``operands``: a
    float32 array each, or a number. Branches are taken by each thread by itself."""
    operands = [np.asarray(each, np.float32) for each in operands]
    threads = np.broadcast_shapes(*(each.shape for each in operands))
    names = {f"${results + i}": np.broadcast_to(e, threads) for i, e in enumerate(operands)}
    names = {name: each.view(np.uint32) for name, each in names.items()}
    body = text.strip().removeprefix("{").removesuffix("}")
    waiting = {}  # by label the threads that have branched to it
    with np.errstate(all="ignore"):
        for line in filter(None, (part.strip() for part in re.split(r"[;\n]", body))):
            if line.startswith("."):
                continue
            if line.endswith(":"):
                waiting.pop(line[:-1])  # no branches back
                continue
            negated, guard, operation, rest = LINE.fullmatch(line).groups()
            active = np.ones(threads, bool)
            for others in waiting.values():
                active &= ~others
            if guard:
                active = active & (names[guard] ^ bool(negated))
            places = [place.strip() for place in rest.split(",")]
            if operation in ("bra", "bra.uni"):
                waiting[places[0]] = waiting.get(places[0], False) | active
                continue
            got = compute(operation, [value(names, place) for place in places[1:]])
            before = names.get(places[0], np.zeros(threads, got.dtype))
            names[places[0]] = np.where(active, got, before)
    assert not waiting, "no label for these branches"
    return [names[f"${i}"].view(np.float32) for i in range(results)]


def value(names, place):
    if place in names:
        return names[place]
    if place.startswith("0f"):
        return np.uint32(int(place[2:], 16))
    return np.uint32(int(place, 0) & 0xFFFFFFFF)


def compute(operation, given):
    kind = operation.split(".")
    if kind[0] == "setp":
        wide = np.int32 if kind[-1] == "s32" else np.uint32 if kind[-1] == "b32" else np.float32
        one, other = (np.asarray(each).view(wide) for each in given[:2])
        found = {"gt": one > other, "ge": one >= other, "ne": one != other}[kind[1]]
        return found | given[2] if kind[2] == "or" else found
    if kind[-1] in ("b32", "s32"):
        whole = {
            "mov": lambda a: a, "and": lambda a, b: a & b, "or": lambda a, b: a | b,
            "shl": lambda a, b: a << b, "add": lambda a, b: a + b, "sub": lambda a, b: a - b,
        }  # fmt: skip
        return np.asarray(whole[kind[0]](*given), np.uint32)
    numbers = [np.asarray(each).view(np.float32).astype(np.float64) for each in given]
    exact = {
        "mov": lambda a: a, "neg": lambda a: -a, "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "max": np.fmax,
        "fma": lambda a, b, c: a * b + c, "ex2": np.exp2, "rcp": lambda a: 1 / a, "tanh": np.tanh,
    }  # fmt: skip
    result = exact[kind[0]](*numbers).astype(np.float32)
    if "ftz" in kind:
        result = np.where(np.abs(result) < np.float32(2.0**-126), np.float32(0), result)
    return np.asarray(result, np.float32).view(np.uint32)
