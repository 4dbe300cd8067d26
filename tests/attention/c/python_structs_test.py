"""The ctypes structs of bench/rapt_attention.py have the fields of rapt/attention.h."""

import ctypes
import pathlib
import re
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "bench"))

import rapt_attention  # noqa: E402

HEADER = (ROOT / "attention/c/include/rapt/attention.h").read_text()
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
    "float*": ctypes.c_void_p,
    "int32_t*": ctypes.c_void_p,
    "rapt_input": rapt_attention.Tensor,
    "rapt_output": rapt_attention.Tensor,
}


def fields_of(struct):
    """(name, type) of each field of a struct in the header."""
    body = re.search(rf"typedef struct {struct} {{(.*?)\n}} {struct};", HEADER, re.DOTALL).group(1)
    body = re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL)
    fields = []
    for text, name, count in re.findall(r"([\w ]+?\*?)\s+(\w+)(?:\[(\d+)\])?;", body):
        kind = TYPES[text.strip()]
        fields.append((name, kind * int(count) if count else kind))
    return fields


class PythonStructsTest(unittest.TestCase):
    def test_every_struct_has_the_fields_of_the_header(self):
        for struct, copy in {
            "rapt_context_options": rapt_attention.ContextOptions,
            "rapt_problem": rapt_attention.Problem,
            "rapt_arguments": rapt_attention.Arguments,
            "rapt_linear_problem": rapt_attention.LinearProblem,
            "rapt_linear_arguments": rapt_attention.LinearArguments,
            "rapt_lsh_problem": rapt_attention.LshProblem,
            "rapt_lsh_arguments": rapt_attention.LshArguments,
            "rapt_input": rapt_attention.Tensor,
            "rapt_output": rapt_attention.Tensor,
        }.items():
            self.assertEqual(fields_of(struct), copy._fields_, struct)


if __name__ == "__main__":
    unittest.main()
