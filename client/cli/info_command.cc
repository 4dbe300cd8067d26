#include <chrono>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "client/cli/commands.h"
#include "client/console/json.h"
#include "client/console/server_connection.h"
#include "client/console/text.h"

namespace rapt {
namespace {

// "avx512 (in use), avx2, portable". Omits sets that the machine does not support.
std::string NameSets(const client::BackendInfo& backend) {
  std::vector<std::string> names;
  for (const client::InstructionSetInfo& set : backend.instruction_sets) {
    if (set.available) names.push_back(absl::StrCat(set.name, set.in_use ? " (in use)" : ""));
  }
  return absl::StrJoin(names, ", ");
}

// "1m30s".
std::string HumanTime(std::chrono::milliseconds time) {
  return absl::FormatDuration(absl::FromChrono(time));
}

void PrintCaches(const std::optional<client::CacheLimits>& caches) {
  if (!caches) {
    absl::PrintF("caches    none: the server runs without --kv_cache_bytes\n");
    return;
  }
  const int64_t per_caller =
      caches->max_bytes_per_caller > 0 ? caches->max_bytes_per_caller : caches->max_bytes;
  absl::PrintF("caches    up to %s; %s in %d caches per caller\n", HumanBytes(caches->max_bytes),
               HumanBytes(per_caller), caches->max_caches_per_caller);
  absl::PrintF("leases    %s by default, %s at most\n", HumanTime(caches->default_lease),
               HumanTime(caches->max_lease));
}

void Print(const client::ServerInfo& info, const std::string& address) {
  absl::PrintF("server    rapt-server %s at %s\n", info.version, address);
  for (const client::BackendInfo& backend : info.backends) {
    absl::PrintF("backend   %s%s\n", backend.name,
                 backend.available ? "" : absl::StrCat(", not available: ", backend.reason));
    const std::string sets = NameSets(backend);
    if (!sets.empty()) absl::PrintF("          %s\n", sets);
  }
  absl::PrintF("chosen    --backend=%s --isa=%s\n", info.backend, info.isa);
  absl::PrintF("threads   %d\n", info.compute_threads);
  absl::PrintF("memory    %s of %s reserved\n", HumanBytes(info.memory_reserved_bytes),
               HumanBytes(info.memory_budget_bytes));
  const client::AdmissionLimits& limits = info.admission;
  absl::PrintF("messages  up to %s, received at %s/s at least\n",
               HumanBytes(info.max_message_bytes), HumanBytes(limits.min_receive_bytes_per_second));
  absl::PrintF("requests  up to %s of outputs and workspace\n",
               HumanBytes(limits.max_compute_bytes));
  absl::PrintF("calls     up to %d open, %d per caller\n", limits.max_open_calls,
               limits.max_calls_per_caller);
  absl::PrintF("queue     up to %d requests, for %s at most\n", limits.max_queued_requests,
               HumanTime(limits.max_queue_delay));
  absl::PrintF("deadline  %s by default, %s at most\n", HumanTime(limits.default_deadline),
               HumanTime(limits.max_deadline));
  PrintCaches(info.caches);
}

void WriteBackend(const client::BackendInfo& backend, JsonWriter& json) {
  json.BeginObject().Key("name").String(backend.name);
  json.Key("available").Boolean(backend.available).Key("reason").String(backend.reason);
  json.Key("instruction_sets").BeginArray();
  for (const client::InstructionSetInfo& set : backend.instruction_sets) {
    json.BeginObject().Key("name").String(set.name).Key("available").Boolean(set.available);
    json.Key("in_use").Boolean(set.in_use).EndObject();
  }
  json.EndArray().EndObject();
}

void WriteAdmission(const client::AdmissionLimits& limits, JsonWriter& json) {
  json.BeginObject().Key("max_open_calls").Integer(limits.max_open_calls);
  json.Key("max_calls_per_caller").Integer(limits.max_calls_per_caller);
  json.Key("max_compute_bytes").Integer(limits.max_compute_bytes);
  json.Key("max_queued_requests").Integer(limits.max_queued_requests);
  json.Key("max_queue_delay_ms").Integer(limits.max_queue_delay.count());
  json.Key("min_receive_bytes_per_second").Integer(limits.min_receive_bytes_per_second);
  json.Key("default_deadline_ms").Integer(limits.default_deadline.count());
  json.Key("max_deadline_ms").Integer(limits.max_deadline.count()).EndObject();
}

void WriteCaches(const client::CacheLimits& limits, JsonWriter& json) {
  json.BeginObject().Key("max_bytes").Integer(limits.max_bytes);
  json.Key("max_bytes_per_caller").Integer(limits.max_bytes_per_caller);
  json.Key("max_caches_per_caller").Integer(limits.max_caches_per_caller);
  json.Key("default_lease_ms").Integer(limits.default_lease.count());
  json.Key("max_lease_ms").Integer(limits.max_lease.count()).EndObject();
}

void PrintJson(const client::ServerInfo& info, const std::string& address) {
  JsonWriter json;
  json.BeginObject().Key("address").String(address).Key("version").String(info.version);
  json.Key("backends").BeginArray();
  for (const client::BackendInfo& backend : info.backends) WriteBackend(backend, json);
  json.EndArray().Key("backend").String(info.backend).Key("isa").String(info.isa);
  json.Key("compute_threads").Integer(info.compute_threads);
  json.Key("memory_budget_bytes").Integer(info.memory_budget_bytes);
  json.Key("memory_reserved_bytes").Integer(info.memory_reserved_bytes);
  json.Key("max_message_bytes").Integer(info.max_message_bytes);
  json.Key("admission");
  WriteAdmission(info.admission, json);
  if (info.caches) WriteCaches(*info.caches, json.Key("caches"));
  json.EndObject();
  std::puts(json.Take().c_str());
}

}  // namespace

ExitCode RunInfoCommand(CommandArguments arguments) {
  ServerFlags flags;
  bool as_json = false;
  const CommandLine line{
      .usage = "rapt info [flags]",
      .summary =
          "Shows a server's version, backends, instruction sets, threads, limits and caches.",
      .flags = Joined({flags.Table(), {{"json", "", "print the report as JSON", &as_json}}}),
      .examples = {"rapt info", "rapt info --address 127.0.0.1:8001 --json"}};
  if (const std::optional<ExitCode> done = ParseOrExit(line, arguments)) return *done;
  RAPT_ASSIGN_OR_EXIT(const auto server, FailConnect, Connect(flags));
  RAPT_ASSIGN_OR_EXIT(const client::ServerInfo info, FailCall, server->GetServerInfo());
  (as_json ? PrintJson : Print)(info, flags.address);
  return ExitCode::kOk;
}

}  // namespace rapt
