#include "server/wire/http/http_call.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "server/rejection.h"
#include "server/wire/timeout.h"
#include "server/wire/trailers.h"

namespace rapt::http {
namespace {

// Of a chunked body, whose size is not known in advance.
constexpr int64_t kSlabBytes = 1 << 20;

std::vector<Header> HeadersOf(const Call& call, const absl::Status& status,
                              std::vector<Header> headers) {
  for (auto& [name, value] : TrailersOf(call, status)) {
    headers.push_back({name, std::move(value)});
  }
  return headers;
}

}  // namespace

HttpCall::HttpCall(Connection& connection, const CallEnvironment& environment, BufferPool& pool,
                   LiveCount& live_calls, CalledMethod called)
    : UnaryCall(environment, called.method->observe, called.method->traits),
      loop_(connection.loop()),
      weak_connection_(connection.weak_from_this()),
      connection_(&connection),
      number_(connection.call_number()),
      pool_(pool),
      place_(live_calls),
      called_(std::move(called)) {}

void HttpCall::Begin(const Request& request) {
  handler_ = called_.method->new_handler(request, called_.values);
  CallHeaders headers = {.authorization = request.Values(kAuthorizationHeader),
                         .traceparent = request.Values(kTraceparentHeader),
                         .certificate = connection_->certificate(),
                         .peer = connection_->peer()};
  std::optional<std::chrono::nanoseconds> timeout = std::chrono::nanoseconds::max();
  const HeaderValues timeouts = request.Values(kTimeoutHeader);
  if (timeouts.size() == 1) timeout = ParseTimeout(timeouts[0]);
  if (timeouts.size() > 1) timeout = std::nullopt;
  const Instant arrived = call().arrived();
  if (timeout && *timeout < Instant::max() - arrived) headers.deadline = arrived + *timeout;
  OnHeaders(headers);
  if (has_finished_) return;
  is_reading_ = true;
  if (!timeout) {
    return OnBadRead(absl::InvalidArgumentError(
        timeouts.size() > 1
            ? absl::StrCat("the request has several headers ", kTimeoutHeader)
            : absl::StrCat("header ", kTimeoutHeader, " is invalid; ", kTimeoutFormat)));
  }
  is_chunked_ = request.is_chunked;
  const auto length = static_cast<int64_t>(request.content_length);
  const absl::StatusOr<int64_t> extra = is_chunked_ ? 0 : handler_->ExtraBytes(length);
  if (!extra.ok()) return OnBadRead(extra.status());
  admitted_ = is_chunked_ ? SlabBytes() : length;
  is_reading_ = false;
  OnSize(admitted_, *extra);
}

// Beyond the limit, a slab of one byte, which is refused.
int64_t HttpCall::SlabBytes() {
  const int64_t most = call().traits().carries_tensors ? call().limits().max_message_bytes
                                                       : call().traits().max_small_bytes;
  return std::max<int64_t>(std::min(kSlabBytes, most - admitted_), 1);
}

void HttpCall::StartReading() {
  loop_.Run([this] { OpenSlab(); });
}

void HttpCall::OpenSlab() {
  is_reading_ = true;
  if (connection_ == nullptr) {
    OnRead(false);  // deletes this
    return;
  }
  if (!OnReadingStarted()) return;  // may have deleted this
  if (is_whole_) return HandleBody();
  try {
    slabs_.push_back({pool_.Take(admitted_ - received_), received_});
  } catch (const std::bad_alloc&) {
    return OnBadRead(OutOfMemory(absl::StrCat("a body of ", admitted_, " bytes")));
  }
  connection_->ReadBody();  // may delete this
}

absl::Span<uint8_t> HttpCall::BodyPlace() {
  if (received_ == admitted_) {
    is_reading_ = false;
    const int64_t more = SlabBytes();
    admitted_ += more;
    OnMore(more);
    return {};
  }
  const Slab& slab = slabs_.back();
  return {reinterpret_cast<uint8_t*>(slab.buffer.data()) + (received_ - slab.begin),
          static_cast<size_t>(admitted_ - received_)};
}

void HttpCall::OnBodyEnd() {
  is_reading_ = false;
  if (!is_chunked_) return HandleBody();
  is_whole_ = true;
  const absl::StatusOr<int64_t> extra = handler_->ExtraBytes(received_);
  if (!extra.ok()) return OnBadRead(extra.status());
  if (*extra == 0) return HandleBody();
  OnMore(0, *extra);
}

void HttpCall::HandleBody() {
  is_reading_ = false;
  if (!OnRead(true, received_)) return;
  for (const Slab& slab : slabs_) {
    const int64_t end = std::min(received_, slab.begin + slab.buffer.size());
    if (end > slab.begin) slices_.push_back({slab.buffer.data(), slab.begin, end});
  }
  handler_->OnBody({{slices_, 0}, received_}, *this);
}

void HttpCall::OnBadBody() {
  is_reading_ = false;
  OnBadRead(absl::InvalidArgumentError("the chunks of the body are malformed"));
}

void HttpCall::Respond(ResponseHead head, ResponseMessage body) {
  BeginResponse(body.size());
  loop_.Run([this, head = std::move(head), body = std::move(body)]() mutable {
    has_finished_ = true;
    if (connection_ == nullptr) return Delete();
    connection_->Respond(head.status, head.content_type,
                         HeadersOf(call(), absl::OkStatus(), std::move(head.headers)),
                         std::move(body));
  });
}

void HttpCall::Finish(const absl::Status& status) {
  loop_.Run([this, status] {
    has_finished_ = true;
    if (connection_ == nullptr) return Delete();
    Response response = ErrorResponse(status);
    ResponseMessage body;
    body.Append(response.body);
    connection_->Respond(response.status, response.content_type,
                         HeadersOf(call(), status, std::move(response.headers)), std::move(body));
  });
}

// The call may be gone when the task runs.
void HttpCall::Abort() {
  loop_.Post([connection = weak_connection_, number = number_] {
    if (const auto open = connection.lock()) open->CloseDuring(number);
  });
}

void HttpCall::OnClosed(bool has_responded) {
  connection_ = nullptr;
  if (!has_responded) OnCancelled();
  if (has_finished_) return Delete();
  if (is_reading_) OnRead(false);  // deletes this
}

void HttpCall::Delete() {
  UnaryCall::OnClosed();
  delete this;
}

}  // namespace rapt::http
