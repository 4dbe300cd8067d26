#include "client/cli/cache_report.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "client/console/text.h"

namespace rapt {
namespace {

// "9m59s"
std::string HumanSeconds(std::chrono::milliseconds time) {
  return absl::FormatDuration(absl::Trunc(absl::FromChrono(time), absl::Seconds(1)));
}

// "3", or "3..9" if the layers differ.
std::string HumanLengths(const std::vector<int64_t>& lengths) {
  const auto [least, most] = std::minmax_element(lengths.begin(), lengths.end());
  if (least == lengths.end()) return "-";
  return *least == *most ? absl::StrCat(*least) : absl::StrCat(*least, "..", *most);
}

bool IsInt8(const client::CacheInfo& cache) { return cache.storage == client::CacheStorage::kInt8; }

std::string Describe(const client::LayerShape& shape) {
  std::string text = absl::StrFormat("%d of Hkv %d, D %d, Dv %d", shape.layers, shape.kv_heads,
                                     shape.head_size, shape.value_head_size);
  if (shape.keep_last > 0) absl::StrAppend(&text, ", keeps the last ", shape.keep_last);
  if (shape.keep_first > 0) absl::StrAppend(&text, ", positions below ", shape.keep_first);
  return text;
}

}  // namespace

void PrintTable(const std::vector<client::CacheInfo>& caches) {
  constexpr size_t kColumns = 6;
  std::vector<std::array<std::string, kColumns>> rows = {
      {"id", "name", "bytes", "shared", "lengths", "lease left"}};
  for (const client::CacheInfo& cache : caches) {
    rows.push_back({cache.id, cache.name, HumanBytes(cache.bytes), HumanBytes(cache.shared_bytes),
                    HumanLengths(cache.lengths), HumanSeconds(cache.expires_in)});
  }
  std::array<int, kColumns> widths = {};
  for (const auto& row : rows) {
    for (size_t n = 0; n < kColumns; ++n) {
      widths[n] = std::max(widths[n], static_cast<int>(row[n].size()));
    }
  }
  for (const auto& row : rows) {
    absl::PrintF("%-*s  %-*s", widths[0], row[0], widths[1], row[1]);
    for (size_t n = 2; n < kColumns; ++n) absl::PrintF("  %*s", widths[n], row[n]);
    std::puts("");
  }
}

void Print(const client::CacheInfo& cache) {
  absl::PrintF("id          %s\nname        %s\n", cache.id, cache.name);
  for (const client::LayerShape& shape : cache.shapes) {
    absl::PrintF("layers      %s\n", Describe(shape));
  }
  absl::PrintF("dtype       %s%s\n", client::NameOf(cache.dtype),
               IsInt8(cache) ? ", stored as INT8" : "");
  absl::PrintF("lengths     %s\n", HumanLengths(cache.lengths));
  absl::PrintF("position    %d of token 0\n", cache.first_position);
  absl::PrintF("generation  %d\n", cache.generation);
  absl::PrintF("lease       %s, %s left\n", HumanSeconds(cache.lease),
               HumanSeconds(cache.expires_in));
  absl::PrintF("memory      %s, %s of it shared, %d tokens reserved\n", HumanBytes(cache.bytes),
               HumanBytes(cache.shared_bytes), cache.reserve_tokens);
}

void Write(const client::CacheInfo& cache, JsonWriter& json) {
  json.BeginObject().Key("id").String(cache.id).Key("name").String(cache.name);
  json.Key("shapes").BeginArray();
  for (const client::LayerShape& shape : cache.shapes) {
    json.BeginObject().Key("layers").Integer(shape.layers).Key("kv_heads").Integer(shape.kv_heads);
    json.Key("head_size").Integer(shape.head_size);
    json.Key("value_head_size").Integer(shape.value_head_size);
    json.Key("keep_first").Integer(shape.keep_first).Key("keep_last").Integer(shape.keep_last);
    json.EndObject();
  }
  const absl::string_view dtype = client::NameOf(cache.dtype);
  json.EndArray().Key("dtype").String({dtype.data(), dtype.size()});
  json.Key("storage").String(IsInt8(cache) ? "int8" : "plain");
  json.Key("first_position").Integer(cache.first_position);
  json.Key("lengths").Integers(cache.lengths);
  json.Key("generation").Integer(static_cast<int64_t>(cache.generation));
  json.Key("lease_ms").Integer(cache.lease.count());
  json.Key("expires_in_ms").Integer(cache.expires_in.count());
  json.Key("reserve_tokens").Integer(cache.reserve_tokens);
  json.Key("bytes").Integer(cache.bytes).Key("shared_bytes").Integer(cache.shared_bytes);
  json.EndObject();
}

void PrintJson(const client::CacheInfo& cache) {
  JsonWriter json;
  Write(cache, json);
  std::puts(json.Take().c_str());
}

ExitCode PrintMade(absl::StatusOr<client::Cache> made, bool json) {
  if (!made.ok()) return FailCall(made.status());
  if (json) {
    RAPT_ASSIGN_OR_EXIT(const client::CacheInfo info, FailCall, made->Refresh());
    PrintJson(info);
    made->Release();
  } else {
    std::puts(made->Release().c_str());
  }
  return ExitCode::kOk;
}

}  // namespace rapt
