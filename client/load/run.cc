#include "client/load/run.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <charconv>
#include <ctime>
#include <deque>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/mutex.h"
#include "client/cpp/deadline.h"
#include "client/cpp/reason.h"
#include "client/load/mix.h"

namespace rapt::load {
namespace {

using std::chrono::nanoseconds;
using Clock = std::chrono::steady_clock;

double Seconds(const timespec& time) {
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

double ProcessCpuSeconds() {
  timespec time;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return Seconds(time);
}

double CpuSeconds(std::thread& thread) {
  clockid_t clock;
  timespec time{};
  if (pthread_getcpuclockid(thread.native_handle(), &clock) == 0) clock_gettime(clock, &time);
  return Seconds(time);
}

// Parses microseconds from trailing metadata.
std::optional<std::chrono::microseconds> ReadTime(
    const std::multimap<grpc::string_ref, grpc::string_ref>& metadata, const char* key) {
  const auto found = metadata.find(key);
  if (found == metadata.end()) return std::nullopt;
  int64_t us = 0;
  const grpc::string_ref& text = found->second;
  const auto read = std::from_chars(text.data(), text.data() + text.size(), us);
  if (read.ec != std::errc() || us < 0) return std::nullopt;
  return std::chrono::microseconds(us);
}

std::optional<ServerTimes> ReadServerTimes(const grpc::ClientContext& context) {
  const auto& metadata = context.GetServerTrailingMetadata();
  const auto total = ReadTime(metadata, "rapt-total-us");
  if (!total) return std::nullopt;
  const std::chrono::microseconds none{0};
  return ServerTimes{ReadTime(metadata, "rapt-queue-us").value_or(none),
                     ReadTime(metadata, "rapt-compute-us").value_or(none), *total};
}

// The state shared by all streams of a load.
struct Shared {
  const Load& load;
  Clock::time_point start;

  nanoseconds Now() const { return Clock::now() - start; }
};

class Group;

// Carries one call at a time. Its events arrive in the completion queue. Thread-compatible: after
// Start(), only the queue's thread may use the stream.
class Stream {
 public:
  enum class Event : uint8_t { kStarted, kWrote, kRead, kFinished };
  struct Tag {
    Stream* stream;
    Event event;
  };

  Stream(const Shared& shared, const client::Connection& connection, grpc::CompletionQueue& queue,
         std::unique_ptr<CallSource> source)
      : shared_(shared), stub_(connection.channel), queue_(queue), source_(std::move(source)) {}

  CallSource& source() { return *source_; }

  void Start(size_t shape, nanoseconds due) {
    call_ = source_->Next(shape);
    record_ = {.shape = call_.shape, .due = due};
    record_.request_bytes = call_.encoded->message_bytes;
    context_.emplace();
    received_.clear();
    record_.sent = shared_.Now();
    context_->set_deadline(
        client::Deadline::After(due + shared_.load.deadline - record_.sent).ToGrpc());
    if (shared_.load.interface.transport != Transport::kStream) {
      unary_ = stub_.PrepareUnaryCall(&*context_, call_.method, call_.encoded->messages.front(),
                                      &queue_);
      unary_->StartCall();
      unary_->Finish(&incoming_, &status_, &tags_[3]);
      return;
    }
    pending_ = 0;
    next_message_ = 0;
    streaming_ = stub_.PrepareCall(&*context_, call_.method, &queue_);
    streaming_->StartCall(&tags_[0]);
  }

  // Returns true if the call has finished.
  bool On(Event event, bool ok) {
    switch (event) {
      case Event::kStarted:
        if (!ok) return FinishStream();
        Write();
        Read();
        return false;
      case Event::kWrote:
        --pending_;
        if (ok && next_message_ < call_.encoded->messages.size()) {
          Write();
          return false;
        }
        return FinishStream();
      case Event::kRead:
        --pending_;
        if (!ok) return FinishStream();
        if (record_.status.ok()) {
          record_.status = StatusInResponse(shared_.load.interface, incoming_);
        }
        record_.response_bytes += static_cast<int64_t>(incoming_.Length());
        received_.push_back(incoming_);
        Read();
        return false;
      case Event::kFinished:
        Finish();
        return true;
    }
    return false;
  }

  const CallRecord& record() const { return record_; }
  // Returns whether the record counts.
  bool counts() const { return call_.is_measured || !record_.status.ok(); }

  Group* group = nullptr;

 private:
  void Write() {
    const std::vector<grpc::ByteBuffer>& messages = call_.encoded->messages;
    grpc::WriteOptions options;
    const bool is_last = next_message_ + 1 == messages.size();
    if (is_last) options.set_last_message();
    ++pending_;
    streaming_->Write(messages[next_message_++], options, &tags_[1]);
  }

  void Read() {
    ++pending_;
    streaming_->Read(&incoming_, &tags_[2]);
  }

  bool FinishStream() {
    if (pending_ == 0) streaming_->Finish(&status_, &tags_[3]);
    return false;
  }

  void Finish() {
    record_.done = shared_.Now();
    if (shared_.load.interface.transport != Transport::kStream) {
      record_.response_bytes = static_cast<int64_t>(incoming_.Length());
      received_.push_back(incoming_);
    }
    if (!status_.ok()) {
      record_.status = absl::Status(static_cast<absl::StatusCode>(status_.error_code()),
                                    status_.error_message());
      client::SetReason(*context_, record_.status);
    }
    if (record_.status.ok()) record_.server = ReadServerTimes(*context_);
    source_->OnDone(record_.status, std::exchange(received_, {}));
    incoming_.Clear();
    unary_.reset();
    streaming_.reset();
  }

  const Shared& shared_;
  grpc::GenericStub stub_;
  grpc::CompletionQueue& queue_;
  const std::unique_ptr<CallSource> source_;
  Tag tags_[4] = {{this, Event::kStarted},
                  {this, Event::kWrote},
                  {this, Event::kRead},
                  {this, Event::kFinished}};

  // State of the current call.
  OutgoingCall call_;
  CallRecord record_;
  std::optional<grpc::ClientContext> context_;
  std::unique_ptr<grpc::GenericClientAsyncResponseReader> unary_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> streaming_;
  grpc::ByteBuffer incoming_;
  grpc::Status status_;
  std::vector<grpc::ByteBuffer> received_;
  size_t next_message_ = 0;
  int pending_ = 0;  // writes and reads
};

// Streams of a closed loop that send together. All belong to the same thread.
class Group {
 public:
  std::vector<Stream*> streams;
  int in_flight = 0;
  nanoseconds due{0};
};

// Idle streams of an open loop. Thread-safe.
class FreeStreams {
 public:
  void Put(Stream* stream) {
    MutexLock lock(mutex_);
    streams_.push_back(stream);
    not_empty_.Signal();
  }

  // Returns the stream that has been idle longest, so that all connections are used. Returns
  // nullptr at the timeout.
  Stream* Take(nanoseconds timeout, bool* had_to_wait) {
    const Clock::time_point end = Clock::now() + timeout;
    MutexLock lock(mutex_);
    *had_to_wait = streams_.empty();
    while (streams_.empty()) {
      const nanoseconds left = end - Clock::now();
      if (left.count() <= 0) return nullptr;
      not_empty_.WaitFor(mutex_, left);
    }
    Stream* const stream = streams_.front();
    streams_.pop_front();
    return stream;
  }

  size_t size() const {
    MutexLock lock(mutex_);
    return streams_.size();
  }

 private:
  mutable Mutex mutex_;
  CondVar not_empty_;
  std::deque<Stream*> streams_ ABSL_GUARDED_BY(mutex_);
};

// Receives the responses of its streams.
struct Receiver {
  Receiver(size_t shapes, const Load& load) : recorder(shapes, load.warmup, load.slo) {}

  grpc::CompletionQueue queue;
  Recorder recorder;
  std::vector<std::unique_ptr<Stream>> streams;
  std::vector<std::unique_ptr<Group>> groups;
  Histogram group_latency;  // used by `thread` only, until it has ended
  std::thread thread;
};

class Driver {
 public:
  Driver(const Load& load, Workload& workload, client::Connections& connections,
         const std::atomic<bool>& stop)
      : load_(load),
        shared_{load, Clock::now()},
        workload_(workload),
        choice_(workload.shapes(), load.seed),
        connections_(connections),
        interrupted_(stop) {}

  absl::StatusOr<Run> operator()(absl::FunctionRef<void(const TimedInterval&)> observe) {
    absl::Status made = MakeStreams();
    if (made.ok()) Measure(observe);
    for (const auto& receiver : receivers_) {
      for (const auto& stream : receiver->streams) stream->source().Release();
    }
    if (!made.ok()) return made;
    return std::move(run_);
  }

 private:
  absl::Status MakeStreams() {
    const int threads = std::min(load_.threads, load_.streams / load_.group);
    for (int i = 0; i < threads; ++i) {
      receivers_.push_back(std::make_unique<Receiver>(workload_.shapes().size(), load_));
    }
    for (int i = 0; i < load_.streams && !interrupted_; ++i) {
      auto source = workload_.NewSource(connections_.at(i));
      if (!source.ok()) return source.status();
      Receiver& receiver = *receivers_[static_cast<size_t>(i / load_.group % threads)];
      Stream& stream = *receiver.streams.emplace_back(std::make_unique<Stream>(
          shared_, connections_.at(i), receiver.queue, *std::move(source)));
      absl::Status prepared = stream.source().Prepare(choice_(static_cast<uint64_t>(i)));
      if (!prepared.ok()) return prepared;
      if (i % load_.group == 0) receiver.groups.push_back(std::make_unique<Group>());
      stream.group = receiver.groups.back().get();
      stream.group->streams.push_back(&stream);
    }
    return absl::OkStatus();
  }

  void Measure(absl::FunctionRef<void(const TimedInterval&)> observe) {
    shared_.start = Clock::now();  // after encoding
    for (const auto& receiver : receivers_) {
      if (load_.arrivals) {
        for (const auto& stream : receiver->streams) free_.Put(stream.get());
      } else {
        for (const auto& group : receiver->groups) StartGroup(*group);
      }
      receiver->thread = std::thread([this, &receiver] { Receive(*receiver); });
    }
    if (load_.arrivals) {
      sender_ = std::thread([this] { SendArrivals(); });
    }
    RecordIntervals(observe);
    if (sender_.joinable()) sender_.join();
    WaitForResponses();
    for (const auto& receiver : receivers_) receiver->queue.Shutdown();
    for (const auto& receiver : receivers_) {
      receiver->thread.join();
      run_.totals.Add(receiver->recorder.totals());
      run_.groups.Add(receiver->group_latency);
      for (const auto& stream : receiver->streams) Check(*stream);
    }
    run_.dropped = dropped_;
    run_.due = due_;
    run_.tester.held_up = held_up_;
  }

  // --- Sending ---

  void Start(Stream& stream, size_t shape, nanoseconds due) {
    in_flight_.fetch_add(1, std::memory_order_relaxed);
    stream.Start(shape, due);
  }

  void StartGroup(Group& group) {
    group.due = shared_.Now();
    group.in_flight = static_cast<int>(group.streams.size());
    for (Stream* stream : group.streams) {
      Start(*stream, choice_(sent_.fetch_add(1, std::memory_order_relaxed)), group.due);
    }
  }

  // Returns false if the load ends before `due`. Calls due before the end are sent even after it,
  // since they waited longest.
  bool SleepUntil(nanoseconds due) const {
    constexpr std::chrono::milliseconds kPollInterval{50};
    for (;;) {
      if (is_over_ && due >= over_at_.load()) return false;
      const nanoseconds left = due - shared_.Now();
      if (left.count() <= 0) return true;
      std::this_thread::sleep_for(std::min<nanoseconds>(left, kPollInterval));
    }
  }

  void SendArrivals() {
    prctl(PR_SET_TIMERSLACK, 1000);  // ns; 50 µs by default
    Arrivals arrivals = *load_.arrivals;
    for (uint64_t n = 0;; ++n) {
      const std::optional<nanoseconds> due = arrivals.Next();
      if (!due || !SleepUntil(*due)) break;
      const bool is_measured = *due >= load_.warmup;
      if (is_measured) due_.fetch_add(1, std::memory_order_relaxed);
      Stream* const stream = TakeStream(*due);
      if (stream == nullptr) {
        if (is_measured) dropped_.fetch_add(1, std::memory_order_relaxed);
        continue;
      }
      Start(*stream, load_.shape_of.empty() ? choice_(n) : load_.shape_of[n], *due);
    }
    all_sent_ = true;
  }

  // Returns an idle stream for a call that is due, or nullptr if there is none before its deadline
  // or the load was interrupted.
  Stream* TakeStream(nanoseconds due) {
    constexpr nanoseconds kPollInterval = std::chrono::milliseconds(50);
    bool had_to_wait = false;
    for (;;) {
      const nanoseconds now = shared_.Now();
      const nanoseconds left = due + load_.deadline - now;
      if (left.count() <= 0 || interrupted_.load(std::memory_order_relaxed)) return nullptr;
      bool waits = false;
      Stream* const stream = free_.Take(std::min(left, kPollInterval), &waits);
      had_to_wait = had_to_wait || waits;
      if (stream == nullptr) continue;
      // Calls due while another one waits are late for the same reason.
      was_held_up_ = had_to_wait || (was_held_up_ && now - due > kLate);
      if (was_held_up_ && now - due > kLate && due >= load_.warmup) ++held_up_;
      return stream;
    }
  }

  // --- Receiving ---

  void Receive(Receiver& receiver) {
    void* tag;
    bool ok;
    while (receiver.queue.Next(&tag, &ok)) {
      const auto [stream, event] = *static_cast<Stream::Tag*>(tag);
      if (!stream->On(event, ok)) continue;
      const CallRecord& record = stream->record();
      if (stream->counts()) receiver.recorder.Record(record);
      OnCallDone(receiver, *stream, record.done);
    }
  }

  void OnCallDone(Receiver& receiver, Stream& stream, nanoseconds done) {
    if (load_.arrivals) {
      free_.Put(&stream);
    } else if (Group& group = *stream.group; --group.in_flight == 0) {
      if (load_.group > 1 && group.due >= load_.warmup) {
        receiver.group_latency.Record((done - group.due).count());
      }
      if (!is_over_.load(std::memory_order_relaxed)) StartGroup(group);
    }
    // Must come last: once the counter is 0, no call may start.
    in_flight_.fetch_sub(1, std::memory_order_release);
  }

  // --- Recording ---

  bool IsOver(nanoseconds measured) const {
    if (interrupted_.load(std::memory_order_relaxed)) return true;
    if (all_sent_.load() && in_flight_.load() == 0) return true;
    if (measured < load_.duration) return false;
    if (load_.min_requests == 0) return true;
    int64_t finished = 0;
    for (const auto& receiver : receivers_) finished += receiver->recorder.finished();
    return finished >= load_.min_requests;
  }

  void RecordIntervals(absl::FunctionRef<void(const TimedInterval&)> observe) {
    std::vector<double> cpu_at_begin;
    double process_at_begin = 0;
    nanoseconds begin = -load_.warmup;  // of the interval
    int64_t due_before = 0;
    const auto is_measured = [&] { return begin.count() >= 0; };
    const auto note_begin = [&] {
      cpu_at_begin.clear();
      for (const auto& receiver : receivers_) cpu_at_begin.push_back(CpuSeconds(receiver->thread));
      if (sender_.joinable()) cpu_at_begin.push_back(CpuSeconds(sender_));
      process_at_begin = ProcessCpuSeconds();
    };
    if (is_measured()) note_begin();
    for (;;) {
      nanoseconds end = begin + load_.interval;
      if (!is_measured()) end = std::min(end, nanoseconds(0));
      while (shared_.Now() - load_.warmup < end && !IsOver(shared_.Now() - load_.warmup)) {
        constexpr std::chrono::milliseconds kPollInterval{20};
        std::this_thread::sleep_for(
            std::min<nanoseconds>(end - (shared_.Now() - load_.warmup), kPollInterval));
      }
      const nanoseconds now = shared_.Now() - load_.warmup;
      const int64_t due = due_.load(std::memory_order_relaxed);
      TimedInterval interval{.begin = begin,
                             .length = now - begin,
                             .due = due - due_before,
                             .in_flight = in_flight_.load(std::memory_order_relaxed)};
      for (const auto& receiver : receivers_) {
        interval.calls.Add(receiver->recorder.TakeInterval());
      }
      observe(interval);
      due_before = due;
      if (is_measured()) run_.intervals.push_back(std::move(interval));
      const bool was_measured = is_measured();
      begin = now;
      if (!was_measured && is_measured()) note_begin();
      if (IsOver(now)) break;
    }
    over_at_ = load_.warmup + begin;
    is_over_ = true;
    run_.measured = std::max(begin, nanoseconds(0));
    if (!is_measured()) return;
    run_.tester.cpu_seconds = ProcessCpuSeconds() - process_at_begin;
    const double wall = std::chrono::duration<double>(run_.measured).count();
    size_t thread = 0;
    const auto note_end = [&](std::thread& one) {
      const double busy = (CpuSeconds(one) - cpu_at_begin[thread++]) / wall;
      run_.tester.busiest_thread = std::max(run_.tester.busiest_thread, busy);
    };
    for (const auto& receiver : receivers_) note_end(receiver->thread);
    if (sender_.joinable()) note_end(sender_);
  }

  void WaitForResponses() const {
    // Bounded by the calls' deadlines.
    while (in_flight_.load(std::memory_order_acquire) > 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  void Check(Stream& stream) {
    const absl::Status status = stream.source().Check();
    if (absl::IsNotFound(status)) return;
    ++run_.checked;
    if (!status.ok()) run_.wrong.push_back(status);
  }

  const Load& load_;
  Shared shared_;
  Workload& workload_;
  const ShapeChoice choice_;
  client::Connections& connections_;
  const std::atomic<bool>& interrupted_;

  std::atomic<nanoseconds> over_at_{};
  std::atomic<bool> is_over_{false};   // send no more calls
  std::atomic<bool> all_sent_{false};  // open loop: no arrivals left
  std::atomic<int> in_flight_{0};
  std::atomic<uint64_t> sent_{0};
  std::atomic<int64_t> due_{0};
  std::atomic<int64_t> dropped_{0};
  std::atomic<int64_t> held_up_{0};
  bool was_held_up_ = false;  // used by the sender only

  Run run_;
  FreeStreams free_;
  std::vector<std::unique_ptr<Receiver>> receivers_;
  std::thread sender_;
};

}  // namespace

absl::StatusOr<Run> RunLoad(const Load& load, Workload& workload, client::Connections& connections,
                            absl::FunctionRef<void(const TimedInterval&)> observe,
                            const std::atomic<bool>& stop) {
  return Driver(load, workload, connections, stop)(observe);
}

}  // namespace rapt::load
