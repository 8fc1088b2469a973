"""An encoder of graphs written from graph_encoding.md alone, held against the golden bytes.

It shares nothing with the daemon's, so that what the page leaves out, or says wrongly, fails here.
"""

import glob
import json
import os
import struct
import unittest

GOLDEN = "proto/chorus/v1/golden"

DTYPES = ("UNSPECIFIED F16 BF16 F32 F64 I8 U8 I16 I32 I64 BOOL COMPLEX64 COMPLEX128").split()
KINDS = ("UNSPECIFIED ALL_REDUCE BROADCAST REDUCE ALL_GATHER REDUCE_SCATTER GATHER SCATTER "
         "ALL_TO_ALL SEND RECV BARRIER").split()
REDUCTIONS = "UNSPECIFIED SUM AVG PRODUCT MIN MAX PREMUL_SUM BAND BOR BXOR".split()
ROLES = "DATA STATE SCALAR SEED".split()
EFFECTS = "PURE COLLECTIVE RANDOM".split()


def varint(n):
    out = bytearray()
    while n >= 128:
        out.append(n % 128 + 128)
        n //= 128
    out.append(n)
    return bytes(out)


def signed(n):
    n = int(n)
    return varint(2 * n if n >= 0 else -2 * n - 1)


def text(s):
    raw = s.encode()
    return varint(len(raw)) + raw


def listed(encode, items):
    return varint(len(items)) + b"".join(encode(item) for item in items)


def enum(names, prefix, value):
    return bytes([names.index(value[len(prefix):])])


def tensor_type(m):
    symbols = {s.get("dim", 0): s.get("symbol", 0) for s in m.get("symbolicDims", [])}
    dims = m.get("dims", [])
    return (enum(DTYPES, "DTYPE_", m.get("dtype", "DTYPE_UNSPECIFIED")) + b"\0" + varint(len(dims)) +
            b"".join(signed(size) + varint(symbols[i] + 1 if i in symbols else 0)
                     for i, size in enumerate(dims)))


def role(m):
    return enum(ROLES, "VALUE_ROLE_", m.get("role", "VALUE_ROLE_DATA"))


def group_slot(m):
    held = m.get("heldRanks", [])
    return (signed(m.get("size", 0)) + listed(signed, held) +
            listed(signed, m.get("deviceSlots", [0] * len(held))))


def graph_input(m):
    return (tensor_type(m["type"]) + role(m) + bytes([m.get("donatable", False)]) +
            signed(m.get("deviceSlot", 0)))


def graph_output(m):
    return signed(m.get("value", 0)) + role(m) + signed(m.get("mayAlias", -1))


def attribute(m):
    if "intValue" in m:
        value = b"\0" + signed(m["intValue"])
    elif "floatValue" in m:
        value = b"\1" + struct.pack("<d", m["floatValue"])
    elif "intList" in m:
        value = b"\2" + listed(signed, m["intList"].get("values", []))
    else:
        value = b"\3" + text(m["stringValue"])
    return text(m["name"]) + value


def collective(m):
    part = m.get("part", 0)
    flags = ((1 if m.get("wantsGrad") else 0) + (2 if m.get("leadsToCollective") else 0) +
             (4 if m.get("leadsToLeaf") else 0) + (8 if part else 0))
    instance = m.get("instance", {})
    gradient = instance.get("gradient")
    bound = instance.get("bound")
    counts = m.get("runtimeCounts")
    return (enum(KINDS, "COLLECTIVE_KIND_", m["kind"]) + signed(m.get("groupSlot", 0)) +
            signed(m.get("rank", 0)) + signed(m.get("root", -1)) +
            enum(REDUCTIONS, "REDUCTION_", m.get("reduction", "REDUCTION_UNSPECIFIED")) +
            bytes([flags]) + (signed(part) if part else b"") + signed(m.get("peer", -1)) +
            signed(m.get("tag", 0)) +
            (b"\0" if not instance else b"\1" if gradient is not None else b"\2") +
            signed(-1 if gradient is None else gradient.get("node", 0)) +
            signed(0 if gradient is None else gradient.get("request", 0)) +
            signed(-1 if bound is None else bound.get("slot", 0)) +
            listed(signed, m.get("counts", [])) +
            signed(-1 if counts is None else counts.get("input", 0)) +
            signed(0 if counts is None else counts.get("maximum", 0)))


def node(m):
    effect = m.get("effect", "EFFECT_COLLECTIVE" if "collective" in m else "EFFECT_PURE")
    attributes = sorted(m.get("attributes", []), key=lambda a: a["name"].encode())
    return (text(m["op"]) + signed(m.get("version", 1)) + listed(attribute, attributes) +
            listed(signed, m.get("inputs", [])) + listed(tensor_type, m.get("outputs", [])) +
            signed(m.get("deviceSlot", 0)) + enum(EFFECTS, "EFFECT_", effect) +
            (b"\1" + collective(m["collective"]) if "collective" in m else b"\0") +
            text(m.get("source", "")))


def size_rule(m):
    place = 1 if m.get("count") else 2 if m.get("runtimeCountMaximum") else 0
    return (signed(m.get("node", 0)) + bytes([place]) + signed(m.get("attribute", 0)) +
            signed(m.get("element", 0)) + signed(m.get("symbol", 0)) + signed(m.get("scale", 0)) +
            signed(m.get("offset", 0)))


def graph(m):
    rules = m.get("sizeRules", [])
    return (b"CHRG" + signed(m.get("irVersion", 1)) + signed(m.get("deviceSlotCount", 1)) +
            signed(m.get("instanceSlotCount", 0)) + listed(group_slot, m.get("groupSlots", [])) +
            listed(graph_input, m.get("inputs", [])) + listed(node, m.get("nodes", [])) +
            listed(graph_output, m.get("outputs", [])) +
            (listed(size_rule, rules) if rules else b""))


class GraphEncodingTest(unittest.TestCase):

    def test_the_page_is_enough_to_make_the_golden_bytes(self):
        goldens = sorted(glob.glob(os.path.join(GOLDEN, "*.graph.hex")))
        self.assertGreaterEqual(len(goldens), 3)
        for golden in goldens:
            with self.subTest(golden), open(golden) as hexes:
                expected = bytes.fromhex(hexes.read())
                with open(golden[:-len(".graph.hex")] + ".json") as json_file:
                    message = json.load(json_file)
                made = graph(message.get("registerGraph", {}).get("graph", message))
                self.assertEqual(made.hex(" "), expected.hex(" "))

    def test_numbers_of_every_length(self):
        self.assertEqual([signed(n).hex() for n in (0, -1, 1, -2, 63, -64, 64)],
                         ["00", "01", "02", "03", "7e", "7f", "8001"])
        self.assertEqual(signed(-2**63).hex(), "ff" * 9 + "01")


if __name__ == "__main__":
    unittest.main()
