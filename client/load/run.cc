#include "client/load/run.h"

#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <ctime>
#include <deque>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "client/load/mix.h"

namespace rapt::load {
namespace {

using std::chrono::nanoseconds;
using Clock = std::chrono::steady_clock;

double SecondsOf(const timespec& time) {
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

double ProcessCpuSeconds() {
  timespec time;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return SecondsOf(time);
}

double CpuSeconds(std::thread& thread) {
  clockid_t clock;
  timespec time{};
  if (pthread_getcpuclockid(thread.native_handle(), &clock) == 0) clock_gettime(clock, &time);
  return SecondsOf(time);
}

}  // namespace

// Streams of a closed loop that send together. All belong to the same thread.
class Group {
 public:
  std::vector<Stream*> streams;
  int in_flight = 0;
  nanoseconds due{0};
};

namespace {

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
  Receiver(std::unique_ptr<Inbox> of_streams, size_t shapes, const Load& load)
      : inbox(std::move(of_streams)), recorder(shapes, load.warmup, load.slo) {}

  const std::unique_ptr<Inbox> inbox;
  Recorder recorder;
  std::vector<std::unique_ptr<Stream>> streams;
  std::vector<std::unique_ptr<Group>> groups;
  Histogram group_latency;  // used by `thread` only, until it has ended
  std::thread thread;
};

class Driver {
 public:
  Driver(const Load& load, Workload& workload, Wire& wire, const std::atomic<bool>& stop)
      : load_(load),
        workload_(workload),
        choice_(workload.shapes(), load.seed),
        wire_(wire),
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
      receivers_.push_back(
          std::make_unique<Receiver>(wire_.NewInbox(clock_), workload_.shapes().size(), load_));
    }
    for (int i = 0; i < load_.streams && !interrupted_; ++i) {
      RAPT_ASSIGN_OR_RETURN(auto source, workload_.NewSource(wire_.connection(i)));
      Receiver& receiver = *receivers_[static_cast<size_t>(i / load_.group % threads)];
      Stream& stream =
          *receiver.streams.emplace_back(receiver.inbox->NewStream(i, std::move(source)));
      RAPT_RETURN_IF_ERROR(stream.source().Prepare(choice_(static_cast<uint64_t>(i))));
      if (i % load_.group == 0) receiver.groups.push_back(std::make_unique<Group>());
      stream.group = receiver.groups.back().get();
      stream.group->streams.push_back(&stream);
    }
    return absl::OkStatus();
  }

  void Measure(absl::FunctionRef<void(const TimedInterval&)> observe) {
    clock_.start = Clock::now();  // after encoding
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
    run_.after.begin = run_.measured;
    run_.after.length = clock_.Now() - load_.warmup - run_.measured;
    for (const auto& receiver : receivers_) receiver->inbox->Shutdown();
    for (const auto& receiver : receivers_) {
      receiver->thread.join();
      run_.totals.Add(receiver->recorder.totals());
      run_.after.calls.Add(receiver->recorder.TakeInterval());
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
    stream.Start(shape, due, load_.deadline);
  }

  void StartGroup(Group& group) {
    group.due = clock_.Now();
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
      const nanoseconds left = due - clock_.Now();
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
      const nanoseconds now = clock_.Now();
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
    while (Stream* const stream = receiver.inbox->Next()) {
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
      while (clock_.Now() - load_.warmup < end && !IsOver(clock_.Now() - load_.warmup)) {
        constexpr std::chrono::milliseconds kPollInterval{20};
        std::this_thread::sleep_for(
            std::min<nanoseconds>(end - (clock_.Now() - load_.warmup), kPollInterval));
      }
      const nanoseconds now = clock_.Now() - load_.warmup;
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
  LoadClock clock_;
  Workload& workload_;
  const ShapeChoice choice_;
  Wire& wire_;
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

absl::StatusOr<Run> RunLoad(const Load& load, Workload& workload, Wire& wire,
                            absl::FunctionRef<void(const TimedInterval&)> observe,
                            const std::atomic<bool>& stop) {
  return Driver(load, workload, wire, stop)(observe);
}

}  // namespace rapt::load
