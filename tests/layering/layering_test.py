"""Include rules, as documented in docs/ARCHITECTURE.md. Change both together."""

import fnmatch
import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Part of the tree -> what its files may include besides themselves. The most specific part that a
# file belongs to decides alone. "x/" is everything below x; "x/*.h" is the headers right in x.
CALL = "call/include/rapt/*.h"
ATTENTION = (CALL, "attention/*.h", "attention/layer/*.h", "attention/mechanism/*/*.h", "attention/positions/*.h", "attention/rotary/*.h", "attention/score/*.h")
BACKENDS = ("attention/cpu/", "attention/cudnn/", "attention/reference/")
# Plain values that every part of the server may use.
VALUES = ("server/queue_state.h", "server/rejection.h", "server/request.h")
RULES = {
    "base/": (),
    "call/": (),
    "attention/*": (ATTENTION, "base/"),
    "attention/backends.cc": (ATTENTION, *BACKENDS, "base/"),
    # The C interface uses the library like an external caller.
    "attention/c/": (ATTENTION, "base/"),
    "attention/cpu/": (ATTENTION, "attention/score/", "base/"),
    "attention/cudnn/": (ATTENTION, "base/"),
    "attention/layer/": (ATTENTION, "base/"),
    "attention/layer/files/": (ATTENTION, "base/"),
    "attention/mechanism/": (ATTENTION, "attention/score/", "base/"),
    "attention/positions/": (ATTENTION, "base/"),
    "attention/reference/": (ATTENTION, "base/"),
    "attention/rotary/": (ATTENTION, "base/"),
    "attention/score/": (ATTENTION, "base/"),
    "server/main.cc": ("server/server.h", "server/options.h", "server/housekeeper.h", "base/"),
    "server/server.*": ("server/", "attention/", "base/"),
    "server/options.*": ("server/cache/limits.h", ATTENTION, "base/"),
    "server/request.*": (ATTENTION, "base/"),
    "server/queue_state.*": ("base/",),
    "server/rejection.*": ("base/",),
    "server/housekeeper.*": ("base/",),
    "server/engine.*": (
        "server/attention_stream.h",
        *VALUES,
        "server/admission/",
        "server/execution/",
        "server/metrics/",
        ATTENTION,
        "base/",
    ),
    "server/readiness.*": ("server/execution/", ATTENTION, "base/"),
    "server/attention_stream.*": (
        *VALUES,
        "server/admission/",
        "server/execution/",
        ATTENTION,
        "base/",
    ),
    "server/calls/": ("server/engine.h", *VALUES, ATTENTION, "base/"),
    # Codecs use the library's values, of which requests consist.
    "server/protocols/": (*VALUES, "server/attention_stream.h", "server/cache/", "server/calls/", "server/models/", "server/shared_memory/", ATTENTION, "base/", "proto/"),
    "server/wire/": (
        "server/engine.h",
        "server/attention_stream.h",
        *VALUES,
        "server/cache/",
        "server/calls/",
        "server/models/",
        "server/protocols/",
        "server/shared_memory/",
        ATTENTION,
        "base/",
        "proto/",
    ),
    "server/wire/http/": ("server/wire/*.h", "server/calls/", "server/protocols/*.h", *VALUES, "base/"),
    "server/shared_memory/": ("base/",),
    "server/cache/": (*VALUES, ATTENTION, "base/"),
    "server/models/": ("server/request.h", "server/admission/", "attention/layer/files/", ATTENTION, "base/"),
    "server/admission/": (*VALUES, ATTENTION, "base/"),
    "server/execution/": (*VALUES, ATTENTION, "base/"),
    "server/metrics/": (*VALUES, "server/calls/", ATTENTION, "base/"),
    "client/": ("proto/", CALL, "base/"),
    "client/cpp/": ("proto/", CALL, "base/"),
    # The command line uses the client library; `--local` computes in process.
    "client/cli/": ("client/console/", "client/cpp/", "attention/layer/files/", ATTENTION, "base/"),
    "client/console/": ("client/cpp/", CALL, "base/"),
    "client/http/": ("client/cpp/", CALL, "base/"),
    # The load tester sends messages encoded by the library and checks responses against the definition.
    "client/load/": ("client/console/", "client/cpp/", "client/http/", "proto/", ATTENTION, "base/"),
}

# The parts that may include these libraries; no other part may.
WIRE_LIBRARIES = ("grpc", "google/protobuf/", "prometheus/", "boost/", "nghttp2/", "openssl/")
KNOWS_WIRE_LIBRARIES = (
    "server/server.cc",
    "server/wire/",
    "server/protocols/",
    "server/calls/tokens.cc",
    "server/metrics/",
    "client/cpp/",
    "client/http/",
    "client/load/",
)

# The same for JSON; attention/cudnn/ includes it for cudnn-frontend.
JSON_LIBRARY = "nlohmann/"
KNOWS_JSON = ("attention/cudnn/", "attention/layer/files/", "base/strict_json.*", "server/protocols/", "server/wire/")

INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)
OURS = ("attention/", "base/", "call/", "server/", "client/", "proto/", "tests/", "bench/")


def matches(path, pattern):
    if pattern.endswith("/"):
        return path.startswith(pattern)
    return fnmatch.fnmatch(path, pattern) and path.count("/") == pattern.count("/")


def part_of(path):
    """Returns the most specific part of RULES that contains the file, or None."""
    parts = [part for part in RULES if matches(path, part)]
    return max(parts, key=len, default=None)


def flat(patterns):
    """Returns the patterns with groups such as ATTENTION expanded."""
    return [p for entry in patterns for p in ((entry,) if isinstance(entry, str) else entry)]


def violation(path, included):
    """Returns why `path` must not include `included`, or None."""
    if included.startswith(WIRE_LIBRARIES):
        if not any(matches(path, part) for part in KNOWS_WIRE_LIBRARIES):
            return f"{path}: only {', '.join(KNOWS_WIRE_LIBRARIES)} may include {included}"
        return None
    if included.startswith(JSON_LIBRARY):
        if not any(matches(path, part) for part in KNOWS_JSON):
            return f"{path}: only {', '.join(KNOWS_JSON)} may include {included}"
        return None
    # The public headers of calls and of the client library, as included by users.
    if included.startswith("rapt/"):
        is_of_calls = (ROOT / "call/include" / included).exists()
        included = ("call/include/" if is_of_calls else "client/cpp/include/") + included
    if not included.startswith(OURS):
        return None  # the standard library, Abseil
    part = part_of(path)
    if part is None:
        return f"{path}: belongs to no part of the tree that the rules know"
    allowed = flat((part, *RULES[part]))
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
    files = [f for top in ("attention", "base", "server", "client") for f in (ROOT / top).rglob("*") if f.suffix in (".h", ".cc", ".inc")]
    return {f.relative_to(ROOT).as_posix(): f.read_text(encoding="utf-8") for f in files}


class LayeringTest(unittest.TestCase):
    def test_the_tree_follows_the_rules(self):
        sources = our_sources()
        self.assertGreater(len(sources), 20)
        found = violations(sources)
        self.assertEqual(found, [], "\n" + "\n".join(found))

    def test_planted_includes_are_caught(self):
        planted = {
            "attention/plan.cc": '#include "attention/cpu/kernels.h"',
            "attention/mechanism/softmax/chunked.cc": '#include "attention/cpu/kernels.h"',
            "attention/problem.h": "#include <grpcpp/grpcpp.h>",
            "attention/attention.h": '#include "server/engine.h"',
            "attention/layer/layer.cc": "#include <nlohmann/json.hpp>",
            "attention/cpu/cpu_backend.cc": '#include "attention/reference/reference_backend.h"',
            "attention/c/c_interface.cc": '#include "attention/cpu/kernels.h"',
            "base/json_string.cc": "#include <nlohmann/json.hpp>",
            "base/mutex.h": '#  include "server/request.h"',
            "server/admission/queue.h": '#include "server/engine.h"',
            "server/execution/scheduler.cc": '#include "server/protocols/oip/codec.h"',
            "server/engine.cc": '#include "google/protobuf/message.h"',
            "server/protocols/oip/codec.cc": '#include "server/admission/memory_budget.h"',
            "server/protocols/rapt/codec.cc": '#include "attention/cpu/kernels.h"',
            "server/request.cc": '#include "rapt/client.h"',
            "server/wire/http/server.cc": '#include "server/engine.h"',
            "client/cpp/client.cc": '#include "attention/attention.h"',
            "server/novelty/novelty.cc": '#include "base/mutex.h"',
        }
        caught = violations(planted)
        self.assertEqual([message.split(":")[0] for message in caught], sorted(planted))

    def test_allowed_includes_pass(self):
        allowed = {
            "attention/backends.cc": '#include "attention/cpu/cpu_backend.h"',
            "attention/cpu/cpu_backend.cc": '#include "attention/backend.h"\n#include <vector>',
            "server/wire/oip/methods.cc": '#include "proto/inference/grpc_service.pb.h"',
            "server/server.cc": '#include "server/wire/oip/methods.h"',
            "client/cli/attend.cc": '#include "attention/attention.h"\n#include "rapt/client.h"',
            "client/cpp/client.cc": '#include "rapt/client.h"\n#include <grpcpp/grpcpp.h>',
        }
        self.assertEqual(violations(allowed), [])


if __name__ == "__main__":
    unittest.main()
