// The life of a call over a fake transport.
#include "server/calls/unary_call.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/calls/call.h"
#include "server/rejection.h"
#include "tests/support/call_environment.h"

namespace rapt {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;

constexpr int64_t kMaxMessageBytes = 4000;
constexpr int64_t kBytesPerSecond = 1000;
constexpr char kTraceparent[] = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

// Records the requested steps.
class FakeCall final : public UnaryCall {
 public:
  using UnaryCall::BeginResponse;
  using UnaryCall::call;
  using UnaryCall::End;
  using UnaryCall::OnBytesSent;
  using UnaryCall::OnCancelled;
  using UnaryCall::OnClosed;
  using UnaryCall::OnHeaders;
  using UnaryCall::OnMore;
  using UnaryCall::OnRead;
  using UnaryCall::OnSize;
  FakeCall(const CallEnvironment& environment, const CallObserver& observe,
           MethodTraits traits = {})
      : UnaryCall(environment, observe, traits) {}

  // Runs before the read starts.
  void set_before_reading(std::function<void()> run) { before_reading_ = std::move(run); }

  bool is_reading() const { return is_reading_; }
  // Returns what OnReadingStarted() has returned.
  bool goes_on_reading() const { return goes_on_reading_; }
  bool has_dropped_message() const { return has_dropped_message_; }
  bool is_aborted() const { return is_aborted_; }
  const std::vector<absl::Status>& finishes() const { return finishes_; }

 private:
  void StartReading() override {
    if (before_reading_) before_reading_();
    is_reading_ = true;
    goes_on_reading_ = OnReadingStarted();
  }
  void DropMessage() override { has_dropped_message_ = true; }
  void Finish(const absl::Status& status) override { finishes_.push_back(status); }
  void Abort() override { is_aborted_ = true; }

  std::function<void()> before_reading_;
  bool is_reading_ = false;
  bool goes_on_reading_ = false;
  bool has_dropped_message_ = false;
  bool is_aborted_ = false;
  std::vector<absl::Status> finishes_;
};

class UnaryCallTest : public test::CallEnvironmentTest {
 protected:
  UnaryCallTest()
      : CallEnvironmentTest(/*calls_per_caller=*/1,
                            {.max_message_bytes = kMaxMessageBytes,
                             .min_receive_bytes_per_second = kBytesPerSecond,
                             .default_deadline = seconds(60),
                             .max_deadline = seconds(100)}) {}

  CallHeaders Headers() const { return {.peer = "ipv4:127.0.0.1:4711"}; }

  // The headers have arrived.
  FakeCall& NewCall(const CallHeaders& headers) {
    call_ = std::make_unique<FakeCall>(environment_, observe_);
    call_->OnHeaders(headers);
    return *call_;
  }

  // The size of the message has arrived as well, and memory for it is reserved.
  FakeCall& NewReadingCall(const CallHeaders& headers, int64_t bytes = kMaxMessageBytes) {
    FakeCall& call = NewCall(headers);
    call.OnSize(bytes);
    EXPECT_TRUE(call.is_reading());
    return call;
  }

  // Closes the call and returns its report.
  CallReport Close() {
    call_->OnClosed();
    call_.reset();
    EXPECT_EQ(reports_.size(), 1u);
    return reports_.back();
  }

  // Advances the clock and returns when the alarms due by then have fired.
  void Advance(std::chrono::nanoseconds time) {
    clock_.Advance(time);
    std::promise<void> rang;
    Alarm last(timer_, [&rang] { rang.set_value(); });
    last.Set(clock_.Now());  // runs after other alarms of the same time
    timer_.Wake();
    rang.get_future().wait();
  }

  // An alarm may set others.
  void AdvanceAndSettle(std::chrono::nanoseconds time) {
    Advance(time);
    for (int n = 0; n < 3; ++n) Advance(std::chrono::nanoseconds(1));
  }

  int64_t message_memory() const { return gate_.reserved_bytes(AdmissionGate::Share::kReceive); }

  std::vector<CallReport> reports_;
  const CallObserver observe_ = [this](const CallReport& report) { reports_.push_back(report); };
  std::unique_ptr<FakeCall> call_;
};

TEST_F(UnaryCallTest, AMessageOfUnknownSizeIsReservedInParts) {
  FakeCall& call = NewReadingCall(Headers(), 1000);
  call.OnMore(3000);
  EXPECT_EQ(message_memory(), 4000);
  call.OnMore(1);
  ASSERT_EQ(call.finishes().size(), 1u);
  EXPECT_EQ(RejectionOf(call.finishes()[0]), Rejection::kTooLarge);
  Close();
  EXPECT_EQ(message_memory(), 0);
}

TEST_F(UnaryCallTest, AMessageOfUnknownSizeHasTheBytesThatArrived) {
  FakeCall& call = NewCall(Headers());
  call.OnSize(1000, 500);
  call.OnMore(1000);
  EXPECT_EQ(message_memory(), 2500);
  EXPECT_TRUE(call.OnRead(true, 1200));
  call.End(absl::OkStatus());
  EXPECT_EQ(Close().received_bytes, 1200);
}

// It holds memory for what has arrived.
TEST_F(UnaryCallTest, WaitsOnlyShortlyForMemoryForMoreOfAMessage) {
  for (const milliseconds deadline : {milliseconds(30'000), milliseconds(1)}) {
    CallHeaders headers = Headers();
    headers.deadline = clock_.Now() + deadline;
    FakeCall& call = NewReadingCall(headers, 1000);
    std::vector<AdmissionGate::Result> all;
    while (auto held = gate_.AdmitNow({.share = AdmissionGate::Share::kReceive, .bytes = 1000})) {
      all.push_back(*std::move(held));
    }
    call.OnMore(1000);
    EXPECT_TRUE(call.finishes().empty());
    Advance(std::min<std::chrono::nanoseconds>(deadline, seconds(1)) - nanoseconds(1));
    EXPECT_TRUE(call.finishes().empty());
    AdvanceAndSettle(nanoseconds(1));
    ASSERT_EQ(call.finishes().size(), 1u);
    EXPECT_EQ(call.finishes()[0].code(), deadline > seconds(1)
                                             ? absl::StatusCode::kResourceExhausted
                                             : absl::StatusCode::kDeadlineExceeded);
    Close();
    reports_.clear();
  }
}

TEST_F(UnaryCallTest, ExtraMemoryIsNoPartOfTheMessage) {
  FakeCall& call = NewCall(Headers());
  call.OnSize(kMaxMessageBytes, 500);
  EXPECT_EQ(message_memory(), kMaxMessageBytes + 500);
  EXPECT_TRUE(call.OnRead(true));
  call.End(absl::OkStatus());
  EXPECT_EQ(Close().received_bytes, kMaxMessageBytes);
  EXPECT_EQ(message_memory(), 0);
}

// The size of a chunked body says how much its handler needs.
TEST_F(UnaryCallTest, ExtraMemoryMayFollowTheMessage) {
  FakeCall& call = NewCall(Headers());
  call.OnSize(kMaxMessageBytes);
  call.OnMore(0, 500);
  EXPECT_TRUE(call.is_reading());
  EXPECT_EQ(message_memory(), kMaxMessageBytes + 500);
  EXPECT_TRUE(call.OnRead(true, 1200));
  call.End(absl::OkStatus());
  EXPECT_EQ(Close().received_bytes, 1200);
  EXPECT_EQ(message_memory(), 0);
}

TEST_F(UnaryCallTest, ASmallResponseIsChargedUntilTheCallIsClosed) {
  for (const bool is_small : {true, false}) {
    call_ = std::make_unique<FakeCall>(environment_, observe_,
                                       MethodTraits{.carries_tensors = !is_small});
    call_->OnHeaders(Headers());
    call_->OnSize(100);
    EXPECT_TRUE(call_->OnRead(true));
    call_->BeginResponse(5000);
    EXPECT_EQ(message_memory(), is_small ? 5000 : 0);
    Close();
    EXPECT_EQ(message_memory(), 0);
    reports_.clear();
  }
}

TEST_F(UnaryCallTest, IsOpenFromItsHeadersUntilItIsClosed) {
  FakeCall& call = NewReadingCall(Headers());
  EXPECT_EQ(open_calls_.count(), 1);
  call.End(absl::InternalError("a reason"));
  EXPECT_EQ(open_calls_.count(), 1);
  EXPECT_EQ(Close().status, absl::InternalError("a reason"));
  EXPECT_EQ(open_calls_.count(), 0);
}

TEST_F(UnaryCallTest, ARejectedCallReadsNothingAndKeepsNoPlace) {
  FakeCall other(environment_, observe_);
  other.OnHeaders(Headers());
  FakeCall& call = NewCall(Headers());
  EXPECT_FALSE(call.is_reading());
  ASSERT_EQ(call.finishes().size(), 1u);
  EXPECT_EQ(RejectionOf(call.finishes()[0]), Rejection::kCallerCalls);
  EXPECT_EQ(Close().ended_in, Stage::kQueue);
  EXPECT_EQ(open_calls_.count(), 1);
}

TEST_F(UnaryCallTest, TheDeadlineIsTheCallersOrTheDefaultUpToTheMaximum) {
  const Instant now = clock_.Now();
  const std::pair<Instant, std::chrono::seconds> cases[] = {{Instant::max(), seconds(60)},
                                                            {now + seconds(5), seconds(5)},
                                                            {now + seconds(500), seconds(100)}};
  for (const auto& [requested, allowed] : cases) {
    CallHeaders headers = Headers();
    headers.deadline = requested;
    FakeCall& call = NewCall(headers);
    EXPECT_EQ(call.call().deadline(), now + allowed);
    Request request;
    request.deadline = now + seconds(30);
    call.call().Bind(request);
    EXPECT_EQ(request.deadline, std::min(now + seconds(30), now + allowed));
    call_.reset();
  }
}

TEST_F(UnaryCallTest, RejectsACallWhoseDeadlineHasPassed) {
  CallHeaders headers = Headers();
  headers.deadline = clock_.Now();
  EXPECT_FALSE(NewCall(headers).is_reading());
  EXPECT_EQ(Close().status.code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(UnaryCallTest, HoldsMemoryForItsMessageFromTheSizeToTheResponse) {
  FakeCall& call = NewCall(Headers());
  EXPECT_FALSE(call.is_reading());
  EXPECT_EQ(message_memory(), 0);
  call.OnSize(300);
  EXPECT_TRUE(call.is_reading());
  EXPECT_EQ(message_memory(), 300);
  ASSERT_TRUE(call.OnRead(true));
  EXPECT_EQ(message_memory(), 300);
  call.BeginResponse(10);
  EXPECT_TRUE(call.has_dropped_message());
  EXPECT_EQ(message_memory(), 0);
  const CallReport report = Close();
  EXPECT_TRUE(report.status.ok());
  EXPECT_EQ(report.received_bytes, 300);
  EXPECT_EQ(report.sent_bytes, 10);
  EXPECT_EQ(report.ended_in, Stage::kSend);
}

TEST_F(UnaryCallTest, RejectsAMessageOverTheLimitBeforeItIsRead) {
  FakeCall& call = NewCall(Headers());
  call.OnSize(kMaxMessageBytes + 1);
  EXPECT_FALSE(call.is_reading());
  ASSERT_EQ(call.finishes().size(), 1u);
  EXPECT_EQ(RejectionOf(call.finishes()[0]), Rejection::kTooLarge);
  EXPECT_EQ(message_memory(), 0);
}

TEST_F(UnaryCallTest, EvictsASenderWhoseSizeDoesNotArrive) {
  FakeCall& call = NewCall(Headers());
  Advance(seconds(2));
  ASSERT_EQ(call.finishes().size(), 1u);
  EXPECT_EQ(RejectionOf(call.finishes()[0]), Rejection::kSlowSender);
  call.OnSize(300);
  EXPECT_FALSE(call.is_reading()) << "the size arrived too late";
}

TEST_F(UnaryCallTest, EvictsASenderThatIsTooSlow) {
  FakeCall& call = NewReadingCall(Headers());
  Advance(seconds(2) + seconds(kMaxMessageBytes / kBytesPerSecond) - milliseconds(1));
  EXPECT_TRUE(call.finishes().empty());
  Advance(milliseconds(1));
  ASSERT_EQ(call.finishes().size(), 1u);
  EXPECT_EQ(RejectionOf(call.finishes()[0]), Rejection::kSlowSender);
  EXPECT_FALSE(call.OnRead(true)) << "the message arrived too late";
  EXPECT_EQ(call.finishes().size(), 1u);
  const CallReport report = Close();
  EXPECT_EQ(report.ended_in, Stage::kReceive);
  EXPECT_EQ(report.time_of(Stage::kReceive), seconds(6));
}

// A transport must not use the call afterwards, as its end may have destroyed it.
TEST_F(UnaryCallTest, AReadThatStartsTooLateSaysThatTheCallHasEnded) {
  for (const auto& [time, ends] : {std::pair(seconds(1), false), std::pair(seconds(100), true)}) {
    FakeCall& call = NewCall(Headers());
    call.set_before_reading([this, time = time] { clock_.Advance(time); });
    call.OnSize(300);
    EXPECT_EQ(call.goes_on_reading(), !ends);
    EXPECT_EQ(call.finishes().size(), ends ? 1u : 0u);
    if (!ends) call.End(absl::OkStatus());
    Close();
    reports_.clear();
  }
}

TEST_F(UnaryCallTest, EvictsASenderAtTheDeadline) {
  CallHeaders headers = Headers();
  headers.deadline = clock_.Now() + seconds(1);
  FakeCall& call = NewCall(headers);
  Advance(seconds(1));
  ASSERT_EQ(call.finishes().size(), 1u);
  EXPECT_EQ(call.finishes()[0].code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(UnaryCallTest, AReceivedMessageIsNotEvicted) {
  FakeCall& call = NewReadingCall(Headers());
  ASSERT_TRUE(call.OnRead(true));
  Advance(seconds(50));
  EXPECT_TRUE(call.finishes().empty());
}

TEST_F(UnaryCallTest, AnIncompleteMessageEndsTheCall) {
  for (const bool caller_left : {false, true}) {
    FakeCall& call = NewReadingCall(Headers());
    EXPECT_FALSE(call.OnRead(false));
    ASSERT_EQ(call.finishes().size(), 1u);
    if (caller_left) call.OnCancelled();
    EXPECT_EQ(Close().status.code(),
              caller_left ? absl::StatusCode::kCancelled : absl::StatusCode::kInvalidArgument);
    reports_.clear();
  }
}

TEST_F(UnaryCallTest, ARequestIsCancelledWithItsCall) {
  FakeCall& call = NewCall(Headers());
  Request request;
  call.call().Bind(request);
  EXPECT_FALSE(request.cancelled->load());
  call.OnCancelled();
  EXPECT_TRUE(request.cancelled->load());
}

TEST_F(UnaryCallTest, AbortsAResponseThatIsReadTooSlowly) {
  FakeCall& call = NewReadingCall(Headers());
  ASSERT_TRUE(call.OnRead(true));
  call.BeginResponse(2 * kBytesPerSecond);
  Advance(seconds(22) - milliseconds(1));
  EXPECT_FALSE(call.is_aborted());
  Advance(milliseconds(1));
  EXPECT_TRUE(call.is_aborted());
  call.OnCancelled();
  const CallReport report = Close();
  EXPECT_EQ(RejectionOf(report.status), Rejection::kSlowReader);
  EXPECT_EQ(report.time_of(Stage::kSend), seconds(22));
  EXPECT_EQ(report.total, seconds(22));
}

TEST_F(UnaryCallTest, AnUnsentResponseIsNotReportedAsOk) {
  for (const auto& [time, code] : {std::pair(seconds(1), absl::StatusCode::kCancelled),
                                   std::pair(seconds(10), absl::StatusCode::kDeadlineExceeded)}) {
    CallHeaders headers = Headers();
    headers.deadline = clock_.Now() + seconds(10);
    FakeCall& call = NewReadingCall(headers);
    ASSERT_TRUE(call.OnRead(true));
    call.BeginResponse(1);
    Advance(time);
    call.OnCancelled();
    EXPECT_EQ(Close().status.code(), code);
    reports_.clear();
  }
}

TEST_F(UnaryCallTest, ReturnsTheTraceparentWithAndWithoutAPlan) {
  CallHeaders headers = Headers();
  headers.traceparent = {kTraceparent};
  FakeCall& call = NewCall(headers);
  std::vector<std::string> names;
  const auto trailer = [&names](const char* name, const std::string&) { names.emplace_back(name); };
  call.call().ForEachTrailer(trailer);
  EXPECT_THAT(names, ElementsAre("traceparent"));

  names.clear();
  Result result;
  result.routing.backend = BuiltInBackends()[0];
  result.plan = "a plan";
  call.call().Record(result);
  call.call().ForEachTrailer(trailer);
  EXPECT_THAT(names, ElementsAre("traceparent", "rapt-backend", "rapt-plan", "rapt-queue-us",
                                 "rapt-compute-us", "rapt-total-us"));
  EXPECT_EQ(Close().traceparent, kTraceparent);
}

TEST_F(UnaryCallTest, AStreamIsIdleBetweenRequestsAndReportsEach) {
  std::optional<Call> call(std::in_place, environment_, observe_);
  ASSERT_TRUE(call->Enter(Headers()).ok());
  call->MarkIdle();
  EXPECT_EQ(open_calls_.count(), 0);
  EXPECT_EQ(open_calls_.places(), 1);
  for (int n = 1; n <= 2; ++n) {
    clock_.Advance(seconds(5));
    call->MarkActive();
    EXPECT_EQ(open_calls_.count(), 1);
    call->KeepMessageMemory(engine_.ChargeMessage(100));
    call->report().received_bytes += 100;
    EXPECT_EQ(message_memory(), 100) << "charged without a reservation";
    clock_.Advance(seconds(1));
    call->Report(absl::OkStatus());
    EXPECT_EQ(reports_.back().received_bytes, 100);
    EXPECT_EQ(reports_.back().total, seconds(1)) << "measured from the arrival of the request";
    call->ReleaseMessageMemory();
    call->MarkIdle();
  }
  call.reset();
  EXPECT_EQ(open_calls_.places(), 0);
}

// The caller of Headers() holds most of both shares, and another one waits for memory.
class GivesWayTest : public UnaryCallTest {
 protected:
  GivesWayTest() {
    const int64_t all = gate_.LimitOf(kReceive);
    Hold(kReceive, all);
    Hold(kCompute, all - 100);  // by two calls
    Hold(kCompute, 100);
  }

  void Hold(AdmissionGate::Share share, int64_t bytes) {
    auto held = gate_.AdmitNow(
        {.share = share, .bytes = bytes, .caller = gate_.CallerOf("ipv4:127.0.0.1")});
    ASSERT_TRUE(held && held->ok());
    held_.push_back(*std::move(held));
  }

  void LetAnotherCallerWait(AdmissionGate::Share share) {
    gate_.Queue({.share = share, .bytes = 20'000, .caller = gate_.CallerOf("another")},
                [](AdmissionGate::Result) {});
  }

  static constexpr auto kReceive = AdmissionGate::Share::kReceive;
  static constexpr auto kCompute = AdmissionGate::Share::kCompute;

  std::vector<AdmissionGate::Result> held_;
};

TEST_F(GivesWayTest, ASilentSenderEndsWhenItsMemoryIsWaitedFor) {
  FakeCall& call = NewReadingCall(Headers());
  LetAnotherCallerWait(kReceive);
  AdvanceAndSettle(AdmissionGate::kSilentTime - milliseconds(1));
  EXPECT_TRUE(call.finishes().empty());
  AdvanceAndSettle(milliseconds(1));
  ASSERT_EQ(call.finishes().size(), 1u);
  EXPECT_EQ(RejectionOf(call.finishes()[0]), Rejection::kCallerShare);
  EXPECT_EQ(Close().ended_in, Stage::kReceive);
}

TEST_F(GivesWayTest, ASilentReaderEndsWhenItsMemoryIsWaitedFor) {
  FakeCall& call = NewReadingCall(Headers());
  ASSERT_TRUE(call.OnRead(true));
  call.BeginResponse(30'000);  // a reader has 20 s, and 30 s at the minimum rate
  LetAnotherCallerWait(kCompute);
  AdvanceAndSettle(AdmissionGate::kSilentTime - milliseconds(1));
  EXPECT_FALSE(call.is_aborted());
  AdvanceAndSettle(milliseconds(1));
  EXPECT_TRUE(call.is_aborted());
  call.OnCancelled();
  EXPECT_EQ(RejectionOf(Close().status), Rejection::kCallerShare);
}

TEST_F(GivesWayTest, AnOnlyCallEndsIfItsReaderFallsBehindTheMinimumRate) {
  held_.clear();
  Hold(kCompute, gate_.LimitOf(kCompute));
  FakeCall& call = NewReadingCall(Headers());
  ASSERT_TRUE(call.OnRead(true));
  call.BeginResponse(30'000);
  LetAnotherCallerWait(kCompute);
  for (int n = 0; n < 4; ++n) {
    AdvanceAndSettle(seconds(1));
    call.OnBytesSent(kBytesPerSecond);
  }
  AdvanceAndSettle(seconds(1));
  EXPECT_FALSE(call.is_aborted());
  AdvanceAndSettle(seconds(1));
  EXPECT_TRUE(call.is_aborted());
  call.OnCancelled();
  EXPECT_EQ(RejectionOf(Close().status), Rejection::kCallerShare);
}

// A stream does both at once, and must not be cancelled as a slow reader when its sender is slow.
TEST_F(GivesWayTest, ASilentSenderIsNotASilentReader) {
  Call call(environment_, observe_);
  ASSERT_TRUE(call.Enter(Headers()).ok());
  ASSERT_TRUE(call.SetDeadline(Instant::max()).ok());
  call.KeepMessageMemory(engine_.ChargeMessage(100, call.caller_memory()));
  Alarm alarm(timer_, [] {});
  call.BeginSending(30'000, call.deadline(), {.receive = true, .compute = true}, alarm);
  call.BeginReceiving(100, {.receive = true, .compute = true}, alarm);
  LetAnotherCallerWait(kReceive);
  AdvanceAndSettle(AdmissionGate::kSilentTime);
  EXPECT_EQ(call.receive_end(), Instant::min());
  EXPECT_EQ(RejectionOf(call.SlowSender("stream")), Rejection::kCallerShare);
  EXPECT_GT(call.send_end(), clock_.Now());
  EXPECT_EQ(call.NotSent().code(), absl::StatusCode::kCancelled);
  call.EndSending();
  EXPECT_EQ(call.receive_end(), Instant::min()) << "still silent";
  call.EndWaits();
}

TEST_F(GivesWayTest, NobodyEndsWhileNobodyWaits) {
  FakeCall& call = NewReadingCall(Headers());
  AdvanceAndSettle(seconds(4));
  EXPECT_TRUE(call.finishes().empty());
  call.End(absl::OkStatus());
  Close();
}

}  // namespace
}  // namespace rapt
