#include "client/rapt/shared_regions.h"

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

// A region serves calls of any size up to its own: few sizes, used again often.
constexpr int64_t kLeastRegionBytes = 1 << 20;

// The server maps and unmaps in microseconds; who waits longer waits in vain.
constexpr std::chrono::seconds kRegistrationTime{1};

int64_t RegionBytes(int64_t bytes) {
  int64_t size = kLeastRegionBytes;
  while (size < bytes) size *= 2;
  return size;
}

std::string NewName() {
  std::random_device random;
  return absl::StrFormat("rapt-%08x%08x%08x%08x", random(), random(), random(), random());
}

}  // namespace

bool IsSameMachine(const std::string& address) {
  // Of several servers, the one that registers a region is not the one that computes in it.
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
  // All pages at once: what can't be had is found out here, and not by a signal.
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

grpc::Status Register(SharedRegion& region, const Connection& connection,
                      const Deadline& deadline) {
  inference::SystemSharedMemoryRegisterRequest request;
  request.set_name(region.name());
  request.set_key("/" + region.name());
  request.set_byte_size(region.bytes().size());
  inference::SystemSharedMemoryRegisterResponse response;
  grpc::ClientContext context;
  context.set_deadline(deadline.ToGrpc());
  const grpc::Status status = GRPCInferenceService::NewStub(connection.channel)
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

SharedRegions::SharedRegions(const std::string& address, Connections& connections)
    : connections_(connections), is_offered_(IsSameMachine(address)) {}

SharedRegions::~SharedRegions() {
  MutexLock lock(mutex_);
  for (const auto& region : idle_) UnregisterNow(*region);
}

std::unique_ptr<SharedRegion> SharedRegions::Take(int64_t bytes, const Deadline& deadline) {
  std::unique_ptr<SharedRegion> too_small;  // makes room for a larger one
  {
    MutexLock lock(mutex_);
    if (!is_offered_) return nullptr;
    if (std::unique_ptr<SharedRegion> region = TakeIdle(bytes)) return region;
    if (regions_ == kMaxRegions) {
      if (idle_.empty()) return nullptr;
      too_small = std::move(idle_.front());
      idle_.erase(idle_.begin());
    } else {
      ++regions_;
    }
  }
  if (too_small != nullptr) UnregisterNow(*too_small);
  std::unique_ptr<SharedRegion> region = SharedRegion::Make(RegionBytes(bytes));
  if (region != nullptr && RegisterNow(*region, deadline)) return region;
  MutexLock lock(mutex_);
  --regions_;
  return nullptr;
}

std::unique_ptr<SharedRegion> SharedRegions::TakeIdle(int64_t bytes) {
  // The smallest that is large enough.
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

bool SharedRegions::RegisterNow(SharedRegion& region, const Deadline& deadline) {
  const Deadline soon =
      Deadline::After(std::min<std::chrono::nanoseconds>(kRegistrationTime, deadline.left()));
  const ConnectionLease connection = connections_.LeastBusy();
  const grpc::Status status = Register(region, *connection, soon);
  if (status.ok()) return true;
  const bool may_change = status.error_code() == grpc::StatusCode::UNAVAILABLE ||
                          status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED ||
                          status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED;
  MutexLock lock(mutex_);
  is_offered_ = is_offered_ && may_change;
  return false;
}

void SharedRegions::UnregisterNow(const SharedRegion& region) {
  const ConnectionLease connection = connections_.LeastBusy();
  Unregister(region, *connection, Deadline::After(kRegistrationTime));
}

void SharedRegions::GiveBack(std::unique_ptr<SharedRegion> region) {
  MutexLock lock(mutex_);
  idle_.push_back(std::move(region));
}

void SharedRegions::Discard(std::unique_ptr<SharedRegion> region) {
  UnregisterNow(*region);
  MutexLock lock(mutex_);
  --regions_;
}

}  // namespace rapt::client
