"""The client's messages are those of proto/, as fields and as bytes."""

import pathlib
import re

import pytest
from rapt import _messages, _reports
from rapt._messages import DOUBLE, INT, INT32, TEXT, UINT, decode, encode

PROTO = pathlib.Path(__file__).resolve().parents[3] / "proto/rapt/v1"
SOURCE = "".join((PROTO / name).read_text() for name in ("attention.proto", "cache.proto"))



def camel(name):
    return "".join(word.capitalize() for word in name.split("_"))


MESSAGES = {
    name: camel(name)
    for name, value in vars(_messages).items()
    if name.isupper() and isinstance(value, dict)
}
KINDS = {"double": DOUBLE, "string": TEXT, "bytes": "bytes", "int32": INT32, "uint64": UINT}


def fields_of(message):
    """name -> (number, kind as in _messages)."""
    indent, body = re.search(rf"^( *)message {message} {{\n(.*?)^\1}}", SOURCE, re.MULTILINE | re.DOTALL).groups()
    found = {}
    field = rf"^{indent}  (?:optional )?(repeated )?(\w+) (\w+) = (\d+);"
    for repeated, kind, name, number in re.findall(field, body, re.MULTILINE):
        is_message = re.search(rf"^ *message {kind} ", SOURCE, re.MULTILINE)
        kind = kind if is_message else KINDS.get(kind, INT)
        found[name] = int(number), [kind] if repeated else kind
    return found


def enumerators_of(name):
    """Of an enumeration, in the order of their numbers, which are all there."""
    body = re.search(rf"^enum {camel(name)} {{\n(.*?)^}}", SOURCE, re.MULTILINE | re.DOTALL)[1]
    found = re.findall(r"^  (\w+) = (\d+);", body, re.MULTILINE)
    assert [int(number) for _, number in found] == [*range(len(found))]
    return tuple(enumerator for enumerator, _ in found)


def named(kind):
    if isinstance(kind, list):
        return [named(kind[0])]
    if isinstance(kind, tuple):
        assert kind == enumerators_of(next(name for name, value in vars(_messages).items() if value is kind))
        return INT
    if isinstance(kind, (str, range)):
        return kind
    return next(MESSAGES[name] for name, value in vars(_messages).items() if value is kind)


@pytest.mark.parametrize("name", MESSAGES)
def test_fields_are_those_of_the_proto(name):
    proto = fields_of(MESSAGES[name])
    for field, (number, kind) in getattr(_messages, name).items():
        assert proto[field] == (number, named(kind)), field


# A field that is missing here would be left out of calls, whatever their options say.
@pytest.mark.parametrize(("name", "left_out"), (("ATTENTION", set()), ("ATTEND_REQUEST", {"priority", "places"})))
def test_calls_of_attention_have_every_field_of_the_proto(name, left_out):
    assert set(getattr(_messages, name)) == set(fields_of(MESSAGES[name])) - left_out


@pytest.mark.parametrize(
    ("kind", "message", "left_out"),
    (
        (_reports.Diagnosis, "DiagnoseResponse", {"gradients"}),
        (_reports.Range, "Range", set()),
        (_reports.TensorReport, "TensorReport", set()),
        (_reports.EmptyRows, "EmptyRows", set()),
        (_reports.BackendChoice, "BackendChoice", set()),
        (_reports.MemoryEstimates, "EstimateMemoryResponse", set()),
        (_reports.MemoryEstimate, "MemoryEstimate", set()),
        (_reports.InputEstimate, "InputEstimate", set()),
        (_reports.OperatorEstimate, "OperatorEstimate", set()),
        (_reports.LayerEstimate, "LayerEstimate", set()),
        (_reports.ServerInfo, "GetServerInfoResponse", set()),
        (_reports.BackendInfo, "BackendInfo", set()),
        (_reports.InstructionSetInfo, "InstructionSetInfo", set()),
        (_reports.AdmissionLimits, "AdmissionLimits", set()),
        (_reports.CacheLimits, "CacheLimits", set()),
        (_reports.LayerShape, "LayerShape", set()),
        (_reports.CacheInfo, "Cache", set()),
    ),
)
def test_reports_have_the_fields_of_the_proto(kind, message, left_out):
    assert set(kind.__dataclass_fields__) == set(fields_of(message)) - left_out


def joined(schema, values):
    return b"".join(bytes(buffer) for buffer in encode(schema, values))


INNER = {"n": (1, INT), "t": (16, TEXT)}
OUTER = {"n": (1, INT), "d": (2, DOUBLE), "m": (3, INNER), "many": (4, [INNER]), "numbers": (5, [INT]), "b": (2047, "bytes")}
OUTER |= {"e": (20, ("NONE", "ONE")), "i": (21, INT32), "u": (22, UINT)}


@pytest.mark.parametrize(
    ("values", "data"),
    (
        ({}, ""),
        ({"n": 1}, "0801"),
        ({"n": 0}, "0800"),
        ({"n": True}, "0801"),
        ({"n": 300}, "08ac02"),
        ({"n": -1}, "08ffffffffffffffffff01"),
        ({"n": -(2**63)}, "0880808080808080808001"),
        ({"d": 1.0}, "11000000000000f03f"),
        ({"m": {"t": "é"}}, "1a05820102c3a9"),
        ({"m": {}}, "1a00"),
        ({"many": [{"n": 5}, {}], "numbers": [3, 270]}, "22020805" + "2200" + "2a03038e02"),
        ({"b": b"xyz", "n": None}, "fa7f0378797a"),
        ({"e": "ONE"}, "a00101"),
        ({"i": -(2**31)}, "a80180808080f8ffffffff01"),
        ({"u": 2**64 - 1}, "b001ffffffffffffffffff01"),
    ),
)
def test_bytes_are_those_of_protocol_buffers(values, data):
    assert joined(OUTER, values).hex() == data
    want = {name: [] for name, (_, kind) in OUTER.items() if isinstance(kind, list)}
    want |= {name: value for name, value in values.items() if value is not None}
    want["many"] = [{"n": 5}, {}] if "many" in values else []
    assert decode(OUTER, memoryview(bytes.fromhex(data))) == want


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    (
        ("i", 2**31, ValueError, "^i is 2147483648; it must be from -2147483648 to 2147483647$"),
        ("n", 2**63, ValueError, "^n is "),
        ("numbers", [3, -(2**63) - 1], ValueError, "^numbers is "),
        ("u", -1, ValueError, "^u is -1; it must be from 0 to 18446744073709551615$"),
        ("u", 1.5, TypeError, "^u is 1.5; it must be an integer$"),
    ),
)
def test_integers_that_a_field_does_not_hold_are_refused(name, value, error, message):
    with pytest.raises(error, match=message):
        encode(OUTER, {name: value})


def test_unknown_fields_are_skipped_and_numbers_may_be_unpacked():
    unknown = bytes.fromhex("3005" + "3d01020304" + "390102030405060708" + "420161")
    data = unknown + bytes.fromhex("2803" + "0807" + "2804") + unknown
    assert decode(OUTER, memoryview(data)) == {"many": [], "numbers": [3, 4], "n": 7}


@pytest.mark.parametrize("data", ("08", "0880", "08" + "ff" * 11, "11ab", "1a05", "0b", "0c", "0e", "0a0161", "1001", "820101ff"))
def test_malformed_bytes_are_an_error(data):
    with pytest.raises((ValueError, LookupError)):
        decode(OUTER | {"text": (16, TEXT)}, memoryview(bytes.fromhex(data)))


@pytest.mark.parametrize(
    ("start", "at"),
    (
        ("", 0),
        ("0801" + "0a80808001", 0),  # no bytes: text
        ("0801" + "8280808080808080808080", 0),
        ("0801" + "fa7f8001" + "0102", 6),
        ("0801" + "fa7f02" + "0102" + "fa7f8001", 11),
        ("1100000000000000f0" + "1a8080808001" + "0801" + "0a80808001" + "01", 22),  # in a message
        ("1a8080808001" + "0801" + "0a8080", 0),  # cut within a size
        ("1a8080808001" + "4a80808001" + "01", 0),  # an unknown field
        ("0c", 0),
    ),
)
def test_the_place_of_a_payload_is_found_in_the_first_bytes(start, at):
    schema = OUTER | {"m": (3, {"n": (1, "bytes")})}
    assert _messages.payload_at(schema, memoryview(bytes.fromhex(start))) == at


def test_tensors_are_not_copied():
    data = bytearray(100)
    buffers = encode(_messages.ATTEND_REQUEST, {"q": {"dtype": 1, "shape": (25,), "data": memoryview(data)}, "want_lse": 1})
    data[:] = b"x" * 100
    assert any(buffer == b"x" * 100 for buffer in buffers) and len(buffers) == 3
