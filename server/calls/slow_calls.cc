#include "server/calls/slow_calls.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "attention/diagnosis.h"
#include "base/clock.h"
#include "base/log.h"

namespace rapt {
namespace {

std::vector<LogField> FieldsOf(absl::string_view method, const CallReport& report) {
  std::vector<LogField> fields = {{"method", method},
                                  {"code", absl::StatusCodeToString(report.status.code())},
                                  {"total_us", Microseconds(report.total)}};
  const std::pair<const char*, Stage> stages[] = {{"receive_us", Stage::kReceive},
                                                  {"queue_us", Stage::kQueue},
                                                  {"compute_us", Stage::kCompute},
                                                  {"send_us", Stage::kSend}};
  for (const auto& [key, stage] : stages) {
    const std::chrono::nanoseconds time = report.time_of(stage);
    if (time != CallReport::kNever) fields.emplace_back(key, Microseconds(time));
  }
  if (report.problem != nullptr) fields.emplace_back("call", Describe(*report.problem));
  if (report.routing.backend != nullptr) fields.emplace_back("plan", report.plan);
  if (const Backend* piece_fallback = report.routing.piece_fallback; piece_fallback != nullptr) {
    fields.emplace_back("stand_in", piece_fallback->name());
  }
  if (!report.traceparent.empty()) fields.emplace_back("traceparent", report.traceparent);
  fields.emplace_back("received_bytes", report.received_bytes);
  fields.emplace_back("sent_bytes", report.sent_bytes);
  return fields;
}

}  // namespace

void SlowCalls::Note(absl::string_view method, const CallReport& report) {
  if (limit_ == std::chrono::nanoseconds::zero() || report.total < limit_) return;
  const std::optional<int64_t> left_out = lines_.Take();
  if (!left_out) return;
  std::vector<LogField> fields = FieldsOf(method, report);
  if (*left_out > 0) fields.emplace_back("left_out", *left_out);
  Log(LogLevel::kWarning, "slow call", fields);
}

}  // namespace rapt
