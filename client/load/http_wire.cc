#include <google/protobuf/util/json_util.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <optional>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/descriptor.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "client/http/connection.h"
#include "client/http/target.h"
#include "client/load/wire.h"
#include "proto/inference/grpc_service.pb.h"

namespace rapt::load {
namespace {

using client::HttpConnection;
using client::HttpResponse;
using client::HttpTarget;
using std::chrono::nanoseconds;

// The server ends calls at their deadlines; the tester ends those of a server that does not.
constexpr std::chrono::milliseconds kDeadlineCheck{5};

// The value of Grpc-Timeout, which has at most 8 digits.
std::string TimeoutText(nanoseconds timeout) {
  const auto us = std::chrono::ceil<std::chrono::microseconds>(timeout);
  if (us.count() < 100'000'000) return absl::StrCat(std::max<int64_t>(us.count(), 1), "u");
  return absl::StrCat(std::chrono::ceil<std::chrono::milliseconds>(timeout).count(), "m");
}

// The string's bytes, which the buffer owns, without a copy.
grpc::ByteBuffer BufferOf(std::string bytes) {
  auto* const owned = new std::string(std::move(bytes));
  const grpc::Slice slice(
      owned->data(), owned->size(), [](void* text) { delete static_cast<std::string*>(text); },
      owned);
  return grpc::ByteBuffer(&slice, 1);
}

class HttpInbox;

// A call owns a connection of HTTP/1.1 until its response, so every stream has its own.
class HttpStream final : public Stream {
 public:
  HttpStream(const LoadClock& clock, std::unique_ptr<CallSource> source, const HttpTarget& target,
             HttpInbox& inbox)
      : Stream(clock, std::move(source)), target_(target), connection_(target), inbox_(inbox) {}

  // Each returns true if this has ended the call.
  bool OnReady() {
    MutexLock lock(mutex_);
    return Continue();
  }
  bool OnTime(std::chrono::steady_clock::time_point now) {
    MutexLock lock(mutex_);
    if (!is_in_flight_ || now < end_) return false;
    connection_.Close();
    Finish(absl::DeadlineExceededError("no response within the deadline"));
    return true;
  }

 private:
  void Send(nanoseconds timeout) override;
  bool Continue() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Finish(absl::StatusOr<HttpResponse> response) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const HttpTarget& target_;
  Mutex mutex_;  // an open loop sends on a thread of its own
  HttpConnection connection_ ABSL_GUARDED_BY(mutex_);
  std::vector<grpc::Slice> body_;  // of the call in flight
  bool is_in_flight_ ABSL_GUARDED_BY(mutex_) = false;
  std::chrono::steady_clock::time_point end_ ABSL_GUARDED_BY(mutex_);
  HttpInbox& inbox_;
};

class HttpInbox final : public Inbox {
 public:
  HttpInbox(const LoadClock& clock, const HttpTarget& target)
      : clock_(clock),
        target_(target),
        epoll_(epoll_create1(EPOLL_CLOEXEC)),
        wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    epoll_event event = {};
    event.events = EPOLLIN;
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event);
  }

  // Has the stream continue when its connection is ready. Thread-safe.
  void Watch(HttpStream& stream, const HttpConnection& connection, HttpConnection::Wait wait) {
    epoll_event event = {};
    event.events = EPOLLONESHOT | (wait == HttpConnection::Wait::kReading ? EPOLLIN : EPOLLOUT);
    event.data.ptr = &stream;
    const int descriptor = connection.descriptor();
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, descriptor, &event) == 0 || errno != ENOENT) return;
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, descriptor, &event);  // a new connection
  }

  // Has Next() return a stream whose call ended as it was sent. Thread-safe.
  void Put(HttpStream& stream) {
    MutexLock lock(mutex_);
    put_.push_back(&stream);
    eventfd_write(wake_.get(), 1);
  }

 private:
  std::unique_ptr<Stream> NewStream(int, std::unique_ptr<CallSource> source) override {
    auto stream = std::make_unique<HttpStream>(clock_, std::move(source), target_, *this);
    streams_.push_back(stream.get());
    return stream;
  }

  Stream* Next() override {
    while (ended_.empty()) {
      if (!Wait()) return nullptr;
    }
    HttpStream* const stream = ended_.back();
    ended_.pop_back();
    return stream;
  }

  // Waits for events and moves streams whose calls have ended to ended_. Returns false after
  // Shutdown().
  bool Wait() {
    std::array<epoll_event, 256> events;
    const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()),
                                 static_cast<int>(kDeadlineCheck.count()));
    for (int i = 0; i < count; ++i) {
      auto* const stream = static_cast<HttpStream*>(events[static_cast<size_t>(i)].data.ptr);
      if (stream != nullptr && stream->OnReady()) ended_.push_back(stream);
    }
    CheckDeadlines();
    eventfd_t value;
    if (eventfd_read(wake_.get(), &value) != 0) return true;
    MutexLock lock(mutex_);
    ended_.insert(ended_.end(), put_.begin(), put_.end());
    put_.clear();
    return !is_shut_down_;
  }

  void CheckDeadlines() {
    const auto now = std::chrono::steady_clock::now();
    if (now < checked_ + kDeadlineCheck) return;
    checked_ = now;
    for (HttpStream* const stream : streams_) {
      if (stream->OnTime(now)) ended_.push_back(stream);
    }
  }

  void Shutdown() override {
    MutexLock lock(mutex_);
    is_shut_down_ = true;
    eventfd_write(wake_.get(), 1);
  }

  const LoadClock& clock_;
  const HttpTarget& target_;
  const Descriptor epoll_, wake_;
  std::vector<HttpStream*> streams_;
  std::vector<HttpStream*> ended_;
  std::chrono::steady_clock::time_point checked_ = {};
  Mutex mutex_;
  std::vector<HttpStream*> put_ ABSL_GUARDED_BY(mutex_);
  bool is_shut_down_ ABSL_GUARDED_BY(mutex_) = false;
};

void HttpStream::Send(nanoseconds timeout) {
  MutexLock lock(mutex_);
  end_ = std::chrono::steady_clock::now() + timeout;
  is_in_flight_ = true;
  call_.encoded->messages.front().Dump(&body_);
  std::vector<iovec> places;
  for (const grpc::Slice& slice : body_) {
    places.push_back({const_cast<uint8_t*>(slice.begin()), slice.size()});
  }
  connection_.Start(
      target_.Head("POST", call_.method,
                   {{"Content-Type", "application/octet-stream"},
                    {"Inference-Header-Content-Length", absl::StrCat(call_.encoded->json_bytes)},
                    {"Grpc-Timeout", TimeoutText(timeout)}},
                   static_cast<size_t>(call_.encoded->message_bytes)),
      std::move(places));
  if (Continue()) inbox_.Put(*this);
}

bool HttpStream::Continue() {
  const HttpConnection::Wait wait = connection_.Continue();
  if (wait != HttpConnection::Wait::kNothing) {
    inbox_.Watch(*this, connection_, wait);
    return false;
  }
  Finish(connection_.TakeResponse());
  return true;
}

void HttpStream::Finish(absl::StatusOr<HttpResponse> response) {
  is_in_flight_ = false;
  body_.clear();
  record_.status = response.ok() ? client::StatusOf(*response) : response.status();
  std::vector<grpc::ByteBuffer> binary;
  if (record_.status.ok()) {
    record_.server = ReadServerTimes([&](const char* name) { return response->Value(name); });
    record_.response_bytes = static_cast<int64_t>(response->body.size());
    size_t json = 0;
    if (absl::SimpleAtoi(response->Value("inference-header-content-length"), &json) &&
        json <= response->body.size()) {
      const grpc::ByteBuffer whole = BufferOf(std::move(response->body));
      grpc::Slice slice;
      whole.DumpToSingleSlice(&slice).ok();
      slice = slice.sub(json, slice.size());
      binary.emplace_back(&slice, 1);
    }
  }
  End(std::move(binary));
}

class HttpWire final : public Wire {
 public:
  explicit HttpWire(HttpTarget target) : target_(std::move(target)) {}

 private:
  absl::Status WaitUntilReady(nanoseconds timeout) override {
    absl::Status status = Get("/v2/health/live", timeout).status();
    if (status.ok()) return status;
    return absl::UnavailableError(absl::StrCat(
        "no HTTP server is ready: ", status.message(),
        "; rapt-server serves HTTP at --http_address, by default 127.0.0.1:8000; set --address"));
  }

  ServerIdentity FetchIdentity() override {
    const absl::StatusOr<HttpResponse> response = Get("/v2", kIdentityTimeout);
    inference::ServerMetadataResponse metadata;
    if (!response.ok() ||
        !google::protobuf::util::JsonStringToMessage(response->body, &metadata).ok()) {
      return {};
    }
    return {metadata.name(), metadata.version(), "", 0};
  }

  absl::StatusOr<HttpResponse> Get(const char* path, nanoseconds timeout) {
    return HttpConnection(target_).Exchange(target_.Head("GET", path), {}, timeout);
  }

  const client::Connection* connection(int) override { return nullptr; }

  std::unique_ptr<Inbox> NewInbox(const LoadClock& clock) override {
    return std::make_unique<HttpInbox>(clock, target_);
  }

  const HttpTarget target_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Wire>> NewHttpWire(const std::string& address,
                                                  const client::Options& options) {
  RAPT_ASSIGN_OR_RETURN(HttpTarget target, HttpTarget::Make(address, options));
  return std::make_unique<HttpWire>(std::move(target));
}

}  // namespace rapt::load
