"""Who may include whom. The rules are docs/ARCHITECTURE.md's; change both in one deliberate step."""

import fnmatch
import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Part of the tree -> what its files may include beside themselves. The most specific part that a
# file belongs to decides alone. "x/" is everything below x; "x/*.h" is the headers right in x.
ATTENTION = "server/attention/*.h"
BACKENDS = ("server/attention/cpu/", "server/attention/cudnn/", "server/attention/reference/")
RULES = {
    "server/main.cc": ("server/", "proto/"),
    "server/options.*": (ATTENTION, "server/base/"),
    "server/request.*": (ATTENTION, "server/base/"),
    "server/engine.*": (
        "server/attention_stream.h",
        "server/request.h",
        "server/admission/",
        "server/execution/",
        "server/metrics/",
        ATTENTION,
        "server/base/",
    ),
    "server/readiness.*": ("server/execution/", ATTENTION, "server/base/"),
    "server/slow_calls.*": ("server/call_report.h", ATTENTION, "server/base/"),
    "server/attention_stream.*": (
        "server/request.h",
        "server/admission/",
        "server/execution/",
        ATTENTION,
        "server/base/",
    ),
    "server/call_report.*": ("server/request.h", ATTENTION, "server/base/"),
    # A request is made of the library's values, so that a codec names them.
    "server/wire/": (
        "server/engine.h",
        "server/attention_stream.h",
        "server/request.h",
        "server/call_report.h",
        "server/shared_memory/",
        ATTENTION,
        "server/base/",
        "proto/",
    ),
    "server/shared_memory/": ("server/base/",),
    "server/admission/": ("server/request.h", ATTENTION, "server/base/"),
    "server/execution/": ("server/request.h", ATTENTION, "server/base/"),
    "server/metrics/": ("server/call_report.h", ATTENTION, "server/base/"),
    "server/base/": (),
    "server/attention/*": (ATTENTION, "server/base/"),
    "server/attention/backends.cc": (ATTENTION, *BACKENDS, "server/base/"),
    # The C interface: a caller of the library, like those outside.
    "server/attention/c/": (ATTENTION, "server/base/"),
    "server/attention/cpu/": (ATTENTION, "server/base/"),
    "server/attention/cudnn/": (ATTENTION, "server/base/"),
    "server/attention/reference/": (ATTENTION, "server/base/"),
    "client/": ("proto/", "server/base/"),
    "client/rapt/": ("proto/", "server/base/"),
    # The command line speaks through the library; `--local` computes in process.
    "client/cli/": ("client/console/", "client/rapt/", ATTENTION, "server/base/"),
    "client/console/": ("client/rapt/",),
    # The load tester sends what the library has encoded, and checks answers against the definition.
    "client/load/": ("client/console/", "client/rapt/", "proto/", ATTENTION, "server/base/"),
}

# Who may know what travels or is scraped; everybody else is free of these libraries.
WIRE_LIBRARIES = ("grpc", "google/protobuf/", "prometheus/", "civetweb", "CivetServer", "openssl/")
KNOWS_WIRE_LIBRARIES = ("server/main.cc", "server/wire/", "server/metrics/", "client/rapt/", "client/load/")

INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)
OURS = ("server/", "client/", "proto/", "tests/", "bench/")


def matches(path, pattern):
    if pattern.endswith("/"):
        return path.startswith(pattern)
    return fnmatch.fnmatch(path, pattern) and path.count("/") == pattern.count("/")


def part_of(path):
    """The most specific part of RULES that holds the file, or None."""
    parts = [part for part in RULES if matches(path, part)]
    return max(parts, key=len, default=None)


def violation(path, included):
    """Why `path` must not include `included`, or None."""
    if included.startswith(WIRE_LIBRARIES):
        if not any(matches(path, part) for part in KNOWS_WIRE_LIBRARIES):
            return f"{path}: only {', '.join(KNOWS_WIRE_LIBRARIES)} may include {included}"
        return None
    if included.startswith("rapt/"):
        included = "client/" + included  # as users of the installed library write it
    # The client library's public headers, as its users name them.
    if included.startswith("rapt/"):
        included = "client/" + included
    if not included.startswith(OURS):
        return None  # the standard library, Abseil
    part = part_of(path)
    if part is None:
        return f"{path}: belongs to no part of the tree that the rules know"
    allowed = (part, *RULES[part])
    if not any(matches(included, pattern) for pattern in allowed):
        return f"{path}: {part} may not include {included}; it may include {', '.join(allowed)}"
    return None


def violations(sources):
    """sources: path from the root -> text."""
    found = []
    for path, text in sorted(sources.items()):
        for quoted, angled in INCLUDE.findall(text):
            found.append(violation(path, quoted or angled))
    return [message for message in found if message]


def our_sources():
    files = [f for top in ("server", "client") for f in (ROOT / top).rglob("*") if f.suffix in (".h", ".cc", ".inc")]
    return {f.relative_to(ROOT).as_posix(): f.read_text(encoding="utf-8") for f in files}


class LayeringTest(unittest.TestCase):
    def test_the_tree_keeps_the_rules(self):
        sources = our_sources()
        self.assertGreater(len(sources), 20)
        found = violations(sources)
        self.assertEqual(found, [], "\n" + "\n".join(found))

    def test_planted_includes_are_caught(self):
        planted = {
            "server/attention/plan.cc": '#include "server/attention/cpu/kernels.h"',
            "server/attention/problem.h": "#include <grpcpp/grpcpp.h>",
            "server/attention/attention.h": '#include "server/engine.h"',
            "server/attention/cpu/cpu_backend.cc": '#include "server/attention/reference/reference_backend.h"',
            "server/attention/c/c_interface.cc": '#include "server/attention/cpu/kernels.h"',
            "server/base/mutex.h": '#  include "server/request.h"',
            "server/admission/queue.h": '#include "server/engine.h"',
            "server/execution/scheduler.cc": '#include "server/wire/oip/codec.h"',
            "server/engine.cc": '#include "google/protobuf/message.h"',
            "server/wire/oip/codec.cc": '#include "server/admission/memory_budget.h"',
            "server/wire/rapt/codec.cc": '#include "server/attention/cpu/kernels.h"',
            "server/request.cc": '#include "rapt/client.h"',
            "client/rapt/client.cc": '#include "server/attention/attention.h"',
            "server/novelty/novelty.cc": '#include "server/base/mutex.h"',
        }
        caught = violations(planted)
        self.assertEqual([message.split(":")[0] for message in caught], sorted(planted))

    def test_allowed_includes_pass(self):
        allowed = {
            "server/attention/backends.cc": '#include "server/attention/cpu/cpu_backend.h"',
            "server/attention/cpu/cpu_backend.cc": '#include "server/attention/backend.h"\n#include <vector>',
            "server/wire/oip/service.cc": '#include "proto/inference/service.grpc.pb.h"',
            "server/main.cc": '#include "server/wire/oip/service.h"',
            "client/cli/attend.cc": '#include "server/attention/attention.h"\n#include "rapt/client.h"',
            "client/rapt/client.cc": '#include "rapt/client.h"\n#include <grpcpp/grpcpp.h>',
        }
        self.assertEqual(violations(allowed), [])


if __name__ == "__main__":
    unittest.main()
