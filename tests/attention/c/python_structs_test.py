"""The ctypes structs and enumerations of client/python/rapt/capi.py are those of rapt/attention.h.

Needs RAPT_LIBRARY, which the module loads."""

import ctypes
import pathlib
import re
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "client/python/rapt"))  # not the package, which needs NumPy

import capi  # noqa: E402

HEADER = re.sub(r"/\*.*?\*/", "", (ROOT / "attention/c/include/rapt/attention.h").read_text(), flags=re.DOTALL)
TYPES = {
    "size_t": ctypes.c_size_t,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "double": ctypes.c_double,
    "const char*": ctypes.c_char_p,
    "const void*": ctypes.c_void_p,
    "void*": ctypes.c_void_p,
    "const int64_t*": ctypes.c_void_p,
    "rapt_input": capi.Tensor,
    "rapt_output": capi.Tensor,
}


def fields_of(struct):
    """(name, type) of each field of a struct in the header."""
    body = re.search(rf"typedef struct {struct} {{(.*?)\n}} {struct};", HEADER, re.DOTALL).group(1)
    fields = []
    for text, name, count in re.findall(r"([\w ]+?\*?)\s+(\w+)(?:\[(\d+)\])?;", body):
        kind = TYPES[text.strip()]
        fields.append((name, kind * int(count) if count else kind))
    return fields


def values_of(enum):
    """Name without RAPT_, in lower case -> value."""
    body = re.search(rf"typedef enum {enum} {{(.*?)\n}} {enum};", HEADER, re.DOTALL).group(1)
    return {name.lower(): eval(value) for name, value in re.findall(r"RAPT_(\w+) = ([\d< ]+)", body)}


class PythonStructsTest(unittest.TestCase):
    def test_every_struct_has_the_fields_of_the_header(self):
        for struct, copy in {
            "rapt_context_options": capi.ContextOptions,
            "rapt_problem": capi.Problem,
            "rapt_arguments": capi.Arguments,
            "rapt_tensor": capi.NamedTensor,
            "rapt_input": capi.Tensor,
            "rapt_output": capi.Tensor,
        }.items():
            self.assertEqual(fields_of(struct), copy._fields_, struct)

    def test_every_enumeration_has_the_values_of_the_header(self):
        names = ("FP32", "FP16", "BF16", "FP64", "BOOL", "INT32", "INT64")
        types = {name.lower(): getattr(capi, name) for name in names}
        for enum, copy in {
            "rapt_dtype": types,
            "rapt_score_output": {"no_scores": 0, **capi.SCORE_OUTPUTS},
            "rapt_score_function": capi.SCORE_FUNCTIONS,
            "rapt_alignment": capi.ALIGNMENTS,
            "rapt_normalizer": capi.NORMALIZERS,
            "rapt_gradient": {f"d_{name}": 1 << bit for bit, name in enumerate(capi.GRADIENTS)},
        }.items():
            self.assertEqual(values_of(enum), copy, enum)

    def test_every_size_is_that_of_the_header(self):
        for name in ("MESSAGE_BYTES", "MAX_RANK"):
            self.assertEqual(int(re.search(rf"#define RAPT_{name} (\d+)", HEADER)[1]), getattr(capi, name), name)


if __name__ == "__main__":
    unittest.main()
