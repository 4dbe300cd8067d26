#include "client/cpp/shared_regions.h"

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "proto/inference/grpc_service.grpc.pb.h"

namespace rapt::client {
namespace {

using inference::GRPCInferenceService;

// Regions have few sizes, so that they are reused often.
constexpr int64_t kMinRegionBytes = 1 << 20;

// The server maps and unmaps in microseconds. A longer wait means that it does not respond.
constexpr std::chrono::seconds kRegistrationTimeout{1};

int64_t RegionBytes(int64_t bytes) {
  int64_t size = kMinRegionBytes;
  while (size < bytes) size *= 2;
  return size;
}

std::string NewName() {
  std::random_device random;
  return absl::StrFormat("rapt-%08x%08x%08x%08x", random(), random(), random(), random());
}

}  // namespace

bool IsSameMachine(const std::string& address) {
  // With several servers, the call may reach one that has not registered the region.
  if (absl::StrContains(address, ',')) return false;
  absl::string_view host = address;
  for (const absl::string_view scheme : {"dns:", "ipv4:", "ipv6:"}) {
    if (absl::StartsWith(host, scheme)) {
      host.remove_prefix(scheme.size());
      break;
    }
  }
  while (absl::StartsWith(host, "/")) host.remove_prefix(1);  // of "dns:///localhost"
  for (const absl::string_view ours : {"unix:", "127.", "localhost:", "[::1]:"}) {
    if (absl::StartsWith(host, ours)) return true;
  }
  return false;
}

std::unique_ptr<SharedRegion> SharedRegion::Make(int64_t bytes) {
  const std::string name = NewName();
  const int descriptor = shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
  if (descriptor < 0) return nullptr;
  void* data = MAP_FAILED;
  // Allocates all pages now. Otherwise a lack of memory would raise SIGBUS later.
  if (posix_fallocate(descriptor, 0, bytes) == 0) {
    data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor,
                0);
  }
  close(descriptor);
  if (data == MAP_FAILED) {
    shm_unlink(name.c_str());
    return nullptr;
  }
  return std::unique_ptr<SharedRegion>(
      new SharedRegion(name, {static_cast<std::byte*>(data), static_cast<size_t>(bytes)}));
}

SharedRegion::~SharedRegion() {
  Unlink();
  munmap(bytes_.data(), bytes_.size());
}

void SharedRegion::Unlink() {
  if (std::exchange(is_linked_, false)) shm_unlink(name_.c_str());
}

grpc::Status Register(SharedRegion& region, const Connection& connection, const Deadline& deadline,
                      const std::stop_token& stop) {
  inference::SystemSharedMemoryRegisterRequest request;
  request.set_name(region.name());
  request.set_key("/" + region.name());
  request.set_byte_size(region.bytes().size());
  inference::SystemSharedMemoryRegisterResponse response;
  grpc::ClientContext context;
  context.set_deadline(deadline.ToGrpc());
  const std::stop_callback cancel(stop, [&context] { context.TryCancel(); });
  grpc::Status status = GRPCInferenceService::NewStub(connection.channel)
                            ->SystemSharedMemoryRegister(&context, request, &response);
  region.Unlink();
  return status;
}

void Unregister(const SharedRegion& region, const Connection& connection,
                const Deadline& deadline) {
  inference::SystemSharedMemoryUnregisterRequest request;
  request.set_name(region.name());
  inference::SystemSharedMemoryUnregisterResponse response;
  grpc::ClientContext context;
  context.set_deadline(deadline.ToGrpc());
  GRPCInferenceService::NewStub(connection.channel)
      ->SystemSharedMemoryUnregister(&context, request, &response);
}

// Unregisters a region in the background, then destroys it and itself.
class SharedRegions::Unregistration {
 public:
  Unregistration(SharedRegions& regions, std::unique_ptr<SharedRegion> region)
      : regions_(regions),
        region_(std::move(region)),
        connection_(regions.connections_.LeastBusy()),
        stub_(GRPCInferenceService::NewStub(connection_->channel)) {
    request_.set_name(region_->name());
    context_.set_deadline(Deadline::After(kRegistrationTimeout).ToGrpc());
  }

  void Start() {
    stub_->async()->SystemSharedMemoryUnregister(&context_, &request_, &response_,
                                                 [this](const grpc::Status&) { End(); });
  }

 private:
  void End() {
    SharedRegions& regions = regions_;
    delete this;
    regions.ReleaseSlot();
  }

  SharedRegions& regions_;
  const std::unique_ptr<SharedRegion> region_;
  const ConnectionLease connection_;
  const std::unique_ptr<GRPCInferenceService::Stub> stub_;
  inference::SystemSharedMemoryUnregisterRequest request_;
  inference::SystemSharedMemoryUnregisterResponse response_;
  grpc::ClientContext context_;
};

SharedRegions::SharedRegions(const std::string& address, Connections& connections)
    : connections_(connections), is_available_(IsSameMachine(address)) {}

SharedRegions::~SharedRegions() {
  std::vector<std::unique_ptr<SharedRegion>> idle;
  {
    MutexLock lock(mutex_);
    idle.swap(idle_);
  }
  for (auto& region : idle) Discard(std::move(region));
  MutexLock lock(mutex_);
  while (regions_ > 0) no_regions_.Wait(mutex_);
}

std::unique_ptr<SharedRegion> SharedRegions::Take(int64_t bytes, const Deadline& deadline,
                                                  const std::stop_token& stop) {
  std::unique_ptr<SharedRegion> too_small;
  {
    MutexLock lock(mutex_);
    if (!is_available_) return nullptr;
    if (std::unique_ptr<SharedRegion> region = TakeIdle(bytes)) return region;
    if (regions_ < kMaxRegions) {
      ++regions_;
    } else if (idle_.empty()) {
      return nullptr;
    } else {
      too_small = std::move(idle_.front());
      idle_.erase(idle_.begin());
    }
  }
  if (too_small != nullptr) {
    Discard(std::move(too_small));
    return nullptr;
  }
  std::unique_ptr<SharedRegion> region = SharedRegion::Make(RegionBytes(bytes));
  if (region == nullptr) {
    ReleaseSlot();
    return nullptr;
  }
  if (RegisterNow(*region, deadline, stop)) return region;
  Discard(std::move(region));  // the server may have registered it nevertheless
  return nullptr;
}

std::unique_ptr<SharedRegion> SharedRegions::TakeIdle(int64_t bytes) {
  // Best fit.
  auto best = idle_.end();
  for (auto region = idle_.begin(); region != idle_.end(); ++region) {
    const size_t size = (*region)->bytes().size();
    if (static_cast<int64_t>(size) < bytes) continue;
    if (best == idle_.end() || size < (*best)->bytes().size()) best = region;
  }
  if (best == idle_.end()) return nullptr;
  std::unique_ptr<SharedRegion> region = std::move(*best);
  idle_.erase(best);
  return region;
}

bool SharedRegions::RegisterNow(SharedRegion& region, const Deadline& deadline,
                                const std::stop_token& stop) {
  const Deadline soon =
      Deadline::After(std::min<std::chrono::nanoseconds>(kRegistrationTimeout, deadline.left()));
  const ConnectionLease connection = connections_.LeastBusy();
  const grpc::Status status = Register(region, *connection, soon, stop);
  if (status.ok()) return true;
  const bool may_change = status.error_code() == grpc::StatusCode::UNAVAILABLE ||
                          status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED ||
                          status.error_code() == grpc::StatusCode::CANCELLED ||
                          status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED;
  MutexLock lock(mutex_);
  is_available_ = is_available_ && may_change;
  return false;
}

void SharedRegions::Return(std::unique_ptr<SharedRegion> region) {
  MutexLock lock(mutex_);
  idle_.push_back(std::move(region));
}

void SharedRegions::Discard(std::unique_ptr<SharedRegion> region) {
  (new Unregistration(*this, std::move(region)))->Start();
}

void SharedRegions::ReleaseSlot() {
  MutexLock lock(mutex_);
  if (--regions_ == 0) no_regions_.SignalAll();
}

}  // namespace rapt::client
